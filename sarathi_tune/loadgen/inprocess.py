"""The load generator for the built-in engine: open loop, absolute times, the same for a real and a virtual clock.

Requests are added at their intended times (or after the step that was running then), whatever the engine's queue looks
like, and every token is stamped after the step that made it. The steady window starts at `warmup_s` (a closed loop's
not before its slots have answered once) and ends with the sending: what is intended in it is counted and followed to
its end. Before it, requests are sent and not counted, so that a start in which everybody prefills at once can't own
the tail.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

from sarathi_tune.engine.executor import Clock
from sarathi_tune.engine.loop import Engine, StepResult
from sarathi_tune.engine.request import Request, RequestState
from sarathi_tune.errors import RequestRefusedError
from sarathi_tune.loadgen.heap import frozen_heap
from sarathi_tune.loadgen.record import FailureKind, LoadResult, Outcome, RequestRecord, StepRecord
from sarathi_tune.workload.spec import RequestSpec

#: How often `on_progress` is called at most, in seconds of the run's clock.
_PROGRESS_S = 0.1


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and its time in seconds from the start of the run; None sends it as soon as `in_flight` has room."""

    spec: RequestSpec
    at_s: float | None


def timed(specs: Sequence[RequestSpec], times_s: Sequence[float | None]) -> tuple[TimedRequest, ...]:
    """Requests paired with their times, as many as there are of both."""
    return tuple(TimedRequest(spec, at_s) for spec, at_s in zip(specs, times_s, strict=False))


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a run is. Seconds from its start."""

    elapsed_s: float
    num_intended: int
    num_sent: int
    num_finished: int
    num_running: int
    num_waiting: int


@dataclass(slots=True, eq=False)
class _Track:
    """A request under way. `token_steps[i]` is the index, in the run, of the step that gave token i."""

    timed: TimedRequest
    intended_s: float
    request: Request
    sent_s: float
    lag_s: float
    token_steps: list[int] = field(default_factory=list)
    scheduled_s: float | None = None
    refusal: str | None = None


@dataclass(slots=True, eq=False)
class LoadRecorder:
    """A run in progress. Whoever makes it and hands it to `run_load` can read `result()` at any time, after Ctrl-C too:
    the tokens so far are there, and whatever hadn't finished is counted as interrupted or not sent."""

    pending: deque[TimedRequest] = field(default_factory=deque)
    tracks: dict[int, _Track] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    #: For each step, how many steps up to and including it held prefill tokens.
    prefill_steps: list[int] = field(default_factory=list)
    window_s: tuple[float, float] = (0.0, 0.0)
    elapsed_s: float = 0.0
    is_complete: bool = False
    is_diverged: bool = False

    def result(self) -> LoadResult:
        """What is known so far, one record per intended request, in order of intention."""
        leftover: FailureKind = "unfinished" if self.is_complete else "interrupted"
        records = [self._sent(track, leftover) for track in self.tracks.values()]
        records += [self._not_sent(item) for item in self.pending if item.spec.request_id not in self.tracks]
        return LoadResult(
            records=tuple(sorted(records, key=lambda record: record.intended_s)),
            steps=tuple(self.steps),
            window_s=self.window_s,
            elapsed_s=self.elapsed_s,
            is_complete=self.is_complete,
            is_diverged=self.is_diverged,
        )

    def _sent(self, track: _Track, leftover: FailureKind) -> RequestRecord:
        request, indices = track.request, track.token_steps
        outcome: Outcome = "finished" if request.state is RequestState.FINISHED else "failed"
        failure = None if outcome == "finished" else leftover
        if track.refusal is not None:
            failure = "refused"
        seen = self.prefill_steps
        return RequestRecord(
            request_id=request.request_id,
            intended_s=track.intended_s,
            prompt_tokens=request.num_prompt_tokens,
            output_asked=request.max_output_tokens,
            outcome=outcome,
            sent_s=track.sent_s,
            scheduled_s=track.scheduled_s,
            token_s=tuple(self.steps[index].end_s for index in indices),
            stalled=tuple(seen[b] > seen[a] for a, b in pairwise(indices)),
            output_got=len(indices),
            failure=failure,
            detail=track.refusal or "",
            lag_s=track.lag_s,
            cached_tokens=request.num_cached,
            num_preemptions=request.num_preemptions,
        )

    def _not_sent(self, item: TimedRequest) -> RequestRecord:
        return RequestRecord(
            request_id=item.spec.request_id,
            intended_s=self.elapsed_s if item.at_s is None else item.at_s,
            prompt_tokens=item.spec.prompt_tokens,
            output_asked=item.spec.output_tokens,
            outcome="not_sent",
        )


