"""Where output goes when it can't go where it should, and what odd terminals and locales get."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import H100, ROOT, spawn

DERIVE = ["derive", str(H100), "--slo-itl", "20ms", "--max-num-seqs", "32", "--context", "1k"]
FULL = Path("/dev/full")


def shell(command: str) -> tuple[int, str]:
    """A shell's redirections around the command; (exit code of the command, stderr). `$T` is the command."""
    script = f'T="{sys.executable} -m sarathi_tune"; set -o pipefail; {command}'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments", [DERIVE, [*DERIVE, "--json", "-"], [*DERIVE, "--quiet"], ["--help"], ["--version"]], ids=" ".join
)
def test_a_full_disk_under_stdout(arguments: list[str]) -> None:
    code, err = shell(f"$T {' '.join(arguments)} > /dev/full")
    assert (code, err) == (2, "error: Can't write to stdout: No space left on device.\n")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_under_stderr_leaves_the_exit_code() -> None:
    assert shell("$T report none 2> /dev/full") == (2, "")
    assert shell("$T report none 2>&-") == (2, "")


@pytest.mark.parametrize("closed", [">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    """The document is whole: nothing that was meant for stdout went into a file that got its number."""
    target = tmp_path / "result.json"
    assert shell(f"$T {' '.join(DERIVE)} --json {target} {closed}")[0] == 0
    assert spawn("report", target).code == 0


def test_a_reader_that_goes_away() -> None:
    assert shell(f"$T {' '.join(DERIVE)} | head -c 20 > /dev/null") == (141, "")


@pytest.mark.parametrize("columns", ["0", "1", "20", "39"])
def test_a_terminal_that_says_it_is_narrower_than_any_table(columns: str) -> None:
    ended = spawn(*DERIVE, environment={"COLUMNS": columns})
    assert ended.code == 0
    assert ended.out == spawn(*DERIVE, environment={"COLUMNS": "40"}).out
    assert "vllm serve" in ended.out


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": ""}, {"NO_COLOR": "1"}, {"COLUMNS": "x"}], ids=str)
def test_no_control_codes_in_a_pipe(environment: dict[str, str]) -> None:
    ended = spawn(*DERIVE, environment=environment)
    assert ended.code == 0
    assert all(letter.isprintable() or letter == "\n" for letter in ended.out + ended.err)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_an_encoding_without_our_signs(encoding: str) -> None:
    ended = spawn(*DERIVE, environment={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
    assert ended.code == 0
    assert "vllm serve" in ended.out


def test_the_c_locale_and_a_name_that_it_cannot_spell() -> None:
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = spawn("--slo-itl", "20ms", "--model", "模型", environment=c_locale)
    assert ended.code == 2
    assert ended.err.startswith("error: Unknown model ")
    assert ended.err.count("\n") == 1
