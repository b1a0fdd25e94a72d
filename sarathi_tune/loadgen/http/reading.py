"""What a stream of events means: which of them carry tokens, when, how many, and whether the answer is whole.

A token-bearing event has text, reasoning or a tool call in it, or, where the server counts along (continuous usage), a
count that has risen. The role, the empty finish event and the usage event are none: they make neither a first token nor
a gap.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from sarathi_tune.loadgen.http.sse import SseEvent, SseParser
from sarathi_tune.loadgen.http.template import Template, learn, string_of

Status = Literal["ok", "error", "truncated"]

_DONE = "[DONE]"
_DECODER = json.JSONDecoder()
#: The fields of a chat delta that are tokens of the answer.
_PAYLOADS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")
_MAX_DETAIL = 300
#: Events that were read in full until one of them becomes the template of those to come.
_LEARN_AFTER = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer. `token_s` has the stamp of every event with tokens, `event_tokens` how many each carried (None when
    that can't be known), `first_tokens` those of the first (estimated from the length of its text where the server
    doesn't count along). `coalesced` events came in the same read as the one before them, so that their gap reads 0.
    `is_cut` says that the last event had no blank line behind it."""

    status: Status
    token_s: tuple[float, ...] = ()
    event_tokens: tuple[int, ...] | None = None
    first_tokens: int = 1
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    error: str = ""
    finish_reason: str | None = None
    events: int = 0
    coalesced: int = 0
    is_cut: bool = False


def read_stream(reads: Iterable[tuple[float, bytes]]) -> Reading:
    """Read an event stream from (stamp, bytes) of every read; an event happens when its last byte is there."""
    parser, reader, last_s = SseParser(), _Reader(), 0.0
    for last_s, piece in reads:
        at, end = 0, len(piece)
        while at < end:
            if parser.is_between_events:
                at = reader.take_alike(last_s, piece, at)
                if at == end:
                    break
            behind = piece.find(b"\n\n", at) + 2
            behind = behind if behind > 1 else end
            for event in parser.feed(piece[at:behind]):
                reader.take(last_s, event)
            at = behind
    tail = parser.finish()
    if tail is not None:
        reader.take_tail(last_s, tail)
    return reader.reading()


def error_text(document: object) -> str | None:
    """What a JSON document says went wrong; None when it is no error."""
    if not isinstance(document, dict):
        return None
    error = document.get("error")
    if not error:
        if document.get("object") != "error":
            return _text_of(document.get("detail"))
        error = document
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or error.get("type") or error.get("code")
        return _text_of(message) or "an error without a message"
    return _text_of(error) or "an error without a message"


