"""A run as `vllm bench serve --save-result --save-detailed` writes it (vLLM 0.32), so that other tools can read it.

The definitions are vLLM's: times from sending (not from the intended time), gaps between events pooled over the
requests that succeeded, TPOT over (tokens - 1), goodput by TTFT and TPOT, percentiles by linear interpolation; when a
request was sent by a clock that all processes of the machine share (`time.perf_counter`). What a request without
success has is 0 or empty there, and so it is here.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from sarathi_tune.config.slo import Slo
from sarathi_tune.loadgen.latency import failure_of
from sarathi_tune.loadgen.record import LoadResult, RequestRecord
from sarathi_tune.stats import quantile


def vllm_result(
    result: LoadResult,
    *,
    model: str,
    endpoint: str,
    rate_per_s: float | None,
    slo: Slo | None = None,
    max_concurrency: int | None = None,
    created: datetime | None = None,
) -> dict[str, Any]:
    """The document. `rate_per_s` None is a closed loop, which vLLM calls the rate "inf"."""
    records = [record for record in result.records if record.outcome != "not_sent"]
    good = [record for record in records if _succeeded(record)]
    start_s = min((record.sent_s or 0.0 for record in records), default=0.0)
    duration_s = max((record.end_s or record.sent_s or 0.0 for record in records), default=0.0) - start_s
    inputs, outputs = sum(map(_input, good)), sum(map(_output, good))
    origin_s = result.client.origin_s if result.client else 0.0
    backend = "openai-chat" if endpoint == "chat" else "openai"
    per_s = (1 / duration_s) if duration_s > 0 else 0.0
    document: dict[str, Any] = {
        "date": (created or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": "sarathi-tune",
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(result.records),
        "request_rate": "inf" if rate_per_s is None else rate_per_s,
        "burstiness": 1.0,
        "max_concurrency": max_concurrency,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(result.records) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) * per_s,
        "request_goodput": None if slo is None else sum(_is_good(record, slo) for record in good) * per_s,
        "output_throughput": outputs * per_s,
        "total_token_throughput": (inputs + outputs) * per_s,
        "input_lens": [_input(record) for record in records],
        "output_lens": [_output(record) if _succeeded(record) else 0 for record in records],
        "ttfts": [_ttft_s(record) or 0.0 for record in records],
        "itls": [_gaps_s(record) for record in records],
        "latencies": [_latency_s(record) for record in records],
        "start_times": [origin_s + (record.sent_s or 0.0) for record in records],
        "queue_times": [0.0] * len(records),
        "generated_texts": [""] * len(records),
        "errors": [_error(record) for record in records],
        "rtfx": 0.0,
        **_peaks(good),
    }
    ttfts = [seconds for record in good if (seconds := _ttft_s(record)) is not None]
    document |= _metric("ttft", ttfts)
    document |= _metric("tpot", [seconds for record in good if (seconds := _tpot_s(record)) is not None])
    document |= _metric("itl", [gap for record in good for gap in _gaps_s(record)])
    document |= _metric("e2el", [_latency_s(record) for record in good])
    return document


def _metric(name: str, values_s: Sequence[float]) -> dict[str, float]:
    """Mean, median, population standard deviation and percentiles in milliseconds; vLLM gives 0 for no value."""
    values = [value * 1e3 for value in values_s] or [0.0]
    mean = math.fsum(values) / len(values)
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": quantile(values, 0.5),
        f"std_{name}_ms": math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
        **{f"p{level}_{name}_ms": quantile(values, level / 100) for level in (50, 90, 95, 99)},
    }


def _peaks(records: Sequence[RequestRecord]) -> dict[str, float | int]:
    """Tokens and concurrent requests of the busiest second, in whole seconds from the first sending."""
    start_s = min((record.sent_s or 0.0 for record in records), default=0.0)
    tokens: dict[int, int] = {}
    running: dict[int, int] = {}
    for record in records:
        sent_s = (record.sent_s or 0.0) - start_s
        for stamp in record.token_s:
            second = int(stamp - start_s)
            tokens[second] = tokens.get(second, 0) + 1
        for second in range(int(sent_s), int(sent_s + _latency_s(record)) + 1):
            running[second] = running.get(second, 0) + 1
    return {
        "max_output_tokens_per_s": float(max(tokens.values(), default=0)),
        "max_concurrent_requests": max(running.values(), default=0),
    }


def _succeeded(record: RequestRecord) -> bool:
    """vLLM counts short answers as completed; an answer without a token is a failure there too."""
    return failure_of(record) in (None, "short_output")


def _ttft_s(record: RequestRecord) -> float | None:
    return record.token_s[0] - record.sent_s if record.token_s and record.sent_s is not None else None


def _latency_s(record: RequestRecord) -> float:
    return record.token_s[-1] - record.sent_s if record.token_s and record.sent_s is not None else 0.0


def _gaps_s(record: RequestRecord) -> list[float]:
    return [after - before for before, after in pairwise(record.token_s)]


def _tpot_s(record: RequestRecord) -> float | None:
    tokens = _output(record)
    return (record.token_s[-1] - record.token_s[0]) / (tokens - 1) if tokens > 1 and record.token_s else None


def _is_good(record: RequestRecord, slo: Slo) -> bool:
    first_s, tpot_s = _ttft_s(record), _tpot_s(record) or 0.0
    is_first_in_time = slo.ttft_ms is None or (first_s is not None and first_s * 1e3 <= slo.ttft_ms)
    return is_first_in_time and tpot_s * 1e3 <= slo.itl_ms


def _input(record: RequestRecord) -> int:
    return record.prompt_tokens if record.prompt_got is None else record.prompt_got


def _output(record: RequestRecord) -> int:
    return record.output_got if record.output_got is not None else len(record.token_s)


def _error(record: RequestRecord) -> str:
    kind = failure_of(record)
    return "" if kind in (None, "short_output") else f"{kind}: {record.detail}"
