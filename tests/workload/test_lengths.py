"""Length distributions against closed forms and against the figures that they are made from."""

import math
from random import Random
from statistics import fmean, median, stdev

import pytest

from sarathi_tune.workload.lengths import Empirical, Fixed, Lengths, Lognormal, Uniform


def draw(lengths: Lengths, n: int = 20_000) -> list[int]:
    rng = Random(1)
    return [lengths.quantile(rng.random()) for _ in range(n)]


def test_a_lognormal_goes_through_its_median_and_p90() -> None:
    lengths = Lognormal.from_median_p90(1730, 5696, 1, None)
    assert lengths.quantile(0.5) == 1730
    assert lengths.quantile(0.9) == 5696
    # by hand: sigma = ln(5696 / 1730) / 1.28155
    assert lengths.sigma == pytest.approx(math.log(5696 / 1730) / 1.28155, rel=1e-5)


def test_a_lognormal_from_mean_and_sd_has_them() -> None:
    values = draw(Lognormal.from_mean_sd(200, 50, 1, None))
    assert fmean(values) == pytest.approx(200, rel=0.01)
    assert stdev(values) == pytest.approx(50, rel=0.03)


def test_a_lognormal_from_median_and_mean_has_them() -> None:
    values = draw(Lognormal.from_median_mean(1020, 1155, 1, None))
    assert median(values) == pytest.approx(1020, rel=0.02)
    assert fmean(values) == pytest.approx(1155, rel=0.02)


def test_clamps_hold() -> None:
    values = draw(Lognormal.from_median_p90(100, 1000, 50, 200))
    assert min(values) == 50
    assert max(values) == 200


def test_a_uniform_reaches_both_ends_equally_often() -> None:
    values = draw(Uniform(low=3, high=6), 40_000)
    assert set(values) == {3, 4, 5, 6}
    assert all(values.count(value) == pytest.approx(10_000, rel=0.05) for value in (3, 4, 5, 6))


def test_an_empirical_distribution_interpolates_and_ends_flat() -> None:
    lengths = Empirical(points=((0.1, 10.0), (0.5, 100.0), (0.9, 500.0)))
    assert [lengths.quantile(level) for level in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)] == [
        10,
        10,
        55,
        100,
        300,
        500,
        500,
    ]


def test_the_shortest_length_is_known() -> None:
    assert Fixed(tokens=7).shortest == 7
    assert Uniform(low=3, high=6).shortest == 3
    assert Lognormal.from_median_p90(100, 200, 5, None).shortest == 5
    assert Lognormal.from_median_p90(100, 100, 5, None).shortest == 100
    assert Empirical(points=((0.0, 10.0), (1.0, 20.0))).shortest == 10
