"""CSV traces: Azure's (2023 and 2024) and BurstGPT."""

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from sarathi_tune.errors import DocumentError
from sarathi_tune.workload.trace import TraceRow
from sarathi_tune.workload.traces.source import HELP, Line, numbered_lines

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


def read_azure(path: Path) -> Iterator[TraceRow]:
    """`TIMESTAMP,ContextTokens,GeneratedTokens`, with times of day such as 2023-11-16 18:15:46.6805900 or
    2024-05-10 00:00:00.009930+00:00."""
    for line in _lines(path, AZURE):
        yield TraceRow(_time_s(line, AZURE[0]), line.tokens(AZURE[1]), line.tokens(AZURE[2]))


def read_burstgpt(path: Path) -> Iterator[TraceRow]:
    """`Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, in seconds. A request that failed has no
    response tokens."""
    for line in _lines(path, BURSTGPT):
        yield TraceRow(line.number(BURSTGPT[0]), line.tokens(BURSTGPT[1]), line.tokens(BURSTGPT[2]))


def columns_of(header: str) -> tuple[str, ...]:
    """The names in the first line of a CSV file."""
    return tuple(name.strip() for name in next(csv.reader([header]), []))


def _lines(path: Path, needed: tuple[str, ...]) -> Iterator[Line]:
    numbered = numbered_lines(path)
    first = next(numbered, None)
    names = columns_of(first[1]) if first else ()
    for name in needed:
        if name not in names:
            raise DocumentError(f"Trace {path}, line 1: the column {name!r} is missing; {HELP}.")
    for number, text in numbered:
        values = next(csv.reader([text]))
        if len(values) != len(names):
            raise DocumentError(
                f"Trace {path}, line {number}: there are {len(values)} values for {len(names)} columns; {HELP}."
            )
        fields = {name: value.strip() for name, value in zip(names, values, strict=True)}
        yield Line(path, f"line {number}", fields)


def _time_s(line: Line, field: str) -> float:
    text = str(line.fields[field])
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise line.error(
            field, f"must be a time such as 2023-11-16 18:15:46.6805900, not {line.shown(field)}"
        ) from None
    # without a zone it is UTC: this machine's own zone may have nights of 23 and 25 hours
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
