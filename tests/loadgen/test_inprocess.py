"""The load generator over scripted steps: times by hand."""

import gc
from collections.abc import Iterator
from itertools import pairwise

import pytest

from sarathi_tune.config.slo import Slo
from sarathi_tune.engine.plan import StepPlan, StepShape
from sarathi_tune.engine.request import Request
from sarathi_tune.loadgen.clock import SystemClock
from sarathi_tune.loadgen.inprocess import LoadProgress, LoadRecorder, run_load
from sarathi_tune.loadgen.latency import gaps_ms, stalled_gaps_ms, summarise, ttft_ms
from tests.loadgen.doubles import ScriptedClock, ScriptedExecutor, at, make_engine


def test_tokens_are_stamped_after_their_step() -> None:
    engine, clock = make_engine(lambda shape: 0.5 if shape.chunks else 0.25)
    result = run_load(engine, clock, at(1.0, output_tokens=3))
    (record,) = result.records
    assert record.token_s == pytest.approx((1.5, 1.75, 2.0))
    assert (record.intended_s, record.sent_s, record.scheduled_s) == pytest.approx((1.0, 1.0, 1.0))
    # vllm #7242: the time to the first token is no gap
    assert gaps_ms(record) == pytest.approx([250.0, 250.0])
    assert ttft_ms(record) == pytest.approx(500.0)
    assert [step.duration_ms for step in result.steps] == pytest.approx([500, 250, 250])
    engine.check_idle()


def test_queueing_counts_from_the_intended_time() -> None:
    # vllm #54101: service 1 s, one slot, arrivals each 0.5 s: 1, 1.5 ... 5.5 s, not 1 s each
    for slots in ({"max_num_seqs": 1, "in_flight": None}, {"max_num_seqs": 64, "in_flight": 1}):
        engine, clock = make_engine(lambda _: 1.0, max_num_seqs=slots["max_num_seqs"] or 1)
        requests = at(*(index * 0.5 for index in range(10)))
        result = run_load(engine, clock, requests, in_flight=slots["in_flight"])
        found = [ttft_ms(record) for record in result.records]
        assert found == pytest.approx([1000 + 500 * index for index in range(10)])


def test_sending_keeps_its_absolute_schedule() -> None:
    # vllm #21104: sleeping between sends adds up; here every sleep is 2 ms late, and the last request too is 2 ms late
    engine, clock = make_engine(lambda _: 0.0001, clock=ScriptedClock(oversleep_s=0.002))
    result = run_load(engine, clock, at(*(index * 0.005 for index in range(200))))
    lateness = [record.sent_s - record.intended_s for record in result.records if record.sent_s is not None]
    assert len(lateness) == 200
    assert max(lateness) == pytest.approx(0.002)
    assert [record.lag_s for record in result.records] == pytest.approx([0] + [0.002] * 199)


def test_waiting_for_a_running_step_is_no_lag_of_the_client() -> None:
    engine, clock = make_engine(lambda _: 1.0)
    result = run_load(engine, clock, at(0.0, 0.25))
    late = result.records[1]
    assert late.sent_s == pytest.approx(1.0)
    assert late.lag_s == pytest.approx(0.0)
    assert late.scheduled_s == pytest.approx(1.0)


def test_a_gap_with_prefill_of_another_request_is_stalled() -> None:
    # request 0 decodes at 0.1 s a step; request 1 arrives in its third step and its prefill takes 2 s
    engine, clock = make_engine(lambda shape: 2.0 if shape.chunks else 0.1)
    result = run_load(engine, clock, at(0.0, output_tokens=6) + at(2.15, output_tokens=2, first_id=1))
    first, second = result.records
    assert gaps_ms(first) == pytest.approx([100, 100, 2000, 100, 100])
    assert first.stalled == (False, False, True, False, False)
    assert stalled_gaps_ms(first) == pytest.approx([2000])
    # its own prefill is before its first token and stalls none of its own gaps
    assert second.stalled == (False,)


def test_a_gap_that_spans_a_prefill_step_without_the_request_is_stalled() -> None:
    # the old vLLM: a step of prefill alone, while the decode sits still
    engine, clock = make_engine(lambda shape: 2.0 if shape.chunks else 0.1, scheduler="prefill-first")
    result = run_load(engine, clock, at(0.0, output_tokens=5) + at(2.15, first_id=1))
    first = result.records[0]
    assert any(step.shape.num_decodes == 0 for step in result.steps[1:])
    assert gaps_ms(first) == pytest.approx([100, 100, 2100, 100])
    assert first.stalled == (False, False, True, False)


def test_a_refused_request_is_a_failed_row_and_the_others_run() -> None:
    engine, clock = make_engine(lambda _: 1.0, max_model_len=100)
    requests = at(0.0) + at(0.1, prompt_tokens=100, first_id=1) + at(0.2, first_id=2)
    result = run_load(engine, clock, requests)
    assert [record.outcome for record in result.records] == ["finished", "failed", "finished"]
    assert result.records[1].failure == "refused"
    assert "context is 100" in result.records[1].detail
    engine.check_idle()