@dataclass(slots=True, eq=False)
class _Reader:
    stamps: list[float] = field(default_factory=list)
    #: For each stamp, the tokens up to and including it as the server counts them; None where it doesn't.
    counts: list[int | None] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    counted: int | None = None
    #: Whether an event with a choice has had a count: then a rising one means a token.
    counts_along: bool = False
    choices_seen: int = 0
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    is_done: bool = False
    is_cut: bool = False
    events: int = 0
    template: Template | None = None
    #: Events that no template fitted.
    in_full: int = 0

    def take_alike(self, at_s: float, piece: bytes, at: int) -> int:
        """Take the events from `at` on that are like the template; where the first one lies that isn't."""
        template = self.template
        if template is None:
            return at
        head, match, skip = template.head, template.match, len(template.head)
        found = last = None
        while piece.startswith(head, at) and (found := match(piece, at + skip)) is not None:
            last = found
            raw = found[1]
            count = int(found["completion_tokens"]) if template.has_counts else None
            if raw or self._has_risen(count):
                text = string_of(raw)
                self.text.append(text)
                self.stamps.append(at_s)
                self.counts.append(count)
                self.lengths.append(len(text))
            if count is not None:
                self.counted, self.counts_along = count, True
                if count > (self.output_tokens or 0):
                    self.output_tokens = count
            self.choices_seen += 1
            self.events += 1
            at = found.end()
        if last is not None and template.has_counts:
            self.prompt_tokens = int(last["prompt_tokens"])
            if template.cached_tokens is not None:
                self.cached_tokens = template.cached_tokens
        return at

    def take(self, at_s: float, event: SseEvent) -> None:
        self.events += 1
        if event.name == "error":
            self._fail(event.data)
            return
        if event.data.strip() == _DONE:
            self.is_done = True
            return
        try:
            document = _parsed(event.data)
        except ValueError:
            self.error = self.error or f"an event is not JSON: {event.data[:80]!r}"
            return
        self._take_document(at_s, document)
        self.in_full += 1
        if self.in_full >= _LEARN_AFTER and not self.in_full & (self.in_full - 1):  # ever more rarely
            self.template = learn(event.data, document) or self.template

    def take_tail(self, at_s: float, event: SseEvent) -> None:
        """An event that no blank line ends: it counts if it is whole, and half of one is none."""
        self.is_cut = True
        if event.data.strip() != _DONE and event.name != "error":
            try:
                json.loads(event.data)
            except ValueError:
                return
        self.take(at_s, event)

    def reading(self) -> Reading:
        status: Status = "ok"
        if self.error is not None:
            status = "error"
        elif not self.is_done and self.finish_reason is None:
            status = "truncated"
        event_tokens = self._event_tokens()
        return Reading(
            status=status,
            token_s=tuple(self.stamps),
            event_tokens=event_tokens,
            first_tokens=event_tokens[0] if event_tokens else self._estimated_first(),
            output_tokens=self.output_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            text="".join(self.text),
            error=(self.error or "")[:_MAX_DETAIL],
            finish_reason=self.finish_reason,
            events=self.events,
            coalesced=sum(before == after for before, after in pairwise(self.stamps)),
            is_cut=self.is_cut,
        )

    def _take_document(self, at_s: float, document: Any) -> None:
        if not isinstance(document, dict):
            self.error = self.error or "an event is no JSON object"
            return
        if "choices" not in document or "error" in document or document.get("object") == "error":
            failure = error_text(document)
            if failure is not None:
                self.error = self.error or failure
                return
        choices = document.get("choices") or ()
        count = self._take_usage(document.get("usage"))
        length, has_payload = 0, False
        for choice in choices:
            taken = self._take_choice(choice)
            has_payload = has_payload or taken is not None
            length += taken or 0
        if not choices:
            return
        has_risen = self._has_risen(count)
        self.choices_seen += 1
        if count is not None:
            self.counts_along = True
        if has_payload or has_risen:
            self.stamps.append(at_s)
            self.counts.append(count)
            self.lengths.append(length)
        if count is not None:
            self.counted = count

    def _has_risen(self, count: int | None) -> bool:
        """Whether a count says that there is another token."""
        return count is not None and count > (self.counted or 0) and (self.counts_along or not self.choices_seen)

    def _take_usage(self, usage: Any) -> int | None:
        if not isinstance(usage, dict):
            return None
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int):
            self.prompt_tokens = prompt
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            self.cached_tokens = details["cached_tokens"]
        if not isinstance(output, int):
            return None
        self.output_tokens = max(output, self.output_tokens or 0)
        return output

    def _take_choice(self, choice: Any) -> int | None:
        """The length of the choice's payload; None when it has none."""
        if not isinstance(choice, dict):
            return None
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta")
        found: int | None = None
        if isinstance(delta, dict):
            if isinstance(delta.get("content"), str):
                self.text.append(delta["content"])
            for name in _PAYLOADS:
                if delta.get(name):
                    found = (found or 0) + len(delta[name])
        text = choice.get("text")
        if isinstance(text, str) and text:
            self.text.append(text)
            found = (found or 0) + len(text)
        return found

    def _fail(self, data: str) -> None:
        try:
            document = json.loads(data)
        except ValueError:
            document = None
        message = document.get("message") if isinstance(document, dict) else None
        self.error = self.error or error_text(document) or _text_of(message) or data or "an error event without data"

    def _event_tokens(self) -> tuple[int, ...] | None:
        counts, total = self.counts, self.output_tokens
        if not counts:
            return ()
        if all(count is not None for count in counts):
            known = [0, *(count for count in counts if count is not None)]
            return tuple(max(0, after - before) for before, after in pairwise(known))
        return (1,) * len(counts) if total == len(counts) else None

    def _estimated_first(self) -> int:
        """Tokens of the first event by its share of the text: the best there is without a count."""
        total, length = self.output_tokens, sum(self.lengths)
        if not total or not length:
            return 1
        most = total - len(self.lengths) + 1  # every later event has at least one
        return max(1, min(most, round(total * self.lengths[0] / length)))


def _parsed(text: str) -> Any:
    """A JSON document; without json.loads' look for white space around it, where there is none."""
    try:
        document, end = _DECODER.raw_decode(text)
    except ValueError:
        return json.loads(text)
    return document if end == len(text) else json.loads(text)


def _text_of(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()) or None
