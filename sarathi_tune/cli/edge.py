"""Errors become one sentence and an exit code here, and nowhere else."""

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, ParamSpec

import typer
from rich.text import Text

from sarathi_tune.cli.consoles import talk_console
from sarathi_tune.cli.signals import Stop, orderly_stop
from sarathi_tune.errors import ExitCode, SarathiTuneError

P = ParamSpec("P")

#: A defect of ours (EX_SOFTWARE of sysexits.h), and a reader of stdout that went away (128 + SIGPIPE).
DEFECT = 70
READER_GONE = 141
_STDOUT_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})

#: A message that is longer quotes something that nobody wants to read whole.
LONGEST_MESSAGE = 800

DEBUG_VARIABLE = "SARATHI_TUNE_DEBUG"


def edge(command: Callable[P, ExitCode | None]) -> Callable[P, None]:
    """Run a command and end the process with its exit code; None means 0."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        stop = Stop()
        try:
            with orderly_stop(stop):
                code = command(*args, **kwargs)
                sys.stdout.flush()
        except SarathiTuneError as error:
            _end(str(error), error.exit_code)
        except KeyboardInterrupt:
            _end("Interrupted.", ExitCode.INTERRUPTED)
        except OSError as error:
            raise typer.Exit(unwritten(error)) from None
        except MemoryError:
            _end(
                "There is not enough memory for this; choose a smaller model or a shorter context.",
                ExitCode.OUT_OF_MEMORY,
            )
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if stop.came:  # somebody swallowed the KeyboardInterrupt and failed for want of what it had cut short
                _end("Interrupted.", ExitCode.INTERRUPTED)
            _say_defect(error)
            raise typer.Exit(DEFECT) from error
        if code:
            raise typer.Exit(int(code))

    return guarded


def _end(message: str, code: int) -> NoReturn:
    _say(message)
    raise typer.Exit(int(code))


def _say(message: str) -> None:
    with suppress(OSError):  # stderr can't be written either: the exit code still tells
        talk_console().print(Text(f"error: {_one_line(message)}", style="red"), soft_wrap=True)


def _one_line(message: str) -> str:
    """The message as something that a terminal can show: it quotes files and flags, which may hold anything."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in message)
    if len(shown) <= LONGEST_MESSAGE:
        return shown
    half = LONGEST_MESSAGE // 2
    return f"{shown[:half]}[...]{shown[-half:]}"


def _say_defect(error: Exception) -> None:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error, file=sys.stderr)
    place = traceback.extract_tb(error.__traceback__)[-1]
    _say(
        f"This is a defect of sarathi-tune, not of your input: {type(error).__name__}: {error} "
        f"({place.name}, line {place.lineno}); run again with {DEBUG_VARIABLE}=1 and report the traceback."
    )


def unwritten(error: OSError) -> int:
    """The exit code when stdout can't be written: silently when nobody reads it any more (`| head`), else with the
    reason. Any other failure of the operating system that got this far is a defect."""
    is_reader_gone = isinstance(error, BrokenPipeError)
    if not is_reader_gone and error.errno not in _STDOUT_TROUBLE:
        _say_defect(error)
        return DEFECT
    # Elsewhere with what is still buffered, or the interpreter complains when it flushes.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if is_reader_gone:
        return READER_GONE
    _say(f"Can't write to stdout: {error.strerror}.")
    return ExitCode.USAGE


def open_missing_streams() -> None:
    """Give a closed stdin, stdout or stderr (`>&-`) the null device. Left free, its number would go to the next file
    that is opened, and whatever is written to stdout would end up there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
