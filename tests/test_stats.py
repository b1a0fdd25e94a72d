"""Quantiles against numpy, bounds against published sample sizes, intervals against their own promise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_tune.stats import (
    bootstrap_interval,
    mad,
    median,
    min_samples,
    quantile,
    quantile_interval,
    wilson_interval,
)

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=50), st.floats(0, 1))
def test_quantile_is_numpys(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-6)


def test_nothing_has_no_quantile() -> None:
    assert math.isnan(quantile([], 0.5))
    assert math.isnan(median([]))
    assert math.isnan(mad([]))


def test_mad_by_hand() -> None:
    # median 2, deviations 1 1 0 0 2 4 7 -> sorted 0 0 1 1 2 4 7
    assert median([1, 1, 2, 2, 4, 6, 9]) == 2
    assert mad([1, 1, 2, 2, 4, 6, 9]) == 1


@pytest.mark.parametrize(
    ("q", "confidence", "sides", "expected"),
    [
        (0.99, 0.95, "upper", 299),
        (0.99, 0.95, "two", 368),
        (0.99, 0.99, "upper", 459),
        (0.5, 0.95, "two", 6),
        (0.95, 0.95, "upper", 59),  # the classical Wilks number
    ],
)
def test_sample_sizes_of_the_literature(q: float, confidence: float, sides: str, expected: int) -> None:
    assert min_samples(q, confidence, sides) == expected  # type: ignore[arg-type]
    values = list(range(expected))
    assert quantile_interval(values, q, confidence, sides) is not None  # type: ignore[arg-type]
    assert quantile_interval(values[:-1], q, confidence, sides) is None  # type: ignore[arg-type]


def test_the_smallest_sample_has_its_maximum_as_bound() -> None:
    assert quantile_interval(list(range(299)), 0.99, sides="upper") == (-math.inf, 298.0)


def test_median_interval_by_hand() -> None:
    # n = 10: P(X <= 1) = 11/1024 = 0.011, P(X <= 2) = 56/1024 = 0.055: order statistics 2 and 9.
    assert quantile_interval(list(range(1, 11)), 0.5) == (2.0, 9.0)


def test_order_statistics_cover_as_promised() -> None:
    rng = np.random.default_rng(1)
    true = -math.log(0.05)  # p95 of the exponential distribution
    hits = 0
    for _ in range(400):
        interval = quantile_interval(rng.exponential(size=150).tolist(), 0.95)
        assert interval is not None
        hits += interval[0] <= true <= interval[1]
    assert hits >= 0.93 * 400


def test_wilson_by_the_textbook() -> None:
    # 10 of 100 (Newcombe 1998, method 3): 0.0552 to 0.1744.
    low, high = wilson_interval(10, 100)
    assert (low, high) == (pytest.approx(0.0552, abs=1e-4), pytest.approx(0.1744, abs=1e-4))
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 20)[0] == 0.0
    assert wilson_interval(20, 20)[1] == 1.0


def test_bootstrap_keeps_requests_together() -> None:
    rng = np.random.default_rng(2)
    # Gaps of a request share its level: 30 requests of 100 gaps hold 30 independent values, not 3,000.
    groups = [(level + 0.01 * rng.standard_normal(100)).tolist() for level in rng.standard_normal(30)]
    single = [[value] for group in groups for value in group]
    grouped = bootstrap_interval(groups, lambda values: float(values.mean()), resamples=400)
    ungrouped = bootstrap_interval(single, lambda values: float(values.mean()), resamples=400)
    assert grouped is not None
    assert ungrouped is not None
    assert grouped[1] - grouped[0] > 4 * (ungrouped[1] - ungrouped[0])
    assert bootstrap_interval(groups[:1], lambda values: float(values.mean())) is None
    assert bootstrap_interval(groups, lambda v: float(v.mean()), resamples=50, seed=3) == bootstrap_interval(
        groups, lambda v: float(v.mean()), resamples=50, seed=3
    )
