"""The step model: a profile's times as a sum of a few non-negative terms, with its error and its spread.

The fit is relative (a 10 ms step counts as much as a 500 ms one), robust (Huber weights), sparse (a term that explains
nothing goes, then the rest is fitted again without a penalty) and non-negative (so the model is monotone).
Decisions 010 to 012 in docs/decisions/ say why; docs/method.md is the long form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sarathi_tune.measure.profile import Profile
from sarathi_tune.stats import median
from sarathi_tune.stepmodel.artefacts import without_artefacts
from sarathi_tune.stepmodel.error import hold_out_error, residual_sigma, with_additive
from sarathi_tune.stepmodel.features import Observation, candidate_terms, find_stairs
from sarathi_tune.stepmodel.model import HasRandom, HoldOutError, Spread, StepModel
from sarathi_tune.stepmodel.rows import filled_rows, observations
from sarathi_tune.stepmodel.solve import Fitted, fit_terms
from sarathi_tune.stepmodel.spread import pooled_spread, spread_notices

__all__ = ["HasRandom", "HoldOutError", "Spread", "StepModel", "fit_step_model"]

#: Query blocks of attention kernels that a chunk may have to fill (FlashAttention 64 and 128, FlashInfer up to 256).
QUERY_BLOCKS = (16, 32, 64, 128, 256)


def fit_step_model(profile: Profile) -> StepModel:
    """Fit the step model to a profile.

    Works from a rich measured profile as from four rows written by hand. Raises DocumentError when no row has a time.
    """
    rows = observations(profile)
    training = [row for row, sample in rows if not sample.held_out] or [row for row, _ in rows]
    held_out = [row for row, sample in rows if sample.held_out and row not in training]
    training, rejected, found = without_artefacts(training)
    fitted = _choose(training, profile)
    residuals = fitted.residuals(training)
    spread = pooled_spread([row for row, _ in rows if row.label not in rejected])
    model = StepModel(
        terms=fitted.terms,
        coefficients=fitted.coefficients,
        spread=spread,
        error=hold_out_error(fitted, training, held_out),
        stairs=fitted.stairs,
        rows=filled_rows(profile),
        rejected=tuple(rejected),
        measured_tokens=tuple(sorted({row.load.tokens for row in training})),
        num_rows=len(training),
        residual_sigma=residual_sigma(residuals, len(training) - len(fitted.terms)),
        notices=tuple(found) + spread_notices(spread),
    )
    return replace(model, error=with_additive(model, [row for row, _ in rows if row.label not in rejected]))


def _choose(rows: Sequence[Observation], profile: Profile) -> Fitted:
    """The form of the model: stairs where they were measured, the onset of fixed costs, the attention's query block."""
    stairs = find_stairs(rows, 3.0 * (profile.noise or 0.0))
    graph_limit = max(profile.graph_sizes, default=None)

    def fit(query_block: int, onsets: tuple[int, int]) -> Fitted:
        terms = candidate_terms(
            rows,
            stairs=stairs,
            graph_limit=graph_limit,
            query_block=query_block,
            chunk_onset=onsets[0],
            mix_onset=onsets[1],
        )
        return replace(fit_terms(terms, rows), stairs=tuple(stairs))

    onsets = _onsets(fit(0, (0, 0)), rows)
    best = fit(0, onsets)
    if _block_is_visible(rows):
        score = best.score(rows)
        for block in QUERY_BLOCKS:
            candidate = fit(block, onsets)
            if candidate.score(rows) < 0.93 * score - 5e-4:
                best, score = candidate, candidate.score(rows)
    return best


def _block_is_visible(rows: Sequence[Observation]) -> bool:
    """Whether narrow chunks were timed behind different prefixes, so that a query block's cost shows."""
    prefixes = {prefix for row in rows for prefix, count in row.load.chunks if count < QUERY_BLOCKS[-1]}
    return len(prefixes) > 1


def _onsets(instant: Fitted, rows: Sequence[Observation]) -> tuple[int, int]:
    """Over how many chunk tokens the fixed costs of a chunk and of a mix set in.

    Below the narrowest chunk that was timed nothing is known but the decode-only step at chunk 0. A fixed cost as large
    as a whole decode step is one that a chunk pays however narrow it is (0: no CUDA graph covers such steps); a smaller
    one may as well be a tile or a kernel that fills up, and is interpolated from the decode-only step.
    """
    decode_ms = [row.centre_ms for row in rows if not row.load.chunks]
    plain_ms = decode_ms or [min(row.centre_ms for row in rows)]
    fixed_ms = sum(
        value
        for term, value in zip(instant.terms, instant.coefficients, strict=True)
        if term.name in ("chunk_fixed", "mix_fixed")
    )
    if fixed_ms >= median(plain_ms):
        return 0, 0
    chunk = min((row.load.chunk_tokens for row in rows if row.load.chunks), default=0)
    mix = min((row.load.chunk_tokens for row in rows if row.load.chunks and row.load.decodes), default=0)
    return chunk, mix
