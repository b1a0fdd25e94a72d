"""Whether a run over HTTP may be believed: was it the server that was measured, or the client?"""

from dataclasses import dataclass
from typing import Any

from sarathi_tune.goodput.objective import MAX_FAILED_SHARE
from sarathi_tune.goodput.validity import MAX_LAG_SHARE, MAX_RATE_ERROR
from sarathi_tune.loadgen.latency import EventViews, LatencyReport
from sarathi_tune.loadgen.record import LoadResult, RequestRecord
from sarathi_tune.notices import (
    Notice,
    batch_not_met,
    client_lag,
    client_starved,
    events_coalesced,
    heap_collected,
    output_length_unknown,
    prefix_cache_hits,
    prompt_length_differs,
    rate_not_delivered,
    requests_failed,
    run_interrupted,
    too_few_gaps,
)
from sarathi_tune.stats import median, min_samples, quantile

#: Above these shares a remark is due: events without a stamp of their own, prompt tokens from the cache, and the
#: difference between the prompt lengths asked for and counted.
MAX_COALESCED_SHARE = 0.01
MAX_CACHED_SHARE = 0.01
MAX_PROMPT_ERROR = 0.01


@dataclass(frozen=True, slots=True)
class HttpValidity:
    """`problems` mean that the run doesn't count, `remarks` that it should be read with care; `facts` are the numbers
    behind both. `is_client_limited`: the client itself was too slow, and more worker processes may help."""

    problems: tuple[Notice, ...]
    remarks: tuple[Notice, ...]
    facts: dict[str, Any]
    is_client_limited: bool

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
            "facts": self.facts,
        }


def check_http_run(
    result: LoadResult, report: LatencyReport, views: EventViews, *, allow_prefix_hits: bool = False
) -> HttpValidity:
    """Check a run, its report and its views. `allow_prefix_hits` is for workloads whose prompts share a prefix."""
    records = result.counted
    facts = _facts(result, records)
    limit_ms = MAX_LAG_SHARE * report.slo.itl_ms
    client = []
    if facts["lag_p99_ms"] > limit_ms:
        client.append(client_lag(facts["lag_p99_ms"], limit_ms))
    if facts["loop_lag_p99_ms"] > limit_ms:
        client.append(client_starved(facts["loop_lag_p99_ms"], limit_ms))
    return HttpValidity(
        problems=(*client, *_problems(result, report, facts, allow_prefix_hits)),
        remarks=tuple(_remarks(report, views, facts, records, limit_ms)),
        facts=facts,
        is_client_limited=bool(client),
    )


def _facts(result: LoadResult, records: tuple[RequestRecord, ...]) -> dict[str, Any]:
    sent = [record for record in records if record.sent_s is not None]
    client = result.client
    prompts = [(record.prompt_tokens, record.prompt_got) for record in records if record.prompt_got is not None]
    return {
        "intended": len(records),
        "sent": len(sent),
        "lag_p99_ms": quantile([record.lag_s * 1e3 for record in sent], 0.99) if sent else 0.0,
        "loop_lag_p99_ms": client.loop_lag_p99_ms if client else 0.0,
        "loop_lag_max_ms": client.loop_lag_max_ms if client else 0.0,
        "gc_pauses_ms": list(client.gc_pauses_ms) if client else [],
        "workers": client.workers if client else 1,
        "gaps": sum(max(0, len(record.token_s) - 1) for record in records),
        "stalled_gaps": sum(sum(record.stalled or ()) for record in records),
        "prompt_tokens_asked": sum(asked for asked, _ in prompts),
        "prompt_tokens_got": sum(got or 0 for _, got in prompts),
        "cached_tokens": sum(record.cached_tokens or 0 for record in records),
        "cached_tokens_known": any(record.cached_tokens is not None for record in records),
    }


def _problems(
    result: LoadResult, report: LatencyReport, facts: dict[str, Any], allow_prefix_hits: bool
) -> list[Notice]:
    found = []
    if not result.is_complete:
        found.append(run_interrupted())
    if facts["sent"] < (1 - MAX_RATE_ERROR) * facts["intended"]:
        found.append(rate_not_delivered(facts["sent"], facts["intended"]))
    enough = min_samples(report.slo.percentile)
    if facts["gaps"] < enough:
        found.append(too_few_gaps("inter-token gaps", facts["gaps"], enough))
    if facts["cached_tokens"] > MAX_CACHED_SHARE * facts["prompt_tokens_got"] and not allow_prefix_hits:
        found.append(prefix_cache_hits(facts["cached_tokens"]))
    return found


def _remarks(
    report: LatencyReport,
    views: EventViews,
    facts: dict[str, Any],
    records: tuple[RequestRecord, ...],
    limit_ms: float,
) -> list[Notice]:
    found, counts = [], report.counts
    enough = min_samples(report.slo.percentile)
    if counts.failed_share > MAX_FAILED_SHARE:
        kinds = [f"{number} {kind.replace('_', ' ')}" for kind, number in counts.failures.items()]
        kinds += [f"{counts.not_sent} not sent"] if counts.not_sent else []
        found.append(requests_failed(counts.failed + counts.not_sent, counts.intended, ", ".join(kinds)))
    if facts["gaps"] and not facts["stalled_gaps"]:
        found.append(batch_not_met(0, 1))
    elif facts["gaps"] >= enough > facts["stalled_gaps"]:
        found.append(too_few_gaps("stalled gaps", facts["stalled_gaps"], enough))
    if views.coalesced_share > MAX_COALESCED_SHARE:
        found.append(events_coalesced(views.coalesced_share))
    long_ms = [pause for pause in facts["gc_pauses_ms"] if pause > limit_ms]
    if long_ms:
        found.append(heap_collected(len(long_ms), max(long_ms)))
    errors = [
        record.prompt_got / record.prompt_tokens - 1 for record in records if record.prompt_got and record.prompt_tokens
    ]
    if errors and abs(median(errors)) > MAX_PROMPT_ERROR:
        found.append(prompt_length_differs(median(errors)))
    if any(record.token_s and record.output_got is None for record in records):
        found.append(output_length_unknown())
    return found
