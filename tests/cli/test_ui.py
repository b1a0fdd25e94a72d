"""Progress: sparse lines in a log, a bar that leaves no trace on a terminal, silence when asked."""

import io
import re

import pytest
from rich.console import Console

from sarathi_tune.cli.ui import PlainUi, TerminalUi, make_ui
from sarathi_tune.notices import Notice
from sarathi_tune.report.progress import SilentUi


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def plain() -> tuple[PlainUi, Hands, io.StringIO]:
    file, clock = io.StringIO(), Hands()
    return PlainUi(Console(file=file, width=80), clock), clock, file


def test_a_log_gets_a_line_every_ten_seconds_with_the_time_left() -> None:
    ui, clock, file = plain()
    with ui.phase("measure", total=40) as phase:
        for _ in range(40):
            clock.s += 1.0
            phase.describe("8x1024")
            phase.advance()
    assert file.getvalue().splitlines() == [
        "measure: 40 to do",
        "measure: 10/40, about 30 s left",
        "measure: 20/40, about 20 s left",
        "measure: 30/40, about 10 s left",
        "measure: 40/40, about 0 s left",
        "measure: done in 40 s",
    ]


def test_a_phase_of_unknown_length_counts() -> None:
    ui, clock, file = plain()
    with ui.phase("verify") as phase:
        clock.s += 11.0
        phase.advance(7)
    assert file.getvalue().splitlines() == ["verify: begins", "verify: 7 done", "verify: done in 11 s"]


def test_a_phase_that_fails_is_not_done() -> None:
    ui, _, file = plain()
    with pytest.raises(KeyboardInterrupt), ui.phase("measure", total=2):
        raise KeyboardInterrupt
    assert "done" not in file.getvalue()


def test_notes_and_notices_are_lines() -> None:
    ui, _, file = plain()
    ui.note("decode step 8x1024: 21.3 ms [sic]")
    ui.notice(Notice("machine-busy", "warning", "The machine was busy.", "Stop the other work."))
    note, notice = file.getvalue().splitlines()
    assert note == "decode step 8x1024: 21.3 ms [sic]"
    assert notice == "warning: The machine was busy."


def test_a_terminal_gets_a_bar_that_disappears() -> None:
    file = io.StringIO()
    ui = TerminalUi(Console(file=file, width=80, force_terminal=True, _environ={}))
    with ui.phase("measure", total=2) as phase:
        phase.describe("8x1024")
        phase.advance()
        phase.advance()
    text = file.getvalue()
    assert "2/2" in text
    assert "\x1b[?25h" in text, "the cursor is shown again"
    assert re.search(r"measure: 0 s\x1b\[0m\n$", text)


def test_quiet_is_silent_and_a_pipe_is_plain() -> None:
    assert isinstance(make_ui(quiet=True), SilentUi)
    assert isinstance(make_ui(quiet=False), PlainUi)


def test_a_phase_may_turn_out_longer() -> None:
    ui, clock, file = plain()
    with ui.phase("measure", total=10) as phase:
        phase.expect(20)
        clock.s += 10.0
        phase.advance(10)
    assert "measure: 10/20, about 10 s left" in file.getvalue()
