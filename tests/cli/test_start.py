"""Starting up: help and version at once, whatever else is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sarathi_tune import __version__
from tests.cli.running import ROOT, run, spawn

COMMANDS = ["profile", "derive", "sweep", "report", "doctor"]


def test_version() -> None:
    assert spawn("--version").out == f"sarathi-tune {__version__}\n"


def test_help_names_every_command_flag_and_exit_code() -> None:
    text = " ".join(run("--help").out.split())
    for word in [*COMMANDS, "--slo-itl", "--dry-run", "--resume", "20ms", "3 infeasible", "130 interrupted"]:
        assert word in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    ended = run(command, "--help")
    assert ended.code == 0
    assert f"sarathi-tune {command}" in ended.out


def test_the_exit_code_holds_when_the_interruption_came_within_an_exec(tmp_path: Path) -> None:
    """Python under `-m` ends itself with SIGINT then, unless that is taken back."""
    (tmp_path / "wrapped.py").write_text(
        "import os, runpy, signal, sarathi_tune.cli\n"
        "def main():\n"
        "    try:\n"
        "        exec('os.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(10**6): pass')\n"
        "    except KeyboardInterrupt:\n"
        "        raise SystemExit(130) from None\n"
        "sarathi_tune.cli.main = main\n"
        "runpy.run_module('sarathi_tune', run_name='__main__')\n"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    ended = subprocess.run([sys.executable, "-m", "wrapped"], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert ended.returncode == 130
