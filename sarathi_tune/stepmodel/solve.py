"""Coefficients for given terms: robust, non-negative, relative, and only for the terms that are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sarathi_tune.stats import MAD_TO_SIGMA
from sarathi_tune.stepmodel.features import Observation, Term, TermName
from sarathi_tune.stepmodel.nonnegative import nonnegative_solution

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]


#: What it costs to use a term, in shares of a step: attention before curvature, curvature before fixed costs, and a
#: rise that ends (which no GEMM does on the large scale) last.
_PENALTY: dict[TermName, float] = {
    "host": 0.0,
    "tokens": 0.0,
    "hinge": 1.0,
    "stair": 0.3,
    "ramp": 2.0,
    "context": 0.1,
    "decodes": 0.5,
    "attention": 0.5,
    "chunk_fixed": 1.0,
    "mix_fixed": 1.0,
}
_PENALTY_SCALE = 5e-4
_HUBER = 1.5
_MIN_SCALE = 0.003


@dataclass(frozen=True, slots=True)
class Fitted:
    """Terms with their coefficients in ms per unit, before anything is known about error and spread."""

    terms: tuple[Term, ...]
    coefficients: tuple[float, ...]
    stairs: tuple[int, ...] = ()

    def predict_ms(self, row: Observation) -> float:
        """The centre of this row in milliseconds."""
        return sum(value * term.value(row.load) for term, value in zip(self.terms, self.coefficients, strict=True))

    def residuals(self, rows: Sequence[Observation]) -> list[float]:
        """Relative errors, predicted over measured minus 1."""
        return [self.predict_ms(row) / row.centre_ms - 1.0 for row in rows]

    def score(self, rows: Sequence[Observation]) -> float:
        """Mean absolute relative error with single failures capped, for comparing forms of the model."""
        return sum(min(abs(value), 0.3) for value in self.residuals(rows)) / len(rows)


def fit_terms(terms: Sequence[Term], rows: Sequence[Observation], weights: Sequence[float] | None = None) -> Fitted:
    """Robust non-negative fit of these terms: penalised to find which are needed, then those alone without a penalty.

    `weights` multiply the rows' squared relative errors (the bootstrap's).
    """
    import numpy as np

    kept = identifiable(terms, rows)
    design = design_matrix(kept, rows)
    scale = design.max(axis=0)
    design = design / scale
    row_weights = np.ones(len(rows)) if weights is None else np.asarray(weights, dtype=np.float64)
    penalty = np.array([_PENALTY[term.name] for term in kept]) * _PENALTY_SCALE * row_weights.sum()
    shares = irls(design, row_weights, penalty)
    needed = np.flatnonzero(shares > 1e-4)
    shares = irls(design[:, needed], row_weights, None)
    return Fitted(
        terms=tuple(kept[i] for i in needed),
        coefficients=tuple(float(value) for value in shares / scale[needed]),
    )


def design_matrix(terms: Sequence[Term], rows: Sequence[Observation]) -> Matrix:
    """[row, term] values over the row's time: a fitted row of it sums to 1."""
    import numpy as np

    return np.array([[term.value(row.load) / row.centre_ms for term in terms] for row in rows], dtype=np.float64)


def identifiable(terms: Sequence[Term], rows: Sequence[Observation]) -> list[Term]:
    """The terms that differ from zero and from every earlier one (up to a factor) on these rows."""
    import numpy as np

    values = np.array([[term.value(row.load) for row in rows] for term in terms], dtype=np.float64)
    norms = np.linalg.norm(values, axis=1)
    kept: list[int] = []
    for index in range(len(terms)):
        if norms[index] == 0.0:
            continue
        cosines = values[kept] @ values[index] / (norms[kept] * norms[index])
        if not (cosines > 1.0 - 1e-10).any():
            kept.append(index)
    return [terms[index] for index in kept]


def irls(design: Matrix, row_weights: Matrix, penalty: Matrix | None, rounds: int = 8) -> Matrix:
    """Non-negative coefficients with Huber weights; every row of the design should sum to 1.

    `penalty` (per coefficient, doubled) is added to the squared error. A ridge far below any rounding of the inputs
    keeps terms apart that these rows can't tell apart.
    """
    import numpy as np

    robust = np.ones(len(design))
    solution = np.zeros(design.shape[1])
    positive = None
    for _ in range(rounds):
        weights = row_weights * robust
        gram = design.T @ (design * weights[:, None])
        gram[np.diag_indices_from(gram)] += 1e-9 * weights.sum()
        moment = design.T @ weights
        solution, positive = nonnegative_solution(gram, moment if penalty is None else moment - penalty, positive)
        residual = np.abs(design @ solution - 1.0)
        scale = max(_MIN_SCALE, MAD_TO_SIGMA * float(np.median(residual)))
        updated = np.minimum(1.0, _HUBER * scale / np.maximum(residual, 1e-12))
        if np.abs(updated - robust).max() < 1e-3:
            break
        robust = updated
    return solution
