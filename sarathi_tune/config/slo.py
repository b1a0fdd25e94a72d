"""What the user promises to their users."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives in milliseconds at the 99th percentile; `ttft_ms` is optional."""

    itl_ms: float
    ttft_ms: float | None = None
    percentile: float = 0.99
