"""No character is cut, nothing is lost, and nothing of a stop string gets out."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_tune.server.detokenise import AnswerText, IncrementalText, StopStrings

#: Every byte is a token: what a byte-level tokenizer does in the worst case.
WRITTEN = "Grüße, 日本語 and 🙂👩‍👩‍👧 — fin"


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def pieces_of(tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    text = IncrementalText(decode, before)
    return [*(text.push(token) for token in tokens), text.finish()]


def test_characters_of_several_tokens_come_whole() -> None:
    pieces = pieces_of(WRITTEN.encode())
    assert "".join(pieces) == WRITTEN
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[2:4] == ["", "ü"], "the first half of ü gives nothing"


def test_an_answer_that_ends_within_a_character_shows_that() -> None:
    assert "".join(pieces_of("ab日".encode()[:-1])) == "ab\ufffd"


@given(st.binary(max_size=200))
def test_any_bytes_come_out_as_the_decoder_writes_them(data: bytes) -> None:
    written = "".join(pieces_of(data))
    assert written.replace("\ufffd", "") == decode(data).replace("\ufffd", "")


def test_wrong_bytes_without_end_are_given_out_and_cost_no_more_and_more() -> None:
    longest = 0

    def watched(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    text = IncrementalText(watched)
    written = "".join([text.push(0xFF) for _ in range(1000)])
    assert len(written) >= 1000 - 8
    assert longest <= 20


def test_the_space_that_a_decoder_drops_at_the_start_is_kept_behind_a_prompt() -> None:
    words = {1: " the", 2: " cat", 3: " sat"}

    def sentencepiece(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    text = IncrementalText(sentencepiece, before=[1])
    assert [text.push(2), text.push(3)] == [" cat", " sat"]
    assert IncrementalText(sentencepiece).push(2) == "cat"


@given(st.text("abc", max_size=30), st.text("abc", min_size=1, max_size=4), st.data())
def test_a_text_ends_before_its_stop_string(text: str, stop: str, data: st.DataObject) -> None:
    stops, out, left = StopStrings([stop]), "", text
    while left and not stops.found:
        size = data.draw(st.integers(1, len(left)))
        out += stops.push(left[:size])
        left = left[size:]
        assert stop not in out
    out += "" if stops.found else stops.finish()
    assert out == text.partition(stop)[0]
    assert stops.found == (stop in text)


def test_what_may_become_a_stop_string_is_held_back_and_given_out_if_it_does_not() -> None:
    stops = StopStrings(["END", "\n\n"])
    assert [stops.push(piece) for piece in ("a E", "N", "X\n", "b")] == ["a ", "", "ENX", "\nb"]


@pytest.mark.parametrize(
    ("token", "is_last", "expected"),
    [(ord("x"), False, ("x", None)), (ord("x"), True, ("x", "length")), (0, True, ("", "stop"))],
)
def test_why_an_answer_ends(token: int, is_last: bool, expected: tuple[str, str | None]) -> None:
    answer = AnswerText(decode, stop_token_ids=frozenset({0}))
    assert answer.push(token, is_last=is_last) == expected


def test_what_was_held_back_comes_with_the_last_token() -> None:
    answer = AnswerText(decode, stops=["abcd"])
    assert [answer.push(ord(token), is_last=False) for token in "xab"] == [("x", None), ("", None), ("", None)]
    assert answer.push(ord("c"), is_last=True) == ("abc", "length")


def test_a_stop_string_in_the_last_token_is_a_stop() -> None:
    answer = AnswerText(decode, stops=["b"])
    assert answer.push(ord("a"), is_last=False) == ("a", None)
    assert answer.push(ord("b"), is_last=True) == ("", "stop")
