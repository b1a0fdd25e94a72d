"""From what happened to the figures of a comparison."""

from bisect import bisect_left
from collections.abc import Iterator

from sarathi_tune.loadgen.latency import distribution, gaps_ms, ttft_ms
from sarathi_tune.loadgen.record import LoadResult, RequestRecord
from sarathi_tune.report.comparison import BudgetedStep, Outcome
from sarathi_tune.tune.comparing.load import Load


def outcome(result: LoadResult, load: Load, slo_ms: float, budgeted: BudgetedStep) -> Outcome:
    """The figures of a run. `budgeted`: the step that the largest gap is measured in."""
    records = result.records
    gaps = [gap for record in records for gap in gaps_ms(record)]
    itl = distribution(gaps)
    ttft = distribution(
        first for record in records if record.request_id in load.judged and (first := ttft_ms(record)) is not None
    )
    tokens = sum(len(record.token_s) for record in records)
    return Outcome(
        requests=len(records),
        finished=sum(record.outcome == "finished" for record in records),
        gaps=len(gaps),
        duration_s=result.elapsed_s,
        ttft_p50_ms=ttft.p50_ms,
        ttft_p99_ms=ttft.p99_ms,
        itl_p50_ms=itl.p50_ms,
        itl_p99_ms=itl.p99_ms,
        itl_max_ms=itl.max_ms,
        stalled_gaps=sum(sum(record.stalled or ()) for record in records),
        gaps_over_slo=sum(gap > slo_ms for gap in gaps),
        largest_gap_steps=_largest_gap_steps(result),
        largest_gap_units=itl.max_ms / budgeted.p50_ms if itl.max_ms is not None else None,
        largest_gap_p99_units=itl.max_ms / budgeted.p99_ms if itl.max_ms is not None else None,
        output_tokens_per_s=tokens / result.elapsed_s if result.elapsed_s > 0 else 0.0,
        preemptions=sum(record.num_preemptions for record in records),
        cached_tokens=sum(record.cached_tokens or 0 for record in records),
        prompt_tokens=sum(record.prompt_tokens for record in records),
        trace=_trace(records),
    )


def _stamped_gaps(record: RequestRecord) -> Iterator[tuple[float, float]]:
    """(end of the gap in s, its length in ms)."""
    return zip(record.token_s[1:], gaps_ms(record), strict=True)


def _largest_gap_steps(result: LoadResult) -> int | None:
    """How many steps the engine made in the largest gap."""
    largest = max((pair for record in result.records for pair in _stamped_gaps(record)), key=_length, default=None)
    if largest is None:
        return None
    end_s, gap_ms = largest
    ends = [step.end_s for step in result.steps]
    # a step's end and a token's stamp are the same number; half a microsecond is for the subtraction
    return bisect_left(ends, end_s - 5e-7) - bisect_left(ends, end_s - gap_ms / 1e3 - 5e-7)


def _length(pair: tuple[float, float]) -> float:
    return pair[1]


def _trace(records: tuple[RequestRecord, ...]) -> tuple[tuple[float, float], ...]:
    """Every distinct gap, in order of time, to a tenth of a millisecond in time and a hundredth in length."""
    seen = {(round(end_s, 4), round(gap, 2)) for record in records for end_s, gap in _stamped_gaps(record)}
    return tuple(sorted(seen))
