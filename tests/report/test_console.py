"""What a person reads: nothing broken at any width, nothing but text in a pipe, each verdict in its own words."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from sarathi_tune.report.console import print_result, print_serve_line
from sarathi_tune.report.result import Result
from tests.report import examples

EVERY = [
    examples.recommended,
    examples.infeasible,
    examples.not_binding,
    examples.not_the_budget,
    examples.inconclusive,
]


def shown(result: Result, width: int = 80, *, terminal: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    colour = {"color_system": "truecolor"} if terminal else {}
    console = Console(file=file, width=width, force_terminal=terminal, highlight=False, _environ={}, **colour)
    print_result(result, console)
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("example", EVERY)
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_except_the_one_to_paste(example, width: int) -> None:
    too_wide = [line for line in shown(example(), width).splitlines() if len(line) > width]
    assert [line for line in too_wide if not line.startswith("vllm serve")] == []


@pytest.mark.parametrize("example", EVERY)
def test_a_pipe_gets_no_control_codes(example) -> None:
    text = shown(example())
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text) is None


def test_a_terminal_gets_colour() -> None:
    assert "\x1b[1;32mToken budget 352" in shown(examples.recommended(), terminal=True)
    assert "\x1b[1;31mInfeasible" in shown(examples.infeasible(), terminal=True)


@pytest.mark.parametrize("example", EVERY)
def test_ascii_is_enough(example) -> None:
    shown(example(), encoding="ascii").encode("ascii")


def test_the_verdict_comes_first_then_the_line_to_paste() -> None:
    lines = shown(examples.recommended()).splitlines()
    assert lines[0] == "Token budget 352 meets p99 ITL 100 ms: 98.3 ms measured at 0.52 req/s."
    assert lines[2] == "vllm serve smollm2-135m --max-num-batched-tokens 352 --max-num-seqs 8"


def test_the_line_to_paste_is_one_line_however_narrow_and_quoted_for_the_shell() -> None:
    result = replace(examples.recommended(), model={"name": "/models/my model; rm -rf x"})
    line = "vllm serve '/models/my model; rm -rf x' --max-num-batched-tokens 352 --max-num-seqs 8"
    assert line in shown(result, width=40).splitlines()


def test_quiet_shows_the_line_alone_and_nothing_without_a_budget() -> None:
    file = io.StringIO()
    print_serve_line(examples.recommended(), Console(file=file, width=40))
    assert file.getvalue() == "vllm serve smollm2-135m --max-num-batched-tokens 352 --max-num-seqs 8\n"
    print_serve_line(examples.infeasible(), Console(file=file, width=40))
    assert file.getvalue().count("\n") == 1


def test_the_parts_come_in_the_order_in_which_they_are_asked() -> None:
    text = shown(examples.recommended())
    headings = ["Rule of thumb", "Why 352", "Step time", "Neighbours", "Predicted against", "Rests on", "Warnings"]
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)
    assert text.rstrip().endswith("too long.")


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (
            examples.infeasible,
            ["Infeasible: p99 ITL 20.0 ms, and 16 decodes alone take 20.6 ms.", "--max-num-seqs 13", "SLO of 22.4 ms"],
        ),
        (examples.not_binding, ["Not binding: every budget meets p99 ITL 5000 ms", "What limits instead"]),
        (examples.not_the_budget, ["Not the budget", "What it is instead", "CUDA graphs", "205 ms"]),
        (examples.inconclusive, ["Inconclusive", "31 %", "90 to 900 tokens"]),
    ],
)
def test_each_verdict_has_its_own_words(example, words: list[str]) -> None:
    text = " ".join(shown(example(), width=200).split())
    assert [word for word in words if word not in text] == []


def test_an_infeasible_objective_gives_nothing_to_paste() -> None:
    assert "vllm serve" not in shown(examples.infeasible())


def test_a_missed_verification_is_said_first() -> None:
    first = shown(examples.recommended(met=False)).splitlines()[0]
    assert first == "Token budget 352 misses the objective at 0.52 req/s: p99 ITL 112 ms > 100 ms."


def test_a_run_that_does_not_count_is_not_a_success() -> None:
    result = examples.recommended()
    void = replace(result.runs[0], problems=("client lag p99 12 ms.",))
    text = shown(replace(result, runs=(void,)), width=120)
    assert "its verification doesn't count" in text.splitlines()[0]
    assert "Invalid at 352, 0.52 req/s: client lag p99 12 ms." in text


def test_a_derived_budget_says_that_it_was_not_verified() -> None:
    assert "Derived, not verified" in shown(examples.recommended(verified=False)).splitlines()[0]


def test_figures_stand_in_the_tables_at_80_columns() -> None:
    text = shown(examples.recommended())
    assert re.search(r"▸ +352 +97\.1 +yes +310 +1,044 +0\.51", text)
    assert re.search(r"2,048 +0\.52 +505 +512 +12,310 +12,900 +0 +0 +4,290 +no", text)
    assert re.search(r"256 +0\.52 .* 120 +void", text)


def test_a_wide_terminal_shows_more_of_a_run() -> None:
    assert "stalled" not in shown(examples.recommended(), width=80).split("Predicted against")[1].split("Invalid")[0]
    wide = shown(examples.recommended(), width=120)
    assert re.search(r"352 +0\.52 +97\.1 +98\.3 +102 +310 +322 +1,044", wide)


def test_the_rule_of_thumb_is_three_steps() -> None:
    text = shown(examples.recommended())
    assert re.search(r"1  decode step \(measured, 8x1024\) +21\.3 ms", text)
    assert re.search(r"2  prefill per token \(measured, 98\.3 ms / 512 tokens\) +0\.192 ms", text)
    assert re.search(r"3  budget = 1 / 2.* 111 tokens", text)
    assert "overstates the hybrid steps that were measured by 12 % (n = 9)" in " ".join(text.split())


def test_what_was_left_open_is_printed_with_its_origin() -> None:
    text = shown(examples.recommended())
    assert re.search(r"decodes +8 \(default on cpu\)", text)
    assert re.search(r"context +1,024 \(given\)", text)
    assert re.search(r"prefix +2,048\n", text)


def test_a_second_objective_is_part_of_the_promise() -> None:
    result = examples.recommended()
    both = replace(result, objective=replace(result.objective, ttft_ms=1500.0))
    assert shown(both).startswith("Token budget 352 meets p99 ITL 100 ms and TTFT 1500 ms: 98.3 ms measured")
