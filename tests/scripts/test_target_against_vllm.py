"""The tables of what was found of a vLLM with one budget after the other."""

from typing import Any

from scripts.target_against_vllm import budget_row, scene_row


def result(**advice: Any) -> dict[str, Any]:
    scenes = [
        {"name": "few", "own_ms": 50.004, "seen_ms": 50.1},
        {"name": "one", "own_ms": 17.2, "seen_ms": 17.3},
        {"name": "few", "own_ms": 90.0, "seen_ms": 91.0},
        {"name": "short", "own_ms": None, "seen_ms": 30.0},
    ]
    server = {"budget_tokens": 2048, "interval_tokens": [2015, 2066], "scenes": scenes}
    server |= {"own_gap_ms": 60.0, "seen_gap_ms": 60.055}
    return {"server": server, "advice": advice, "phases": [{"seconds": 0.2}, {"seconds": 76.4}]}


def test_what_was_inferred_and_advised() -> None:
    advised = result(verdict="met", budget_tokens=91, interval_tokens=[76, 105])
    assert budget_row(2048, advised) == "| 2,048 | 2,048 | 2,015 to 2,066 | 77 s | 91 (76 to 105) |"
    nothing = result(verdict="inconclusive", budget_tokens=None, interval_tokens=None)
    nothing["server"] |= {"budget_tokens": None, "interval_tokens": None}
    assert budget_row(128, nothing) == "| 128 | none | none | 77 s | inconclusive |"


def test_both_clocks_of_the_first_time_a_scene_was_played() -> None:
    assert scene_row(2048, result()) == "| 2,048 | 17.20, 17.30 |  |  |  | 50.00, 50.10 | 60.00, 60.05 |"
