"""The socket: an httpx transport that stamps what it reads with its arrival and parses nothing but HTTP's framing.

httpx's own transport wakes a task for every chunk and runs it through three layers of Python: at some thousand events a
second the client is busy with itself, and its stamps are late. Here the event loop hands the bytes to `buffer_updated`,
which keeps them with the kernel's stamp (see `arrival`); events are read from them after the run (see `reading`). Heads
are written and read by h11.

HTTP/1.1 only: HTTP/2 puts all streams behind one connection's flow control. No limit on connections: a pool that holds
requests back would measure itself. Proxies of the environment are not used.
"""

import asyncio
import os
import re
import socket
import ssl
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import httpx

from sarathi_tune.loadgen.http.arrival import ArrivalSocket
from sarathi_tune.loadgen.http.framing import Framing, FramingError, framing_of

#: The family of an address, and the address as the family has it.
_Address = tuple[int, Any]
#: The key of `httpx.Response.extensions` under which the wire lies.
WIRE = "wire"
#: Far more than an event, and little enough for hundreds of connections.
_BUFFER_BYTES = 16 * 1024
#: How h11 quotes what it couldn't read.
_BYTES = re.compile(r"bytearray\(b(.*?)\)$")
#: A connection that was idle for longer isn't used again: servers close theirs after about 5 s.
_KEEP_IDLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds of each phase. `first_byte_s` runs from sending to the first byte of the body (a full queue makes it
    long), `between_reads_s` from one read to the next, `request_s` over everything."""

    connect_s: float = 10.0
    first_byte_s: float = 120.0
    between_reads_s: float = 60.0
    request_s: float = 600.0


@dataclass(slots=True, eq=False)
class Wire:
    """What came for one request: `reads` holds (stamp, payload) of each read of the socket that brought some. Stamps
    are seconds of `time.perf_counter`, in `kernel_stamped_reads` of the reads by the kernel. Once `ended` is set,
    `is_complete` says whether the body ended as it should, and `error` what went wrong instead."""

    ended: asyncio.Future[None]
    sent_s: float = 0.0
    first_byte_s: float | None = None
    last_read_s: float = 0.0
    end_s: float | None = None
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    kernel_stamped_reads: int = 0
    is_complete: bool = False
    error: Exception | None = None

    @property
    def body(self) -> bytes:
        """Everything that came so far."""
        return b"".join(payload for _, payload in self.reads)


@dataclass(slots=True, eq=False)
class _Exchange:
    """One request under way on a connection. `head` resolves to the response's head."""

    method: str
    parser: h11.Connection
    wire: Wire
    head: asyncio.Future[h11.Response]
    framing: Framing | None = None