def test_what_runs_at_the_cut_off_is_followed_to_its_end() -> None:
    engine, clock = make_engine(lambda _: 1.0)
    result = run_load(engine, clock, at(0.0, 1.5, 3.0, output_tokens=4), stop_after_s=2.0)
    assert [record.outcome for record in result.records] == ["finished", "finished"]
    assert result.window_s == (0.0, 2.0)
    assert result.elapsed_s > 2.0


@pytest.mark.parametrize(("drain", "drain_s"), [(False, 60.0), (True, 2.0)])
def test_what_outlives_the_deadline_is_unfinished_and_missed(drain: bool, drain_s: float) -> None:
    engine, clock = make_engine(lambda _: 1.0)
    result = run_load(engine, clock, at(0.0, 0.0, output_tokens=9), stop_after_s=3.0, drain=drain, drain_s=drain_s)
    assert [record.failure for record in result.records] == ["unfinished", "unfinished"]
    assert result.elapsed_s == pytest.approx(3.0 if not drain else 5.0)
    assert summarise(result, Slo(5000)).goodput_per_s == 0
    engine.check_idle()


def test_what_could_not_be_sent_by_the_deadline_is_not_lost() -> None:
    # vllm #13082: intended = good + missed + failed + not sent
    engine, clock = make_engine(lambda _: 1.0)
    result = run_load(engine, clock, at(*([0.0] * 5), output_tokens=2), stop_after_s=1.0, drain_s=4.0, in_flight=1)
    counts = summarise(result, Slo(2000, ttft_ms=1500)).counts
    assert (counts.good, counts.slo_miss, counts.failed, counts.not_sent) == (1, 1, 1, 2)
    assert counts.intended == 5


def test_a_warm_up_is_sent_and_not_counted() -> None:
    # evalscope #1627: everybody prefills at once at the start
    engine, clock = make_engine(lambda shape: 0.1 * max(1, len(shape.chunks)))
    requests = at(*([0.0] * 20)) + at(5.0, 6.0, first_id=20)
    everything = summarise(run_load(engine, clock, requests), Slo(1000))
    engine, clock = make_engine(lambda shape: 0.1 * max(1, len(shape.chunks)))
    steady = run_load(engine, clock, requests, warmup_s=4.0, stop_after_s=8.0)
    assert everything.ttft.max_ms == pytest.approx(2000)
    report = summarise(steady, Slo(1000))
    assert report.ttft.max_ms == pytest.approx(100)
    assert report.counts.intended == 2
    assert report.duration_s == pytest.approx(4.0)
    assert len(steady.records) == 22


def test_the_window_of_n_arrivals_at_a_rate_is_n_over_the_rate() -> None:
    engine, clock = make_engine(lambda _: 0.01)
    result = run_load(engine, clock, at(*(index * 20.0 for index in range(5))))  # 0.05 per second
    assert result.duration_s == pytest.approx(100.0)
    assert summarise(result, Slo(1000)).goodput_per_s == pytest.approx(0.05)


def test_filling_and_draining_do_not_enter_the_saturated_rate() -> None:
    # guidellm #93: a closed loop of 4 streams at 0.1 s a step whose first step takes 4 s: 40 tokens per second
    times_s = iter([4.0])
    engine, clock = make_engine(lambda _: next(times_s, 0.1), max_num_seqs=4, budget=8)
    requests = at(*([None] * 80), prompt_tokens=2, output_tokens=10)
    result = run_load(engine, clock, requests, in_flight=4)
    assert all(record.outcome == "finished" for record in result.records)
    assert max(step.num_running for step in result.steps) <= 4
    assert result.window_s[0] == pytest.approx(4.0)
    assert result.window_s[1] < result.elapsed_s
    assert result.window_tokens_per_s == pytest.approx(40, rel=0.03)
    assert 800 / result.elapsed_s < 36  # what the whole run would make of it
    # sent as slots come free: the wait of a closed loop is no queueing
    assert max(ttft_ms(record) or 0 for record in result.counted) == pytest.approx(100)


def test_a_closed_loop_intends_nothing_behind_its_window() -> None:
    engine, clock = make_engine(lambda _: 0.5)
    result = run_load(engine, clock, at(*([None] * 100)), in_flight=1, stop_after_s=3.0)
    assert len(result.records) == 6
    assert {record.outcome for record in result.records} == {"finished"}


def test_a_queue_that_only_grows_ends_the_run() -> None:
    engine, clock = make_engine(lambda _: 1.0, max_num_seqs=1)
    requests = at(*(index * 0.1 for index in range(1000)))
    result = run_load(engine, clock, requests, give_up_after_s=5.0)
    assert result.is_diverged
    assert result.elapsed_s < 10
    counts = summarise(result, Slo(1000)).counts
    assert counts.intended == 1000
    assert counts.not_sent > 800
    engine.check_idle()


