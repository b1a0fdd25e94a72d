"""The event-stream parser, against the rules and examples of the WHATWG HTML standard (9.2.5 and 9.2.6)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_tune.loadgen.http.sse import SseEvent, SseParser


def parse(*pieces: bytes) -> list[tuple[str, str]]:
    parser = SseParser()
    return [(event.name, event.data) for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_lines_end_in_three_ways(end: str) -> None:
    assert parse(f"data: YHOO{end}data: +2{end}data: 10{end}{end}".encode()) == [("message", "YHOO\n+2\n10")]


def test_the_example_with_a_comment_and_ids() -> None:
    # the standard's second example; its third block has no space, its first none of the data
    stream = b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n"
    assert parse(stream) == [("message", "first event"), ("message", "second event"), ("message", " third event")]


def test_the_example_with_empty_data() -> None:
    # the standard: two events, of which the last block is incomplete and discarded
    parser = SseParser()
    assert [event.data for event in parser.feed(b"data\n\ndata\ndata\n\ndata:")] == ["", "\n"]


def test_only_one_space_is_dropped() -> None:
    assert parse(b"data:test\n\ndata: test\n\n") == [("message", "test")] * 2


def test_separators_of_other_alphabets_are_text() -> None:
    # httpx's aiter_lines splits here
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"
    assert parse(f"data: {text}\n\n".encode()) == [("message", text)]


def test_a_byte_order_mark_is_dropped_once() -> None:
    assert parse(b"\xef\xbb\xbfdata: a\n\ndata: \xef\xbb\xbfb\n\n") == [("message", "a"), ("message", "\ufeffb")]


def test_the_name_of_an_event_ends_with_it() -> None:
    assert parse(b"event: error\ndata: a\n\ndata: b\n\n") == [("error", "a"), ("message", "b")]


def test_an_error_without_data_is_not_lost() -> None:
    assert parse(b"event: error\n\n") == [("error", "")]


def test_an_event_of_200_kb_in_small_packets() -> None:
    text = "x" * 200_000
    stream = f"data: {text}\n\n".encode()
    pieces = [stream[at : at + 1400] for at in range(0, len(stream), 1400)]
    assert parse(*pieces) == [("message", text)]


def test_an_event_happens_with_its_last_byte() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\n\r") == [SseEvent("message", "a")], "a CR ends the line without waiting for its LF"
    assert parser.feed(b"\ndata: b\n") == []
    assert parser.feed(b"\n") == [SseEvent("message", "b")]


def test_a_tail_without_a_blank_line() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n\ndata: [DONE]") == [SseEvent("message", "a")]
    assert parser.finish() == SseEvent("message", "[DONE]")
    assert SseParser().finish() is None


LINES = st.lists(
    st.sampled_from(["data: a", "data:b", "data", ": note", "event: error", "id: 7", "retry: 3", "", "data: é漢", "x"]),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(LINES, st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_any_cuts_give_the_same_events(lines: list[str], end: str, data: st.DataObject) -> None:
    stream = "".join(line + end for line in [*lines, "", ""]).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parse(*pieces) == parse(stream)
    assert parse(*(stream[at : at + 1] for at in range(len(stream)))) == parse(stream)
