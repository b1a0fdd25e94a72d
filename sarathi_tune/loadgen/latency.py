"""Every latency metric, defined once. Here is where "p99" is decided.

    TTFT       first token - *intended* time: a client that sends late, or holds back, doesn't hide the queue
    gap (ITL)  between consecutive tokens of one request; the first token is TTFT and never a gap
    TPOT       (last - first) / (tokens behind the first); undefined for a one-token answer
    own p99    the p99 of one request's gaps; below 100 gaps that is nearly its longest gap
    per token  an event of k tokens shared out over them: k gaps of its k-th part (a display may smooth like that)
    fluidity   share of tokens in time, when token i is due i ITLs behind the first; a late one moves the rest back
    good       finished in full, TTFT within its objective (if there is one), own p99 gap within the ITL objective
    goodput    good requests per second of the window

Three p99s of the gaps stand side by side because they answer different questions. *Pooled* over all gaps: what
`vllm bench serve` prints; it hides every stall while fewer than 1 % of the gaps are stalled. *Stalled*: over the gaps
in which prefill tokens of others were computed; it does not depend on how often that happens. *Own*: one number per
request, what its reader saw. The mean gap per request is there to show that it hides what the others do not.

Quantiles interpolate linearly between order statistics, as numpy does. Whoever is missing (failed, never sent, no
token) is counted, and is never a zero.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from sarathi_tune.config.slo import Slo
from sarathi_tune.loadgen.record import FailureKind, LoadResult, RequestRecord
from sarathi_tune.stats import bootstrap_interval, quantile_interval, quantile_sorted, wilson_interval

Verdict = Literal["good", "slo_miss", "failed", "not_sent"]


def ttft_ms(record: RequestRecord) -> float | None:
    """Milliseconds from the intended time to the first token; None without a token."""
    return (record.token_s[0] - record.intended_s) * 1e3 if record.token_s else None


def gaps_ms(record: RequestRecord) -> list[float]:
    """Milliseconds between consecutive tokens (over HTTP: events with tokens), the first token excluded."""
    return [(after - before) * 1e3 for before, after in pairwise(record.token_s)]


def stalled_gaps_ms(record: RequestRecord) -> list[float]:
    """The gaps in which prefill tokens of other requests were computed; empty where the steps can't be seen."""
    if record.stalled is None:
        return []
    return [gap for gap, stalled in zip(gaps_ms(record), record.stalled, strict=True) if stalled]


def tpot_ms(record: RequestRecord) -> float | None:
    """Milliseconds per output token behind the first event; None when there is none or their number is unknown."""
    if record.output_got is None or len(record.token_s) < 2:
        return None
    behind = record.output_got - record.first_tokens
    return (record.token_s[-1] - record.token_s[0]) * 1e3 / behind if behind > 0 else None


def scheduling_delay_ms(record: RequestRecord) -> float | None:
    """Milliseconds from the intended time to the start of the first step that computed something of the request."""
    return None if record.scheduled_s is None else (record.scheduled_s - record.intended_s) * 1e3


def own_quantile_ms(record: RequestRecord, level: float) -> float | None:
    """That quantile of the request's own gaps; None without a gap."""
    gaps = gaps_ms(record)
    return quantile_sorted(sorted(gaps), level) if gaps else None


def failure_of(record: RequestRecord) -> FailureKind | None:
    """Why a sent request counts as failed, if it does: an answer without tokens or shorter than asked is a failure,
    whatever the server called it."""
    if record.outcome == "not_sent":
        return None
    if record.outcome == "failed":
        return record.failure or "unfinished"
    if not record.token_s:
        return "no_tokens"
    if record.output_got is not None and record.output_got < record.output_asked:
        return "short_output"
    return None


def token_gaps_ms(record: RequestRecord) -> list[float]:
    """Milliseconds per token: the gap before an event of k tokens counts k times, with its k-th part. Empty where the
    tokens of the events can't be known."""
    if record.event_tokens is None:
        return []
    gaps = zip(gaps_ms(record), record.event_tokens[1:], strict=True)
    return [gap / tokens for gap, tokens in gaps for _ in range(tokens)]


