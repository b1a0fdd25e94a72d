"""How sure a run is that it meets its SLO."""

from collections.abc import Sequence

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.objective import MAX_FAILED_SHARE, Criterion
from sarathi_tune.loadgen.latency import gaps_ms, judge, stalled_gaps_ms, ttft_ms
from sarathi_tune.loadgen.record import RequestRecord
from sarathi_tune.stats import median


def pass_probability(
    records: Sequence[RequestRecord], slo: Slo, criterion: Criterion, *, resamples: int = 200, seed: int = 0
) -> float:
    """The share of resampled runs that meet the SLO. Whole requests are drawn, because the gaps of one share its
    stalls. A run is its own only witness here: what never happened in it can't be drawn."""
    import numpy as np

    if not records:
        return 0.0
    rng = np.random.default_rng(seed)
    gaps = [np.asarray(gaps_ms(record)) for record in records]
    stalled = [np.asarray(stalled_gaps_ms(record)) for record in records]
    firsts = [np.asarray([first] if (first := ttft_ms(record)) is not None else []) for record in records]
    verdicts = [judge(record, slo) for record in records]
    failed = np.asarray([verdict in ("failed", "not_sent") for verdict in verdicts])
    good = np.asarray([verdict == "good" for verdict in verdicts])

    def is_within(groups: list[np.ndarray], pick: np.ndarray, limit_ms: float | None) -> bool:
        pooled = np.concatenate([groups[index] for index in pick])
        return limit_ms is None or not pooled.size or float(np.quantile(pooled, slo.percentile)) <= limit_ms

    passed = 0
    for _ in range(resamples):
        pick = rng.integers(0, len(records), len(records))
        is_met = float(failed[pick].mean()) <= MAX_FAILED_SHARE
        if criterion == "per-request":
            is_met = is_met and float(good[pick].mean()) >= slo.percentile
        else:
            is_met = is_met and is_within(gaps, pick, slo.itl_ms) and is_within(firsts, pick, slo.ttft_ms)
        if criterion == "every-step":
            is_met = is_met and is_within(stalled, pick, slo.itl_ms)
        passed += is_met
    return passed / resamples


def queue_growth_ms(records: Sequence[RequestRecord]) -> float:
    """How much longer the last quarter of the requests waited for its first token than the first quarter, in the
    median: a queue that only grows shows here even where no TTFT was promised. 0 with fewer than 8 requests."""
    waits = [first for record in sorted(records, key=lambda r: r.intended_s) if (first := ttft_ms(record)) is not None]
    quarter = len(waits) // 4
    return median(waits[-quarter:]) - median(waits[:quarter]) if quarter >= 2 else 0.0
