"""A trace file as numbered lines, and the fields of a line. Every error names file, line and field."""

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr  # bounded: a field may hold anything
from typing import Any

from sarathi_tune.errors import DocumentError
from sarathi_tune.units import MAX_TOKENS

HELP = "docs/workloads.md describes the formats"
#: No field of a trace is longer; a line that is comes from another kind of file.
_MAX_LINE = 64 << 20


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that aren't empty, with their numbers; `.gz` is unpacked. Raises DocumentError."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline=None) as file:
            number = 0
            while line := file.readline(_MAX_LINE):
                number += 1
                if len(line) >= _MAX_LINE:
                    raise DocumentError(f"Trace {path}, line {number} is longer than {_MAX_LINE >> 20} MiB; {HELP}.")
                if stripped := line.strip():
                    yield number, stripped
    except UnicodeDecodeError as error:
        raise DocumentError(f"Trace {path} can't be read: it is no UTF-8 text.") from error
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DocumentError(f"Trace {path} can't be read: {reason}.") from error


@dataclass(frozen=True, slots=True)
class Line:
    """A request as its file has it: the fields, and where they stand."""

    path: Path
    place: str
    fields: Mapping[str, Any]

    def error(self, field: str, what: str) -> DocumentError:
        """The error about a field."""
        return DocumentError(f"Trace {self.path}, {self.place}: field {field!r} {what}; {HELP}.")

    def tokens(self, field: str) -> int:
        """A whole number of tokens, 0 included."""
        value = self.number(field)
        if value != int(value) or value > MAX_TOKENS:
            raise self.error(
                field, f"must be a whole number of tokens of at most {MAX_TOKENS}, not {self.shown(field)}"
            )
        return int(value)

    def number(self, field: str) -> float:
        """A number that isn't negative."""
        value = self.fields.get(field)
        if value is None or value == "":
            raise self.error(field, "is missing")
        try:
            number = float(value) if not isinstance(value, bool | list | dict) else -1.0
        except (ValueError, OverflowError):
            number = -1.0
        if not 0 <= number < float("inf"):
            raise self.error(field, f"must be a number that is not negative, and not {self.shown(field)}")
        return number

    def shown(self, field: str) -> str:
        """The field's value, shortened."""
        return repr(self.fields.get(field))
