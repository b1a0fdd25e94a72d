"""What the client itself adds: streams from a local server whose every event is stamped as it leaves.

The server runs in a process of its own, emits to all streams in steps, as an engine with continuous batching does, and
notes `time.perf_counter` before each write. That clock is one for the whole machine, so that the client's stamps can be
set against the server's. Client and server share the machine here: what is found is an upper bound for a client that
has it for itself.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from sarathi_tune.loadgen.http.client import HttpSettings
from sarathi_tune.loadgen.http.openai import Dialect
from sarathi_tune.loadgen.http.target import Target
from sarathi_tune.loadgen.http.worker import run_http_load
from sarathi_tune.loadgen.inprocess import TimedRequest
from sarathi_tune.loadgen.latency import Distribution, distribution
from sarathi_tune.loadgen.record import LoadResult
from sarathi_tune.machine.cpu import affinity
from sarathi_tune.machine.processes import leave_signals_to_the_parent
from sarathi_tune.stats import quantile
from sarathi_tune.workload.spec import RequestSpec

EVENTS_PER_S = 20.0
LEVELS = (1, 10, 25, 50, 100, 200, 300, 400, 600, 800)
#: A client is trusted while its own part of the gaps stays below this at p99.
TRUSTED_GAP_MS = 2.0
#: And while it sends this close to its schedule at p99.
TRUSTED_LAG_MS = 5.0

_MODEL = "selftest"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Level:
    """One number of streams. All in milliseconds: `gap_error` is the client's gap minus the server's, without sign;
    `first_added` and `event_added` are from the server's write to the client's stamp, of first tokens and of all;
    `server_lag_p99_ms` is how late the server itself was."""

    streams: int
    workers: int
    lag_p99_ms: float
    loop_lag_p99_ms: float
    first_added: Distribution
    event_added: Distribution
    gap_error: Distribution
    server_lag_p99_ms: float
    events_per_s: float
    events_per_cpu_s: float
    failed: int

    @property
    def is_trusted(self) -> bool:
        """Whether the client may be believed at this number of streams."""
        gap_ms = self.gap_error.p99_ms
        return (
            self.failed == 0 and gap_ms is not None and gap_ms <= TRUSTED_GAP_MS and self.lag_p99_ms <= TRUSTED_LAG_MS
        )

    def as_dict(self) -> dict[str, Any]:
        """The level as it stands in a document."""
        return {
            "streams": self.streams,
            "workers": self.workers,
            "trusted": self.is_trusted,
            "lag_p99_ms": self.lag_p99_ms,
            "loop_lag_p99_ms": self.loop_lag_p99_ms,
            "first_added": self.first_added.as_dict(),
            "event_added": self.event_added.as_dict(),
            "gap_error": self.gap_error.as_dict(),
            "server_lag_p99_ms": self.server_lag_p99_ms,
            "events_per_s": self.events_per_s,
            "events_per_cpu_s": self.events_per_cpu_s,
            "failed": self.failed,
        }


def run_selftest(
    levels: Sequence[int] = LEVELS,
    *,
    seconds: float = 2.0,
    events_per_s: float = EVENTS_PER_S,
    workers: int = 1,
    on_level: Callable[[Level], None] | None = None,
) -> tuple[Level, ...]:
    """Measure the levels in rising order; stops behind the second one in a row that isn't trusted."""
    done: list[Level] = []
    with stamping_server(events_per_s) as server:
        for streams in levels:
            done.append(measure_level(server, streams, seconds=seconds, workers=workers))
            if on_level is not None:
                on_level(done[-1])
            if len(done) > 1 and not done[-1].is_trusted and not done[-2].is_trusted:
                break
    return tuple(done)


def trusted_streams(levels: Sequence[Level]) -> int:
    """Up to how many streams the client may be believed: every level up to there was trusted. 0 if none."""
    trusted = 0
    for level in levels:
        if not level.is_trusted:
            break
        trusted = level.streams
    return trusted


def measure_level(server: "StampingServer", streams: int, *, seconds: float, workers: int) -> Level:
    """`streams` answers that run at once for `seconds`, after a start spread over half a second."""
    events = max(2, round(seconds * server.events_per_s))
    requests = tuple(
        TimedRequest(RequestSpec(index, (index,), events), 0.5 * index / streams) for index in range(streams)
    )
    server.reset()
    result = run_http_load(
        Target(server.url),
        Dialect(_MODEL),
        requests,
        HttpSettings(workers=workers, stop_after_s=0.5 + 1e-6, drain_s=60),
    )
    return compare(result, server.stamps(), streams)


def compare(result: LoadResult, served: "Served", streams: int) -> Level:
    """The client's stamps against the server's."""
    client = result.client
    assert client is not None, "a run over HTTP knows its client"
    origin_s = client.origin_s
    pairs = [(record, served.stamps.get(record.request_id, ())) for record in result.records]
    whole = [(record, stamps) for record, stamps in pairs if len(record.token_s) == len(stamps) > 0]
    added = [[(ours + origin_s - theirs) * 1e3 for ours, theirs in zip(r.token_s, s, strict=True)] for r, s in whole]
    errors = [abs(after - before) for of_request in added for before, after in pairwise(of_request)]
    lags = [record.lag_s * 1e3 for record in result.records]
    events = sum(len(record.token_s) for record in result.records)
    return Level(
        streams=streams,
        workers=client.workers,
        lag_p99_ms=quantile(lags, 0.99),
        loop_lag_p99_ms=client.loop_lag_p99_ms,
        first_added=distribution(of_request[0] for of_request in added),
        event_added=distribution(value for of_request in added for value in of_request),
        gap_error=distribution(errors),
        server_lag_p99_ms=quantile(served.lags_ms, 0.99) if served.lags_ms else 0.0,
        events_per_s=events / result.elapsed_s if result.elapsed_s else 0.0,
        events_per_cpu_s=events / client.cpu_s if client.cpu_s else 0.0,
        failed=len(pairs) - len(whole),
    )


