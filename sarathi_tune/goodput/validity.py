"""Whether a run may be believed: what each check saw, and what to do about it."""

from dataclasses import dataclass
from typing import Any

from sarathi_tune.goodput.objective import MAX_FAILED_SHARE, SUSTAINABLE_DELAY_MS
from sarathi_tune.loadgen.latency import LatencyReport
from sarathi_tune.loadgen.record import LoadResult
from sarathi_tune.notices import (
    Notice,
    batch_not_met,
    client_lag,
    overloaded,
    preempted,
    prefix_cache_hits,
    rate_not_delivered,
    requests_failed,
    run_interrupted,
    too_few_gaps,
)
from sarathi_tune.stats import min_samples, quantile

#: The client may be late by this share of the ITL objective at p99.
MAX_LAG_SHARE = 0.05
#: The delivered rate may differ from the intended one by this share.
MAX_RATE_ERROR = 0.01


@dataclass(frozen=True, slots=True)
class Validity:
    """`problems` mean that the run doesn't count; `remarks` that it does and should be read with care. `facts` are the
    numbers behind both, for the result document."""

    problems: tuple[Notice, ...]
    remarks: tuple[Notice, ...]
    facts: "Facts"

    @property
    def is_valid(self) -> bool:
        """Whether the run counts."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The checks as they stand in a result document."""
        return {
            "valid": self.is_valid,
            "problems": [notice.as_dict() for notice in self.problems],
            "remarks": [notice.as_dict() for notice in self.remarks],
            "facts": self.facts.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen. `hybrid_decodes`: the most decodes that ran beside a prefill chunk in one step."""

    sent: int
    intended: int
    lag_p99_ms: float
    hybrid_decodes: int
    preemptions: int
    gaps: int
    stalled_gaps: int
    cached_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The facts as they stand in a result document."""
        return {
            "sent": self.sent,
            "intended": self.intended,
            "lag_p99_ms": self.lag_p99_ms,
            "hybrid_decodes": self.hybrid_decodes,
            "preemptions": self.preemptions,
            "gaps": self.gaps,
            "stalled_gaps": self.stalled_gaps,
            "cached_tokens": self.cached_tokens,
        }


def check_run(
    result: LoadResult, report: LatencyReport, *, full_batch: int = 1, allow_prefix_hits: bool = False
) -> Validity:
    """Check a run and its report. `full_batch` is the decode batch that the run is to speak for (Little's law at its
    rate, or `max_num_seqs`): a prompt must have been computed beside that many decodes."""
    facts = _facts(result)
    return Validity(
        problems=tuple(_problems(result, report, facts, full_batch, allow_prefix_hits)),
        remarks=tuple(_remarks(report, facts)),
        facts=facts,
    )


def _facts(result: LoadResult) -> Facts:
    counted = result.counted
    lags = [record.lag_s * 1e3 for record in counted if record.sent_s is not None]
    return Facts(
        sent=len(lags),
        intended=len(counted),
        lag_p99_ms=quantile(lags, 0.99) if lags else 0.0,
        hybrid_decodes=max((step.shape.num_decodes for step in result.steps if step.shape.chunks), default=0),
        preemptions=sum(step.num_preempted for step in result.steps),
        gaps=sum(max(0, len(record.token_s) - 1) for record in counted),
        stalled_gaps=sum(sum(record.stalled or ()) for record in counted),
        cached_tokens=sum(record.cached_tokens or 0 for record in counted),
    )


def _problems(
    result: LoadResult, report: LatencyReport, facts: Facts, full_batch: int, allow_prefix_hits: bool
) -> list[Notice]:
    slo, counts = report.slo, report.counts
    found = []
    if not result.is_complete:
        found.append(run_interrupted())
    if facts.sent < (1 - MAX_RATE_ERROR) * facts.intended:
        found.append(rate_not_delivered(facts.sent, facts.intended))
    if facts.lag_p99_ms > MAX_LAG_SHARE * slo.itl_ms:
        found.append(client_lag(facts.lag_p99_ms, MAX_LAG_SHARE * slo.itl_ms))
    if facts.hybrid_decodes < full_batch:
        found.append(batch_not_met(facts.hybrid_decodes, full_batch))
    if facts.gaps < min_samples(slo.percentile):
        found.append(too_few_gaps("inter-token gaps", facts.gaps, min_samples(slo.percentile)))
    if facts.cached_tokens > 0 and not allow_prefix_hits:
        found.append(prefix_cache_hits(facts.cached_tokens))
    if counts.failed_share > MAX_FAILED_SHARE:
        kinds = [f"{number} {kind.replace('_', ' ')}" for kind, number in counts.failures.items()]
        kinds += [f"{counts.not_sent} not sent"] if counts.not_sent else []
        found.append(requests_failed(counts.failed + counts.not_sent, counts.intended, ", ".join(kinds)))
    return found


def _remarks(report: LatencyReport, facts: Facts) -> list[Notice]:
    found = []
    enough = min_samples(report.slo.percentile)
    if facts.gaps >= enough > facts.stalled_gaps:
        found.append(too_few_gaps("stalled gaps", facts.stalled_gaps, enough))
    if facts.preemptions:
        found.append(preempted(facts.preemptions))
    delay_ms = report.scheduling_delay.p50_ms
    if delay_ms is not None and delay_ms > SUSTAINABLE_DELAY_MS:
        found.append(overloaded(delay_ms / 1e3, SUSTAINABLE_DELAY_MS / 1e3))
    return found