def fluidity(record: RequestRecord, slo: Slo) -> float | None:
    """Share of the tokens that came in time (the fluidity index of Etalon, Agrawal et al. 2024). The first token is due
    at the TTFT objective, or when it comes if there is none; each further one an ITL later. A missed deadline puts the
    following ones off, so that one stall doesn't count against every token behind it. None without tokens."""
    if not record.token_s:
        return None
    tokens = record.event_tokens or (1,) * len(record.token_s)
    first_s, itl_s = record.token_s[0], slo.itl_ms / 1e3
    due_s = first_s if slo.ttft_ms is None else record.intended_s + slo.ttft_ms / 1e3
    in_time = 0
    for at_s, count in zip(record.token_s, tokens, strict=True):
        for _ in range(count):
            is_late = at_s > due_s + 1e-9
            in_time += not is_late
            due_s = (at_s if is_late else due_s) + itl_s
    total = sum(tokens)
    return in_time / total if total else None


def judge(record: RequestRecord, slo: Slo) -> Verdict:
    """What the request counts as. Every intended request is exactly one of the four."""
    if record.outcome == "not_sent":
        return "not_sent"
    if failure_of(record) is not None:
        return "failed"
    first_ms, own_ms = ttft_ms(record), own_quantile_ms(record, slo.percentile)
    assert first_ms is not None, "a request that did not fail has a token"
    if slo.ttft_ms is not None and first_ms > slo.ttft_ms:
        return "slo_miss"
    return "slo_miss" if own_ms is not None and own_ms > slo.itl_ms else "good"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Quantiles of `n` values in milliseconds, None when there is no value. `tail_ms` is the quantile at the SLO's own
    percentile, with a 95 % interval where one was asked for and enough values are there."""

    n: int
    mean_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    p999_ms: float | None = None
    max_ms: float | None = None
    tail_ms: float | None = None
    tail_interval_ms: tuple[float, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The distribution as it stands in a result document."""
        interval = self.tail_interval_ms
        return {
            "n": self.n,
            "mean_ms": self.mean_ms,
            "p50_ms": self.p50_ms,
            "p90_ms": self.p90_ms,
            "p99_ms": self.p99_ms,
            "p999_ms": self.p999_ms,
            "max_ms": self.max_ms,
            "tail_ms": self.tail_ms,
            "tail_interval_ms": None if interval is None else list(interval),
        }


@dataclass(frozen=True, slots=True)
class Counts:
    """intended = good + slo_miss + failed + not_sent, always. `failures` splits `failed` by kind."""

    good: int = 0
    slo_miss: int = 0
    failed: int = 0
    not_sent: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def intended(self) -> int:
        """Every request that the window asked for."""
        return self.good + self.slo_miss + self.failed + self.not_sent

    @property
    def failed_share(self) -> float:
        """Share of the intended requests that failed or were never sent."""
        return (self.failed + self.not_sent) / self.intended if self.intended else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The counts as they stand in a result document."""
        return {
            "intended": self.intended,
            "good": self.good,
            "slo_miss": self.slo_miss,
            "failed": self.failed,
            "not_sent": self.not_sent,
            "failures": dict(self.failures),
        }


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """What the requests of one run saw. `itl` pools all gaps, `itl_stalled` those with prefill in them, `itl_own` has
    one own p99 per request, `itl_mean` one mean per request. `stalled_share` is the share of gaps that are stalled,
    `stalls_per_s` how many of them one stream meets per second; both None where the steps can't be seen."""

    slo: Slo
    duration_s: float
    counts: Counts
    offered_per_s: float
    goodput_per_s: float
    attained_share: float
    attained_interval: tuple[float, float]
    output_tokens_per_s: float
    ttft: Distribution
    itl: Distribution
    itl_stalled: Distribution
    itl_own: Distribution
    itl_mean: Distribution
    tpot: Distribution
    scheduling_delay: Distribution
    stalled_share: float | None
    stalls_per_s: float | None
    num_preemptions: int

    def as_dict(self) -> dict[str, Any]:
        """The report as it stands in a result document."""
        return {
            "percentile": self.slo.percentile,
            "duration_s": self.duration_s,
            "requests": self.counts.as_dict(),
            "failed_share": self.counts.failed_share,
            "offered_per_s": self.offered_per_s,
            "goodput_per_s": self.goodput_per_s,
            "attained_share": self.attained_share,
            "attained_interval": list(self.attained_interval),
            "output_tokens_per_s": self.output_tokens_per_s,
            "ttft": self.ttft.as_dict(),
            "itl": self.itl.as_dict(),
            "itl_stalled": self.itl_stalled.as_dict(),
            "itl_own": self.itl_own.as_dict(),
            "itl_mean": self.itl_mean.as_dict(),
            "tpot": self.tpot.as_dict(),
            "scheduling_delay": self.scheduling_delay.as_dict(),
            "stalled_share": self.stalled_share,
            "stalls_per_s": self.stalls_per_s,
            "preemptions": self.num_preemptions,
        }


