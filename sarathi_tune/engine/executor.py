"""The one thing the engine asks of whatever computes a step, and of whatever tells the time.

Three executors exist: the torch runner (`runtime.runner`), the step model under a virtual clock (`stepmodel.virtual`),
and the test double. The engine can't tell them apart.
"""

from typing import Protocol

from sarathi_tune.engine.plan import StepPlan


class Clock(Protocol):
    """Seconds on some monotonic clock; real or virtual."""

    def now_s(self) -> float:
        """The current time in seconds."""
        ...

    def sleep_until_s(self, when_s: float) -> None:
        """Return at `when_s` or as soon as possible after it; at once if it has passed."""
        ...


class Executor(Protocol):
    """Computes steps. Returns only when the device has finished, so that the caller's clock times the execution."""

    def execute(self, plan: StepPlan) -> list[int]:
        """Compute every slice of `plan` and return one token id per slice with `samples`, in the plan's order."""
        ...
