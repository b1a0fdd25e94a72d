"""Whether a run over HTTP may be believed: was it the server that was measured, or the client?"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sarathi_tune.goodput.server_account import ServerAccount
from sarathi_tune.goodput.validity import (
    MAX_LAG_SHARE,
    Facts,
    Validity,
    failures,
    few_stalls,
    late_client,
    undelivered,
)
from sarathi_tune.loadgen.latency import EventViews, LatencyReport
from sarathi_tune.loadgen.record import MAX_COALESCED_SHARE, LoadResult, RequestRecord, is_stamped_on_arrival
from sarathi_tune.notices import (
    Notice,
    batch_not_met,
    client_starved,
    events_coalesced,
    heap_collected,
    output_length_unknown,
    prefix_cache_hits,
    prompt_length_differs,
)
from sarathi_tune.stats import median

#: Above these shares a remark is due: prompt tokens from the cache, and the difference between the prompt lengths asked
#: for and counted.
MAX_CACHED_SHARE = 0.01
MAX_PROMPT_ERROR = 0.01


def check_http_run(
    result: LoadResult,
    report: LatencyReport,
    views: EventViews,
    *,
    server: ServerAccount | None = None,
    allow_prefix_hits: bool = False,
) -> Validity:
    """Check a run, its report and its views, beside what the server counted. `allow_prefix_hits` is for workloads whose
    prompts share a prefix."""
    records = result.counted
    facts, more = Facts.of(records), _more_facts(result, records, views)
    # how late stamps may be because the client read late
    limit_ms = math.inf if more["stamped_on_arrival"] else MAX_LAG_SHARE * report.slo.itl_ms
    client = late_client(facts, report.slo)
    if more["loop_lag_p99_ms"] > limit_ms:
        client.append(client_starved(more["loop_lag_p99_ms"], limit_ms))
    problems = [*client, *undelivered(result, facts, report.slo)]
    if facts.cached_tokens > MAX_CACHED_SHARE * more["prompt_tokens_got"] and not allow_prefix_hits:
        problems.append(prefix_cache_hits(facts.cached_tokens))
    stalls = [batch_not_met(0, 1)] if facts.gaps and not facts.stalled_gaps else few_stalls(facts, report.slo)
    own = () if server is None else server.remarks()
    return Validity(
        problems=tuple(problems),
        remarks=(*failures(report), *stalls, *own, *_remarks(views, more, records, limit_ms)),
        facts=facts,
        more_facts=more,
        is_client_limited=bool(client),
    )


def _more_facts(result: LoadResult, records: Sequence[RequestRecord], views: EventViews) -> dict[str, Any]:
    """What only a client over HTTP knows, of itself and of what the server counted."""
    client = result.client
    prompts = [(record.prompt_tokens, record.prompt_got) for record in records if record.prompt_got is not None]
    return {
        "loop_lag_p99_ms": client.loop_lag_p99_ms if client else 0.0,
        "loop_lag_max_ms": client.loop_lag_max_ms if client else 0.0,
        "stamped_on_arrival": client is not None
        and is_stamped_on_arrival(client.reads, client.kernel_stamped_reads, views.coalesced_share),
        "gc_pauses_ms": list(client.gc_pauses_ms) if client else [],
        "workers": client.workers if client else 1,
        "prompt_tokens_asked": sum(asked for asked, _ in prompts),
        "prompt_tokens_got": sum(got or 0 for _, got in prompts),
        "cached_tokens_known": any(record.cached_tokens is not None for record in records),
    }


def _remarks(
    views: EventViews, more: Mapping[str, Any], records: Sequence[RequestRecord], limit_ms: float
) -> list[Notice]:
    found = []
    if views.coalesced_share > MAX_COALESCED_SHARE:
        found.append(events_coalesced(views.coalesced_share))
    long_ms = [pause for pause in more["gc_pauses_ms"] if pause > limit_ms]
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
