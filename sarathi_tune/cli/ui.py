"""Progress on stderr: bars with an estimate on a terminal, a line now and then everywhere else."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from sarathi_tune.cli.consoles import talk_console
from sarathi_tune.notices import Notice
from sarathi_tune.report.progress import Phase, SilentUi, Ui

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: At most one plain line in so many seconds: a CI log shouldn't be longer than the result.
SPARSE_S = 10.0


def make_ui(*, quiet: bool) -> Ui:
    """The progress that suits stderr."""
    if quiet:
        return SilentUi()
    console = talk_console()
    return TerminalUi(console) if console.is_terminal else PlainUi(console)


#: From this width on there is room for a long bar.
WIDE = 100


class TerminalUi:
    """One live bar for the phase that runs; a line stays for each that has ended."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """A bar with count, time gone and time to go; it disappears and leaves the time that the phase took."""
        started_s = time.monotonic()
        with _bar(self._console, is_counted=total is not None) as progress:
            yield _BarPhase(progress, progress.add_task(name, total=total, now=""))
        took = time.monotonic() - started_s
        self._console.print(Text(f"{name}: {took:.0f} s", style="dim"))

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(Text(text))

    def notice(self, notice: Notice) -> None:
        """A yellow line above the bar; the remedy comes with the result."""
        self._console.print(Text(notice.cause, style="yellow" if notice.severity == "warning" else "dim"))


def _bar(console: Console, *, is_counted: bool) -> "Progress":
    """A bar with the time left; what is being done right now gives way first where the terminal is narrow."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    name = TextColumn("{task.description}", table_column=Column(no_wrap=True))
    now = TextColumn("{task.fields[now]}", style="dim", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    if not is_counted:
        return Progress(name, now, TimeElapsedColumn(), console=console, transient=True, expand=True)
    columns: list[ProgressColumn] = [
        name,
        BarColumn(bar_width=18 if console.width < WIDE else 40),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        TextColumn("left", style="dim", table_column=Column(no_wrap=True)),
        now,
    ]
    return Progress(*columns, console=console, transient=True, expand=True)


class _BarPhase:
    def __init__(self, progress: "Progress", task: "TaskID") -> None:
        self._progress = progress
        self._task = task

    def advance(self, count: int = 1) -> None:
        self._progress.advance(self._task, count)

    def describe(self, text: str) -> None:
        self._progress.update(self._task, now=text)

    def expect(self, total: int) -> None:
        self._progress.update(self._task, total=total)


class PlainUi:
    """Lines for a log: when a phase begins, at most every ten seconds while it lasts, and when it ends."""

    def __init__(self, console: Console, now_s: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now_s = now_s

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """Say that `name` begins and, when it ended well, how long it took."""
        started_s = self._now_s()
        self._say(f"{name}: {total} to do" if total else f"{name}: begins")
        yield _PlainPhase(name, total, self._say, self._now_s)
        self._say(f"{name}: done in {self._now_s() - started_s:.0f} s")

    def note(self, text: str) -> None:
        """One line."""
        self._say(text)

    def notice(self, notice: Notice) -> None:
        """One line; the remedy comes with the result."""
        self._say(f"{notice.severity}: {notice.cause}")

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class _PlainPhase:
    def __init__(self, name: str, total: int | None, say: Callable[[str], None], now_s: Callable[[], float]) -> None:
        self._name = name
        self._total = total
        self._say = say
        self._now_s = now_s
        self._started_s = self._said_s = now_s()
        self._done = 0

    def advance(self, count: int = 1) -> None:
        self._done += count
        now_s = self._now_s()
        if now_s - self._said_s < SPARSE_S:
            return
        self._said_s = now_s
        self._say(f"{self._name}: {self._progress(now_s)}")

    def describe(self, text: str) -> None:
        """Too much for a log."""

    def expect(self, total: int) -> None:
        self._total = total

    def _progress(self, now_s: float) -> str:
        if not self._total or not self._done:
            return f"{self._done} done"
        left_s = (now_s - self._started_s) / self._done * (self._total - self._done)
        return f"{self._done}/{self._total}, about {max(0.0, left_s):.0f} s left"
