"""Non-negative least squares on normal equations: the step model's solver.

`scipy.optimize.nnls` gives the same answer (the tests hold this one against it), but importing `scipy.optimize` takes
longer than a whole `derive`; and a fit solves nearly the same problem hundreds of times, so that starting from the last
set of positive terms leaves one small solve each. See docs/decisions/010.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]
    Mask = NDArray[np.bool_]

#: Relative to the moments: a gradient below this isn't a descent.
_TOLERANCE = 1e-12


def nonnegative_solution(gram: Vector, moment: Vector, start: Mask | None = None) -> tuple[Vector, Mask]:
    """Minimise x' gram x - 2 moment' x over x >= 0; returns x and which entries are positive.

    `gram` [n, n] must be positive definite. `start` guesses the positive entries; a wrong guess costs time only. The
    active-set method of Lawson and Hanson (1974, ch. 23) on normal equations, as by Bro and de Jong (1997).
    """
    import numpy as np

    size = len(moment)
    x = np.zeros(size)
    positive = np.zeros(size, dtype=bool) if start is None else start.copy()
    if positive.any():
        x, positive = _shrunk(gram, moment, np.where(positive, 1e-300, 0.0), positive)
    tolerance = _TOLERANCE * max(1e-300, float(np.abs(moment).max(initial=0.0)))
    for _ in range(10 * size + 10):
        gradient = np.where(positive, -np.inf, moment - gram @ x)
        entry = int(gradient.argmax()) if size else 0
        if not size or gradient[entry] <= tolerance:
            break
        positive[entry] = True
        x, positive = _shrunk(gram, moment, x, positive)
        if not positive[entry]:  # rounding: the entry can't leave zero
            break
    return x, positive


def _shrunk(gram: Vector, moment: Vector, x: Vector, positive: Mask) -> tuple[Vector, Mask]:
    """The minimum over the positive entries, walking back from it until none is negative."""
    import numpy as np

    while positive.any():
        index = np.flatnonzero(positive)
        best = np.zeros_like(x)
        best[index] = np.linalg.solve(gram[np.ix_(index, index)], moment[index])
        negative = index[best[index] <= 0.0]
        if not len(negative):
            return best, positive
        steps = x[negative] / (x[negative] - best[negative] + 1e-300)
        x = x + steps.min() * (best - x)
        gone = negative[steps <= steps.min()]
        x[gone] = 0.0
        positive = positive.copy()
        positive[gone] = False
    return np.zeros_like(x), positive
