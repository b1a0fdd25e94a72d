"""Errors become one sentence and an exit code here, and nowhere else."""

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, ParamSpec

import typer
from rich.text import Text

from sarathi_tune.cli.consoles import talk_console
from sarathi_tune.errors import ExitCode, SarathiTuneError

P = ParamSpec("P")

#: A defect of ours (EX_SOFTWARE of sysexits.h), and a reader of stdout that went away (128 + SIGPIPE).
DEFECT = 70
READER_GONE = 141

DEBUG_VARIABLE = "SARATHI_TUNE_DEBUG"


def edge(command: Callable[P, ExitCode | None]) -> Callable[P, None]:
    """Run a command and end the process with its exit code; None means 0."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
        except SarathiTuneError as error:
            _end(str(error), error.exit_code)
        except KeyboardInterrupt:
            _end("Interrupted.", ExitCode.INTERRUPTED)
        except BrokenPipeError:
            _end_without_reader()
        except MemoryError:
            _end(
                "There is not enough memory for this; choose a smaller model or a shorter context.",
                ExitCode.OUT_OF_MEMORY,
            )
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            _end_defect(error)
        if code:
            raise typer.Exit(int(code))

    return guarded


def _end(message: str, code: int) -> NoReturn:
    talk_console().print(Text(f"error: {message}", style="red"), soft_wrap=True)
    raise typer.Exit(int(code))


def _end_defect(error: Exception) -> NoReturn:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error, file=sys.stderr)
    place = traceback.extract_tb(error.__traceback__)[-1]
    _end(
        f"This is a defect of sarathi-tune, not of your input: {type(error).__name__}: {error} "
        f"({place.name}, line {place.lineno}); run again with {DEBUG_VARIABLE}=1 and report the traceback.",
        DEFECT,
    )


def _end_without_reader() -> NoReturn:
    """Nobody reads stdout any more (`| head`). Point it elsewhere, or the interpreter complains when it flushes."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    raise typer.Exit(READER_GONE)
