"""The metric definitions, against cases that other clients got wrong and against hand calculations."""

from random import Random
from typing import Any

import pytest

from sarathi_tune.config.slo import Slo
from sarathi_tune.loadgen.latency import (
    LatencyReport,
    count,
    distribution,
    failure_of,
    gaps_ms,
    judge,
    own_quantile_ms,
    summarise_records,
    tpot_ms,
    ttft_ms,
)
from sarathi_tune.loadgen.record import RequestRecord

SLO = Slo(50)


def record(*token_s: float, **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": 0,
        "intended_s": 0.0,
        "prompt_tokens": 8,
        "output_asked": len(token_s),
        "outcome": "finished",
        "sent_s": 0.0,
        "token_s": token_s,
        "output_got": len(token_s),
    }
    return RequestRecord(**(fields | changes))


def with_gaps(gaps_of_ms: list[float], **changes: Any) -> RequestRecord:
    stamps = [1.0]
    for gap in gaps_of_ms:
        stamps.append(stamps[-1] + gap / 1e3)
    return record(*stamps, **changes)


def report(records: list[RequestRecord], slo: Slo = SLO, duration_s: float = 10.0) -> LatencyReport:
    return summarise_records(records, slo, duration_s=duration_s)


def test_the_first_token_is_no_gap() -> None:
    # vllm #15106, #7242
    answer = record(1.5, 1.52)
    assert ttft_ms(answer) == pytest.approx(1500)
    assert gaps_ms(answer) == pytest.approx([20])


def test_time_to_first_token_counts_from_the_intended_time() -> None:
    assert ttft_ms(record(3.0, intended_s=1.0, sent_s=2.5)) == pytest.approx(2000)


def test_tpot_divides_by_the_tokens_behind_the_first_event() -> None:
    # vllm #27485: T(a)@1 T(bcde)@1.4 U(5)
    assert tpot_ms(record(1.0, 1.4, output_got=5)) == pytest.approx(100)
    # aiperf PR #1279: T(abc)@1 T(d)@2 U(4)
    assert tpot_ms(record(1.0, 2.0, output_got=4, first_tokens=3)) == pytest.approx(1000)
    # vllm PR #55508: T(a)@1 T(b)@2, usage at 2.5 is no token
    assert tpot_ms(record(1.0, 2.0)) == pytest.approx(1000)


def test_tpot_of_one_token_and_of_an_unknown_number_is_undefined() -> None:
    # vllm-omni #6693: it must not be 0, and TTFT is judged all the same
    assert tpot_ms(record(1.0)) is None
    assert tpot_ms(record(1.0, 2.0, output_got=None)) is None
    assert judge(record(1.0), Slo(50, ttft_ms=2000)) == "good"
    assert judge(record(1.0), Slo(50, ttft_ms=500)) == "slo_miss"
    only = report([record(1.0)])
    assert only.tpot.n == 0
    assert only.tpot.p99_ms is None


def test_one_long_gap_among_many_is_visible() -> None:
    # guidellm #1145: 199 gaps of 20 ms and one of 2 s; the mean gap is 29.9 ms
    found = report([with_gaps([20.0] * 199 + [2000.0])], Slo(50))
    assert found.itl.max_ms == pytest.approx(2000)
    assert found.itl.p99_ms == pytest.approx(20)
    assert found.itl.p999_ms == pytest.approx(20 + 0.801 * 1980, rel=1e-3)  # position 198.801 of 0 .. 199
    assert found.itl_own.p99_ms == pytest.approx(20)
    assert found.itl_mean.p99_ms == pytest.approx(29.9)


def test_an_mean_hides_what_the_tail_shows() -> None:
    # 2 % of the steps at 120 ms among 20 ms ones, 200 gaps a request, SLO 50 ms: pooled p99 is 120 ms, p99 of the
    # requests' means 24.5 ms; every request passes on its mean and 23 % pass on their own p99
    rng = Random(4)
    records = [with_gaps([120.0 if rng.random() < 0.02 else 20.0 for _ in range(200)]) for _ in range(2000)]
    found = report(records, Slo(50))
    assert found.itl.p99_ms == pytest.approx(120)
    assert found.itl_mean.p99_ms == pytest.approx(24.5, abs=0.5)
    assert found.itl_mean.max_ms is not None
    assert found.itl_mean.max_ms < 50
    assert found.attained_share == pytest.approx(0.23, abs=0.03)


def test_below_a_hundred_gaps_the_own_p99_is_nearly_the_longest() -> None:
    assert own_quantile_ms(with_gaps([20.0] * 46 + [120.0]), 0.99) == pytest.approx(74, abs=0.1)  # 20 + 0.54 * 100
    assert own_quantile_ms(with_gaps([120.0]), 0.99) == pytest.approx(120)
    assert own_quantile_ms(record(1.0), 0.99) is None


