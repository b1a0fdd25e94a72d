"""Ctrl-C and its relatives: the command in a process of its own, interrupted where it hurts, and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue

import pytest

from sarathi_tune.measure.profile import load_profile
from sarathi_tune.report.result import Result
from sarathi_tune.report.stored import load_stored
from tests.cli.running import ROOT
from tests.tune.tiny import tiny_model

#: The console script with short verification windows. A shell's background jobs ignore Ctrl-C; this one mustn't.
_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import sarathi_tune.tune as job
job.SHORTEST_WINDOW_S = job.LONGEST_WINDOW_S = {window_s}
from sarathi_tune.cli import main
main()
"""
#: Promised are 2 s; the machine that runs the tests may be busy with others.
STOP_S = 6.0
#: With --budget there is something to verify whatever this machine's noise makes of the verdict.
BUDGET = 128
#: Met, missed, or too noisy to say: a run that came to its end.
ENDED = {0, 1, 4}


class Started:
    """A command under way, with its stderr by the line."""

    def __init__(self, *arguments: str | Path, window_s: float = 1.0) -> None:
        command = [sys.executable, "-c", _PROGRAM.format(window_s=window_s), *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.said: list[str] = []
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)

    def wait_for(self, beginning: str, timeout_s: float = 60.0) -> None:
        """Until a line of stderr begins like that."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            try:
                self.said.append(self._lines.get(timeout=0.2))
            except Empty:
                assert self.process.poll() is None, f"it ended before {beginning!r}: {self.said}"
                continue
            if self.said[-1].startswith(beginning):
                return
        raise AssertionError(f"{beginning!r} never came: {self.said}")

    def stop(self, *signals: signal.Signals, gap_s: float = 0.05) -> float:
        """Send the signals, wait for the end, and return how long that took."""
        started_s = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            time.sleep(gap_s)
        self.end()
        return time.monotonic() - started_s

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        while not self._lines.empty():
            self.said.append(self._lines.get())
        return code

    @property
    def err(self) -> str:
        return "".join(self.said)

    @property
    def out(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts the main job on the tiny model; whatever still runs at the end is ended."""
    started: list[Started] = []

    def launch(*more: str | Path, window_s: float = 1.0, slo: str = "40ms") -> Started:
        options = ["--model", model, "--workload", "fixed:200:20", "--time-limit", "10s", "--threads", "1"]
        options += ["--out", tmp_path / "runs"]
        started.append(Started("--slo-itl", slo, *options, *more, window_s=window_s))
        return started[-1]

    yield launch
    for process in started:
        process.close()


