"""A run over HTTP, in this process or shared out over several.

Each worker gets its share of the absolute schedule and the same origin on the machine's one monotonic clock. Workers
ignore Ctrl-C: the parent gets it, tells them to stop, and collects what there is.
"""

import asyncio
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from sarathi_tune.errors import InconclusiveError
from sarathi_tune.loadgen.http.client import HttpSettings, Shard, ShardJob, ShardResult, in_shares, run_here
from sarathi_tune.loadgen.http.limits import ensure_descriptors
from sarathi_tune.loadgen.http.openai import Dialect
from sarathi_tune.loadgen.http.target import Target
from sarathi_tune.loadgen.http.turns import run_in_turns
from sarathi_tune.loadgen.inprocess import LoadProgress, TimedRequest, in_order, window_stop
from sarathi_tune.loadgen.record import ClientFacts, LoadResult, RequestRecord
from sarathi_tune.machine.cpu import affinity
from sarathi_tune.machine.processes import OUT_OF_MEMORY_KILL, how_it_ended, leave_signals_to_the_parent
from sarathi_tune.stats import quantile

#: Streams that one process follows without being late itself, with a margin; `sarathi-tune selftest` measures it.
STREAMS_PER_WORKER = 256
#: From "every worker is ready" to the start of the schedule: time to freeze their heaps.
_HEAD_START_S = 0.2
_STOP_WITHIN_S = 20.0


class LoadInterrupted(KeyboardInterrupt):
    """Ctrl-C within a run. `result` is what had come until then; left alone, it ends the program like any Ctrl-C."""

    def __init__(self, result: LoadResult) -> None:
        super().__init__("The run was interrupted.")
        self.result = result


class WorkerLostError(InconclusiveError):
    """A worker process died, and the run was ended: the load wasn't what it should have been. `result` is what the
    others had until then; the lost one's requests count as not sent."""

    def __init__(self, exit_code: int | None, result: LoadResult) -> None:
        remedy = (
            f"{OUT_OF_MEMORY_KILL} Free some, or load the server with fewer streams at once."
            if exit_code == -signal.SIGKILL
            else "Run again; what it printed says why it ended."
        )
        super().__init__(
            f"A client process {how_it_ended(exit_code)} before its share of the load was done, so the run was ended. "
            f"{remedy}"
        )
        self.result = result


def workers_for(streams: float) -> int:
    """How many processes so many streams at once need, as far as there are cores."""
    return max(1, math.ceil(min(len(affinity()), streams / STREAMS_PER_WORKER)))


def run_http_load(
    target: Target,
    dialect: Dialect,
    requests: Sequence[TimedRequest],
    settings: HttpSettings | None = None,
    *,
    on_progress: Callable[[LoadProgress], None] | None = None,
) -> LoadResult:
    """Send `requests` at their times (None: as soon as `settings.in_flight` has room) and follow each to its end.

    Every request leaves a record, whatever happened to it; stamps are seconds from the start of the run. Raises
    LoadInterrupted on Ctrl-C and WorkerLostError when a worker process dies, both with the records, and UsageError when
    the system allows too few open files.
    """
    settings = settings or HttpSettings()
    ordered = in_order(requests, settings.stop_after_s)
    assert settings.in_flight is not None or all(item.at_s is not None for item in ordered), "a closed loop has a limit"
    workers = min(settings.workers, len(ordered), settings.in_flight or len(ordered))
    _ensure_descriptors(len(ordered), settings.in_flight, max(1, workers))
    exit_codes: list[int | None] = []
    if workers < 1:
        shards = [run_here(ShardJob(target, dialect, tuple(ordered), settings), on_progress)]
    else:
        shards, exit_codes = _run_workers(
            [
                _job(target, dialect, share, settings, index, workers)
                for index, share in enumerate(in_shares(ordered, workers))
            ],
            on_progress,
        )
    result = _merge(shards, ordered, settings, workers)
    if exit_codes:
        raise WorkerLostError(exit_codes[0], result)
    if not result.is_complete:
        raise LoadInterrupted(result)
    return result


