"""Each check fails on a run that has its fault, and passes on one that hasn't."""

from dataclasses import replace
from typing import Any

import pytest

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.validity import Validity, check_run
from sarathi_tune.loadgen.inprocess import LoadRecorder, TimedRequest, run_load
from sarathi_tune.loadgen.latency import summarise
from sarathi_tune.loadgen.record import LoadResult
from tests.loadgen.doubles import ScriptedClock, at, make_engine

SLO = Slo(50.0)


def traffic() -> list[TimedRequest]:
    """40 requests that overlap: 10 per second, 0.3 s of decoding each."""
    return at(*(index * 0.1 for index in range(40)), output_tokens=16)


def run(requests: list[TimedRequest] | None = None, **engine: Any) -> LoadResult:
    made, clock = make_engine(lambda _: 0.02, **engine)
    return run_load(made, clock, traffic() if requests is None else requests)


def check(result: LoadResult, slo: Slo = SLO, **options: Any) -> Validity:
    return check_run(result, summarise(result, slo), **options)


def codes(result: LoadResult, slo: Slo = SLO, **options: Any) -> list[str]:
    return [notice.code for notice in check(result, slo, **options).problems]


def test_a_sound_run_counts() -> None:
    found = check(run(), full_batch=3)
    assert found.is_valid
    assert found.facts.sent == found.facts.intended == 40
    assert found.facts.gaps == 40 * 15
    assert found.facts.stalled_gaps > 0
    assert found.as_dict()["valid"] is True


def test_prompts_that_never_meet_the_full_batch_do_not_count() -> None:
    # pegainfer #470: every slot was taken, so that no prompt ran beside the full decode batch
    found = run(at(*([0.0] * 40), output_tokens=16), max_num_seqs=4)
    assert max(step.shape.num_decodes for step in found.steps) == 4
    assert max(step.shape.num_decodes for step in found.steps if step.shape.chunks) < 4
    assert "batch-not-met" in codes(found, full_batch=4)
    assert "batch-not-met" not in codes(run(), full_batch=3)


def test_prompts_that_meet_no_decode_at_all_do_not_count() -> None:
    alone = run(at(*(index * 1.0 for index in range(40)), output_tokens=16))
    assert "batch-not-met" in codes(alone)


def test_a_late_client_does_not_count() -> None:
    # inference-perf #188: the client's lag is billed to the server; 2.5 ms is 5 % of the SLO
    for oversleep_s, wanted in ((0.004, True), (0.002, False)):
        engine, clock = make_engine(lambda _: 0.02, clock=ScriptedClock(oversleep_s))
        result = run_load(engine, clock, at(*(index * 0.5 for index in range(40)), output_tokens=16))
        assert ("client-lag" in codes(result)) == wanted


def test_requests_that_were_not_sent_do_not_count() -> None:
    engine, clock = make_engine(lambda _: 0.02)
    result = run_load(engine, clock, traffic(), in_flight=1, drain_s=1.0)
    assert "rate-not-delivered" in codes(result)
    assert "requests-failed" in codes(result)


def test_failures_do_not_count() -> None:
    requests = traffic()[:39] + at(4.0, prompt_tokens=5000, first_id=99)
    found = check(run(requests, max_model_len=4096))
    assert [notice.code for notice in found.problems] == ["requests-failed"]
    assert "1 of 40 requests" in found.problems[0].cause
    assert "1 refused" in found.problems[0].cause


@pytest.mark.parametrize(("output_tokens", "wanted"), [(8, True), (9, False)])
def test_a_p99_needs_299_gaps(output_tokens: int, wanted: bool) -> None:
    # 40 requests of 7 or 8 gaps: 280 or 320
    requests = at(*(index * 0.1 for index in range(40)), output_tokens=output_tokens)
    assert ("too-few-gaps" in codes(run(requests))) == wanted
    # a p90 is content with 29
    assert "too-few-gaps" not in codes(run(requests), Slo(50.0, percentile=0.9))


def test_few_stalled_gaps_are_a_remark() -> None:
    found = check(run())
    assert found.facts.stalled_gaps < 299
    assert [notice.code for notice in found.remarks] == ["too-few-gaps"]


def test_prefix_cache_hits_do_not_count_unless_meant() -> None:
    # vllm #54227
    result = run()
    hit = replace(result, records=(replace(result.records[0], cached_tokens=16), *result.records[1:]))
    assert codes(hit) == ["prefix-cache-hits"]
    assert codes(hit, allow_prefix_hits=True) == []


def test_preemptions_and_overload_are_remarks() -> None:
    # 12 pages of 16 tokens: four requests of 8 + 60 tokens don't fit at full length
    crowded = run(at(*([0.0] * 40), output_tokens=60), num_pages=12, budget=64)
    found = check(crowded)
    assert found.more_facts["preemptions"] == sum(step.num_preempted for step in crowded.steps) > 0
    assert {"preempted", "overloaded"} <= {notice.code for notice in found.remarks}


def test_an_interrupted_run_does_not_count() -> None:
    recorder = LoadRecorder()
    engine, clock = make_engine(lambda _: 0.02)
    result = run_load(engine, clock, traffic(), recorder=recorder)
    recorder.is_complete = False
    assert "run-interrupted" in codes(recorder.result())
    assert "run-interrupted" not in codes(result)
