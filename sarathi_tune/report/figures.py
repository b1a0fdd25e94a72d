"""Figures in tables, where the column's head holds the unit."""

import math


def ms_figure(value_ms: float | None) -> str:
    """Milliseconds to three significant figures without a unit: 8.34, 97.1, 505, 12,300."""
    if value_ms is None or not math.isfinite(value_ms):
        return "-"
    if value_ms >= 100:
        return f"{value_ms:,.0f}"
    return f"{value_ms:.1f}" if value_ms >= 10 else f"{value_ms:.2f}"


def rate_figure(rate_per_s: float | None) -> str:
    """Requests per second to three significant figures: 0.052, 1.25, 12.5, 340."""
    if rate_per_s is None or not math.isfinite(rate_per_s):
        return "-"
    if rate_per_s == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(rate_per_s))))
    figure = f"{rate_per_s:,.{decimals}f}"
    return figure.rstrip("0").rstrip(".") if decimals else figure


def percent_figure(fraction: float | None) -> str:
    """A fraction as a percentage: 3.1 %, 12 %."""
    if fraction is None or not math.isfinite(fraction):
        return "-"
    return f"{fraction * 100:.1f} %" if abs(fraction) < 0.0995 else f"{fraction * 100:.0f} %"


def count_figure(count: int | None) -> str:
    """A count with thousands separators."""
    return "-" if count is None else f"{count:,}"