def _ensure_descriptors(requests: int, in_flight: int | None, workers: int) -> None:
    """An open loop may have all of its requests open at once, and hardly ever has."""
    at_once = min(requests, in_flight or requests)
    ensure_descriptors(math.ceil(at_once / workers), is_certain=in_flight is not None)


def _job(
    target: Target, dialect: Dialect, share: tuple[TimedRequest, ...], settings: HttpSettings, index: int, workers: int
) -> ShardJob:
    limit = settings.in_flight
    if limit is not None:
        limit = limit // workers + (index < limit % workers)
    return ShardJob(target, dialect, share, replace(settings, in_flight=limit))


def _merge(
    shards: Sequence[ShardResult], ordered: Sequence[TimedRequest], settings: HttpSettings, workers: int
) -> LoadResult:
    records = sorted(
        (record for shard in shards for record in shard.records),
        key=lambda record: (record.intended_s, record.request_id),
    )
    lags = [lag for shard in shards for lag in shard.loop_lags_ms]
    is_closed = any(item.at_s is None for item in ordered)
    stop_s = _closed_stop(shards) if is_closed else window_stop(ordered, settings.stop_after_s)
    if is_closed:  # a closed loop intends what it sends: the rest of its list is nobody's
        records = [record for record in records if record.outcome != "not_sent"]
    return LoadResult(
        records=tuple(records),
        steps=(),
        window_s=_window(records, settings, stop_s, is_closed),
        elapsed_s=max(shard.elapsed_s for shard in shards),
        is_complete=all(shard.is_complete for shard in shards),
        client=ClientFacts(
            workers=max(1, workers),
            loop_lag_p99_ms=quantile(lags, 0.99) if lags else 0.0,
            loop_lag_max_ms=max(lags, default=0.0),
            gc_pauses_ms=tuple(pause for shard in shards for pause in shard.gc_pauses_ms),
            cpu_s=sum(shard.cpu_s for shard in shards),
            events=sum(shard.events for shard in shards),
            reads=sum(shard.reads for shard in shards),
            origin_s=max(shard.origin_s for shard in shards),
            kernel_stamped_reads=sum(shard.kernel_stamped_reads for shard in shards),
        ),
    )


def _closed_stop(shards: Sequence[ShardResult]) -> float | None:
    """When the first share of a closed loop ended its sending; None when none did before its requests were used up."""
    stop_s = min(shard.sending_s for shard in shards)
    return stop_s if math.isfinite(stop_s) else None


def _window(
    records: Sequence[RequestRecord], settings: HttpSettings, stop_s: float | None, is_closed: bool
) -> tuple[float, float]:
    """The steady window. A closed loop's begins when as many have answered as it keeps under way, and ends with its
    sending: filling and draining stay outside. Where no request went out behind the filling, because
    answers take longer than the run, the filling is all there is, and counts."""
    start_s = settings.warmup_s
    if stop_s is None:
        stop_s = max((record.sent_s for record in records if record.sent_s is not None), default=0.0)
    if is_closed and settings.in_flight is not None:
        answered = sorted(record.token_s[0] for record in records if record.token_s)
        if len(answered) >= settings.in_flight:
            filled_s = max(start_s, answered[settings.in_flight - 1])
            if any(filled_s <= record.intended_s < stop_s for record in records):
                start_s = filled_s
            else:  # the first ones go out when a process is ready, which may be before the run's zero
                start_s = min(start_s, *(record.intended_s for record in records))
    return start_s, max(start_s, stop_s)