@dataclass(frozen=True, slots=True)
class EventViews:
    """What only matters where an event isn't a token. `tokens_per_event` and `itl_per_token` cover the requests whose
    events could be counted (`counted_requests` of them); `coalesced_share` is the share of gaps that read 0 because two
    events came in one read."""

    events: int
    counted_requests: int
    tokens_per_event_mean: float | None
    tokens_per_event_max: int | None
    itl_per_token: Distribution
    coalesced_share: float
    fluidity_index: float | None

    def as_dict(self) -> dict[str, Any]:
        """The views as they stand in a result document."""
        return {
            "events": self.events,
            "counted_requests": self.counted_requests,
            "tokens_per_event_mean": self.tokens_per_event_mean,
            "tokens_per_event_max": self.tokens_per_event_max,
            "itl_per_token": self.itl_per_token.as_dict(),
            "coalesced_share": self.coalesced_share,
            "fluidity_index": self.fluidity_index,
        }


def event_views(records: Sequence[RequestRecord], slo: Slo) -> EventViews:
    """The views of runs over HTTP."""
    events = sum(len(record.token_s) for record in records)
    gaps = sum(max(0, len(record.token_s) - 1) for record in records)
    counted = [record.event_tokens for record in records if record.event_tokens]
    sizes = [tokens for event_tokens in counted for tokens in event_tokens]
    shares = [share for share in (fluidity(record, slo) for record in records) if share is not None]
    return EventViews(
        events=events,
        counted_requests=len(counted),
        tokens_per_event_mean=sum(sizes) / len(sizes) if sizes else None,
        tokens_per_event_max=max(sizes, default=None),
        itl_per_token=distribution((gap for record in records for gap in token_gaps_ms(record)), slo.percentile),
        coalesced_share=sum(record.num_coalesced for record in records) / gaps if gaps else 0.0,
        fluidity_index=sum(shares) / len(shares) if shares else None,
    )


def summarise(result: LoadResult, slo: Slo, *, intervals: bool = True, seed: int = 0) -> LatencyReport:
    """The report of a run: over the requests intended in its window."""
    return summarise_records(
        result.counted,
        slo,
        duration_s=result.duration_s,
        output_tokens_per_s=result.window_tokens_per_s,
        intervals=intervals,
        seed=seed,
    )


