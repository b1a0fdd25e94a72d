"""Runs a server for a parent process, and ends it when the parent says so or is gone: killed, crashed or interrupted.

    python keeper.py GRACE_S LOG COMMAND...

The parent holds the other end of stdin; its end of file is the signal. The server and all that it starts stand in a
process group of their own, which gets SIGTERM first and SIGKILL after GRACE_S seconds. On stdout: `pid N` once the
server runs, `failed REASON` if it can't be started, and `exit CODE` at the end, a signal's number with a minus.

Started by its file name, so that it loads nothing but the standard library.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.1


def main(arguments: list[str]) -> int:
    """Keep the server until it or the parent ends."""
    grace_s, log_path, *command = arguments
    for name in ("SIGINT", "SIGHUP", "SIGTERM"):  # whoever means the parent; its end comes over stdin
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    _adopt_orphans()
    try:
        with open(log_path, "ab") as log:  # noqa: PTH123
            server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, restore_signals=True,
                preexec_fn=_heed_signals,
            )  # fmt: skip
    except OSError as error:
        _say(f"failed {error.strerror}")
        return 1
    _say(f"pid {server.pid}")
    while server.poll() is None and not _parent_is_gone():
        pass
    _end_group(server, float(grace_s))
    _say(f"exit {server.returncode}")
    return 0


def _heed_signals() -> None:
    """The server must not inherit that signals are ignored here."""
    for name in ("SIGINT", "SIGHUP", "SIGTERM"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def _parent_is_gone() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], _LOOK_EVERY_S)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1024)


def _end_group(server: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """End whatever is left of the server's group: gently, then not."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(server.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        end_s = time.monotonic() + patience_s
        while _is_there(server) and time.monotonic() < end_s:
            time.sleep(_LOOK_EVERY_S / 2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=1.0)


def _is_there(server: "subprocess.Popen[bytes]") -> bool:
    """Whether any process of the group is left; those that have ended are buried."""
    server.poll()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-server.pid, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(server.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _adopt_orphans() -> None:
    """What the server leaves behind becomes our child, so that it can be buried (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody is there to hear it
        os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
