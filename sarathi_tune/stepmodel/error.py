"""How far the model is off on shapes it hasn't seen, and how far adding two numbers is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from sarathi_tune.stats import MAD_TO_SIGMA, median, quantile
from sarathi_tune.stepmodel.features import NEIGHBOUR_RATIO, Load, Observation, Term, candidate_terms
from sarathi_tune.stepmodel.model import HoldOutError, StepModel
from sarathi_tune.stepmodel.solve import Fitted, fit_terms


def residual_sigma(residuals: Sequence[float], degrees: int) -> float:
    """Lack of fit as a relative standard deviation: the median absolute residual, for the degrees of freedom spent."""
    if not residuals:
        return 0.0
    return MAD_TO_SIGMA * median([abs(value) for value in residuals]) * math.sqrt(len(residuals) / max(1, degrees))


def hold_out_error(fitted: Fitted, training: Sequence[Observation], held_out: Sequence[Observation]) -> HoldOutError:
    if held_out:
        method, errors = "held-out", list(zip(held_out, fitted.residuals(held_out), strict=True))
    else:
        errors = _k_fold(fitted, training)
        method = "k-fold" if errors else "none"
    everything = [abs(error) for _, error in errors]
    hybrid = [abs(error) for row, error in errors if row.load.chunks and row.load.decodes]
    return HoldOutError(
        method=method,
        median=median(everything),
        p95=quantile(everything, 0.95),
        n=len(everything),
        hybrid_median=median(hybrid),
        hybrid_p95=quantile(hybrid, 0.95),
        hybrid_n=len(hybrid),
        additive_median=math.nan,
        additive_bias=math.nan,
        additive_n=0,
    )


def _k_fold(fitted: Fitted, rows: Sequence[Observation], folds: int = 10) -> list[tuple[Observation, float]]:
    """Each row's error under a fit without its fold. Rows at a stair are left in: without its neighbour a stair can't
    be seen, and that says nothing about the model. Rows of one shape stay in one fold."""
    if len(rows) < 4:
        return []
    labels = sorted({row.label for row in rows if not _at_stair(row, fitted.stairs)})
    fold_of = {label: index % min(folds, len(labels)) for index, label in enumerate(_shuffled(labels))}
    errors = []
    for fold in sorted(set(fold_of.values())):
        rest = [row for row in rows if fold_of.get(row.label) != fold]
        without = fit_terms(fitted_candidates(fitted, rest), rest)
        errors += [
            (row, without.predict_ms(row) / row.centre_ms - 1.0) for row in rows if fold_of.get(row.label) == fold
        ]
    return errors


def fitted_candidates(fitted: Fitted, rows: Sequence[Observation]) -> list[Term]:
    """The terms to offer when the same form is fitted to other rows: all candidates, with its block and onsets."""
    at = {term.name: term.at for term in fitted.terms}
    graph = [term.at for term in fitted.terms if term.name == "stair" and term.at not in fitted.stairs]
    return candidate_terms(
        rows,
        stairs=fitted.stairs,
        graph_limit=max(graph, default=None),
        query_block=at.get("attention", 0),
        chunk_onset=at.get("chunk_fixed", 0),
        mix_onset=at.get("mix_fixed", 0),
    )


def _shuffled(labels: list[str]) -> list[str]:
    """A fixed shuffle, so that neighbouring shapes land in different folds."""
    shuffled = list(labels)
    random.Random(0).shuffle(shuffled)
    return shuffled


def _at_stair(row: Observation, stairs: Sequence[int]) -> bool:
    return any(stair <= row.load.tokens <= stair * NEIGHBOUR_RATIO for stair in stairs)


def with_additive(model: StepModel, rows: Sequence[Observation]) -> HoldOutError:
    """The model's error, completed by that of adding a decode step and a prefill step."""
    hybrids = [row for row in rows if row.load.decodes and row.load.chunks]
    errors = [additive_ms(model, row.load, rows) / row.centre_ms - 1.0 for row in hybrids]
    return replace(
        model.error,
        additive_median=median([abs(error) for error in errors]),
        additive_bias=median(errors),
        additive_n=len(errors),
    )


def additive_ms(model: StepModel, load: Load, rows: Sequence[Observation]) -> float:
    """Decode step + prefill step, each on its own: as measured where such a row exists, else as fitted."""
    decode = Load(load.decodes, load.decodes, load.context_sum, 0, ())
    prefill = Load(load.chunk_tokens, 0, 0, load.chunk_tokens, load.chunks)
    return sum(
        _measured_ms(part, rows) or model.centre_ms(part.decodes, part.context_sum, part.chunks)
        for part in (decode, prefill)
    )


def _measured_ms(load: Load, rows: Sequence[Observation]) -> float | None:
    """The time of the row nearest to this pure step, if one is close enough to stand for it (3 decodes: 4 do)."""
    close = [row for row in rows if _close(row.load, load)]
    if not close:
        return None
    return min(close, key=lambda row: (abs(row.load.tokens - load.tokens), -row.load.tokens)).centre_ms


def _close(candidate: Load, load: Load) -> bool:
    if bool(candidate.decodes) != bool(load.decodes) or bool(candidate.chunks) != bool(load.chunks):
        return False
    if load.decodes:
        near = abs(candidate.decodes - load.decodes) <= max(1, load.decodes // 20)
        contexts = candidate.context_sum / candidate.decodes, load.context_sum / load.decodes
        return near and abs(contexts[0] - contexts[1]) <= 0.05 * max(*contexts, 1.0)
    return len(candidate.chunks) == len(load.chunks) and all(
        abs(one[0] - other[0]) <= 0.05 * max(one[0], 1) and abs(one[1] - other[1]) <= 0.05 * other[1]
        for one, other in zip(candidate.chunks, load.chunks, strict=True)
    )
