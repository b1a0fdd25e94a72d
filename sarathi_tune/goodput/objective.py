"""What it means that a run *meets* its SLO."""

from typing import Literal

from sarathi_tune.loadgen.latency import Distribution, LatencyReport
from sarathi_tune.units import format_ms

#: every-step: the SLO's percentile of all gaps, and that of the stalled gaps alone, is within the ITL objective,
#: however rarely stalls happen. pooled: only that of all gaps, as `vllm bench serve` would show it. per-request: that
#: share of the requests is good.
Criterion = Literal["every-step", "pooled", "per-request"]

#: A rate is sustainable while the median request waits at most this long for its first step (Sarathi-Serve, OSDI 2024).
SUSTAINABLE_DELAY_MS = 2000.0
#: Above this share of failed requests no percentile speaks for all.
MAX_FAILED_SHARE = 0.01


def shortfalls(
    report: LatencyReport,
    criterion: Criterion = "every-step",
    *,
    sustainable_delay_ms: float = SUSTAINABLE_DELAY_MS,
) -> tuple[str, ...]:
    """Why the run doesn't meet its SLO, one clause each; empty when it does."""
    slo, counts = report.slo, report.counts
    percent = f"p{slo.percentile * 100:g}"
    found: list[str] = []

    def limit(name: str, seen: Distribution, limit_ms: float) -> None:
        if seen.tail_ms is not None and seen.tail_ms > limit_ms:
            found.append(f"{percent} {name} {format_ms(seen.tail_ms)} > {format_ms(limit_ms)}")

    if counts.intended == 0:
        found.append("no request was intended in the window")
    if counts.failed_share > MAX_FAILED_SHARE:
        found.append(f"{counts.failed + counts.not_sent} of {counts.intended} requests failed or were not sent")
    if criterion == "per-request" and report.attained_share < slo.percentile:
        found.append(f"{report.attained_share:.1%} of the requests are good, {slo.percentile:.0%} are promised")
    if criterion != "per-request":
        limit("ITL", report.itl, slo.itl_ms)
        if slo.ttft_ms is not None:
            limit("TTFT", report.ttft, slo.ttft_ms)
    if criterion == "every-step":
        limit("ITL of stalled gaps", report.itl_stalled, slo.itl_ms)
    delay_ms = report.scheduling_delay.p50_ms
    if delay_ms is not None and delay_ms > sustainable_delay_ms:
        found.append(f"median scheduling delay {format_ms(delay_ms)} > {format_ms(sustainable_delay_ms)}")
    return tuple(found)
