"""How a process ended, in words."""

import signal

OUT_OF_MEMORY_KILL = "If nobody did that, the kernel did, because memory ran out: look at dmesg."


def how_it_ended(return_code: int | None) -> str:
    """The end of a sentence about a process. `return_code` is negative for a signal, as in `subprocess`, and None when
    nobody could read it."""
    if return_code == -signal.SIGKILL:
        return "was killed (SIGKILL)"
    if return_code is not None and return_code < 0:
        return f"was ended by {_signal_name(-return_code)}"
    return f"ended with exit code {'unknown' if return_code is None else return_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
