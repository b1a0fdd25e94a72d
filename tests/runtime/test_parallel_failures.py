"""A rank that dies, raises, runs out of memory or hangs: all processes gone within ten seconds, and one sentence."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.parallel import Layout
from sarathi_tune.config.source import ModelSource
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.errors import ExitCode, OutOfMemoryError, RankError, SarathiTuneError, UsageError
from sarathi_tune.runtime.parallel.ranks import Ranks
from sarathi_tune.runtime.parallel.runner import ParallelRunner, build_runner
from sarathi_tune.runtime.runner import RunnerOptions
from tests.hf_models import tiny_reference
from tests.runtime.conftest import chunk, request_of

SOURCE = ModelSource(ModelConfig("tiny", "llama", 64, 32, 48, 2, 4, 2, 16, 128))
OPTIONS = RunnerOptions(8, device="cpu", dtype="float32")
PLAN = StepPlan((chunk(request_of([3, 4, 5], [0], request_id=1), 0, 3),))
FAULTY = Path(__file__).with_name("faulty_follower.py")
LONGEST_S = 30.0

_started: list[Ranks] = []
_others: set[int] = set()


def _new_processes() -> list[psutil.Process]:
    """Processes below this one that a test has started. Others may have left the tracker that `multiprocessing` keeps
    until its interpreter ends."""
    return [process for process in psutil.Process().children(recursive=True) if process.pid not in _others]


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever a test did, nothing of it is left."""
    before = (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM))
    _others.clear()
    _others.update(process.pid for process in psutil.Process().children(recursive=True))
    yield
    for ranks in _started:
        ranks.close()
    _started.clear()
    assert not _new_processes()
    assert not dist.is_initialized()
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)) == before
    assert not [thread.name for thread in threading.enumerate() if thread.name == "rank-watch"]


def _start(fault: str | None = None, layout: Layout = Layout(2, 1)) -> Ranks:  # noqa: B008
    command = {} if fault is None else {"command": (sys.executable, str(FAULTY), fault)}
    _started.append(Ranks.start(layout, threads=1, **command))  # type: ignore[arg-type]
    return _started[-1]


@contextmanager
def _ends_all(error: type[SarathiTuneError], sentence: str, exit_code: ExitCode) -> Iterator[None]:
    """Soon there is this error and no other process."""
    started_s = time.monotonic()
    with pytest.raises(error, match=sentence) as raised:
        yield
    assert raised.type is error
    assert raised.value.exit_code == exit_code
    assert "\n" not in str(raised.value)
    assert not _new_processes()
    assert time.monotonic() - started_s < LONGEST_S


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2)], ids=str)
def test_a_killed_rank_ends_the_step_it_is_in(layout: Layout) -> None:
    runner = ParallelRunner.build(_start("slow", layout), SOURCE, OPTIONS)
    (pid,) = _started[-1].process_ids
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with _ends_all(RankError, r"^Rank 1 of 2 was killed \(SIGKILL\)\. All ranks were ended\.", ExitCode.TARGET_FAILED):
        runner.execute(PLAN)
    with pytest.raises(RankError, match="SIGKILL"):  # whoever goes on is told the same
        runner.execute(PLAN)


def test_a_rank_killed_between_steps_is_noticed_at_once() -> None:
    """Rank 0 may be busy with other things for a long time: fitting, predicting."""
    ranks = _start()
    ParallelRunner.build(ranks, SOURCE, OPTIONS)
    with _ends_all(RankError, "SIGKILL", ExitCode.TARGET_FAILED):
        os.kill(ranks.process_ids[0], signal.SIGKILL)
        time.sleep(LONGEST_S)


@pytest.mark.parametrize(
    ("fault", "sentence", "exit_code"),
    [
        ("raise", r"^Rank 1 of 2 failed \(ValueError: the weights are upside down, in _raise, line \d+\)\. All ", 6),
        (
            "out-of-memory",
            r"^Rank 1 of 2 ran out of memory \(.*allocate memory.*\)\. All ranks were ended\. Use fewer",
            5,
        ),
        ("exit", r"^Rank 1 of 2 ended with exit code 3 \(a library gave up\)\. All ranks were ended\.", 6),
        ("other-plan", r"have different plans for step 2, .*All ranks were ended\.", 6),
    ],
)
def test_a_rank_that_fails_in_a_step(fault: str, sentence: str, exit_code: int) -> None:
    runner = ParallelRunner.build(_start(fault), SOURCE, OPTIONS)
    with _ends_all(RankError, sentence, ExitCode(exit_code)):
        runner.execute(PLAN)


def test_one_of_four_fails() -> None:
    runner = ParallelRunner.build(_start("raise", Layout(2, 2)), SOURCE, OPTIONS)
    with _ends_all(RankError, r"^Rank 1 of 4 failed \(ValueError", ExitCode.TARGET_FAILED):
        runner.execute(PLAN)


def test_a_rank_whose_weights_do_not_fit() -> None:
    ranks = _start("no-memory-for-weights")
    with _ends_all(OutOfMemoryError, r"^Rank 1 of 2: tiny needs .* for its weights", ExitCode.OUT_OF_MEMORY):
        ParallelRunner.build(ranks, SOURCE, OPTIONS)


