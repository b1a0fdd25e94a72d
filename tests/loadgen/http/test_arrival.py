"""When bytes arrived: by the kernel's clock where it tells it, by the read's where it doesn't."""

import asyncio
import socket
import ssl
import struct
import time
from pathlib import Path

import httpx
import pytest
import trustme

from sarathi_tune.loadgen.http import arrival
from sarathi_tune.loadgen.http.arrival import ArrivalSocket
from sarathi_tune.loadgen.http.client import HttpSettings
from sarathi_tune.loadgen.http.reading import read_stream
from sarathi_tune.loadgen.http.wire import WIRE, StampingTransport, Timeouts, Wire
from sarathi_tune.loadgen.http.worker import run_http_load
from sarathi_tune.loadgen.record import is_stamped_on_arrival
from tests.loadgen.http.servers import (
    DIALECT,
    STREAM_HEAD,
    Line,
    Seen,
    chunk,
    noted_arrivals,
    requests_at,
    serving,
    target,
    text_event,
    tokens,
)

#: What two clocks that are read one behind the other may differ by on a machine that stands still in between.
CLOCKS_S = 0.1


def connected() -> tuple[ArrivalSocket, socket.socket]:
    """Ours, and the other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = ArrivalSocket(socket.AF_INET)
        ours.setblocking(True)
        ours.connect(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


def test_bytes_that_lay_unread_arrived_when_they_were_sent() -> None:
    ours, theirs = connected()
    with ours, theirs, noted_arrivals() as are_told:
        before_s = time.perf_counter()
        theirs.sendall(b"token")
        behind_s = time.perf_counter()
        time.sleep(0.5)  # the client is late
        buffer = bytearray(16)
        assert ours.recv_into(buffer) == 5
        if not are_told:
            pytest.skip("this kernel doesn't tell when bytes arrived")
        assert ours.is_told
        assert before_s - CLOCKS_S < ours.arrival_s < behind_s + CLOCKS_S
        assert buffer[:5] == b"token"
        theirs.sendall(b"later")
        assert ours.recv_into(buffer, 3) == 3
        assert ours.recv_into(buffer, 2) == 2
        assert buffer[:3] == b"ert", "no more than was asked for"
        theirs.close()
        assert ours.recv_into(buffer) == 0
        assert not ours.is_told, "an end brings no bytes"


def test_a_kernel_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_arguments: object) -> None:
        raise OSError("Protocol not available")

    monkeypatch.setattr(ArrivalSocket, "setsockopt", refuses)
    ours, theirs = connected()
    with ours, theirs:
        theirs.sendall(b"token")
        time.sleep(0.01)
        before_s = time.perf_counter()
        assert ours.recv_into(bytearray(16)) == 5
        assert before_s <= ours.arrival_s <= time.perf_counter()
        assert not ours.is_told


@pytest.mark.parametrize(
    ("ancillary", "age_s"),
    [
        ([(1, 37, struct.pack("@6l", 90, 250_000_000, 0, 0, 0, 0))], 9.75),
        ([(1, 2, b"another"), (1, 37, struct.pack("@6l", 99, 999_999_000, 0, 0, 0, 0))], 1e-6),
        ([], None),
        ([(1, 37, b"short")], None),
        ([(1, 37, struct.pack("@6l", 0, 0, 0, 0, 0, 0))], None),  # not noted
        ([(1, 37, struct.pack("@6l", 101, 0, 0, 0, 0, 0))], None),  # the clock was set back
        ([(1, 37, struct.pack("@6l", 20, 0, 0, 0, 0, 0))], None),  # or forward
    ],
)
def test_what_comes_with_the_bytes(ancillary: list[tuple[int, int, bytes]], age_s: float | None) -> None:
    found = arrival._age_s(ancillary, clock_ns=100 * 10**9)
    assert found == (None if age_s is None else pytest.approx(age_s))


def test_a_client_that_stands_still_sees_when_the_server_sent() -> None:
    """The client's loop is held up while the second token comes; nothing but that token comes meanwhile."""
    around: list[float] = []

    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(STREAM_HEAD)
        await line.at(0.1, chunk(text_event("a", 1)))
        await line.wait_until(0.2)
        around.append(time.perf_counter())
        await line.send(chunk(text_event("b", 2)))
        around.append(time.perf_counter())
        await line.at(1.5, chunk(text_event("c", 3, "length")) + b"0\r\n\r\n")

    async def ask(url: str) -> Wire:
        async with httpx.AsyncClient(transport=StampingTransport(Timeouts()), timeout=None) as client:
            response = await client.send(client.build_request("POST", url, json={}), stream=True)
            wire = response.extensions[WIRE]
            assert isinstance(wire, Wire)
            while not wire.reads:
                await asyncio.sleep(0.001)
            time.sleep(0.6)
            await wire.ended
            await response.aclose()
            return wire

    with noted_arrivals() as are_told, serving(answer) as (url, _):
        wire = asyncio.run(ask(url))
    if not are_told:
        pytest.skip("this kernel doesn't tell when bytes arrived")
    assert wire.kernel_stamped_reads == len(wire.reads)
    second_s = read_stream(wire.reads).token_s[1]
    before_s, behind_s = around
    assert before_s - CLOCKS_S < second_s < behind_s + CLOCKS_S


