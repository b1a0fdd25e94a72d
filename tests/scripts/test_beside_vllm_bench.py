"""What is made of the files that both clients save, with values worked out by hand."""

from typing import Any

import pytest

from sarathi_tune.goodput.server_account import Mean
from scripts.beside_vllm_bench import Seen, differences, pooled, read_saved, row, together


def saved(first_s: float, **changes: Any) -> dict[str, Any]:
    """Four requests, one a second: first tokens after 100 to 400 ms, then gaps of 20 and 40 ms."""
    return {
        "num_prompts": 4,
        "completed": 4,
        "start_times": [first_s + number for number in range(4)],
        "ttfts": [0.1, 0.2, 0.3, 0.4],
        "itls": [[0.02, 0.04]] * 4,
        "total_input_tokens": 1024,
        "total_output_tokens": 12,
    } | changes


def test_a_file_is_read() -> None:
    seen = read_saved(saved(100.0))
    assert (len(seen.sent_s), len(seen.all_gaps_s), seen.prompt_tokens, seen.output_tokens) == (4, 8, 1024, 12)
    # numpy.percentile([100, 200, 300, 400], (50, 99)) and of the eight gaps
    assert seen.figures() == pytest.approx((30.0, 40.0, 250.0, 397.0))
    with pytest.raises(RuntimeError, match="3 of 4"):
        read_saved(saved(100.0, completed=3))


def test_only_what_was_sent_while_both_ran_is_compared() -> None:
    theirs, ours = together(read_saved(saved(100.0)), read_saved(saved(98.5)))
    # both ran from 100.0 to 101.5, and the first two seconds are left out
    assert (theirs.sent_s, ours.sent_s) == ((), ())
    long = {"start_times": [100.0, 101.0, 102.0, 103.0]}
    theirs, ours = together(read_saved(saved(0.0, **long)), read_saved(saved(100.25)))
    assert theirs.sent_s == (103.0,)
    assert ours.sent_s == (102.25,)
    assert (theirs.ttfts_s, ours.ttfts_s) == ((0.4,), (0.3,))


def test_rows() -> None:
    seen = read_saved(saved(100.0), (Mean(8, 29.9), Mean(4, 240.0)))
    assert row("a", seen) == (
        "| a | 4 | 1,024 | 12 | 8 | 30.0 | 40.0 | 250.0 | 397.0 | 29.9 | 30.0 (+0.3%) | 240.0 | 250.0 (+4.2%) |"
    )
    assert row("a", read_saved(saved(100.0))).endswith("| 397.0 |")


def test_runs_are_pooled_and_compared() -> None:
    theirs = pooled([read_saved(saved(0.0)), read_saved(saved(9.0))])
    assert (len(theirs.sent_s), theirs.prompt_tokens, theirs.output_tokens) == (8, 2048, 24)
    ours = Seen((0.0, 1.0), (0.125, 0.375), ((0.033, 0.033), (0.033, 0.033)))
    assert differences(theirs, ours).endswith("| +10.0% | -17.5% | +0.0% | -6.9% |")
