"""A run over HTTP in one process: requests go out at absolute times, every read is stamped, each request leaves a row.

The schedule is absolute and nothing is awaited between two sends, so that a slow answer delays no other request. Bodies
are built before the start and events are read after the end: within the run there is only the socket. Times of several
processes can be compared, because `time.perf_counter` is one clock for the whole machine.
"""

import asyncio
import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from sarathi_tune.loadgen.heap import frozen_heap
from sarathi_tune.loadgen.http.failures import describe_status, describe_unstreamed, kind_of, kind_of_status
from sarathi_tune.loadgen.http.openai import Dialect
from sarathi_tune.loadgen.http.reading import Reading, read_stream
from sarathi_tune.loadgen.http.target import Target
from sarathi_tune.loadgen.http.turns import run_in_turns
from sarathi_tune.loadgen.http.wire import WIRE, StampingTransport, Timeouts, Wire
from sarathi_tune.loadgen.inprocess import LoadProgress, TimedRequest
from sarathi_tune.loadgen.record import FailureKind, RequestRecord

#: The event loop sleeps in milliseconds; the rest of the way to a send is polled.
_SPIN_S = 0.0015
_LAG_EVERY_S = 0.02
#: A request's connection is opened so long before it is due.
_AHEAD_S = 0.05
#: epoll counts in whole milliseconds and rounds a sleep up; reads wake it up at once all the same.
_TIMER_S = 0.001
_PROGRESS_S = 0.25
#: How many times the length of a closed loop's run its filling may take.
LONGEST_FILLING = 3.0


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """How a run is done. `in_flight` as in `run_load`; what was sent is followed for up to `drain_s` behind the end of
    the sending. `workers` 0 runs in this process, otherwise in so many of their own.

    `stop_after_s` ends the sending. In a closed loop it counts from when as many requests have ended as are kept under
    way, because with long queues or answers filling takes longer than the run; `LONGEST_FILLING` times it at most.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    in_flight: int | None = None
    warmup_s: float = 0.0
    stop_after_s: float | None = None
    drain_s: float = 600.0
    workers: int = 0


@dataclass(frozen=True, slots=True)
class ShardJob:
    """One process's share of a run: requests in order of their times."""

    target: Target
    dialect: Dialect
    requests: tuple[TimedRequest, ...]
    settings: HttpSettings


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What a share of a run left: one record per request, and how the process fared. `sending_s`: when the sending of a
    closed loop ended."""

    records: tuple[RequestRecord, ...]
    loop_lags_ms: tuple[float, ...]
    gc_pauses_ms: tuple[float, ...]
    cpu_s: float
    events: int
    reads: int
    elapsed_s: float
    origin_s: float
    is_complete: bool
    sending_s: float = math.inf
    kernel_stamped_reads: int = 0


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request and what became of it. Seconds count from the start of the run, the wire's are absolute."""

    item: TimedRequest
    request: httpx.Request
    intended_s: float | None = None
    sent_s: float | None = None
    lag_s: float = 0.0
    wire: Wire | None = None
    status: int | None = None
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    error: Exception | None = None
    is_ended: bool = False