def run_load(
    engine: Engine,
    clock: Clock,
    requests: Sequence[TimedRequest],
    *,
    stop_after_s: float | None = None,
    warmup_s: float = 0.0,
    drain: bool = True,
    drain_s: float = 60.0,
    in_flight: int | None = None,
    give_up_after_s: float | None = None,
    freeze_heap: bool = True,
    recorder: LoadRecorder | None = None,
    on_progress: Callable[[LoadProgress], None] | None = None,
) -> LoadResult:
    """Send `requests` at their times to an idle engine, and follow each to its end.

    `stop_after_s` ends the sending; requests with later times are not part of the run. Without it the window ends one
    mean gap behind the last time (n arrivals at rate r make a window of n / r). Then, with `drain`, what was sent is
    followed to its end for up to `drain_s`; what still runs after that is aborted and counted as unfinished.
    `in_flight` holds requests back while that many are under way; their wait counts from the intended time all the
    same.
    `give_up_after_s` ends the run as diverged once a request has waited that long to be scheduled and eight others
    wait too. `freeze_heap` keeps Python's garbage collector out of the run; a virtual clock doesn't need it.
    A refused request is a failed row. Ctrl-C and executor errors propagate, and the caller's `recorder` keeps what
    there is.
    """
    with frozen_heap() if freeze_heap else nullcontext():
        run = _Run(engine, clock, recorder or LoadRecorder(), in_flight, give_up_after_s, on_progress)
        return run.run(requests, stop_after_s, warmup_s, drain_s if drain else 0.0)


