"""What a server counted of a run, beside the run, with values worked out by hand."""

import pytest

from sarathi_tune.goodput.server_account import Both, Mean, ServerAccount
from sarathi_tune.loadgen.record import RequestRecord

NONE, OWN_TTFT, OWN_GAP = Mean(), Mean(2, 150.0), Mean(3, 83.0)


def answered(sent_s: float, *token_s: float) -> RequestRecord:
    # intended 0.5 s before it was sent: a late client is not the server's time
    return RequestRecord(0, sent_s - 0.5, 32, len(token_s), "finished", sent_s, token_s=token_s)


RECORDS = (
    answered(1.0, 1.2, 1.25, 1.35),
    answered(2.0, 2.1, 2.2),
    RequestRecord(2, 3.0, 32, 4, "failed", 3.0, failure="timeout"),
    RequestRecord(3, 4.0, 32, 4, "not_sent"),
)


def account(ttft: Mean = OWN_TTFT, gap: Mean = OWN_GAP, preemptions: int = 0) -> ServerAccount:
    return ServerAccount.of(ttft, gap, Mean(2, 4.0), preemptions, RECORDS)


def codes(found: ServerAccount) -> list[str]:
    return [notice.code for notice in found.remarks()]


def test_what_was_seen_stands_beside_what_was_counted() -> None:
    found = account()
    assert (found.ttft.seen.n, found.gap.seen.n) == (2, 3)
    assert found.ttft.seen.mean_ms == pytest.approx((200 + 100) / 2)
    assert found.gap.seen.mean_ms == pytest.approx((50 + 100 + 100) / 3)
    assert codes(found) == []


def test_runs_are_added_up() -> None:
    both = account() + ServerAccount(
        Both(Mean(6, 50.0), Mean(6, 60.0)), Both(Mean(9, 43.0), Mean(9, 44.0)), Mean(2, 8.0), 3
    )
    assert both.ttft.own == Mean(8, (2 * 150 + 6 * 50) / 8)
    assert both.gap.own == Mean(12, (3 * 83 + 9 * 43) / 12)
    assert both.gap.seen.mean_ms == pytest.approx((250 + 9 * 44) / 12)
    assert (both.queue, both.preemptions) == (Mean(4, 6.0), 3)
    assert Mean() + Mean() == Mean()
    assert Mean() + Mean(2, 5.0) == Mean(2, 5.0)


def test_answers_of_others_are_told() -> None:
    found = account(ttft=Mean(5, 150.0))
    assert codes(found) == ["server-has-others"]
    assert found.remarks()[0].cause.startswith("3 of the 5 answers")
    # one of 200 is rounding: an answer that was broken off before its first token was read
    assert ServerAccount(Both(Mean(200, 1.0), Mean(199, 1.0)), Both(NONE, NONE), NONE, 0).others == 0


def test_preemptions_are_told() -> None:
    found = account(preemptions=7)
    assert codes(found) == ["server-preempted"]
    assert "7 times" in found.remarks()[0].cause


@pytest.mark.parametrize(
    ("gap", "is_told"),
    [
        (Mean(3, 80.0), False),  # 83.3 seen: 4 % more
        (Mean(3, 79.0), True),  # 5.5 % more
        (Mean(3, 88.0), True),  # 5.3 % less
        (Mean(12, 20.0), False),  # four tokens in an event: other gaps
        (Mean(), False),
    ],
)
def test_gaps_that_differ_are_told(gap: Mean, *, is_told: bool) -> None:
    assert ("gaps-differ" in codes(account(gap=gap))) == is_told


def test_gaps_beside_others_are_not_held_against_each_other() -> None:
    assert codes(account(ttft=Mean(5, 150.0), gap=Mean(3, 20.0))) == ["server-has-others"]