def folder_of(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def timed_steps(folder: Path) -> list[tuple[int, str, str]]:
    """What the journal holds: (round, shape, label) of every step that was timed."""
    records = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [(record["round"], record["shape"], record["label"]) for record in records if "ms" in record]


def wait_for_steps(run: Started, tmp_path: Path, count: int) -> Path:
    """Until so many steps are in the journal."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        assert run.process.poll() is None, run.err
        journals = list((tmp_path / "runs").glob("*/journal.jsonl"))
        if journals and journals[0].read_text().count('"ms"') >= count:
            return journals[0].parent
        time.sleep(0.02)
    raise AssertionError("nothing was timed")


def is_one_sentence(started: Started) -> None:
    """What was said at the end: where things are, and no traceback."""
    assert started.out == ""
    assert "Traceback" not in started.err
    assert "Exception ignored" not in started.err
    assert started.err.count("error: ") == 1
    assert started.said[-1].startswith("error: Interrupted")


def finished(folder: Path) -> Result:
    load_profile(folder / "profile.json")
    stored, _ = load_stored(folder / "result.json")
    assert isinstance(stored, Result)
    return stored


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_interrupted_while_measuring(start: Callable[..., Started], tmp_path: Path, number: signal.Signals) -> None:
    run = start("--no-verify")
    folder = wait_for_steps(run, tmp_path, 10)
    assert run.stop(number) < STOP_S
    assert run.process.returncode == 130
    is_one_sentence(run)
    assert str(folder) in run.err
    assert "--resume" in run.err
    assert len(timed_steps(folder)) >= 10
    assert not (folder / "result.json").exists()


def test_resumed_without_timing_a_step_twice(start: Callable[..., Started], tmp_path: Path) -> None:
    run = start("--no-verify")
    folder = wait_for_steps(run, tmp_path, 30)
    assert run.stop(signal.SIGINT, signal.SIGINT, signal.SIGINT) < STOP_S
    assert run.process.returncode == 130
    is_one_sentence(run)
    before = timed_steps(folder)

    again = start("--no-verify", "--resume")
    assert again.end() in ENDED, again.err
    assert f"{len(before)} timed steps are there" in again.err
    after = timed_steps(folder)
    assert after[: len(before)] == before
    assert len(set(after)) == len(after), "no step is timed twice"
    assert len(after) > len(before)
    counted = {str(sample.shape): len(sample.times_ms) for sample in load_profile(folder / "profile.json").samples}
    assert sum(counted.values()) == len(after)
    assert finished(folder).advice.verdict


def test_interrupted_while_verifying_and_resumed(start: Callable[..., Started], tmp_path: Path) -> None:
    run = start("--budget", str(BUDGET))
    run.wait_for("verify 2,048")
    time.sleep(0.3)
    assert run.stop(signal.SIGINT) < STOP_S
    assert run.process.returncode == 130
    is_one_sentence(run)
    folder = folder_of(tmp_path)
    before = timed_steps(folder)
    (kept,) = folder.glob("verify-*.json")
    content = kept.read_bytes()
    assert kept.name.startswith(f"verify-recommended-{BUDGET}-")

    again = start("--budget", str(BUDGET), "--resume")
    assert again.end() in ENDED, again.err
    assert timed_steps(folder) == before, "measuring was over"
    assert kept.read_bytes() == content
    assert re.search(rf"^{BUDGET} tokens at [\d.e+]+ req/s was verified before", again.err, re.MULTILINE)
    assert not re.search(rf"^verify {BUDGET} at ", again.err, re.MULTILINE)
    runs = {item.role: item for item in finished(folder).runs}
    assert runs["recommended"].budget_tokens == BUDGET
    assert runs["control"].budget_tokens == 2048
    assert runs["recommended"].duration_s == json.loads(content)["run"]["duration_s"]


def test_interrupted_while_loading(start: Callable[..., Started], tmp_path: Path) -> None:
    run = start()
    run.wait_for("prepare: begins")
    assert run.stop(signal.SIGINT) < STOP_S
    assert run.process.returncode == 130
    is_one_sentence(run)
    assert "--resume" not in run.err, "there is nothing to go on with"
    assert not list((tmp_path / "runs").iterdir())


def test_nothing_to_resume(start: Callable[..., Started], tmp_path: Path) -> None:
    run = start("--resume")
    assert run.end() == 2
    assert (
        run.err
        == f"error: There is no interrupted run in {tmp_path / 'runs'}: start without --resume, or give its --out.\n"
    )
    assert run.out == ""


def test_resuming_with_other_options_or_a_torn_journal(start: Callable[..., Started], tmp_path: Path) -> None:
    run = start("--no-verify")
    folder = wait_for_steps(run, tmp_path, 30)
    run.process.kill()
    run.end()
    journal = folder / "journal.jsonl"
    content = journal.read_bytes()
    assert not (folder / "result.json").exists()

    other = start("--no-verify", "--resume", slo="41ms")
    assert other.end() == 2
    assert other.said[-1].startswith("error: ")
    assert "slo_itl_ms was 40.0, is 41.0" in other.said[-1]
    assert "Traceback" not in other.err
    assert journal.read_bytes() == content, "the journal of the other run is untouched"

    journal.write_bytes(content[: content.rindex(b'"ms"') + 3])
    whole = journal.read_bytes().count(b"\n")
    again = start("--no-verify", "--resume")
    assert again.end() in ENDED, again.err
    after = timed_steps(folder)
    assert len(set(after)) == len(after)
    assert journal.read_bytes().splitlines()[:whole] == content.splitlines()[:whole]
    finished(folder)
