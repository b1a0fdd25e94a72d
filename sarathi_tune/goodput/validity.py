"""Whether a run may be believed: what each check saw, and what to do about it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.objective import MAX_FAILED_SHARE, SUSTAINABLE_DELAY_MS
from sarathi_tune.loadgen.latency import LatencyReport
from sarathi_tune.loadgen.record import LoadResult, RequestRecord
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
class Facts:
    """What was seen in a run of any kind, of the requests that count."""

    sent: int
    intended: int
    lag_p99_ms: float
    gaps: int
    stalled_gaps: int
    cached_tokens: int

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> "Facts":
        """The facts of these requests."""
        lags = [record.lag_s * 1e3 for record in records if record.sent_s is not None]
        return cls(
            sent=len(lags),
            intended=len(records),
            lag_p99_ms=quantile(lags, 0.99) if lags else 0.0,
            gaps=sum(max(0, len(record.token_s) - 1) for record in records),
            stalled_gaps=sum(sum(record.stalled or ()) for record in records),
            cached_tokens=sum(record.cached_tokens or 0 for record in records),
        )


@dataclass(frozen=True, slots=True)
class Validity:
    """`problems` mean that the run doesn't count; `remarks` that it does and should be read with care. `facts` and
    `more_facts` are the numbers behind both, for the result document. `is_client_limited`: the client itself was too
    slow, and more worker processes may help."""

    problems: tuple[Notice, ...]
    remarks: tuple[Notice, ...]
    facts: Facts
    more_facts: Mapping[str, Any]
    is_client_limited: bool = False

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
            "facts": asdict(self.facts) | dict(self.more_facts),
        }


def check_run(
    result: LoadResult, report: LatencyReport, *, full_batch: int = 1, allow_prefix_hits: bool = False
) -> Validity:
    """Check a run and its report. `full_batch` is the decode batch that the run is to speak for (Little's law at its
    rate, or `max_num_seqs`): a prompt must have been computed beside that many decodes."""
    facts = Facts.of(result.counted)
    beside = max((step.shape.num_decodes for step in result.steps if step.shape.chunks), default=0)
    preemptions = sum(step.num_preempted for step in result.steps)
    problems = [*late_client(facts, report.slo), *undelivered(result, facts, report.slo)]
    if beside < full_batch:
        problems.append(batch_not_met(beside, full_batch))
    if facts.cached_tokens > 0 and not allow_prefix_hits:
        problems.append(prefix_cache_hits(facts.cached_tokens))
    remarks = few_stalls(facts, report.slo)
    if preemptions:
        remarks.append(preempted(preemptions))
    delay_ms = report.scheduling_delay.p50_ms
    if delay_ms is not None and delay_ms > SUSTAINABLE_DELAY_MS:
        remarks.append(overloaded(delay_ms / 1e3, SUSTAINABLE_DELAY_MS / 1e3))
    return Validity(
        problems=(*problems, *failures(report)),
        remarks=tuple(remarks),
        facts=facts,
        more_facts={"hybrid_decodes": beside, "preemptions": preemptions},
    )


def late_client(facts: Facts, slo: Slo) -> list[Notice]:
    """Requests that were sent late: their wait would be billed to the server."""
    limit_ms = MAX_LAG_SHARE * slo.itl_ms
    return [client_lag(facts.lag_p99_ms, limit_ms)] if facts.lag_p99_ms > limit_ms else []


def undelivered(result: LoadResult, facts: Facts, slo: Slo) -> list[Notice]:
    """A run that was cut off, a rate that wasn't sent, or fewer gaps than the percentile needs."""
    found = []
    if not result.is_complete:
        found.append(run_interrupted())
    if facts.sent < (1 - MAX_RATE_ERROR) * facts.intended:
        found.append(rate_not_delivered(facts.sent, facts.intended))
    enough = min_samples(slo.percentile)
    if facts.gaps < enough:
        found.append(too_few_gaps("inter-token gaps", facts.gaps, enough))
    return found


def few_stalls(facts: Facts, slo: Slo) -> list[Notice]:
    """Enough gaps, and of those in which prompts were computed too few."""
    enough = min_samples(slo.percentile)
    return (
        [too_few_gaps("stalled gaps", facts.stalled_gaps, enough)] if facts.gaps >= enough > facts.stalled_gaps else []
    )


def failures(report: LatencyReport) -> list[Notice]:
    """More failed requests than may be, with their kinds."""
    counts = report.counts
    if counts.failed_share <= MAX_FAILED_SHARE:
        return []
    kinds = [f"{number} {kind.replace('_', ' ')}" for kind, number in counts.failures.items()]
    kinds += [f"{counts.not_sent} not sent"] if counts.not_sent else []
    return [requests_failed(counts.failed + counts.not_sent, counts.intended, ", ".join(kinds))]