def summarise_records(
    records: Sequence[RequestRecord],
    slo: Slo,
    *,
    duration_s: float,
    output_tokens_per_s: float = 0.0,
    intervals: bool = True,
    seed: int = 0,
) -> LatencyReport:
    """The report over `records`, all intended within `duration_s` seconds.

    Gaps of failed requests count as well: they were seen. Intervals of the gaps resample whole requests (the gaps of
    one share its stalls); `seed` makes them repeatable.
    """
    counts = count(records, slo)
    gaps = [gaps_ms(record) for record in records]
    stalled = [stalled_gaps_ms(record) for record in records]
    seen = [group for group, record in zip(gaps, records, strict=True) if record.stalled is not None]
    num_seen, seen_ms = sum(map(len, seen)), sum(map(sum, seen))
    num_stalled = sum(map(len, stalled))
    level = slo.percentile

    def grouped(groups: list[list[float]]) -> Distribution:
        interval = _clustered_interval(groups, level, seed) if intervals else None
        return distribution((value for group in groups for value in group), level, interval)

    def single(values: Iterable[float | None]) -> Distribution:
        known = [value for value in values if value is not None]
        return distribution(known, level, quantile_interval(known, level) if intervals else None)

    return LatencyReport(
        slo=slo,
        duration_s=duration_s,
        counts=counts,
        offered_per_s=counts.intended / duration_s if duration_s > 0 else 0.0,
        goodput_per_s=counts.good / duration_s if duration_s > 0 else 0.0,
        attained_share=counts.good / counts.intended if counts.intended else 0.0,
        attained_interval=wilson_interval(counts.good, counts.intended),
        output_tokens_per_s=output_tokens_per_s,
        ttft=single(map(ttft_ms, records)),
        itl=grouped(gaps),
        itl_stalled=grouped(stalled),
        itl_own=single(own_quantile_ms(record, level) for record in records),
        itl_mean=single(sum(group) / len(group) if group else None for group in gaps),
        tpot=single(map(tpot_ms, records)),
        scheduling_delay=single(map(scheduling_delay_ms, records)),
        stalled_share=num_stalled / num_seen if num_seen else None,
        stalls_per_s=num_stalled / (seen_ms / 1e3) if seen_ms else None,
        num_preemptions=sum(record.num_preemptions for record in records),
    )


def count(records: Iterable[RequestRecord], slo: Slo) -> Counts:
    """How many requests are what."""
    verdicts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for record in records:
        verdict = judge(record, slo)
        verdicts[verdict] += 1
        if verdict == "failed":
            failures[str(failure_of(record))] += 1
    return Counts(
        good=verdicts["good"],
        slo_miss=verdicts["slo_miss"],
        failed=verdicts["failed"],
        not_sent=verdicts["not_sent"],
        failures=dict(sorted(failures.items())),
    )


def distribution(
    values: Iterable[float], level: float = 0.99, interval_ms: tuple[float, float] | None = None
) -> Distribution:
    """The quantiles of `values` (ms); `level` is the SLO's percentile, `interval_ms` belongs to the quantile there."""
    ordered = sorted(values)
    if not ordered:
        return Distribution(0)
    return Distribution(
        n=len(ordered),
        mean_ms=sum(ordered) / len(ordered),
        p50_ms=quantile_sorted(ordered, 0.5),
        p90_ms=quantile_sorted(ordered, 0.9),
        p99_ms=quantile_sorted(ordered, 0.99),
        p999_ms=quantile_sorted(ordered, 0.999),
        max_ms=ordered[-1],
        tail_ms=quantile_sorted(ordered, level),
        tail_interval_ms=interval_ms,
    )


def stalled_share(rate_per_s: float, stalls_per_prompt: float, prefill_s: float, gap_s: float) -> float:
    """The share of a stream's gaps that are stalled when prompts arrive `rate_per_s` times a second, each computed in
    `stalls_per_prompt` steps that take `prefill_s` seconds together, among decode steps of `gap_s`.

    f = q n / (q n + max(0, 1 - q W) / g): per second q n stalled gaps, and the time they leave holds 1 / g others.
    Pooled p99 shows the stalls once f exceeds 1 % (pegainfer #470 measured both sides of it).
    """
    stalls = rate_per_s * stalls_per_prompt
    undisturbed = max(0.0, 1.0 - rate_per_s * prefill_s) / gap_s
    return stalls / (stalls + undisturbed) if stalls else 0.0


def _clustered_interval(groups: list[list[float]], level: float, seed: int) -> tuple[float, float] | None:
    """95 % interval of the pooled quantile, by resampling requests; None with fewer values than a p99 needs at all."""
    import numpy as np

    if sum(map(len, groups)) < 1.0 / (1.0 - level):
        return None
    return bootstrap_interval(groups, lambda pooled: float(np.quantile(pooled, level)), resamples=200, seed=seed)
