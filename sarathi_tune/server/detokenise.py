"""Token by token to text: no character is cut, and nothing of a stop string gets out."""

from collections.abc import Callable, Sequence
from typing import Literal

FinishReason = Literal["stop", "length"]
Decode = Callable[[Sequence[int]], str]

#: What a decoder writes for bytes that are no character (yet).
_INCOMPLETE = "\ufffd"
#: A UTF-8 character has at most four bytes, so this many tokens without a clean end aren't the beginning of one: the
#: bytes are wrong, and all but the last three tokens (which may begin one) are given out as they are.
_MAX_PENDING = 8
_MAX_OPEN = 3


class IncrementalText:
    """The text of a growing token sequence, in pieces that add up to the decoded whole.

    Decodes a short window that starts one piece earlier than what is new, since a decoder may write a token
    differently at the start of a text (a leading space is dropped, for example).
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        """`before`: the last tokens of the prompt, behind which the text goes on."""
        self._decode = decode
        read = decode(before) if before else ""
        # a prompt that ends within a character is none that a text can go on behind
        self._window = [] if read.endswith(_INCOMPLETE) else list(before)
        self._num_read = len(self._window)
        self._read = read if self._window else ""

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(_INCOMPLETE):
            return self._advance(text, len(self._window))
        if len(self._window) - self._num_read >= _MAX_PENDING:
            settled = len(self._window) - _MAX_OPEN
            return self._advance(self._decode(self._window[:settled]), settled)
        return ""

    def finish(self) -> str:
        """What was held back, incomplete as it is."""
        return self._decode(self._window)[len(self._read) :] if len(self._window) > self._num_read else ""

    def _advance(self, text: str, num_tokens: int) -> str:
        piece = text[len(self._read) :]
        self._window = self._window[self._num_read :]
        self._num_read = num_tokens - self._num_read
        self._read = self._decode(self._window[: self._num_read])
        return piece


class StopStrings:
    """Cuts a text before the first stop string, and holds back whatever may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """What may go out; `found` says that a stop string has come and the text ends here."""
        if not self._stops:
            return piece
        text = self._held + piece
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.found = True
            self._held = ""
            return text[: min(places)]
        keep = self._longest_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """The length of the longest end of `text` that some stop string begins with."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops if len(stop) > length):
                return length
        return 0


class AnswerText:
    """The text of one answer, and why it ends."""

    def __init__(
        self,
        decode: Decode,
        *,
        before: Sequence[int] = (),
        stops: Sequence[str] = (),
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._text = IncrementalText(decode, before)
        self._stops = StopStrings(stops)
        self._stop_token_ids = stop_token_ids

    def push(self, token_id: int, *, is_last: bool) -> tuple[str, FinishReason | None]:
        """The text that goes out with this token, and the reason if the answer ends with it. The token that stops an
        answer is counted and has no text."""
        if is_last and token_id in self._stop_token_ids:
            return self._rest(), "stop"
        piece = self._stops.push(self._text.push(token_id))
        if self._stops.found:
            return piece, "stop"
        if not is_last:
            return piece, None
        piece += self._rest()
        return piece, "stop" if self._stops.found else "length"

    def _rest(self) -> str:
        piece = self._stops.push(self._text.finish())
        return piece if self._stops.found else piece + self._stops.finish()
