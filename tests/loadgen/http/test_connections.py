"""Connections, and the room for them, are there before a request is due."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import httpx
import pytest

from sarathi_tune.loadgen.http import wire
from sarathi_tune.loadgen.http.client import HttpSettings
from sarathi_tune.loadgen.http.wire import StampingTransport, Timeouts
from sarathi_tune.loadgen.http.worker import run_http_load
from sarathi_tune.loadgen.latency import failure_of
from tests.loadgen.http.servers import DIALECT, Line, Log, Seen, free_port, requests_at, serving, target, tokens


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; fails after 30 seconds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_connections_are_opened_ahead_of_the_requests() -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.05])

    async def main(url: str, log: Log) -> None:
        transport = StampingTransport(Timeouts())
        where = httpx.URL(url)
        async with httpx.AsyncClient(transport=transport, timeout=None) as client:
            transport.keep_open(where, 3)
            await until(lambda: log.connections >= 3)
            transport.keep_open(where, 2)
            await asyncio.gather(*(client.get(url) for _ in range(3)))
            assert len(log.requests) == log.connections == 3, "each request had one that was open"
            transport.keep_open(where, 3)
            await asyncio.gather(*(client.get(url) for _ in range(4)))
            assert log.connections == 4, "those that were used are idle, and count"
            transport.keep_open(where, 6)
        await until(lambda: len(log.gone) >= log.connections)

    with serving(answer) as (url, log):
        asyncio.run(main(url, log))
        assert log.connections <= 6, "what was still being opened is closed with the rest"


def test_a_connection_that_was_opened_ahead_and_closed_is_no_failure() -> None:
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"

        def serve() -> None:
            listener.accept()[0].close()  # the one ahead
            accepted.append(listener.accept()[0])
            accepted[0].recv(4096)
            accepted[0].sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        async def main() -> str:
            transport = StampingTransport(Timeouts())
            async with httpx.AsyncClient(transport=transport, timeout=None) as client:
                transport.keep_open(httpx.URL(url), 1)
                await asyncio.sleep(0.2)
                return (await client.get(url)).text

        server = threading.Thread(target=serve)
        server.start()
        assert asyncio.run(main()) == "ok"
        server.join()
        accepted[0].close()


def test_what_failed_ahead_fails_nobody_later() -> None:
    """The server was not there yet when the connection was opened, and is when the request is due."""

    async def main() -> None:
        port = free_port()
        where = httpx.URL(f"http://127.0.0.1:{port}/")
        transport = StampingTransport(Timeouts())
        async with httpx.AsyncClient(transport=transport, timeout=None) as client:
            transport.keep_open(where, 2)
            await asyncio.sleep(0.1)

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
                await writer.drain()
                writer.close()
                await writer.wait_closed()

            async with await asyncio.start_server(answer, "127.0.0.1", port):
                assert [(await client.get(where)).text for _ in range(3)] == ["ok"] * 3

    asyncio.run(main())


def test_what_was_opened_too_long_ago_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.01])

    async def main(url: str, log: Log) -> None:
        transport = StampingTransport(Timeouts())
        async with httpx.AsyncClient(transport=transport, timeout=None) as client:
            transport.keep_open(httpx.URL(url), 1)
            await until(lambda: log.connections >= 1)
            monkeypatch.setattr(wire, "_KEEP_IDLE_S", 0.0)
            transport.keep_open(httpx.URL(url), 1)
            await client.get(url)
            assert [seen.connection > 1 for seen in log.requests] == [True]

    with serving(answer) as (url, log):
        asyncio.run(main(url, log))


def test_an_open_loop_opens_its_connections_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a request that is due nothing is left to do but to write it."""
    asked: list[int] = []
    keep_open = StampingTransport.keep_open

    def note_asked(self: StampingTransport, url: httpx.URL, count: int) -> None:
        asked.append(count)
        keep_open(self, url, count)

    monkeypatch.setattr(StampingTransport, "keep_open", note_asked)

    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.01, 0.02, 0.03])

    with serving(answer) as (url, log):
        result = run_http_load(target(url), DIALECT, requests_at(0.2, 0.2, 0.2, 1.2))
    assert [failure_of(record) for record in result.records] == [None] * 4
    assert (len(asked), asked[0], asked[-1]) == (4, 1, 1)
    assert max(asked) <= 3
    assert log.connections == 3


def test_a_closed_loop_opens_none_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StampingTransport, "keep_open", lambda *_: pytest.fail("a connection was opened"))

    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.01, 0.02, 0.03])

    with serving(answer) as (url, log):
        result = run_http_load(target(url), DIALECT, requests_at(*[None] * 6), HttpSettings(in_flight=2))
    assert [failure_of(record) for record in result.records] == [None] * 6
    assert log.connections == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the table's size is told there")
def test_the_table_of_open_files_has_grown_before_the_start() -> None:
    """Its growth within a run is 10 to 20 ms in which nothing leaves."""
    code = (
        "import re\n"
        "from sarathi_tune.loadgen.http.limits import ensure_descriptors\n"
        "size = lambda: int(re.search('FDSize:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "small = size()\n"
        "ensure_descriptors(600, is_certain=True)\n"
        "print(small, size(), len(__import__('os').listdir('/proc/self/fd')))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    small, grown, still_open = map(int, run.stdout.split())
    assert small < 664 <= grown
    assert still_open < 10
