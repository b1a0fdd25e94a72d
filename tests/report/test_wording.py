"""Sentences that are put together."""

import pytest

from sarathi_tune.report.wording import sentence


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 req/s meet it", "3 req/s meet it."),
        ("The server stopped.", "The server stopped."),
        ("It does not answer: is it stuck?", "It does not answer: is it stuck?"),
    ],
)
def test_a_sentence_has_one_end(text: str, expected: str) -> None:
    assert sentence(text) == expected