def test_a_run_says_how_many_reads_the_kernel_stamped() -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.01, 0.02, 0.03])

    with noted_arrivals() as are_told, serving(answer) as (url, _):
        client = run_http_load(target(url), DIALECT, requests_at(0.0, 0.0), HttpSettings(workers=1)).client
    assert client is not None
    assert client.reads >= 6
    assert client.kernel_stamped_reads == (client.reads if are_told else 0)
    assert client.as_dict()["kernel_stamped_reads"] == client.kernel_stamped_reads


def test_over_tls() -> None:
    """Many records at once, more than the client's buffer takes, and a second request on the same connection."""

    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.01] * 400)

    authority = trustme.CA()
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)

    async def ask(url: str, tls: ssl.SSLContext | None) -> list[Wire]:
        wires = []
        async with httpx.AsyncClient(transport=StampingTransport(Timeouts(), tls), timeout=None) as client:
            for _ in range(2):
                response = await client.post(url, json={})
                wires.append(response.extensions[WIRE])
        return wires

    with serving(answer, theirs) as (url, log):
        wires = asyncio.run(ask(url, ours))
        with pytest.raises(httpx.ConnectError, match="isn't trusted"):
            asyncio.run(ask(url, None))
    assert [seen.connection for seen in log.requests] == [1, 1]
    for wire in wires:
        assert wire.is_complete
        assert len(wire.body) > 16 * 1024
        token_s = read_stream(wire.reads).token_s
        assert len(token_s) == 400
        assert wire.sent_s < token_s[0] <= token_s[-1]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts what Linux lists")
def test_a_connection_that_is_refused_leaves_no_socket_open() -> None:
    async def ask(port: int) -> None:
        async with httpx.AsyncClient(transport=StampingTransport(Timeouts()), timeout=None) as client:
            await client.get(f"http://127.0.0.1:{port}/")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with pytest.raises(httpx.ConnectError):
        asyncio.run(ask(port))
    assert len(list(descriptors.iterdir())) == before


@pytest.mark.parametrize(
    ("reads", "by_kernel", "coalesced_share", "holds"),
    [
        (1000, 1000, 0.0, True),
        (1000, 990, 0.01, True),
        (1000, 989, 0.0, False),  # stamps of the loop among them
        (1000, 1000, 0.011, False),  # events that lay together share the last one's stamp
        (0, 0, 0.0, False),
    ],
)
def test_when_lateness_is_not_in_the_stamps(reads: int, by_kernel: int, coalesced_share: float, holds: bool) -> None:
    assert is_stamped_on_arrival(reads, by_kernel, coalesced_share) is holds