@dataclass(frozen=True, slots=True)
class Served:
    """What the server did: stamps of the events of each request (by its only prompt token), and how late its steps
    were."""

    stamps: dict[int, tuple[float, ...]]
    lags_ms: tuple[float, ...]


class StampingServer:
    """The parent's end of the server process."""

    def __init__(self, url: str, events_per_s: float, pipe: "Connection[Any, Any]") -> None:
        self.url, self.events_per_s, self._pipe = url, events_per_s, pipe

    def reset(self) -> None:
        """Forget the stamps so far."""
        self._pipe.send("reset")
        assert self._pipe.recv() == "reset"

    def stamps(self) -> Served:
        """The stamps since the last reset."""
        self._pipe.send("stamps")
        served = self._pipe.recv()
        assert isinstance(served, Served)
        return served


@contextmanager
def stamping_server(events_per_s: float = EVENTS_PER_S) -> Iterator[StampingServer]:
    """A server on a free port of this machine, for as long as this is open."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with one_core_less() as core:
        process = context.Process(target=_serve, args=(theirs, events_per_s, core), daemon=True)
        process.start()
        theirs.close()
        try:
            port = ours.recv()
            yield StampingServer(f"http://127.0.0.1:{port}/v1", events_per_s, ours)
        finally:
            ours.close()
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def one_core_less() -> Iterator[int | None]:
    """Leave a core to the server, so that neither waits for the other. Yields which; None where there is only one, or
    where the system doesn't let a process choose."""
    cores = affinity()
    core = max(cores) if sys.platform == "linux" and len(cores) > 1 else None
    if core is not None:
        try:
            os.sched_setaffinity(0, cores - {core})
        except OSError:
            core = None
    try:
        yield core
    finally:
        if core is not None:
            os.sched_setaffinity(0, cores)


def _serve(pipe: "Connection[Any, Any]", events_per_s: float, core: int | None) -> None:
    """The life of the server process; it ends with its pipe."""
    leave_signals_to_the_parent()
    with contextlib.suppress(OSError):  # a server that is late would be billed to the client
        if core is not None:
            os.sched_setaffinity(0, {core})
        os.nice(-5)
    asyncio.run(_Server(pipe, events_per_s).run())


@dataclass(slots=True, eq=False)
class _Stream:
    """A running answer."""

    transport: asyncio.Transport
    request_id: int
    left: int
    stamps: list[float] = field(default_factory=list)


class _Server:
    def __init__(self, pipe: "Connection[Any, Any]", events_per_s: float) -> None:
        self.pipe, self.step_s = pipe, 1.0 / events_per_s
        self.streams: list[_Stream] = []
        self.all: list[_Stream] = []
        self.lags_ms: list[float] = []
        self.ended = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        server = await loop.create_server(lambda: _Peer(self), sock=listener)
        loop.add_reader(self.pipe.fileno(), self._hear)
        self.pipe.send(listener.getsockname()[1])
        steps = asyncio.create_task(self._step_for_ever())
        await self.ended.wait()
        steps.cancel()
        server.close()

    def start(self, transport: asyncio.Transport, body: bytes) -> None:
        request = json.loads(body)
        transport.write(_HEAD)
        stream = _Stream(transport, int(request["prompt"][0]), int(request["max_tokens"]))
        self.streams.append(stream)
        self.all.append(stream)

    async def _step_for_ever(self) -> None:
        """All streams get their event in the same step, at absolute times."""
        due_s = time.perf_counter()
        while True:
            due_s += self.step_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if self.streams:
                self.lags_ms.append((time.perf_counter() - due_s) * 1e3)
            for stream in self.streams:
                self._emit(stream)
            self.streams = [stream for stream in self.streams if stream.left]

    def _emit(self, stream: _Stream) -> None:
        stream.left -= 1
        finish = '"length"' if not stream.left else "null"
        event = b'data: {"id":"s","choices":[{"index":0,"text":" a","finish_reason":%s}],"usage":{"prompt_tokens":1,'
        event += b'"completion_tokens":%d}}\n\n'
        event = event % (finish.encode(), len(stream.stamps) + 1)
        data = b"%x\r\n%b\r\n" % (len(event), event)
        if not stream.left:
            data += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        stream.stamps.append(time.perf_counter())
        stream.transport.write(data)

    def _hear(self) -> None:
        try:
            question = self.pipe.recv()
            if question == "reset":
                self.all, self.lags_ms = [], []
                self.pipe.send("reset")
            else:
                stamps = {stream.request_id: tuple(stream.stamps) for stream in self.all}
                self.pipe.send(Served(stamps, tuple(self.lags_ms)))
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
            self.ended.set()


class _Peer(asyncio.Protocol):
    """A client's connection: whole requests go to the server."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # asyncio does this only for sockets that name their protocol, which a listener's don't
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None, "data comes over a connection"
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or length is None or len(body) < int(length[1]):
            return
        self._received = b""
        self._server.start(self._transport, body)
