"""Running the command line in tests: in this process for what answers at once, in its own for streams and signals."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from sarathi_tune.cli.app import app

ROOT = Path(__file__).parent.parent.parent
H100 = ROOT / "results" / "examples" / "h100-llama-3.1-8b.profile.json"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def run(*arguments: str | Path) -> Ended:
    """The command in this process."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="sarathi-tune")
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return Ended(result.exit_code, result.stdout, result.stderr)


def spawn(*arguments: str | Path, environment: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Ended:
    """The command in a process of its own, with pipes for its streams."""
    command = [sys.executable, "-m", "sarathi_tune", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    done = subprocess.run(command, capture_output=True, env=env, cwd=cwd, timeout=60, check=False)
    return Ended(done.returncode, done.stdout.decode(errors="strict"), done.stderr.decode(errors="strict"))
