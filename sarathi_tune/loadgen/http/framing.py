"""Where a response body ends: by chunks, by length, or with the connection (RFC 9112, section 6)."""

import re
from collections.abc import Mapping
from typing import Protocol

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
#: A size line or trailer that is longer is no HTTP.
_MAX_LINE_BYTES = 64 * 1024


class FramingError(Exception):
    """Bytes that are no HTTP body of the kind that the head announced."""


class Framing(Protocol):
    """`feed` returns the payload within the bytes; `is_complete` says that the body has ended, `left_over` whether
    bytes came behind its end."""

    is_complete: bool
    left_over: bool

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`. Raises FramingError."""
        ...

    def close(self) -> bool:
        """The connection has ended: was that the end of the body?"""
        ...


class ChunkedBody:
    """`transfer-encoding: chunked`."""

    def __init__(self) -> None:
        self.is_complete = False
        self.left_over = False
        self._left = 0  # of the chunk's payload
        self._expects_line_end = False
        self._in_trailer = False
        self._line = b""
        self._usual = b"-", 0  # the size line of the last whole chunk, and what it says

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`."""
        payload: list[bytes] = []
        if self._is_between_chunks:
            data = self._take_whole(data, payload)
        while data and not self.is_complete:
            if self._left:
                piece = data[: self._left]
                payload.append(piece)
                self._left -= len(piece)
                data = data[len(piece) :]
                self._expects_line_end = not self._left
                continue
            line, found, rest = (self._line + data).partition(b"\n")
            if not found:
                self._keep(line)
                return b"".join(payload)
            self._line, data = b"", rest
            self._end_line(line.removesuffix(b"\r"))
        self.left_over = self.left_over or bool(data)
        return payload[0] if len(payload) == 1 else b"".join(payload)

    def close(self) -> bool:
        """A chunked body ends with its last chunk, never with the connection."""
        return self.is_complete

    def _take_whole(self, data: bytes, payload: list[bytes]) -> bytes:
        """Take the whole chunks at the beginning, as nearly all of a stream are, and return what follows them."""
        at, (line, size) = 0, self._usual
        while True:
            if not data.startswith(line, at):  # most chunks are as long as the one before
                end = data.find(b"\r\n", at, at + 18)
                if end < 0 or not _SIZE.fullmatch(data, at, end):
                    break
                line, size = data[at : end + 2], int(data[at:end], 16)
            start = at + len(line)
            if not size or data[start + size : start + size + 2] != b"\r\n":
                break
            payload.append(data[start : start + size])
            at = start + size + 2
        self._usual = line, size
        return data[at:]

    @property
    def _is_between_chunks(self) -> bool:
        return not (self._left or self._line or self._expects_line_end or self._in_trailer or self.is_complete)

    def _keep(self, line: bytes) -> None:
        if len(line) > _MAX_LINE_BYTES:
            raise FramingError("a chunk's size has no end")
        self._line = line

    def _end_line(self, line: bytes) -> None:
        if self._expects_line_end:
            if line:
                raise FramingError("a chunk is longer than its size")
            self._expects_line_end = False
        elif self._in_trailer:
            self.is_complete = not line
        else:
            size = line.split(b";", 1)[0].strip()
            if not _SIZE.fullmatch(size):
                raise FramingError("a chunk has no size")
            self._left = int(size, 16)
            self._in_trailer = not self._left


class SizedBody:
    """`content-length`, and answers without a body."""

    def __init__(self, size: int) -> None:
        self.is_complete = size == 0
        self.left_over = False
        self._left = size

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`."""
        payload = data[: self._left]
        self._left -= len(payload)
        self.is_complete = not self._left
        self.left_over = self.left_over or len(data) > len(payload)
        return payload

    def close(self) -> bool:
        """Whether all of it was there."""
        return self.is_complete


class UntilClosed:
    """A body that ends with its connection."""

    def __init__(self) -> None:
        self.is_complete = False
        self.left_over = False

    def feed(self, data: bytes) -> bytes:
        """All of it."""
        return data

    def close(self) -> bool:
        """The end of the connection is the end of the body."""
        self.is_complete = True
        return True


def framing_of(status: int, headers: Mapping[str, str], method: str) -> Framing:
    """How the body of a response ends. `headers` by lower-case name. Raises FramingError."""
    if method == "HEAD" or status in (204, 304):
        return SizedBody(0)
    coding = headers.get("transfer-encoding", "").lower().strip()
    if coding:
        if coding != "chunked":
            raise FramingError(f"the transfer-encoding {coding!r} is not known")
        return ChunkedBody()
    length = headers.get("content-length")
    if length is None:
        return UntilClosed()
    if not (length.isascii() and length.isdigit()):
        raise FramingError(f"the content-length {length!r} is no number")
    return SizedBody(int(length))
