"""Arrival times: the right rate, the right irregularity, any rate."""

from itertools import pairwise
from statistics import fmean, stdev

import pytest

from sarathi_tune.errors import UsageError
from sarathi_tune.workload.arrivals import closed_loop, constant, gamma, poisson, poisson_exactly, ramp


def gaps(times: tuple[float, ...]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("rate", [0.01, 0.05, 1.0, 250.0])
def test_poisson_arrivals_have_their_rate_below_one_per_second_too(rate: float) -> None:
    # vllm #47651: rates below 1 per second
    found = gaps(poisson(rate, 0, n=20_000))
    assert fmean(found) == pytest.approx(1 / rate, rel=0.02)
    assert stdev(found) == pytest.approx(1 / rate, rel=0.03)


def test_a_duration_ends_the_arrivals() -> None:
    times = poisson(50.0, 1, duration_s=100.0)
    assert max(times) < 100.0
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert poisson(50.0, 1, n=10, duration_s=100.0) == times[:10]
    assert poisson(0.001, 1, duration_s=0.01) == ()


def test_two_rates_of_one_seed_differ_by_stretching_only() -> None:
    slow, fast = poisson(0.5, 7, n=50), poisson(2.0, 7, n=50)
    assert [time / 4 for time in slow] == pytest.approx(fast)
    assert poisson(0.5, 8, n=50) != slow


def test_poisson_exactly_offers_the_rate_it_names() -> None:
    times = poisson_exactly(0.6, 3, 12)
    assert len(times) == 12
    assert list(times) == sorted(times)
    assert 0 <= times[0] <= times[-1] < 12 / 0.6
    # the count in a tenth of the window is binomial(n, 1/10), as for Poisson arrivals given their number
    counts = [sum(time < 10 for time in poisson_exactly(1.0, seed, 100)) for seed in range(300)]
    assert fmean(counts) == pytest.approx(10, abs=0.6)
    assert stdev(counts) == pytest.approx(3.0, abs=0.4)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_arrivals_have_their_coefficient_of_variation(cv: float) -> None:
    found = gaps(gamma(4.0, cv, 0, n=40_000))
    assert fmean(found) == pytest.approx(0.25, rel=0.05)
    assert stdev(found) / fmean(found) == pytest.approx(cv, rel=0.05)


def test_constant_arrivals() -> None:
    assert constant(0.5, n=4) == (0.0, 2.0, 4.0, 6.0)
    assert constant(2.0, duration_s=2.0) == (0.0, 0.5, 1.0, 1.5)
    assert len(constant(10.0, duration_s=0.3)) == 3


def test_a_closed_loop_has_no_times() -> None:
    assert closed_loop(3) == (None, None, None)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_rate_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="positive number of requests per second"):
        poisson(rate, 0, n=1)


def test_a_bad_coefficient_of_variation_is_refused() -> None:
    with pytest.raises(UsageError, match="coefficient of variation"):
        gamma(1.0, 0.0, 0, n=1)


@pytest.mark.parametrize(("first", "last"), [(0.0, 40.0), (40.0, 0.0), (10.0, 30.0), (20.0, 20.0)])
def test_a_ramp_goes_in_a_straight_line(first: float, last: float) -> None:
    times = ramp(first, last, 3, 1000.0)
    assert len(times) == 20_000
    assert list(times) == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 1000
    # in the k-th of four quarters the mean rate is that of its middle
    for quarter in range(4):
        expected = 250 * (first + (last - first) * (quarter + 0.5) / 4)
        assert sum(250 * quarter <= time < 250 * (quarter + 1) for time in times) == pytest.approx(expected, rel=0.05)