def _run_workers(
    jobs: Sequence[ShardJob], on_progress: Callable[[LoadProgress], None] | None
) -> tuple[list[ShardResult], list[int | None]]:
    """The shards in the order of `jobs`, and the exit codes of the workers that died."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection[Any, Any]] = []
    processes: list[SpawnProcess] = []
    try:
        for job in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        shards, lost = _follow(pipes, jobs, on_progress)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()
    return shards, [processes[index].exitcode for index in lost]


def _follow(
    pipes: Sequence["Connection[Any, Any]"],
    jobs: Sequence[ShardJob],
    on_progress: Callable[[LoadProgress], None] | None,
) -> tuple[list[ShardResult], list[int]]:
    """Start the workers together, pass their progress on, and collect their results; on Ctrl-C, or when one dies, tell
    the others to stop. Returns the results and which workers died of themselves."""
    results: list[ShardResult | None] = [None] * len(pipes)
    progress: list[LoadProgress | None] = [None] * len(pipes)
    open_pipes = list(range(len(pipes)))
    waiting = set(open_pipes)
    lost: list[int] = []
    give_up_s = math.inf
    is_stopped = False
    while open_pipes and time.perf_counter() < give_up_s:
        try:
            ready = wait([pipes[index] for index in open_pipes], timeout=0.5)
            for index in [index for index in open_pipes if pipes[index] in ready]:
                try:
                    message = pipes[index].recv()
                except (EOFError, OSError):
                    open_pipes.remove(index)  # the worker died; its requests are rows all the same
                    waiting.discard(index)
                    if not is_stopped:
                        lost.append(index)
                        is_stopped, give_up_s = True, time.perf_counter() + _STOP_WITHIN_S
                        _tell([pipes[other] for other in open_pipes], "stop")
                    continue
                if isinstance(message, ShardResult):
                    results[index] = message
                    open_pipes.remove(index)
                elif isinstance(message, LoadProgress):
                    progress[index] = message
                else:
                    waiting.discard(index)
                if isinstance(message, str) and not waiting and not is_stopped:
                    _tell([pipes[index] for index in open_pipes], time.perf_counter() + _HEAD_START_S)
            if on_progress is not None and any(progress):
                on_progress(_sum(progress, sum(len(job.requests) for job in jobs)))
        except KeyboardInterrupt:
            if is_stopped:
                raise
            is_stopped, give_up_s = True, time.perf_counter() + _STOP_WITHIN_S
            _tell([pipes[index] for index in open_pipes], "stop")
    return [result or _lost(job) for result, job in zip(results, jobs, strict=True)], lost


def _tell(pipes: Sequence["Connection[Any, Any]"], message: object) -> None:
    for pipe in pipes:
        try:
            pipe.send(message)
        except OSError:
            continue  # that worker has ended; its pipe says so when it is read


def _sum(progress: Sequence[LoadProgress | None], intended: int) -> LoadProgress:
    known = [part for part in progress if part is not None]
    return LoadProgress(
        elapsed_s=max(part.elapsed_s for part in known),
        num_intended=intended,
        num_sent=sum(part.num_sent for part in known),
        num_finished=sum(part.num_finished for part in known),
        num_running=sum(part.num_running for part in known),
        num_waiting=0,
    )


def _lost(job: ShardJob) -> ShardResult:
    """The rows of a worker that died."""
    records = tuple(
        RequestRecord(
            item.spec.request_id, item.at_s or 0.0, item.spec.prompt_tokens, item.spec.output_tokens, "not_sent"
        )
        for item in job.requests
    )
    return ShardResult(records, (), (), 0.0, 0, 0, 0.0, 0.0, is_complete=False)


def _work(pipe: "Connection[Any, Any]", job: ShardJob) -> None:
    """The life of a worker process: prepare, wait for the common origin, run, hand the result back."""
    leave_signals_to_the_parent()
    shard = Shard(job)
    shard.prepare()
    _ensure_descriptors(len(job.requests), job.settings.in_flight, 1)
    pipe.send("ready")
    try:
        origin_s = pipe.recv()
        if isinstance(origin_s, float):
            run_in_turns(_run_shard(shard, origin_s, pipe))
        pipe.send(shard.result())
    except (EOFError, OSError):
        return  # the parent is gone: nobody wants the result


async def _run_shard(shard: Shard, origin_s: float, pipe: "Connection[Any, Any]") -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard() -> None:  # "stop", or the end of the parent
        loop.remove_reader(pipe.fileno())
        stop.set()

    loop.add_reader(pipe.fileno(), heard)
    try:
        await shard.run(origin_s, stop, pipe.send)
    finally:
        loop.remove_reader(pipe.fileno())
