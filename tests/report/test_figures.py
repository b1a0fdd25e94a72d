"""Figures in tables."""

import math

import pytest

from sarathi_tune.report.figures import count_figure, ms_figure, percent_figure, rate_figure


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8.344, "8.34"),
        (97.12, "97.1"),
        (505.4, "505"),
        (12_310.0, "12,310"),
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_milliseconds(value: float | None, text: str) -> None:
    assert ms_figure(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.052, "0.052"),
        (0.52, "0.52"),
        (1.254, "1.25"),
        (12.54, "12.5"),
        (340.2, "340"),
        (1234.0, "1,234"),
        (0, "0"),
        (None, "-"),
    ],
)
def test_rates(value: float | None, text: str) -> None:
    assert rate_figure(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.031, "3.1 %"), (0.12, "12 %"), (1.5, "150 %"), (0.0996, "10 %"), (None, "-")]
)
def test_shares(value: float | None, text: str) -> None:
    assert percent_figure(value) == text


def test_counts() -> None:
    assert (count_figure(2048), count_figure(None)) == ("2,048", "-")