class _Connection(asyncio.BufferedProtocol):
    """A connection and the exchange on it, if there is one.

    It brings its own buffer: asyncio's, of 256 KiB and a new one for every read, costs several times what the read
    itself does (17 against 2.5 microseconds).
    """

    def __init__(self, timeouts: Timeouts, arrivals: ArrivalSocket) -> None:
        self.timeouts = timeouts
        self.arrivals = arrivals
        self.loop = asyncio.get_running_loop()
        self.exchange: _Exchange | None = None
        self.is_reusable = True
        #: Whether it has carried a request before.
        self.was_used = False
        self.idle_since_s = time.perf_counter()
        self._socket: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        # asyncio's TLS fills what it gets record by record, and slices it: a slice of a bytearray would be a copy
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    @property
    def is_fresh(self) -> bool:
        """Whether another request may be sent on it."""
        is_open = self._socket is not None and not self._socket.is_closing()
        return is_open and self.is_reusable and time.perf_counter() - self.idle_since_s < _KEEP_IDLE_S

    def start(self, exchange: _Exchange, request: bytes) -> None:
        """Send a request."""
        assert self.exchange is None, "a connection carries one request at a time"
        assert self._socket is not None, "the connection is made"
        self.exchange = exchange
        self.was_used = True
        exchange.wire.sent_s = time.perf_counter()
        self._socket.write(request)
        self._watch()

    def abort(self, error: Exception | None = None) -> None:
        """Give up: the server sees a closed connection. Without an error it was the client's own wish."""
        self._end(error)
        self.close()

    def close(self) -> None:
        """Drop the connection."""
        self.is_reusable = False
        if self._socket is not None:
            self._socket.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Called by asyncio before each read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by asyncio behind each read, whose arrival the socket has noted."""
        now_s = self.arrivals.arrival_s
        data = bytes(self._buffer[:nbytes])
        exchange = self.exchange
        if exchange is None:  # bytes that nobody asked for
            self.close()
            return
        wire = exchange.wire
        wire.last_read_s = now_s
        try:
            if exchange.framing is None:
                data = self._read_head(exchange, data)
            if exchange.framing is None:
                return
            payload = exchange.framing.feed(data)
        except (FramingError, h11.RemoteProtocolError) as error:
            said = _BYTES.sub(r"\1", str(error))
            self.abort(httpx.RemoteProtocolError(f"The answer is not HTTP: {said}."))
            return
        if payload:
            wire.reads.append((now_s, payload))
            wire.kernel_stamped_reads += self.arrivals.is_told
            if wire.first_byte_s is None:
                wire.first_byte_s = now_s
                self._watch()  # the timer that runs is that of the first byte, and may be much longer
        if exchange.framing.is_complete:
            self._complete(exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection has ended, by either side."""
        self.is_reusable = False
        exchange = self.exchange
        if exchange is None:
            return
        if exc is None and exchange.framing is not None and exchange.framing.close():
            self._complete(exchange)
        elif exchange.framing is None:
            self._end(httpx.RemoteProtocolError(f"The server closed the connection without an answer{_because(exc)}."))
        else:
            self._end(httpx.ReadError(f"The connection broke in the middle of the answer{_because(exc)}."))

    def _read_head(self, exchange: _Exchange, data: bytes) -> bytes:
        """Read on in the head; what follows it, once it is whole."""
        parser = exchange.parser
        parser.receive_data(data)
        event = parser.next_event()
        while isinstance(event, h11.InformationalResponse):
            event = parser.next_event()
        if not isinstance(event, h11.Response):
            return b""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.headers}
        exchange.framing = framing_of(event.status_code, headers, exchange.method)
        closes = "close" in headers.get("connection", "").lower() or event.http_version != b"1.1"
        self.is_reusable = not closes
        if not exchange.head.done():
            exchange.head.set_result(event)
        return bytes(parser.trailing_data[0])

    def _complete(self, exchange: _Exchange) -> None:
        exchange.wire.is_complete = True
        if exchange.framing is None or exchange.framing.left_over:
            self.is_reusable = False
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if exchange is None:
            return
        self.idle_since_s = time.perf_counter()
        wire = exchange.wire
        wire.end_s, wire.error = self.idle_since_s, error
        if not exchange.head.done():
            exchange.head.set_exception(error or httpx.RemoteProtocolError("The answer has no head."))
        if not wire.ended.done():
            wire.ended.set_result(None)

    def _watch(self) -> None:
        """Fail the exchange if a phase takes too long; otherwise look again when the next one could."""
        exchange = self.exchange
        if exchange is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        wire, limits = exchange.wire, self.timeouts
        if wire.first_byte_s is None:
            due_s, what = wire.sent_s + limits.first_byte_s, f"No answer came within {limits.first_byte_s:g} s."
        else:
            due_s = wire.last_read_s + limits.between_reads_s
            what = f"The stream stood still for {limits.between_reads_s:g} s."
        if due_s > wire.sent_s + limits.request_s:
            due_s, what = wire.sent_s + limits.request_s, f"The answer took longer than {limits.request_s:g} s."
        left_s = due_s - time.perf_counter()
        if left_s <= 0:
            self.abort(httpx.ReadTimeout(what))
        else:
            self._timer = self.loop.call_later(left_s, self._watch)