class Shard:
    """The run of a share. `prepare`, then `run` once, then `result`, which is there after an interruption too."""

    def __init__(self, job: ShardJob) -> None:
        self.job = job
        self.origin_s = 0.0
        self.attempts: list[_Attempt] = []
        self.lags_ms: list[float] = []
        self.pauses_ms: list[float] = []
        self.cpu_s = 0.0
        self.elapsed_s = 0.0
        self.is_complete = False
        self._slot_freed_s = 0.0
        self._filled_s: float | None = None
        self._sending_s = math.inf
        self._num_sent = 0
        self._num_ended = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def prepare(self) -> None:
        """Build every request, before time counts."""
        job = self.job
        url, headers = (
            job.target.base_url + job.dialect.path,
            {**job.target.headers, "content-type": "application/json"},
        )
        for item in job.requests:
            request = httpx.Request("POST", url, headers=headers, content=job.dialect.content(item.spec))
            self.attempts.append(_Attempt(item, request))

    async def run(
        self, origin_s: float | None, stop: asyncio.Event, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> None:
        """Send everything from `origin_s` (`time.perf_counter`; None is at once) on, and follow it to its end, or until
        `stop`."""
        transport = StampingTransport(self.job.settings.timeouts)
        with frozen_heap() as pauses:
            cpu_s = time.process_time()
            self.origin_s = time.perf_counter() + _SPIN_S if origin_s is None else origin_s
            helpers = [asyncio.create_task(self._sample_lag()), asyncio.create_task(self._open_ahead(transport))]
            if on_progress is not None:
                helpers.append(asyncio.create_task(self._report(on_progress)))
            try:
                async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=None) as client:
                    await self._run(client, stop)
            finally:
                for helper in helpers:
                    helper.cancel()
                self.elapsed_s = self._now_s()
                self.cpu_s = time.process_time() - cpu_s
                self.pauses_ms = [pause * 1e3 for pause in pauses.pauses_s]

    def result(self) -> ShardResult:
        """Read the streams and say what became of each request."""
        leftover: FailureKind = "unfinished" if self.is_complete else "interrupted"
        pairs = [self._record(attempt, leftover) for attempt in self.attempts]
        return ShardResult(
            records=tuple(record for record, _ in pairs),
            loop_lags_ms=tuple(self.lags_ms),
            gc_pauses_ms=tuple(self.pauses_ms),
            cpu_s=self.cpu_s,
            events=sum(reading.events for _, reading in pairs if reading is not None),
            reads=sum(len(attempt.wire.reads) for attempt in self.attempts if attempt.wire is not None),
            kernel_stamped_reads=sum(
                attempt.wire.kernel_stamped_reads for attempt in self.attempts if attempt.wire is not None
            ),
            elapsed_s=self.elapsed_s,
            origin_s=self.origin_s,
            is_complete=self.is_complete,
            sending_s=self._sending_s,
        )

    async def _run(self, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        sending = asyncio.create_task(self._send_all(client))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                await sending  # for its exception, if there is one
                await self._drain(stopping)
            self.is_complete = not stop.is_set()
        finally:
            left = [task for task in (sending, stopping, *self._tasks) if not task.done()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _drain(self, stopping: asyncio.Task[bool]) -> None:
        """Wait for what is under way; not for ever."""
        end_s = self._now_s() + self.job.settings.drain_s
        while self._tasks and not stopping.done() and (left_s := end_s - self._now_s()) > 0:
            waiting: set[asyncio.Task[None] | asyncio.Task[bool]] = {*self._tasks, stopping}
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def _send_all(self, client: httpx.AsyncClient) -> None:
        settings = self.job.settings
        slots = None if settings.in_flight is None else asyncio.Semaphore(settings.in_flight)
        for attempt in self.attempts:
            at_s = attempt.item.at_s
            if at_s is not None:
                await self._sleep_until(self.origin_s + at_s)
            free_s = 0.0
            if slots is not None:
                if slots.locked():
                    await slots.acquire()
                    free_s = self._slot_freed_s
                else:
                    await slots.acquire()
            now_s = self._now_s()
            if at_s is None and now_s >= self._closed_end_s():
                self._sending_s = self._closed_end_s()
                break  # a closed loop intends nothing behind its end
            attempt.intended_s = now_s if at_s is None else at_s
            attempt.sent_s, attempt.lag_s = now_s, max(0.0, now_s - max(attempt.intended_s, free_s))
            self._num_sent += 1
            task = asyncio.create_task(self._send(client, attempt, slots))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if at_s is None:
                await asyncio.sleep(0)  # let it go out before the next one is made

    async def _open_ahead(self, transport: StampingTransport) -> None:
        """Have a connection open for each request of an open loop when it is due: to send is to write then, and what
        opening takes is no part of its latency, whether a connection was left over or not."""
        if self.job.settings.in_flight is not None:
            return
        for number, attempt in enumerate(self.attempts, 1):
            assert attempt.item.at_s is not None, "an open loop has times"
            await asyncio.sleep(max(0.0, self.origin_s + attempt.item.at_s - _AHEAD_S - time.perf_counter()))
            transport.keep_open(attempt.request.url, number - self._num_sent)

    def _closed_end_s(self) -> float:
        """When the sending of a closed loop ends, as far as that is known."""
        length_s = self.job.settings.stop_after_s
        if length_s is None:
            return math.inf
        return LONGEST_FILLING * length_s if self._filled_s is None else self._filled_s + length_s

    async def _send(self, client: httpx.AsyncClient, attempt: _Attempt, slots: asyncio.Semaphore | None) -> None:
        try:
            response = await client.send(attempt.request, stream=True)
            attempt.status, attempt.headers = response.status_code, response.headers
            attempt.wire = response.extensions[WIRE]
            try:
                await attempt.wire.ended
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            attempt.error = error
        finally:
            attempt.is_ended = True
            self._num_ended += 1
            self._slot_freed_s = self._now_s()
            if self._num_ended == self.job.settings.in_flight:
                self._filled_s = self._slot_freed_s
            if slots is not None:
                slots.release()

    async def _sleep_until(self, when_s: float) -> None:
        left_s = when_s - time.perf_counter()
        if left_s > _SPIN_S:
            await asyncio.sleep(left_s - _SPIN_S)
        while time.perf_counter() < when_s:
            await asyncio.sleep(0)

    async def _sample_lag(self) -> None:
        """How late the loop wakes up: what it stamps is late by as much."""
        while True:
            due_s = time.perf_counter() + _LAG_EVERY_S + _TIMER_S
            await asyncio.sleep(_LAG_EVERY_S)
            self.lags_ms.append(max(0.0, time.perf_counter() - due_s) * 1e3)

    async def _report(self, on_progress: Callable[[LoadProgress], None]) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            on_progress(
                LoadProgress(
                    elapsed_s=self._now_s(),
                    num_intended=len(self.attempts),
                    num_sent=self._num_sent,
                    num_finished=self._num_ended,
                    num_running=self._num_sent - self._num_ended,
                    num_waiting=0,
                )
            )

    def _now_s(self) -> float:
        return time.perf_counter() - self.origin_s

    def _record(self, attempt: _Attempt, leftover: FailureKind) -> tuple[RequestRecord, Reading | None]:
        spec = attempt.item.spec
        if attempt.sent_s is None or attempt.intended_s is None:
            at_s = attempt.item.at_s
            intended_s = self.elapsed_s if at_s is None else at_s
            return RequestRecord(spec.request_id, intended_s, spec.prompt_tokens, spec.output_tokens, "not_sent"), None
        wire, reading = attempt.wire, None
        if wire is not None and attempt.status == 200:
            reading = read_stream(wire.reads)
        failure, detail = self._failure(attempt, reading, leftover)
        seen = reading or Reading("truncated")
        return RequestRecord(
            request_id=spec.request_id,
            intended_s=attempt.intended_s,
            prompt_tokens=spec.prompt_tokens,
            output_asked=spec.output_tokens,
            outcome="finished" if failure is None else "failed",
            sent_s=attempt.sent_s,
            token_s=tuple(stamp - self.origin_s for stamp in seen.token_s),
            output_got=seen.output_tokens,
            first_tokens=seen.first_tokens,
            failure=failure,
            detail=self.job.target.redact(detail),
            lag_s=attempt.lag_s,
            cached_tokens=seen.cached_tokens,
            first_byte_s=self._since_origin(wire.first_byte_s if wire else None),
            end_s=self._since_origin(wire.end_s if wire else None),
            prompt_got=seen.prompt_tokens,
            event_tokens=seen.event_tokens,
            num_coalesced=seen.coalesced,
        ), reading

    def _failure(
        self, attempt: _Attempt, reading: Reading | None, leftover: FailureKind
    ) -> tuple[FailureKind | None, str]:
        """Why the request counts as failed, and in which words; (None, "") when it finished."""
        wire = attempt.wire
        if attempt.error is not None:
            return kind_of(attempt.error), str(attempt.error)
        if wire is None or attempt.status is None:
            return leftover, "no answer had begun"
        if attempt.status != 200:
            return kind_of_status(attempt.status), describe_status(attempt.status, attempt.headers, wire.body)
        unstreamed = describe_unstreamed(attempt.headers, wire.body)
        if unstreamed is not None:
            return "mid_stream_error", unstreamed
        assert reading is not None, "a 200 was read"
        if reading.status == "error":
            return "mid_stream_error", reading.error
        if wire.error is not None and not (reading.finish_reason and isinstance(wire.error, httpx.ReadError)):
            return kind_of(wire.error), str(wire.error)
        if not wire.is_complete and wire.error is None:
            return leftover, "the answer had not ended"
        if not reading.events:
            return "no_tokens", "the stream was empty"
        if reading.status == "truncated":
            return "truncated", "the stream ended with neither a finish reason nor [DONE]"
        return None, ""

    def _since_origin(self, stamp_s: float | None) -> float | None:
        return None if stamp_s is None else stamp_s - self.origin_s


def run_here(job: ShardJob, on_progress: Callable[[LoadProgress], None] | None) -> ShardResult:
    """A run in this process. Ctrl-C ends it in good order: the result says that it isn't complete."""
    shard = Shard(job)
    shard.prepare()

    async def go() -> None:
        stop = asyncio.Event()
        with _stop_on_interrupt(stop):
            await shard.run(None, stop, on_progress)

    run_in_turns(go())
    return shard.result()


@contextlib.contextmanager
def _stop_on_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets `stop`; a second one is Python's own again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        if not stop.is_set():
            loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


def in_shares(requests: Sequence[TimedRequest], shares: int) -> list[tuple[TimedRequest, ...]]:
    """Deal the requests out in turn, so that every share has the same pace."""
    return [tuple(requests[index::shares]) for index in range(shares)]
