"""When requests are sent: absolute times in seconds from the start of a run, any positive rate (0.01 per second too).

The times of one seed are the same pattern at every rate, stretched, so that runs at two rates differ by the rate alone.
"""

import math
from collections.abc import Callable
from random import Random

from sarathi_tune.errors import UsageError


def poisson(
    rate_per_s: float, seed: int, *, n: int | None = None, duration_s: float | None = None
) -> tuple[float, ...]:
    """Poisson arrivals: `n` of them, or all that fall into `duration_s`, or whichever ends first."""
    gaps = Random(f"{seed}/poisson")
    return _accumulate(lambda: -math.log(1.0 - gaps.random()), rate_per_s, n, duration_s)


def poisson_exactly(rate_per_s: float, seed: int, n: int) -> tuple[float, ...]:
    """Poisson arrivals given that exactly `n` of them fall into the window of n / rate seconds: independent uniform
    times, sorted. A short run then offers the very rate that it names."""
    _check(rate_per_s, n, None)
    draws = Random(f"{seed}/poisson-exactly")
    return tuple(sorted(draws.random() * n / rate_per_s for _ in range(n)))


def gamma(
    rate_per_s: float, cv: float, seed: int, *, n: int | None = None, duration_s: float | None = None
) -> tuple[float, ...]:
    """Arrivals with gamma-distributed gaps of coefficient of variation `cv`: 1 is Poisson, above 1 comes in bursts."""
    if not 0 < cv < math.inf:
        raise UsageError(f"The coefficient of variation must be positive, not {cv}.")
    gaps = Random(f"{seed}/gamma")
    shape = 1 / cv**2
    return _accumulate(lambda: gaps.gammavariate(shape, 1 / shape), rate_per_s, n, duration_s)


def constant(rate_per_s: float, *, n: int | None = None, duration_s: float | None = None) -> tuple[float, ...]:
    """One request every 1 / rate seconds, the first one at time 0."""
    _check(rate_per_s, n, duration_s)
    count = n if n is not None else math.inf
    if duration_s is not None:  # a time that is the end itself, but for rounding, is not in the window
        count = min(count, math.ceil(duration_s * rate_per_s - 1e-9))
    return tuple(index / rate_per_s for index in range(int(count)))


def ramp(first_per_s: float, last_per_s: float, seed: int, duration_s: float) -> tuple[float, ...]:
    """Poisson arrivals whose rate goes in a straight line from the first to the last within `duration_s`, given that
    exactly as many come as are to be expected: at least one."""
    _check(max(first_per_s, last_per_s), None, duration_s)
    draws = Random(f"{seed}/ramp")
    area = (first_per_s + last_per_s) / 2 * duration_s
    slope = (last_per_s - first_per_s) / duration_s

    def when(arrived: float) -> float:
        # solves first * t + slope * t^2 / 2 = arrived, in the form that has no slope in a denominator
        root = math.sqrt(max(0.0, first_per_s**2 + 2 * slope * arrived))
        return 2 * arrived / (first_per_s + root)

    return tuple(sorted(when(area * (1.0 - draws.random())) for _ in range(max(1, round(area)))))


def closed_loop(n: int) -> tuple[None, ...]:
    """`n` requests without times of their own: each is sent as soon as `run_load`'s `in_flight` leaves room."""
    return (None,) * n


def _accumulate(
    draw_unit: Callable[[], float], rate_per_s: float, n: int | None, duration_s: float | None
) -> tuple[float, ...]:
    _check(rate_per_s, n, duration_s)
    times: list[float] = []
    units = draw_unit()
    while (n is None or len(times) < n) and (duration_s is None or units / rate_per_s < duration_s):
        times.append(units / rate_per_s)
        units += draw_unit()
    return tuple(times)


def _check(rate_per_s: float, n: int | None, duration_s: float | None) -> None:
    if not 0 < rate_per_s < math.inf:
        raise UsageError(f"The rate must be a positive number of requests per second, not {rate_per_s}.")
    assert n is not None or duration_s is not None, "say how many requests or for how long"
    assert duration_s is None or duration_s < math.inf, "a run has an end"
