"""Events that say the same as one before but for their text and their counts.

Nearly all events of a stream are alike. Where an event has the very bytes of one that was read in full, except within
the string of the text and the digits of the usage, JSON's grammar leaves no doubt about what the rest of it says: it
needs no decoding. Whatever differs in one more byte is read in full.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_LIKE = r'[^"\\\x00-\x1f]*'
_STRING = rf'{_LIKE}(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}){_LIKE})*'
_NUMBER = r"0|[1-9][0-9]{0,17}"
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_NEEDED = ("prompt_tokens", "completion_tokens")
_TEXT_HOLE = {name: re.compile(rf'"{name}"\s*:\s*"({_STRING})"') for name in ("text", "content")}
_COUNT_HOLES = {name: re.compile(rf'"{name}"\s*:\s*({_NUMBER})(?![0-9.eE])') for name in _COUNTS}
#: What is put into the holes to see that they are the right ones.
_PROBE_TEXT, _PROBE_COUNT = "a text that is nobody's", 918_273_640


@dataclass(frozen=True, slots=True)
class Template:
    """An event, line ends included, up to its text (`head`), and the search for the rest. A match has the text in
    group 1; with `has_counts` prompt and completion tokens are in the groups of these names. `cached_tokens` as in the
    event that it was made from."""

    head: bytes
    match: Callable[[bytes, int], "re.Match[bytes] | None"]
    has_counts: bool
    cached_tokens: int | None


def learn(data: str, document: Any) -> Template | None:
    """The template of an event with this data, which was read as `document`.

    None unless it is one choice with text or content and nothing else that makes tokens, no end and no failure, and
    its counts stand behind the text.
    """
    value = _text_of(document)
    usage = document.get("usage") if value is not None else None
    if value is None or "\n" in data or not (usage is None or isinstance(usage, dict)):
        return None
    holes = {value: _only(_TEXT_HOLE[value], data)}
    if usage:
        if not all(type(usage.get(name)) is int for name in _NEEDED):
            return None
        holes |= {name: _only(_COUNT_HOLES[name], data) for name in _COUNTS if name in usage}
    spans = {name: span for name, span in holes.items() if span is not None}
    if len(spans) < len(holes) or min(spans, key=lambda name: spans[name]) != value:
        return None
    if not _fits(data, document, value, spans):
        return None
    order = sorted(spans, key=lambda name: spans[name])
    ends = [*(spans[name][0] for name in order[1:]), len(data)]
    fixed = [data[spans[name][1] : end].encode() for name, end in zip(order, ends, strict=True)]
    details = usage.get("prompt_tokens_details") if usage else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Template(
        head=b"data: " + data[: spans[value][0]].encode(),
        match=_pattern(tuple(order[1:]), tuple(fixed)).match,
        has_counts=bool(usage),
        cached_tokens=cached if isinstance(cached, int) else None,
    )


def string_of(raw: bytes) -> str:
    """What the inside of a JSON string says."""
    text = raw.decode("utf-8", "replace")
    return str(json.loads(f'"{text}"')) if "\\" in text else text


def _text_of(document: Any) -> str | None:
    """The name of the value that holds the text of an event that is nothing but text."""
    if not isinstance(document, dict) or document.get("error") or document.get("object") == "error":
        return None
    choices = document.get("choices")
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        return None
    choice = choices[0]
    delta, text = choice.get("delta"), choice.get("text")
    if choice.get("finish_reason"):
        return None
    if isinstance(delta, dict):
        rest = [delta[name] for name in delta if name not in ("content", "role")]
        return "content" if isinstance(delta.get("content"), str) and not text and not any(rest) else None
    return "text" if isinstance(text, str) and delta is None else None


def _only(pattern: "re.Pattern[str]", data: str) -> tuple[int, int] | None:
    """Where the pattern's group lies, if there is exactly one."""
    found = list(pattern.finditer(data))
    return found[0].span(1) if len(found) == 1 else None


def _fits(data: str, document: Any, value: str, spans: dict[str, tuple[int, int]]) -> bool:
    """Whether other things in the holes change the values that they stand for, and no other."""
    probes = {name: json.dumps(_PROBE_TEXT)[1:-1] if name == value else str(_PROBE_COUNT) for name in spans}
    probed = data
    for name in sorted(spans, key=lambda name: spans[name], reverse=True):
        start, end = spans[name]
        probed = probed[:start] + probes[name] + probed[end:]
    try:
        found = json.loads(probed)
    except ValueError:
        return False
    choice = dict(document["choices"][0])
    if value == "text":
        choice["text"] = _PROBE_TEXT
    else:
        choice["delta"] = choice["delta"] | {"content": _PROBE_TEXT}
    expected = document | {"choices": [choice]}
    if len(spans) > 1:
        expected["usage"] = document["usage"] | {name: _PROBE_COUNT for name in spans if name != value}
    return bool(found == expected)


@lru_cache(maxsize=64)
def _pattern(names: tuple[str, ...], fixed: tuple[bytes, ...]) -> "re.Pattern[bytes]":
    """A text, and behind it counts of these names between fixed bytes; the same for all streams of a server."""
    parts = [f"({_STRING})".encode(), re.escape(fixed[0])]
    for name, bytes_behind in zip(names, fixed[1:], strict=True):
        parts += [f"(?P<{name}>{_NUMBER})".encode(), re.escape(bytes_behind)]
    return re.compile(b"".join(parts) + rb"\n\n")
