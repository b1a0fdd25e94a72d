"""How a process ended, against what real ones return."""

import subprocess
import sys

import pytest

from sarathi_tune.machine.processes import how_it_ended


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("raise SystemExit(7)", "ended with exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed (SIGKILL)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", "was ended by signal 40"),  # a real-time signal has no name
    ],
)
def test_how_a_process_ended(end: str, words: str) -> None:
    assert how_it_ended(subprocess.run([sys.executable, "-c", end], check=False).returncode) == words


def test_nobody_knows_how() -> None:
    assert how_it_ended(None) == "ended with exit code unknown"
