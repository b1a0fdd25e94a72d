"""The file in vLLM's shape: field for field what `vllm bench serve` (0.32) computes from the same stamps."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from sarathi_tune.config.slo import Slo
from sarathi_tune.loadgen.record import ClientFacts, LoadResult, RequestRecord
from sarathi_tune.loadgen.vllm_format import vllm_result

#: The fields of a file that vLLM 0.32.0 wrote with --save-result --save-detailed and default metrics.
FIELDS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "input_lens"),
    *("output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts", "errors"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")),
}


def row(request_id: int, sent_s: float, token_s: tuple[float, ...], **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "intended_s": sent_s - 0.5,  # late: vLLM counts from sending
        "prompt_tokens": 10,
        "output_asked": len(token_s),
        "outcome": "finished",
        "sent_s": sent_s,
        "token_s": token_s,
        "output_got": len(token_s),
        "end_s": token_s[-1] if token_s else sent_s,
    }
    return RequestRecord(**(fields | changes))


RESULT = LoadResult(
    records=(
        row(0, 1.0, (1.2, 1.3, 1.5), prompt_got=12),
        row(1, 2.0, (2.1, 2.2)),
        row(2, 3.0, (3.1,), outcome="failed", failure="truncated", detail="cut", end_s=3.2),
        replace(row(3, 4.0, (), outcome="not_sent"), sent_s=None),
    ),
    steps=(),
    window_s=(0.0, 5.0),
    elapsed_s=5.0,
)


def document(slo: Slo | None = None) -> dict[str, Any]:
    created = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    return vllm_result(RESULT, model="m", endpoint="completions", rate_per_s=2.0, slo=slo, created=created)


def test_every_field_is_there() -> None:
    assert set(document()) >= FIELDS


def test_counts_and_rows() -> None:
    found = document()
    assert (found["num_prompts"], found["completed"], found["failed"]) == (4, 2, 2)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (22, 5)
    assert found["input_lens"] == [12, 10, 10]
    assert found["output_lens"] == [3, 2, 0]
    assert found["ttfts"] == pytest.approx([0.2, 0.1, 0.1])
    assert found["itls"] == [pytest.approx([0.1, 0.2]), pytest.approx([0.1]), []]
    assert found["errors"] == ["", "", "truncated: cut"]
    assert found["date"] == "20260304-050607"
    assert found["duration"] == pytest.approx(2.2)


def test_metrics_by_hand() -> None:
    found = document()
    assert found["median_ttft_ms"] == pytest.approx(150)
    assert found["p99_ttft_ms"] == pytest.approx(199)  # 100 + 0.99 * 100
    assert found["mean_itl_ms"] == pytest.approx(400 / 3)
    assert found["p99_itl_ms"] == pytest.approx(198)  # 100, 100, 200 at position 1.98
    assert found["median_tpot_ms"] == pytest.approx(125)  # 150 and 100
    assert found["std_tpot_ms"] == pytest.approx(25)
    assert found["mean_e2el_ms"] == pytest.approx(350)


def test_goodput_is_vllms() -> None:
    assert document()["request_goodput"] is None
    # TPOTs are 150 and 100 ms
    assert document(Slo(120))["request_goodput"] == pytest.approx(1 / 2.2)
    assert document(Slo(500, ttft_ms=300))["request_goodput"] == pytest.approx(2 / 2.2)


def test_the_busiest_second() -> None:
    found = document()
    # seconds from 1.0: tokens at 0.2, 0.3, 0.5 and 1.1, 1.2
    assert found["max_output_tokens_per_s"] == 3.0
    assert found["max_concurrent_requests"] == 1


def test_sending_is_on_the_clock_of_all_processes() -> None:
    # vLLM: `output.start_time = time.perf_counter()`
    client = ClientFacts(1, 0.1, 0.2, (), 0.01, 5, 5, origin_s=1000.0)
    ours = vllm_result(replace(RESULT, client=client), model="m", endpoint="completions", rate_per_s=2.0)
    assert ours["start_times"] == [1001.0, 1002.0, 1003.0]
    assert document()["start_times"] == [1.0, 2.0, 3.0]