@pytest.mark.parametrize(("waiting", "diverged"), [(8, False), (9, True)])
def test_eight_waiting_requests_are_no_growing_queue(waiting: int, diverged: bool) -> None:
    engine, clock = make_engine(lambda _: 1.0, max_num_seqs=1)
    result = run_load(engine, clock, at(*([0.0] * (1 + waiting))), give_up_after_s=0.5)
    assert result.is_diverged == diverged
    assert all(record.outcome == "finished" for record in result.records) != diverged


class _Interrupting(ScriptedExecutor):
    def execute(self, plan: StepPlan) -> list[int]:
        if self.clock.time_s >= 103.0:
            raise KeyboardInterrupt
        return super().execute(plan)


@pytest.fixture(autouse=True)
def _thawed() -> None:
    """A server that another test ran in this process leaves its heap frozen."""
    gc.unfreeze()


def test_an_interruption_keeps_the_tokens_so_far() -> None:
    engine, clock = make_engine(lambda _: 1.0)
    engine._executor = _Interrupting(clock, lambda _: 1.0)
    recorder = LoadRecorder()
    was_enabled = gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        run_load(engine, clock, at(0.0, 9.0, output_tokens=8), recorder=recorder)
    assert gc.isenabled() == was_enabled
    assert gc.get_freeze_count() == 0
    result = recorder.result()
    assert not result.is_complete
    assert result.elapsed_s == pytest.approx(3.0)
    started, unsent = result.records
    assert started.token_s == pytest.approx((1.0, 2.0, 3.0))
    assert (started.outcome, started.failure) == ("failed", "interrupted")
    assert unsent.outcome == "not_sent"


def test_an_interruption_while_sending_counts_no_request_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, clock = make_engine(lambda _: 1.0)
    recorder = LoadRecorder()

    def add(_: Request) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "add", add)
    with pytest.raises(KeyboardInterrupt):
        run_load(engine, clock, at(0.0, 1.0), recorder=recorder)
    result = recorder.result()
    assert [record.outcome for record in result.records] == ["failed", "not_sent"]
    assert summarise(result, Slo(100)).counts.intended == 2


def test_the_heap_is_frozen_in_the_window_and_thawed_behind_it() -> None:
    # dynamo #12020: a garbage collection looks like a stall
    seen: list[tuple[bool, int]] = []

    def cost_s(_: StepShape) -> float:
        seen.append((gc.isenabled(), gc.get_freeze_count()))
        return 1.0

    engine, clock = make_engine(cost_s)
    run_load(engine, clock, at(0.0))
    assert not seen[0][0]
    assert seen[0][1] > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    seen.clear()
    engine, clock = make_engine(cost_s)
    run_load(engine, clock, at(0.0), freeze_heap=False)
    assert seen == [(True, 0)]


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collector_off")
def test_a_collector_that_was_off_stays_off() -> None:
    engine, clock = make_engine()
    run_load(engine, clock, at(0.0))
    assert not gc.isenabled()


def test_progress_adds_up() -> None:
    seen: list[LoadProgress] = []
    engine, clock = make_engine(lambda _: 0.06)
    run_load(engine, clock, at(*(index * 0.1 for index in range(50))), on_progress=seen.append)
    assert [p.elapsed_s for p in seen] == sorted(p.elapsed_s for p in seen)
    assert all(after.elapsed_s - before.elapsed_s >= 0.0999 for before, after in pairwise(seen))
    assert {p.num_intended for p in seen} == {50}
    assert seen[-1].num_finished <= 50
    assert all(p.num_sent == p.num_finished + p.num_running + p.num_waiting for p in seen)


def test_nothing_asked_is_nothing_done() -> None:
    engine, clock = make_engine()
    result = run_load(engine, clock, [])
    assert result.records == ()
    assert summarise(result, Slo(100)).goodput_per_s == 0.0


def test_the_real_clock_is_on_time() -> None:
    clock = SystemClock()
    start_s = clock.now_s()
    clock.sleep_until_s(start_s - 60.0)
    assert clock.now_s() - start_s < 30.0
    clock.sleep_until_s(start_s + 0.1)
    assert clock.now_s() >= start_s + 0.1


def test_a_real_clock_and_a_virtual_one_give_the_same_rows() -> None:
    class Sleeping(ScriptedExecutor):
        def __init__(self, real: SystemClock) -> None:
            self.real = real

        def execute(self, plan: StepPlan) -> list[int]:
            self.real.sleep_until_s(self.real.now_s() + 0.02)
            return [7 for piece in plan if piece.samples]

    requests = at(0.0, 0.05, 0.31, output_tokens=4)
    engine, virtual_clock = make_engine(lambda _: 0.02)
    virtual = run_load(engine, virtual_clock, requests)
    real_clock = SystemClock()
    engine, _ = make_engine()
    engine._executor, engine._clock = Sleeping(real_clock), real_clock
    real = run_load(engine, real_clock, requests)
    assert [r.stalled for r in real.records] == [r.stalled for r in virtual.records]
    assert [len(r.token_s) for r in real.records] == [4, 4, 4]
    for mine, theirs in zip(real.records, virtual.records, strict=True):
        # a shared machine may oversleep, and is never early
        assert all(a >= b - 1e-3 for a, b in zip(mine.token_s, theirs.token_s, strict=True))
