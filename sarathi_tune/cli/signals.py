"""Ctrl-C, SIGTERM and a closed terminal end a command in the same orderly way, and soon."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sarathi_tune.errors import ExitCode

#: So long a command may clean up and say where things are. Whoever presses Ctrl-C doesn't wait for more than two.
PATIENCE_S = 1.5
_SHOW_CURSOR = "\x1b[?25h"


class Stop:
    """The first signal raises KeyboardInterrupt; the next ones would only hit the cleaning up and are ignored.

    Some libraries swallow the KeyboardInterrupt (numpy does while it is imported), and some compute on without looking:
    then the process ends all the same. What was measured is in the journal, line by line.
    """

    def __init__(self) -> None:
        self.came = False
        #: The command has ended, and whoever called it tells how.
        self.is_told = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if self.came:
            return
        self.came = True
        watchdog = threading.Timer(PATIENCE_S, self._leave)
        watchdog.daemon = True
        watchdog.start()
        raise KeyboardInterrupt

    def _leave(self) -> None:
        if not self.is_told:
            cursor = _SHOW_CURSOR if os.isatty(2) else ""
            os.write(2, f"{cursor}error: Interrupted.\n".encode())
        os._exit(ExitCode.INTERRUPTED)


@contextmanager
def orderly_stop(stop: Stop) -> Iterator[None]:
    """While this is open, the signals that ask a process to end raise KeyboardInterrupt, once.

    Signals that whoever started the process had ignored (`nohup`, a background job) stay ignored. After an interruption
    all are: the process is about to say so and end, and another Ctrl-C would only spoil its exit code.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # no SIGHUP on Windows
            if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        stop.is_told = True
        for number, handler in before.items():
            # Ignored, not handled: the interpreter drops handlers when it shuts down, and then a signal would kill it.
            signal.signal(number, signal.SIG_IGN if stop.came else handler)
