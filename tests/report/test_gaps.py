"""The picture of the gaps: every line fits, what is long stands high, and ASCII is ASCII."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sarathi_tune.errors import UsageError
from sarathi_tune.report.compared import print_comparison
from sarathi_tune.report.comparison import BudgetedStep, Comparison, Contender, Outcome
from sarathi_tune.report.gaps import STRIP_LINES, Scale, check_picture, gap_strips, save_plot
from sarathi_tune.report.glyphs import ASCII, UNICODE


def outcome(trace: tuple[tuple[float, float], ...], longest_ms: float, units: float) -> Outcome:
    return Outcome(
        requests=9,
        finished=9,
        gaps=1000,
        duration_s=10.0,
        ttft_p50_ms=900.0,
        ttft_p99_ms=36_712.0,
        itl_p50_ms=14.9,
        itl_p99_ms=longest_ms / 2,
        itl_max_ms=longest_ms,
        stalled_gaps=100,
        gaps_over_slo=3,
        largest_gap_steps=1,
        largest_gap_units=units,
        largest_gap_p99_units=units * 61.0 / 66.0,
        output_tokens_per_s=300.0,
        preemptions=2,
        cached_tokens=512,
        prompt_tokens=2048,
        trace=trace,
    )


def comparison() -> Comparison:
    steady = tuple((index / 10, 10.0) for index in range(100))
    stalls = (*steady, (5.0, 1000.0))
    chunked = outcome((*steady, (5.0, 60.0)), 60.0, 0.98)
    stalled = outcome(stalls, 1000.0, 16.4)
    return Comparison(
        slo_itl_ms=100.0,
        budget_tokens=160,
        budgeted_step=BudgetedStep(8, 700, 152, 1848, p50_ms=61.0, p99_ms=66.0),
        decode_step_ms=10.0,
        contenders=(
            Contender("sarathi", 160, chunked, chunked, capacity_per_s=1.13),
            Contender("sarathi-single", 160, chunked, chunked, capacity_per_s=1.13),
            Contender("prefill-first", 8192, stalled, stalled, capacity_note="not even 0.1 requests per second"),
        ),
        load={
            "kind": "steady",
            "streams": 8,
            "answer_tokens": 600,
            "num_prompts": 4,
            "prompt_tokens": 2000,
            "every_s": 2.1,
        },
        arrivals_s=(4.5,),
        model={"name": "smollm2-135m", "dtype": "bfloat16"},
        scheduling={"prefix_cache": False, "preemption": "recompute", "max_num_seqs": 12, "kv_tokens": 13_000},
    )


def test_the_scale_puts_the_longest_gap_on_top_and_the_shortest_at_the_bottom() -> None:
    scale = Scale.of(comparison())
    assert (scale.row(1000.0, 16), scale.row(10.0, 16)) == (0, 15)
    # 100 ms is the middle between 10 and 1,000 on a log scale
    assert scale.row(100.0, 16) in (7, 8)
    assert (scale.column(0.0, 50), scale.column(9.9, 50)) == (0, 49)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("glyphs", [ASCII, UNICODE])
def test_strips_fit_and_show_the_stall(width: int, glyphs: object) -> None:
    lines = [line.plain for line in gap_strips(comparison(), width, glyphs)]  # type: ignore[arg-type]
    assert len(lines) == 3 * (STRIP_LINES + 1) + 1
    assert max(map(len, lines)) <= width
    stalled_top, chunked_top = lines[2 * (STRIP_LINES + 1) + 1], lines[1]
    blank = "|" if glyphs is ASCII else "│"
    assert stalled_top.split(blank)[1].strip(), "the stall is drawn on top"
    assert not chunked_top.split(blank)[1].strip()
    if glyphs is ASCII:
        assert all(line.isascii() for line in lines)


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_with_whole_names_and_no_control_codes(width: int) -> None:
    stream = io.StringIO()
    print_comparison(comparison(), Console(file=stream, width=width, highlight=False, markup=False))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "…" not in text
    assert " ".join(text.split()).startswith(
        "Under sarathi no token waited longer than 60.0 ms: 0.91 budgeted steps (66.0 ms at p99, 61.0 ms in the "
        "median)."
    )
    assert "prefill-first let one wait 1000 ms: 15.2 budgeted steps." in text
    assert ("preemp-" in text) is (width == 120)
    assert "Preemptions: sarathi 2" in text
    assert "sarathi 25 %" in text, "of 2,048 prompt tokens 512 were cached"


def test_a_gap_stands_over_the_step_as_long_as_it_was_around_the_run() -> None:
    shown = comparison()
    slow = replace(shown.contenders[0], budgeted_step=shown.budgeted_step.timed(67.1))
    stream = io.StringIO()
    print_comparison(replace(shown, contenders=(slow, *shown.contenders[1:])), Console(file=stream, width=80))
    text = " ".join(stream.getvalue().split())
    assert "budgeted steps (72.6 ms at p99, 67.1 ms in the median)." in text
    assert "takes 66.0 ms at p99" in text
    assert "stands over both, timed again around each run (67.1 ms to 67.1 ms in the median)." in text


@pytest.mark.parametrize(("name", "start"), [("gaps.png", b"\x89PNG"), ("gaps.svg", b"<?xml")])
def test_pictures_are_drawn(tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    save_plot(comparison(), tmp_path / "new" / name)
    assert (tmp_path / "new" / name).read_bytes().startswith(start)


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"must end in \.png or \.svg"):
        check_picture(Path("gaps.jpg"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"sarathi-tune\[report\]"):
        check_picture(Path("gaps.png"))
