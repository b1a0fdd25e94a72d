"""Server-sent events, from bytes that may be cut anywhere (WHATWG HTML, section 9.2.6).

Lines end with LF, CRLF or CR and nothing else: text readers also split at U+2028 or U+0085, which tokens contain. A
line is decoded once it is complete, so that a packet may end within a character.
"""

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event: its `event:` name ("message" without one), and its `data:` lines joined with LF."""

    name: str
    data: str


class SseParser:
    """Feed it bytes in the pieces in which they came; an event is returned with the piece that completes it."""

    def __init__(self) -> None:
        self._line: list[bytes] = []  # the pieces of a line that hasn't ended
        self._data: list[bytes] = []
        self._name = b""
        self._after_cr = False
        self._at_start = True

    @property
    def is_between_events(self) -> bool:
        """Whether the next byte begins an event."""
        return not (self._line or self._data or self._name or self._after_cr or self._at_start)

    def feed(self, piece: bytes) -> list[SseEvent]:
        """The events that end within `piece`."""
        if self._after_cr and piece:  # a CR ended its line at once; an LF behind it belongs to it
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        lines = _LINE_END.split(piece) if b"\r" in piece else piece.split(b"\n")
        if self._line:
            self._line.append(lines[0])
            if len(lines) == 1:
                return []
            lines[0] = b"".join(self._line)
        rest = lines.pop()
        self._line = [rest] if rest else []
        events: list[SseEvent] = []
        for line in lines:
            event = self._end_line(line)
            if event is not None:
                events.append(event)
        return events

    def finish(self) -> SseEvent | None:
        """The event at the end of the stream that no blank line completes, if there is one."""
        line = b"".join(self._line)
        self._line = []
        if line:
            self._end_line(line)
        return self._dispatch()

    def _end_line(self, line: bytes) -> SseEvent | None:
        if self._at_start:
            line = line.removeprefix(_BOM)
            self._at_start = False
        if not line:
            return self._dispatch()
        if line.startswith(b"data: "):
            self._data.append(line[6:])
            return None
        name, _, value = line.partition(b":")  # a comment has an empty name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value
        return None

    def _dispatch(self) -> SseEvent | None:
        data, name = self._data, self._name.decode("utf-8", "replace") if self._name else ""
        if not data and not name:
            return None
        self._data, self._name = [], b""
        if not data and name != "error":  # the standard drops an event without data; a failure must not be lost
            return None
        return SseEvent(name or "message", b"\n".join(data).decode("utf-8", "replace"))
