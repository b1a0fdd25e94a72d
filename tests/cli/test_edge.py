"""Exit codes and streams."""

import pytest
import typer

from sarathi_tune.cli.edge import DEFECT, edge
from sarathi_tune.errors import (
    ExitCode,
    InconclusiveError,
    InfeasibleError,
    InterruptedRunError,
    ModelError,
    OutOfMemoryError,
    SarathiTuneError,
    TargetError,
)


def ended(failure: BaseException) -> int:
    @edge
    def command() -> ExitCode:
        raise failure

    with pytest.raises(typer.Exit) as caught:
        command()
    return caught.value.exit_code


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (ModelError("a"), 2),
        (InfeasibleError("a"), 3),
        (InconclusiveError("a"), 4),
        (OutOfMemoryError("a"), 5),
        (MemoryError(), 5),
        (TargetError("a"), 6),
        (InterruptedRunError("a"), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_failure_has_its_exit_code(failure: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(failure) == code
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: ")
    assert streams.err.count("\n") == 1


def test_every_typed_error_is_tried_above() -> None:
    def below(kind: type[Exception]) -> set[type[Exception]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    assert {kind.exit_code for kind in below(SarathiTuneError)} == {2, 3, 4, 5, 6, 130}


def test_a_defect_is_called_one_and_keeps_its_traceback_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SARATHI_TUNE_DEBUG", raising=False)
    assert ended(ZeroDivisionError("division by zero")) == DEFECT == 70
    quiet = capsys.readouterr().err
    assert "defect of sarathi-tune" in quiet
    assert "ZeroDivisionError" in quiet
    assert "Traceback" not in quiet
    monkeypatch.setenv("SARATHI_TUNE_DEBUG", "1")
    assert ended(ZeroDivisionError("division by zero")) == DEFECT
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_command_that_says_nothing_ends_with_zero() -> None:
    @edge
    def command() -> None:
        return None

    command()


def test_markup_in_a_message_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    ended(ModelError("directory [red]/tmp[/red] is empty"))
    assert "[red]/tmp[/red]" in capsys.readouterr().err
