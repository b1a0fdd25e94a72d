"""The real clock: monotonic, and awake on time."""

import time

#: `time.sleep` may wake late by about this much; the rest is waited for actively.
_SPIN_S = 0.0005


class SystemClock:
    """Seconds of `time.perf_counter`."""

    def now_s(self) -> float:
        """The current time in seconds, monotonic, with an arbitrary zero."""
        return time.perf_counter()

    def sleep_until_s(self, when_s: float) -> None:
        """Return at `when_s`, or at once if it has passed: sleeps, and spins through the last half millisecond."""
        left_s = when_s - time.perf_counter()
        if left_s > _SPIN_S:
            time.sleep(left_s - _SPIN_S)
        while time.perf_counter() < when_s:
            pass
