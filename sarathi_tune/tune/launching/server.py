"""A server that this program started: it is ready, or there is a clear reason; and it is gone afterwards."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sarathi_tune.errors import TargetError, UsageError
from sarathi_tune.machine.processes import how_it_ended
from sarathi_tune.report.progress import Phase, Ui

_KEEPER = Path(__file__).with_name("keeper.py")
#: What a server gets between SIGTERM and SIGKILL.
GRACE_S = 15.0
#: Ctrl-C ends this program within two seconds; the keeper goes on by itself.
_INTERRUPTED_WAIT_S = 0.5
_ASK_EVERY_S = 0.25
_SHOWN_LINES = 12
_LONGEST_LINE = 240


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that serves at `url` once it is ready, and writes its log to `log`."""

    command: tuple[str, ...]
    url: str
    log: Path
    ready_within_s: float = 600.0


@dataclass(slots=True, eq=False)
class RunningServer:
    """A server that answers. `ready_s`: how long it took to start; `pid` is that of its process group. At the end it is
    waited for `stop_within_s`; the keeper ends it in any case."""

    launch: Launch
    pid: int
    ready_s: float
    keeper: "subprocess.Popen[str]"
    stop_within_s: float = GRACE_S + 15.0

    def hurry(self) -> None:
        """This program is about to end: don't wait for the server."""
        self.stop_within_s = _INTERRUPTED_WAIT_S

    def check(self) -> None:
        """Raises TargetError, with the log's last words, when the server has ended."""
        if self.keeper.poll() is not None:
            raise _ended(self.launch, self.keeper, "while it was measured")


@contextmanager
def running(launch: Launch, ui: Ui, name: str) -> Iterator[RunningServer]:
    """Start, wait until it is ready, and stop it at the end, whatever happens. Raises TargetError when it dies or isn't
    ready in time, UsageError when it can't be started at all."""
    keeper = _start(launch)
    stop_within_s = GRACE_S + 15.0
    try:
        server = _ready(launch, keeper, ui, name)
        yield server
        stop_within_s = server.stop_within_s
    except KeyboardInterrupt:
        stop_within_s = _INTERRUPTED_WAIT_S
        raise
    finally:
        _stop(keeper, stop_within_s)


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def last_lines(log: Path, count: int = _SHOWN_LINES) -> list[str]:
    """The end of a log that isn't empty, each line at a length that can be shown."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64 * 1024))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return [line[:_LONGEST_LINE] for line in lines[-count:]]


def _start(launch: Launch) -> "subprocess.Popen[str]":
    command = [sys.executable, "-I", str(_KEEPER), str(GRACE_S), str(launch.log), *launch.command]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C on the terminal is for us alone
    )


def _ready(launch: Launch, keeper: "subprocess.Popen[str]", ui: Ui, name: str) -> RunningServer:
    started_s = time.monotonic()
    assert keeper.stdout is not None, "the keeper's stdout is a pipe"
    said, _, rest = keeper.stdout.readline().strip().partition(" ")
    if said != "pid":
        raise UsageError(
            f"{launch.command[0]!r} can't be started ({rest or 'no reason is known'}): name the executable with "
            "--engine-command."
        )
    with ui.phase(name) as phase:
        while not _answers(launch.url):
            if keeper.poll() is not None:
                _show_log(launch, ui)
                raise _ended(launch, keeper, "before it was ready")
            gone_s = time.monotonic() - started_s
            if gone_s > launch.ready_within_s:
                _show_log(launch, ui)
                raise TargetError(
                    f"{_name(launch)} was not ready within {launch.ready_within_s:.0f} s{_last_words(launch)}; its log "
                    f"is {launch.log}, and --start-timeout gives it longer."
                )
            _describe(phase, launch)
            time.sleep(_ASK_EVERY_S)
    return RunningServer(launch, int(rest), time.monotonic() - started_s, keeper)


def _answers(url: str) -> bool:
    """Whether the server is healthy. Anything else than 200 means: not yet."""
    import httpx  # here, because the start of the program must not wait for it

    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _describe(phase: Phase, launch: Launch) -> None:
    lines = last_lines(launch.log, 1)
    phase.describe(lines[0][:100] if lines else "no output yet")


def _show_log(launch: Launch, ui: Ui) -> None:
    for line in last_lines(launch.log):
        ui.note(f"  {line}")


def _ended(launch: Launch, keeper: "subprocess.Popen[str]", when: str) -> TargetError:
    said = keeper.stdout.read().split() if keeper.stdout is not None else []
    how = how_it_ended(int(said[-1]) if said[:1] == ["exit"] else None)
    return TargetError(f"{_name(launch)} {how} {when}{_last_words(launch)}; its log is {launch.log}.")


def _name(launch: Launch) -> str:
    return " ".join([Path(launch.command[0]).name, *launch.command[1:2]])


def _last_words(launch: Launch) -> str:
    """The line that says most: the last one with an error in it, else the last one."""
    lines = last_lines(launch.log, 40)
    telling = [line for line in lines if "error" in line.lower()]
    return f" ({(telling or lines)[-1].strip()})" if lines else ""


def _stop(keeper: "subprocess.Popen[str]", patience_s: float) -> None:
    """Tell the keeper; it ends the server and then itself."""
    assert keeper.stdin is not None, "the keeper's stdin is a pipe"
    with suppress(OSError):
        keeper.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        keeper.wait(timeout=patience_s)
    if keeper.stdout is not None:
        keeper.stdout.close()
