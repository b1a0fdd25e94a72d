"""How a process ended, in words, and who heeds the signals that ask for an end."""

import signal

#: What to do about "was killed (SIGKILL)".
OUT_OF_MEMORY_KILL = "If nobody did that, the kernel did, because memory ran out: look at dmesg."


def how_it_ended(return_code: int | None) -> str:
    """The end of a sentence about a process. `return_code` is negative for a signal, as in `subprocess`, and None when
    nobody could read it."""
    if return_code == -signal.SIGKILL:
        return "was killed (SIGKILL)"
    if return_code is not None and return_code < 0:
        return f"was ended by {_signal_name(-return_code)}"
    return f"ended with exit code {'unknown' if return_code is None else return_code}"


def leave_signals_to_the_parent() -> None:
    """A child that ends with its parent ignores what asks for an end: a terminal and `timeout` send that to all
    processes of a group, and the child would be gone before the parent has asked it for what it has."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # no SIGHUP on Windows
        if number is not None:
            signal.signal(number, signal.SIG_IGN)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
