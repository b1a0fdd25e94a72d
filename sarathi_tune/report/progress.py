"""How a long run tells that it is alive, without knowing who listens: a terminal, a log file, or nobody."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from sarathi_tune.notices import Notice


class Phase(Protocol):
    """One part of a run, open while it lasts."""

    def advance(self, count: int = 1) -> None:
        """`count` more of the phase's `total` are done."""
        ...

    def describe(self, text: str) -> None:
        """What is being done right now, in a few words: `8x1024+504@0`."""
        ...

    def expect(self, total: int) -> None:
        """There are `total` units of work after all."""
        ...


class Ui(Protocol):
    """Where a run reports to. Nothing that goes through here is data: a result is returned, never printed."""

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[Phase]:
        """Open a phase of `total` units of work (None: unknown). Phases don't overlap."""
        ...

    def note(self, text: str) -> None:
        """One line worth knowing while waiting, such as the first number that is certain."""
        ...

    def notice(self, notice: Notice) -> None:
        """A warning as soon as it is known. It belongs into the result as well."""
        ...


class SilentPhase:
    """Counts, and says nothing."""

    def __init__(self) -> None:
        self.done = 0

    def advance(self, count: int = 1) -> None:
        """Count."""
        self.done += count

    def describe(self, text: str) -> None:
        """Nobody listens."""

    def expect(self, total: int) -> None:
        """Nobody listens."""


class SilentUi:
    """For `--quiet`, for tests, and for use as a library."""

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:  # noqa: ARG002
        """A phase that nobody sees."""
        yield SilentPhase()

    def note(self, text: str) -> None:
        """Nobody listens."""

    def notice(self, notice: Notice) -> None:
        """Nobody listens; the result holds the notice."""
