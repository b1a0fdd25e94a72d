"""Servers whose every byte is scripted: in a thread of their own, on a real socket."""

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sarathi_tune.loadgen.http.arrival import ArrivalSocket
from sarathi_tune.loadgen.http.openai import Dialect
from sarathi_tune.loadgen.http.target import Target, parse_target
from sarathi_tune.loadgen.inprocess import TimedRequest
from sarathi_tune.workload.spec import RequestSpec

DIALECT = Dialect("m")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Seen:
    """A request as the server got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    number: int
    connection: int


Answer = Callable[[Seen, "Line"], Awaitable[None]]


@dataclass
class Line:
    """The server's end of a connection."""

    writer: asyncio.StreamWriter
    started_s: float

    async def wait_until(self, when_s: float) -> None:
        """Sleep until that many seconds after the request came."""
        left_s = self.started_s + when_s - asyncio.get_running_loop().time()
        if left_s > 0:
            await asyncio.sleep(left_s)

    async def at(self, when_s: float, data: bytes) -> None:
        """Send bytes that many seconds after the request came."""
        await self.wait_until(when_s)
        await self.send(data)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Die without a word."""
        self.writer.transport.abort()


@dataclass
class Log:
    """What the server saw."""

    requests: list[Seen] = field(default_factory=list)
    #: When each connection ended, by the number of the request on it.
    gone: list[int] = field(default_factory=list)
    connections: int = 0


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def whole(status: str, body: bytes, kind: str = "application/json", extra: str = "") -> bytes:
    """A whole response."""
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def fails(status: str, message: str, extra: str = "") -> bytes:
    return whole(status, json.dumps({"error": {"message": message, "type": "x", "code": 1}}).encode(), extra=extra)


def text_event(text: str, count: int | None = None, finish: str | None = None) -> bytes:
    document: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    if count is not None:
        document["usage"] = {"prompt_tokens": 8, "completion_tokens": count, "total_tokens": 8 + count}
    return f"data: {json.dumps(document)}\n\n".encode()


def usage_event(count: int, prompt: int = 8, cached: int | None = None) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()


DONE = b"data: [DONE]\n\n"


async def tokens(line: Line, times_s: Sequence[float], prompt: int = 8, cached: int | None = None) -> None:
    """A whole and healthy answer with a token at each of the times."""
    await line.send(STREAM_HEAD)
    for number, time_s in enumerate(times_s, 1):
        await line.at(time_s, chunk(text_event("a", number, "length" if number == len(times_s) else None)))
    await line.send(chunk(usage_event(len(times_s), prompt, cached)) + chunk(DONE) + b"0\r\n\r\n")


@contextmanager
def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, Log]]:
    """A server that answers every request with `answer`; yields its URL and its log."""
    log = Log()
    loop = asyncio.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    started = threading.Event()
    stop = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        log.connections += 1
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection, number = log.connections, -1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {k.lower(): v for k, v in (row.split(": ", 1) for row in head[1:] if row)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                number = len(log.requests)
                seen = Seen(method, path, headers, json.loads(body) if body else None, number, connection)
                log.requests.append(seen)
                await answer(seen, Line(writer, loop.time()))
        except (asyncio.IncompleteReadError, ConnectionError):
            log.gone.append(number)
        except asyncio.CancelledError:
            pass  # the end of the test
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def main() -> None:
        server = await asyncio.start_server(connected, sock=listener, ssl=tls)
        started.set()
        await stop.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    started.wait()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}", log
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=10)
        loop.close()


def target(url: str, **environment: str) -> Target:
    return parse_target(url, environment)


def requests_at(
    *times_s: float | None, output_tokens: int = 3, prompt_tokens: int = 8, first: int = 0
) -> list[TimedRequest]:
    return [
        TimedRequest(RequestSpec(first + index, range(index, index + prompt_tokens), output_tokens), time_s)
        for index, time_s in enumerate(times_s)
    ]


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def noted_arrivals() -> Iterator[bool]:
    """Whether the kernel tells when bytes arrived. It begins a moment after the first socket has asked for it, and goes
    on as long as one does."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ArrivalSocket(socket.AF_INET) as probe:
        probe.setblocking(True)
        probe.connect(listener.getsockname())
        with listener.accept()[0] as other:
            for _ in range(100):
                other.sendall(b"token")
                probe.recv_into(bytearray(8))
                if probe.is_told:
                    break
                time.sleep(0.01)
            yield probe.is_told
