"""Where data goes, and where everything else goes."""

import sys
from typing import NoReturn

from rich.console import Console

#: Narrower than this no table of ours can be read; the terminal may wrap it.
LEAST_WIDTH = 40


class DataConsole(Console):
    """A console whose reader may go away (`| head`): that is an error for the edge, which knows the exit code."""

    def on_broken_pipe(self) -> NoReturn:
        """Called by rich while it handles the BrokenPipeError, which goes on from here."""
        raise BrokenPipeError


def data_console() -> Console:
    """stdout: the result. Plain text when it isn't a terminal."""
    return _wide_enough(DataConsole(file=sys.stdout, highlight=False, markup=False, emoji=False))


def talk_console() -> Console:
    """stderr: progress, notes and errors."""
    return _wide_enough(Console(file=sys.stderr, highlight=False, markup=False, emoji=False))


def _wide_enough(console: Console) -> Console:
    """At least LEAST_WIDTH: some terminals say that they have no columns, and then nothing at all would be shown."""
    if console.width < LEAST_WIDTH:
        console.width = LEAST_WIDTH
    return console


def write_data(text: str) -> None:
    """A document on stdout, as it is: `--json -`."""
    sys.stdout.write(text)
    sys.stdout.flush()