def test_an_answer_without_tokens_is_a_failure() -> None:
    # vllm PR #5895, sglang PR #40555: R@1 [DONE]
    empty = record(output_asked=4)
    assert failure_of(empty) == "no_tokens"
    assert judge(empty, Slo(50)) == "failed"
    assert ttft_ms(empty) is None
    assert report([empty]).ttft.n == 0


def test_an_answer_that_is_too_short_is_a_failure() -> None:
    # tenstorrent/vllm #344: ignore_eos was not honoured
    assert failure_of(record(1.0, 1.02, output_asked=64)) == "short_output"
    assert failure_of(record(1.0, 1.02, output_asked=64, output_got=None)) is None


def test_a_server_that_refuses_does_not_win() -> None:
    # InferenceX #357: 10 requests, 9 x 503
    refused = [record(outcome="failed", failure="http_5xx", output_asked=2) for _ in range(9)]
    found = report([record(0.5, 0.52), *refused], Slo(50), duration_s=10.0)
    assert found.goodput_per_s == pytest.approx(0.1)
    assert found.attained_share == pytest.approx(0.1)
    assert found.counts.failures == {"http_5xx": 9}
    assert found.counts.failed_share == pytest.approx(0.9)
    assert found.ttft.n == 1


def test_every_intended_request_is_counted_once() -> None:
    # vllm #13082: requests vanish from the report
    rows = [
        record(0.5, 0.52),
        record(0.5, 0.62),
        record(5.0, 5.02),
        record(0.5, output_asked=2, outcome="failed", failure="unfinished"),
        record(0.5, output_asked=2, outcome="failed", failure="refused"),
        record(output_asked=2, outcome="not_sent", sent_s=None),
    ]
    counts = count(rows, Slo(50, ttft_ms=1000))
    assert (counts.good, counts.slo_miss, counts.failed, counts.not_sent) == (1, 2, 2, 1)
    assert counts.intended == len(rows)
    assert counts.failures == {"refused": 1, "unfinished": 1}


def test_the_stalled_share_comes_from_gaps_whose_steps_are_known() -> None:
    stalls = (True, False, False, False)
    known = with_gaps([100.0, 20.0, 20.0, 20.0], stalled=stalls)
    unknown = with_gaps([20.0] * 4, stalled=None)
    found = report([known, unknown])
    assert found.stalled_share == pytest.approx(0.25)
    assert found.itl_stalled.n == 1
    assert found.itl_stalled.p99_ms == pytest.approx(100)
    assert found.stalls_per_s == pytest.approx(1 / 0.16)
    blind = report([unknown])
    assert blind.stalled_share is None
    assert blind.stalls_per_s is None
    assert blind.itl_stalled.p99_ms is None


def test_the_slos_percentile_decides_the_tail() -> None:
    gaps = [float(value) for value in range(1, 102)]  # 1 .. 101 ms
    found = report([with_gaps(gaps)], Slo(95, percentile=0.9))
    assert found.itl.tail_ms == pytest.approx(91)
    assert found.itl.p99_ms == pytest.approx(100)
    assert found.counts.good == 1
    assert report([with_gaps(gaps)], Slo(95)).counts.good == 0


def test_an_interval_needs_enough_requests_and_widens_with_clustered_stalls() -> None:
    assert report([with_gaps([20.0] * 500)]).itl.tail_interval_ms is None  # one request says nothing of the next
    assert report([with_gaps([20.0] * 10), with_gaps([20.0] * 10)]).itl.tail_interval_ms is None  # 20 gaps, no p99
    # all stalls in one request of forty: resampling requests sees that this one may be missing
    clustered = [with_gaps([120.0] * 20)] + [with_gaps([20.0] * 20) for _ in range(39)]
    assert report(clustered).itl.tail_interval_ms == pytest.approx((20, 120))
    # stalls in every request alike: no doubt about the p99
    even = [with_gaps([120.0] + [20.0] * 19) for _ in range(40)]
    assert report(even).itl.tail_interval_ms == pytest.approx((120, 120))


def test_a_report_is_a_document() -> None:
    import json

    document = json.loads(json.dumps(report([record(0.5, 0.52), record(outcome="not_sent", sent_s=None)]).as_dict()))
    assert document["requests"]["intended"] == 2
    assert document["itl"]["n"] == 1
    assert document["itl"]["p99_ms"] == pytest.approx(20)
    assert document["itl_stalled"]["p99_ms"] is None


def test_an_empty_distribution_has_no_zero_in_it() -> None:
    # guidellm #216: a missing value is not 0
    assert distribution([]).as_dict() == {"n": 0} | dict.fromkeys(
        ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms", "tail_ms", "tail_interval_ms")
    )


def test_quantiles_are_numpys() -> None:
    import numpy as np

    rng = Random(2)
    values = [rng.expovariate(0.1) for _ in range(777)]
    found = distribution(values)
    assert found.p99_ms == pytest.approx(float(np.quantile(values, 0.99)))
    assert found.p50_ms == pytest.approx(float(np.median(values)))
