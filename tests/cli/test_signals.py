"""The signals that ask a process to end."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import typer

from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.signals import Stop, orderly_stop
from sarathi_tune.errors import ExitCode
from tests.cli.running import ROOT

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def no_sudden_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The handlers as they were, and no watchdog that ends the process of the tests."""
    monkeypatch.setattr(threading.Timer, "start", lambda _timer: None)  # a plain Thread has its own
    before = {number: signal.getsignal(number) for number in ENDING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_the_first_signal_interrupts_and_the_next_ones_are_ignored(number: signal.Signals) -> None:
    stop = Stop()
    with pytest.raises(KeyboardInterrupt), orderly_stop(stop):  # noqa: PT012
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)  # while cleaning up
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.came
    assert signal.getsignal(number) == signal.SIG_IGN
    os.kill(os.getpid(), number)


def test_without_a_signal_everything_is_as_before() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    with orderly_stop(Stop()):
        assert [signal.getsignal(number) for number in ENDING] != before
    assert [signal.getsignal(number) for number in ENDING] == before


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    with orderly_stop(Stop()):
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_another_thread_leaves_signals_alone() -> None:
    seen: list[object] = []

    def body() -> None:
        with orderly_stop(Stop()):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_failure_behind_a_swallowed_interrupt_is_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    @edge
    def command() -> ExitCode:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise AttributeError("half of a module")

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == 130
    assert capsys.readouterr().err == "error: Interrupted.\n"


def spawned(body: str, interrupt: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str]:
    program = f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{body}"
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    interrupt(process)
    _, err = process.communicate(timeout=30)
    return process.returncode, err


DEAF = """
import time
from sarathi_tune.cli.edge import edge
@edge
def command():
    for number in range(300):
        try:
            if number == 0:
                print("ready", flush=True)
            time.sleep(0.1)
        except KeyboardInterrupt:
            pass
command()
"""


def test_who_does_not_listen_is_ended_all_the_same() -> None:
    code, err = spawned(DEAF, lambda process: process.send_signal(signal.SIGINT))
    assert (code, err) == (130, "error: Interrupted.\n")
