"""Where bodies end, against h11, which is the reference here."""

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_tune.loadgen.http.framing import ChunkedBody, FramingError, SizedBody, UntilClosed, framing_of

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def by_h11(body: bytes) -> bytes:
    """The payload as h11 reads it; the body must be whole."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(HEAD + body)
    payload = b""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Data):
            payload += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return payload
        else:
            assert isinstance(event, h11.Response)


BODIES = [
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5;name=value\r\nhello\r\n1\r\n!\r\n0\r\n\r\n",
    b"00A\r\n0123456789\r\n0\r\nExpires: never\r\nX: y\r\n\r\n",
    b"3\r\n\r\n\r\r\n0\r\n\r\n",
    b"0\r\n\r\n",
]


@pytest.mark.parametrize("body", BODIES)
def test_chunks_read_as_h11_reads_them_wherever_they_are_cut(body: bytes) -> None:
    expected = by_h11(body)
    for cut in range(len(body) + 1):
        framing = ChunkedBody()
        assert framing.feed(body[:cut]) + framing.feed(body[cut:]) == expected
        assert framing.is_complete
        assert not framing.left_over
    framing = ChunkedBody()
    assert b"".join(framing.feed(body[at : at + 1]) for at in range(len(body))) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_any_chunks_in_any_pieces(chunks: list[bytes], data: st.DataObject) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in chunks) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=5)))
    framing = ChunkedBody()
    read = [framing.feed(body[a:b]) for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert b"".join(read) == b"".join(chunks) == by_h11(body)


@pytest.mark.parametrize("body", [b"x\r\n", b"\r\n", b"-1\r\n", b"0x5\r\n", b"2\r\nabc\r\n"])
def test_what_is_no_chunk_is_refused(body: bytes) -> None:
    with pytest.raises(FramingError):
        ChunkedBody().feed(body)


def test_a_size_without_an_end_is_refused() -> None:
    framing = ChunkedBody()
    framing.feed(b"1" * 60_000)
    with pytest.raises(FramingError):
        framing.feed(b"1" * 60_000)


def test_bytes_behind_the_end_are_noticed() -> None:
    framing = ChunkedBody()
    framing.feed(b"0\r\n\r\nHTTP/1.1")
    assert framing.left_over


def test_the_kind_follows_from_the_head() -> None:
    assert isinstance(framing_of(200, {"transfer-encoding": "chunked", "content-length": "3"}, "POST"), ChunkedBody)
    assert isinstance(framing_of(200, {}, "POST"), UntilClosed)
    assert isinstance(framing_of(204, {}, "POST"), SizedBody)
    sized = framing_of(200, {"content-length": "3"}, "POST")
    assert sized.feed(b"ab") == b"ab"
    assert not sized.close()
    assert sized.feed(b"cd") == b"c"
    assert sized.is_complete
    assert sized.left_over
    with pytest.raises(FramingError):
        framing_of(200, {"content-length": "-3"}, "POST")
    with pytest.raises(FramingError):
        framing_of(200, {"transfer-encoding": "gzip, chunked"}, "POST")
