"""Order statistics with the uncertainty that belongs to them: plain numbers in, plain numbers out.

numpy and scipy are imported inside the functions, so that `--help` and `derive` don't pay for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Sides = Literal["two", "lower", "upper"]

#: Turns a median absolute deviation into the standard deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826


def quantile(values: Sequence[float], q: float) -> float:
    """The `q` quantile (0 to 1) by linear interpolation between order statistics, as numpy's default; NaN if empty."""
    assert 0.0 <= q <= 1.0, q
    return quantile_sorted(sorted(values), q)


def quantile_sorted(ordered: Sequence[float], q: float) -> float:
    """`quantile` of values that are sorted already."""
    if not ordered:
        return math.nan
    position = q * (len(ordered) - 1)
    below = min(int(position), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    share = position - below
    if share == 0.0 or ordered[below] == ordered[above]:
        return float(ordered[below])
    return float(ordered[below] + share * (ordered[above] - ordered[below]))


def median(values: Sequence[float]) -> float:
    """The median; NaN if empty."""
    return quantile(values, 0.5)


def mad(values: Sequence[float]) -> float:
    """Median absolute deviation from the median, unscaled (times `MAD_TO_SIGMA` for a sigma); NaN if empty."""
    centre = median(values)
    return median([abs(value - centre) for value in values])


def min_samples(q: float, confidence: float = 0.95, sides: Sides = "upper") -> int:
    """How many independent samples a distribution-free bound on the `q` quantile needs.

    The largest of n samples lies above the quantile with probability 1 - q**n, the smallest below it with 1 - (1-q)**n.
    For p99 at 95 %: 299 for a one-sided upper bound, 368 for a two-sided interval.
    """
    assert 0.0 < q < 1.0, q
    assert 0.0 < confidence < 1.0, confidence
    tail = (1.0 - confidence) / (2.0 if sides == "two" else 1.0)
    needs_above = math.ceil(math.log(tail) / math.log(q) - 1e-12)
    needs_below = math.ceil(math.log(tail) / math.log(1.0 - q) - 1e-12)
    if sides == "upper":
        return needs_above
    return needs_below if sides == "lower" else max(needs_above, needs_below)


def quantile_interval(
    values: Sequence[float], q: float, confidence: float = 0.95, sides: Sides = "two"
) -> tuple[float, float] | None:
    """Distribution-free interval of the `q` quantile from order statistics of independent values.

    `sides="upper"` gives (-inf, bound), `"lower"` gives (bound, inf). None when there are too few values for any bound
    at this confidence (see `min_samples`), rather than an interval that promises too much.
    """
    n = len(values)
    if n == 0 or n < min_samples(q, confidence, sides):
        return None
    ordered = sorted(values)
    below = _binomial_cdf(n, q)  # below[k] = P(at most k of the n values lie below the quantile)
    tail = (1.0 - confidence) / (2.0 if sides == "two" else 1.0)
    # The k-th smallest (1-based) is above the quantile unless at least k values lie below: P = 1 - below[k - 1].
    upper = next(k for k in range(1, n + 1) if 1.0 - below[k - 1] <= tail + 1e-12) if sides != "lower" else n
    # It is below the quantile unless fewer than k values lie below: P = below[k - 1].
    lower = next(k for k in range(n, 0, -1) if below[k - 1] <= tail + 1e-12) if sides != "upper" else 1
    return (
        float(ordered[lower - 1]) if sides != "upper" else -math.inf,
        float(ordered[upper - 1]) if sides != "lower" else math.inf,
    )


def _binomial_cdf(n: int, q: float) -> list[float]:
    """P(X <= k) for k = 0 .. n, X binomial(n, q)."""
    import numpy as np
    from scipy import special

    cdf: list[float] = special.bdtr(np.arange(n + 1, dtype=np.float64), n, q).tolist()
    return cdf


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a share; (0, 1) for n = 0. Sound for shares near 0 and 1, where the normal one isn't."""
    assert 0 <= successes <= n, (successes, n)
    if n == 0:
        return 0.0, 1.0
    from scipy import special

    z = float(special.ndtri(0.5 + confidence / 2.0))
    share = successes / n
    denominator = 1.0 + z * z / n
    centre = (share + z * z / (2 * n)) / denominator
    half = z / denominator * math.sqrt(share * (1.0 - share) / n + z * z / (4.0 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def bootstrap_interval(
    groups: Sequence[Sequence[float]],
    statistic: Callable[[NDArray[np.float64]], float],
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile bootstrap of `statistic(pooled values)` that resamples whole groups.

    A group is a request: the gaps within one share its batch, its stalls and its length, so that resampling single gaps
    would promise far too much. `statistic` gets a numpy array. None with fewer than two groups that hold values.
    """
    import numpy as np

    arrays = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if len(arrays) < 2:
        return None
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(arrays), size=(resamples, len(arrays)))
    draws = sorted(float(statistic(np.concatenate([arrays[i] for i in pick]))) for pick in picks)
    tail = (1.0 - confidence) / 2.0
    return quantile_sorted(draws, tail), quantile_sorted(draws, 1.0 - tail)