class _Run:
    """The loop of one run. Times here are seconds from the start of the run."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        recorder: LoadRecorder,
        in_flight: int | None,
        give_up_after_s: float | None,
        on_progress: Callable[[LoadProgress], None] | None,
    ) -> None:
        self.engine, self.clock, self.recorder = engine, clock, recorder
        self.in_flight, self.give_up_after_s, self.on_progress = in_flight, give_up_after_s, on_progress
        self.origin_s = clock.now_s()
        #: When the loop was last free to send: sending is late only by what passes after this.
        self.free_s = 0.0
        self.next_progress_s = 0.0
        self.num_under_way = 0
        self.closed = False
        #: Where the window ends; None until the last request of a closed loop is sent.
        self.stop_s: float | None = None
        self.last_sent_s = 0.0
        #: When a closed loop was steady: as many requests had answered as it keeps under way.
        self.steady_from_s: float | None = None
        self.num_answered = 0
        self.unscheduled: list[_Track] = []

    def run(
        self, requests: Sequence[TimedRequest], stop_after_s: float | None, warmup_s: float, drain_s: float
    ) -> LoadResult:
        recorder = self.recorder
        assert not self.engine.has_work, "the engine still works on something else"
        assert not recorder.tracks, "a recorder holds one run"
        recorder.pending.extend(in_order(requests, stop_after_s))
        self.stop_s = window_stop(recorder.pending, stop_after_s)
        self.closed = any(item.at_s is None for item in recorder.pending)
        recorder.window_s = (warmup_s, warmup_s if self.stop_s is None else self.stop_s)
        try:
            self._loop(drain_s)
        finally:
            recorder.elapsed_s = self._now_s()
            stop_s = self.last_sent_s if self.stop_s is None else self.stop_s
            start_s = max(warmup_s, self.steady_from_s or 0.0)
            recorder.window_s = (start_s, max(start_s, stop_s))
        return self._finish()

    def _loop(self, drain_s: float) -> None:
        recorder, engine = self.recorder, self.engine
        while recorder.pending or engine.has_work:
            now_s = self._now_s()
            if now_s >= (self.last_sent_s if self.stop_s is None else self.stop_s) + drain_s:
                break
            self._send_due(now_s)
            if engine.has_work:
                self._step()
            elif recorder.pending:
                self._wait_for(recorder.pending[0])
            if self._has_diverged():
                recorder.is_diverged = True
                break
            self._report()

    def _now_s(self) -> float:
        return self.clock.now_s() - self.origin_s

    def _wait_for(self, item: TimedRequest) -> None:
        if item.at_s is not None:
            self.clock.sleep_until_s(self.origin_s + item.at_s)

    def _send_due(self, now_s: float) -> None:
        pending = self.recorder.pending
        if self.stop_s is not None and now_s >= self.stop_s and pending and pending[0].at_s is None:
            pending.clear()  # a closed loop intends nothing behind the end of the window
        while pending and self._is_due(pending[0].at_s):
            self._send(pending[0])
            pending.popleft()  # only now: an interruption between the two must not lose the request

    def _is_due(self, at_s: float | None) -> bool:
        if self.in_flight is not None and self.num_under_way >= self.in_flight:
            return False
        # the sum that was slept until, not a difference: rounding must not make a virtual clock wait for ever
        return at_s is None or self.origin_s + at_s <= self.clock.now_s()

    def _send(self, item: TimedRequest) -> None:
        spec, sent_s = item.spec, self._now_s()
        intended_s = sent_s if item.at_s is None else item.at_s
        request = Request(spec.request_id, spec.prompt, spec.output_tokens, arrival_s=self.origin_s + intended_s)
        track = _Track(item, intended_s, request, sent_s, lag_s=max(0.0, sent_s - max(intended_s, self.free_s)))
        self.recorder.tracks[spec.request_id] = track
        self.last_sent_s = sent_s
        try:
            self.engine.add(request)
        except RequestRefusedError as refusal:
            track.refusal = str(refusal)
            return
        self.unscheduled.append(track)
        self.num_under_way += 1

    def _step(self) -> None:
        step = self.engine.step()
        assert step is not None, "an engine with work has a step"
        self.free_s = end_s = self._now_s()
        recorder = self.recorder
        index = len(recorder.steps)
        start_s = step.start_s - self.origin_s
        chunks = step.shape.chunks
        recorder.steps.append(
            StepRecord(start_s, end_s, step.shape, step.num_waiting, step.num_running, step.num_preempted)
        )
        before = recorder.prefill_steps[-1] if index else 0
        recorder.prefill_steps.append(before + bool(chunks))
        if chunks and self.unscheduled:
            self._note_scheduled(start_s)
        self._stamp(step, index)
        if self.closed and self.steady_from_s is None and self.num_answered >= (self.in_flight or 0):
            self.steady_from_s = end_s

    def _stamp(self, step: StepResult, index: int) -> None:
        tracks = self.recorder.tracks
        for emission in step.emissions:
            tracks[emission.request.request_id].token_steps.append(index)
            self.num_answered += emission.is_first
            if emission.is_last:
                self.num_under_way -= 1

    def _note_scheduled(self, start_s: float) -> None:
        waiting = []
        for track in self.unscheduled:
            if track.request.state is RequestState.WAITING:
                waiting.append(track)
            else:
                track.scheduled_s = start_s
        self.unscheduled = waiting

    def _has_diverged(self) -> bool:
        if self.give_up_after_s is None or len(self.unscheduled) <= 8:
            return False
        return self._now_s() - self.unscheduled[0].intended_s > self.give_up_after_s

    def _report(self) -> None:
        if self.on_progress is None or self._now_s() < self.next_progress_s:
            return
        self.next_progress_s = self._now_s() + _PROGRESS_S
        recorder, engine = self.recorder, self.engine
        num_sent = len(recorder.tracks)
        self.on_progress(
            LoadProgress(
                elapsed_s=self._now_s(),
                num_intended=num_sent + len(recorder.pending),
                num_sent=num_sent,
                num_finished=num_sent - self.num_under_way,
                num_running=engine.num_running,
                num_waiting=engine.num_waiting,
            )
        )

    def _finish(self) -> LoadResult:
        recorder = self.recorder
        for track in recorder.tracks.values():
            if track.refusal is None and not track.request.is_finished:
                self.engine.abort(track.request.request_id)
        recorder.is_complete = True
        return recorder.result()


def in_order(requests: Sequence[TimedRequest], stop_after_s: float | None) -> list[TimedRequest]:
    """The requests of a run by their times, without those behind its end."""
    kept = [item for item in requests if item.at_s is None or stop_after_s is None or item.at_s < stop_after_s]
    return sorted(kept, key=lambda item: item.at_s or 0.0)


def window_stop(pending: Sequence[TimedRequest], stop_after_s: float | None) -> float | None:
    """The end of the sending: as given, or one mean gap behind the last time; unknown for a closed loop."""
    if stop_after_s is not None:
        return stop_after_s
    times = [item.at_s for item in pending if item.at_s is not None]
    if not times:
        return None
    span_s = times[-1] - times[0]
    return times[-1] + (span_s / (len(times) - 1) if span_s > 0 else 1.0)
