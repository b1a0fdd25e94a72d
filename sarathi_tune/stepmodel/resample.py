"""Models that the same measurement could have given as well: the uncertainty of whatever is derived from one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sarathi_tune.measure.profile import Profile
from sarathi_tune.stats import MAD_TO_SIGMA
from sarathi_tune.stepmodel.model import Spread, StepModel
from sarathi_tune.stepmodel.rows import observations
from sarathi_tune.stepmodel.solve import design_matrix, irls
from sarathi_tune.stepmodel.spread import SPREAD_POINTS

if TYPE_CHECKING:
    import numpy as np


def resample(profile: Profile, model: StepModel, count: int, seed: int = 0) -> list[StepModel]:
    """`count` models that the same measurement could have given as well.

    Each draw (1) gives every row a random weight (Bayesian bootstrap: exponential, mean 1) and moves its centre by its
    standard error, then fits the model's own terms again; (2) resamples the pooled ratios, for the uncertainty of the
    p99. The form of the model is kept, and what no refit shows is left to the caller: `lack_of_fit`.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    rows = [row for row, sample in observations(profile) if not sample.held_out and row.label not in model.rejected]
    rows = rows or [row for row, _ in observations(profile)]
    design = design_matrix(model.terms, rows)
    scale = np.maximum(design.max(axis=0), 1e-300)
    design = design / scale
    errors = np.array([row.relative_error for row in rows])
    draws = []
    for _ in range(count):
        weights = rng.exponential(size=len(rows)) + 1e-3
        moved = design / np.maximum(0.5, 1.0 + errors * rng.standard_normal(len(rows)))[:, None]
        shares = irls(moved, weights, None, rounds=4)
        coefficients = tuple(float(value) for value in shares / scale)
        draws.append(replace(model, coefficients=coefficients, spread=_resampled(model.spread, rng)))
    return draws


def lack_of_fit(model: StepModel) -> float:
    """Relative standard deviation of the model at a shape it hasn't seen: from the hold-out error if there is one."""
    return MAD_TO_SIGMA * model.error.median if model.error.n >= 3 else model.residual_sigma


def _resampled(spread: Spread, rng: np.random.Generator) -> Spread:
    return replace(
        spread,
        decode=_resampled_ratios(spread.decode, spread.n_decode, rng),
        chunk=_resampled_ratios(spread.chunk, spread.n_chunk, rng),
    )


def _resampled_ratios(ratios: tuple[float, ...], n: int, rng: np.random.Generator) -> tuple[float, ...]:
    """As many ratios as were measured (at most `SPREAD_POINTS`), drawn with replacement and sorted."""
    if n < 2:
        return ratios
    size = min(n, SPREAD_POINTS)
    picks = rng.integers(0, len(ratios), size=size)
    return tuple(sorted(ratios[index] for index in picks.tolist()))