class StampingTransport(httpx.AsyncBaseTransport):
    """The transport for `httpx.AsyncClient`. A response's wire lies in `extensions["wire"]`; whoever reads the
    response's body waits for its end. `timeouts` replaces the client's."""

    def __init__(self, timeouts: Timeouts, tls: ssl.SSLContext | None = None) -> None:
        self.timeouts = timeouts
        self._tls = tls
        self._idle: dict[tuple[str, str, int], list[_Connection]] = defaultdict(list)
        self._ahead: dict[tuple[str, str, int], deque[asyncio.Task[_Connection]]] = defaultdict(deque)
        self._addresses: dict[tuple[str, int], list[_Address]] = {}
        # the kernel notes arrivals as long as some socket asks for it, and begins a moment after the first one did
        self._asks: ArrivalSocket | None = None
        with suppress(OSError):
            self._asks = ArrivalSocket(socket.AF_INET)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and wait for the head of its answer. Raises httpx's transport errors."""
        body = await request.aread()
        while True:
            connection = await self._connection(request.url)
            was_used = connection.was_used
            try:
                return await self._exchange(connection, request, body)
            except (httpx.RemoteProtocolError, httpx.ReadError):
                # the server had closed the idle connection just then: nothing of the request was answered
                if not was_used or connection.exchange is not None:
                    raise

    def keep_open(self, url: httpx.URL, count: int) -> None:
        """Open connections until there is one for each of `count` requests. What fails is told by the request that
        waits for it; without one it is forgotten, and who comes later tries again."""
        idle, ahead = self._idle[_origin(url)][-count:], self._ahead[_origin(url)]
        _drop_spent(ahead)
        for _ in range(count - sum(connection.is_fresh for connection in idle) - len(ahead)):
            task = asyncio.create_task(self._connect(url))
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody may ever ask for it
            ahead.append(task)

    async def aclose(self) -> None:
        """Close the idle connections."""
        ahead = [task for tasks in self._ahead.values() for task in tasks]
        for task in ahead:
            task.cancel()
        opened = await asyncio.gather(*ahead, return_exceptions=True)
        for connection in (*opened, *(idle for connections in self._idle.values() for idle in connections)):
            if isinstance(connection, _Connection):
                connection.close()
        self._ahead.clear()
        self._idle.clear()
        if self._asks is not None:
            self._asks.close()

    async def _exchange(self, connection: _Connection, request: httpx.Request, body: bytes) -> httpx.Response:
        loop = asyncio.get_running_loop()
        parser = h11.Connection(h11.CLIENT)
        wire = Wire(loop.create_future())
        exchange = _Exchange(request.method, parser, wire, loop.create_future())
        head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
        content = [parser.send(head), parser.send(h11.Data(data=body)), parser.send(h11.EndOfMessage())]
        connection.start(exchange, b"".join(part for part in content if part))
        try:
            response = await exchange.head
        except asyncio.CancelledError:
            connection.abort()
            raise
        return httpx.Response(
            response.status_code,
            headers=list(response.headers.raw_items()),
            stream=_Body(self, connection, request.url, wire),
            extensions={WIRE: wire, "reason_phrase": response.reason},
        )

    async def _connection(self, url: httpx.URL) -> _Connection:
        """An idle connection, one that was opened ahead, or a new one."""
        idle, ahead = self._idle[_origin(url)], self._ahead[_origin(url)]
        while idle:
            connection = idle.pop()
            if connection.is_fresh:
                return connection
            connection.close()
        _drop_spent(ahead)
        if ahead:
            connection = await ahead.popleft()
            if connection.is_fresh:
                return connection
            connection.close()
        return await self._connect(url)

    async def _connect(self, url: httpx.URL) -> _Connection:
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                return await self._connect_any(url)
        except TimeoutError:
            raise httpx.ConnectTimeout(f"No connection within {self.timeouts.connect_s:g} s.") from None
        except socket.gaierror as error:
            raise httpx.ConnectError(f"The name {url.host} is not known ({error.strerror}).") from error
        except ssl.SSLCertVerificationError as error:
            said = error.verify_message.rstrip(".")
            raise httpx.ConnectError(f"Its certificate isn't trusted ({said}).") from error
        except ssl.SSLError as error:
            raise httpx.ConnectError(f"No TLS connection: {error.reason or error}.") from error
        except OSError as error:
            raise httpx.ConnectError(f"{os.strerror(error.errno) if error.errno else error}.") from error

    async def _connect_any(self, url: httpx.URL) -> _Connection:
        """Try the host's addresses in order; the one that answers is tried first from then on."""
        loop = asyncio.get_running_loop()
        key = (url.host, _port(url))
        if key not in self._addresses:
            found = await loop.getaddrinfo(*key, type=socket.SOCK_STREAM)
            self._addresses[key] = [(info[0], info[4]) for info in found]
        failure: OSError | None = None
        addresses = self._addresses[key]
        tls = self._context() if url.scheme == "https" else None
        for address in list(addresses):
            try:
                arrivals = await _connected(loop, *address)
                _, connection = await loop.create_connection(
                    partial(_Connection, self.timeouts, arrivals),
                    sock=arrivals,
                    ssl=tls,
                    server_hostname=url.host if tls else None,
                )
            except OSError as error:
                failure = error
                continue
            addresses.remove(address)
            addresses.insert(0, address)
            return connection
        assert failure is not None, "a name that is known has addresses"
        raise failure

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            try:
                self._tls = httpx.create_ssl_context()
            except OSError as error:  # ssl.SSLError is one
                said = f"no certificates can be read from what SSL_CERT_FILE or SSL_CERT_DIR names ({error.strerror})"
                raise httpx.ConnectError(f"{said}.") from error
        return self._tls

    def put_back(self, connection: _Connection, url: httpx.URL) -> None:
        """Keep a connection for the next request, if it can be used again."""
        if connection.exchange is None and connection.is_fresh:
            self._idle[_origin(url)].append(connection)
        else:
            connection.abort()


class _Body(httpx.AsyncByteStream):
    """A response's body as httpx sees it."""

    def __init__(self, transport: StampingTransport, connection: _Connection, url: httpx.URL, wire: Wire) -> None:
        self._transport, self._connection, self._url, self._wire = transport, connection, url, wire
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self._wire.ended
        for _, payload in self._wire.reads:
            yield payload
        if self._wire.error is not None:
            raise self._wire.error

    async def aclose(self) -> None:
        """Give the connection back, or drop it when the body hasn't ended."""
        if not self._is_closed:
            self._is_closed = True
            self._transport.put_back(self._connection, self._url)


async def _connected(loop: asyncio.AbstractEventLoop, family: int, address: Any) -> ArrivalSocket:
    arrivals = ArrivalSocket(family)
    try:
        await loop.sock_connect(arrivals, address)
    except BaseException:
        arrivals.close()
        raise
    return arrivals


def _drop_spent(ahead: deque[asyncio.Task[_Connection]]) -> None:
    """Forget the first ones that failed, and close those that were opened too long ago."""
    while ahead and ahead[0].done():
        task = ahead[0]
        if not task.cancelled() and task.exception() is None:
            if task.result().is_fresh:
                return
            task.result().close()
        ahead.popleft()


def _origin(url: httpx.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, _port(url)


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _because(error: Exception | None) -> str:
    return "" if error is None else f" ({getattr(error, 'strerror', None) or error})"