def test_a_rank_that_does_not_start() -> None:
    with _ends_all(RankError, r"^Rank 1 of 2 ended with exit code 1 \(no such library\)", ExitCode.TARGET_FAILED):
        _start("no-start")


def test_rank_0_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from sarathi_tune.runtime.parallel import worker

    runner = ParallelRunner.build(_start(), SOURCE, OPTIONS)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(worker, "build_batch", fail)
    with _ends_all(RankError, r"^Rank 0 of 2 ran out of memory", ExitCode.OUT_OF_MEMORY):
        runner.execute(PLAN)


def test_a_stopped_rank_is_taken_for_dead() -> None:
    ranks = _start()
    runner = ParallelRunner.build(ranks, SOURCE, OPTIONS)
    with _ends_all(RankError, r"^Rank 1 of 2 hasn't answered for \d+ s", ExitCode.TARGET_FAILED):
        os.kill(ranks.process_ids[0], signal.SIGSTOP)
        runner.execute(PLAN)


class _Finalised:
    """Its finaliser, in which Python drops every exception, takes until the main thread has been interrupted in it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __del__(self) -> None:
        _wait_until(lambda: self.ranks._watch._raised is not None, LONGEST_S)


def test_a_failure_that_is_found_during_a_finaliser() -> None:
    ranks = _start()
    with _ends_all(RankError, r"^Rank 1 of 2 was killed \(SIGKILL\)", ExitCode.TARGET_FAILED):
        os.kill(ranks.process_ids[0], signal.SIGKILL)
        _Finalised(ranks)
        _wait_until(lambda: False, LONGEST_S)


def test_ctrl_c_while_another_rank_computes() -> None:
    """Rank 0 waits inside a collective, where Python can't see the signal."""
    runner = ParallelRunner.build(_start("slow", Layout(1, 2)), SOURCE, OPTIONS)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runner.execute(PLAN)
    assert not _new_processes()
    assert time.monotonic() - started_s < LONGEST_S


def test_followers_end_with_rank_0() -> None:
    """Killed without a chance to end them."""
    script = (
        "import os, sys\n"
        "from sarathi_tune.config.parallel import Layout\n"
        "from sarathi_tune.runtime.parallel.ranks import Ranks\n"
        "ranks = Ranks.start(Layout(2, 1), threads=1)\n"
        "print(*ranks.process_ids, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    _wait_until(lambda: not psutil.pid_exists(int(done.stdout)), LONGEST_S)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny_reference(directory, "llama")
    return directory


def _profile(directory: Path, repeats: int, *more: str) -> list[str]:
    shapes = ["--shapes", "2x32,16@0", "--repeats", str(repeats), "--dtype", "float32", "--quiet"]
    return ["-m", "sarathi_tune", "profile", "--model", str(directory), *shapes, *more]


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, "it took too long"
        time.sleep(0.02)


@pytest.mark.parametrize(("victim", "exit_code"), [("follower", 6), ("rank 0", 130)])
def test_the_command_ends_with_one_sentence(victim: str, exit_code: int, model_directory: Path) -> None:
    """A killed follower, and Ctrl-C: exit codes of the table, no traceback, nothing left."""
    command = subprocess.Popen(
        [sys.executable, *_profile(model_directory, 100_000, "--tensor-parallel", "2")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process = psutil.Process(command.pid)
    _wait_until(lambda: bool(process.children()) and process.children()[0].cpu_times().user > 1.0, 60.0)
    time.sleep(1.0)
    (follower,) = process.children()
    started_s = time.monotonic()
    if victim == "follower":
        follower.kill()
    else:
        command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=LONGEST_S)
    took_s = time.monotonic() - started_s
    assert command.returncode == exit_code, errors
    assert not follower.is_running()
    assert took_s < LONGEST_S
    assert "Traceback" not in errors
    (line,) = errors.strip().splitlines()
    assert line.startswith("error: ")
    assert ("Rank 1 of 2 was killed (SIGKILL)" if victim == "follower" else "nterrupted") in line


def test_torchrun_starts_the_ranks(model_directory: Path) -> None:
    done = subprocess.run(
        [*_torchrun(2), *_profile(model_directory, 3, "--pipeline-parallel", "2", "--json", "-")],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    engine = json.loads(done.stdout)["engine"]
    assert (engine["ranks"], engine["pipeline_parallel"], engine["tensor_parallel"]) == (2, 2, 1)
    assert engine["pipeline"]["steps"] >= 8
    assert engine["pipeline"]["stage_period_ms"] > 0


@pytest.mark.parametrize(("flags", "needed"), [((), 1), (("--tensor-parallel", "3"), 3)])
def test_torchrun_with_another_number_of_processes(flags: tuple[str, ...], needed: int, model_directory: Path) -> None:
    done = subprocess.run(
        [*_torchrun(2), *_profile(model_directory, 3, *flags)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1  # torchrun's own
    said = rf"error: The launcher started 2 processes and .* needs {needed}: make the product of the two 2"
    assert re.search(said, done.stderr), done.stderr


def _torchrun(num_ranks: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
        "--no-python",
        sys.executable,
    ]


def test_a_layout_that_does_not_fit_starts_nothing() -> None:
    with pytest.raises(UsageError, match="use one of 1, 2, 4"):
        build_runner(SOURCE, OPTIONS, Layout(3, 1))
