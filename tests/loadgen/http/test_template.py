"""Streams of events that are alike, which aren't decoded one by one: read as they were written."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_tune.loadgen.http.reading import read_stream
from sarathi_tune.loadgen.http.template import learn

TEXTS = st.text(st.characters(codec="utf-8"), max_size=5) | st.sampled_from(
    ['"', "\\", "\\n", "\n", "\u2028", "漢", ""]
)


def document(text: str, tokens: int, *, chat: bool = False, **more: Any) -> dict[str, Any]:
    """As vLLM 0.32 writes an event with continuous usage."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": 11, "total_tokens": 11 + tokens, "completion_tokens": tokens}
    return {"id": "cmpl-1", "object": "chunk", "created": 7, "model": "m", "choices": [choice], "usage": usage} | more


def written(document: dict[str, Any], *, is_ascii: bool = False) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=is_ascii, separators=(",", ":")).encode() + b"\n\n"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(TEXTS, st.integers(0, 3), st.booleans()), min_size=8, max_size=40),
    st.booleans(),
    st.data(),
)
def test_every_event_says_what_was_written(
    events: list[tuple[str, int, bool]], chat: bool, data: st.DataObject
) -> None:
    """Wherever the stream is cut, and whether or not an event in between is another one."""
    count, stream, ends, expected = 0, b"", [], []
    for text, tokens, is_odd in events:
        count += tokens
        more = {"created": 8} if is_odd else {}
        stream += written(document(text, count, chat=chat, **more), is_ascii=is_odd)
        ends.append(len(stream))
        if text or tokens:
            expected.append((len(stream), count))
    stream += b"data: [DONE]\n\n"
    cuts = sorted({*data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=12)), len(stream)})
    pieces = [stream[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    reading = read_stream([(float(cut), piece) for cut, piece in zip(cuts, pieces, strict=True)])
    assert reading.status == "ok"
    assert reading.text == "".join(text for text, _, _ in events)
    assert reading.events == len(events) + 1
    assert reading.prompt_tokens == 11
    assert reading.output_tokens == count
    assert reading.token_s == tuple(min(float(cut) for cut in cuts if cut >= end) for end, _ in expected)
    known = [0, *(count for _, count in expected)]
    assert reading.event_tokens == tuple(after - before for before, after in pairwise(known))


ALIKE = b"".join(written(document(f" w{count}", count)) for count in range(1, 21))


@pytest.mark.parametrize(
    ("odd", "status"),
    [
        (written(document(" x", 21) | {"error": {"message": "out of memory"}}), "error"),
        (b'data: {"error":{"message":"out of memory"}}\n\n', "error"),
        (b'event: error\ndata: "out of memory"\n\n', "error"),
        (written(document(" x", 21)).replace(b" x", b" \\x"), "error"),
        (written(document(" x", 21)).replace(b" x", b" \x01x"), "error"),
        (written(document(" x", 21)).replace(b'"total_tokens":32', b'"total_tokens":032'), "error"),
        (written(document(" x", 21)).replace(b'"completion_tokens":21', b'"completion_tokens":null'), "ok"),
        (written(document(" x", 21)).replace(b'"finish_reason":null', b'"finish_reason":"stop"'), "ok"),
        (written(document(" x", 21)).replace(b"data: ", b"data:"), "ok"),
        (b": note\n" + written(document(" x", 21)), "ok"),
        (b"id: 3\n" + written(document(" x", 21)).replace(b"\n", b"\r\n"), "ok"),
    ],
)
def test_one_among_many_is_read_for_itself(odd: bytes, status: str) -> None:
    reading = read_stream([(1.0, ALIKE), (2.0, odd), (3.0, written(document(" y", 22)) + b"data: [DONE]\n\n")])
    assert reading.status == status
    assert reading.token_s[:20] == (1.0,) * 20
    assert reading.token_s[-1] == 3.0
    assert reading.token_s.count(2.0) == (status == "ok")
    assert reading.output_tokens == 22


def test_a_text_in_the_name_of_the_model_is_no_text() -> None:
    tricky = document(" a", 1, model='x"text":"y')
    assert learn(json.dumps(tricky), tricky) is not None, "an escaped quote ends no string"
    twice = document(" a", 1) | {"text": "b"}
    assert learn(json.dumps(twice), twice) is None


@pytest.mark.parametrize(
    "other",
    [
        {"choices": []},
        {"choices": [{"text": "a"}, {"text": "b"}]},
        {"choices": [{"text": "a", "finish_reason": "stop"}]},
        {"choices": [{"delta": {"content": "a", "reasoning": "b"}}]},
        {"choices": [{"delta": {"tool_calls": [1]}}]},
        {"choices": [{"text": 1}]},
        {"usage": {"prompt_tokens": 1}, "choices": [{"text": "a"}]},
        {"usage": {"prompt_tokens": 1, "completion_tokens": 2}, "choices": [{"text": "a"}]},
        {"usage": {"prompt_tokens": 1, "completion_tokens": 1.5}, "choices": [{"text": "a"}]},
        [],
        None,
    ],
)
def test_what_is_no_template(other: Any) -> None:
    assert learn(json.dumps(other), other) is None


def test_without_counts_one_event_is_one_token() -> None:
    plain = {"choices": [{"index": 0, "text": " a"}]}
    reading = read_stream([(float(at), written(plain)) for at in range(30)] + [(30.0, b"data: [DONE]\n\n")])
    assert reading.token_s == tuple(float(at) for at in range(30))
    assert reading.output_tokens is None
    assert reading.text == " a" * 30
