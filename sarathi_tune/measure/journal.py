"""The journal of a run: one JSON line per timed step, written at once, so that Ctrl-C or a crash loses nothing.

The first line says what is being measured: `identity` (model, device, threads, question, seed), whose fingerprint must
match on resuming, and the design, which a resumed run takes from here: a second probe would choose other shapes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from sarathi_tune.errors import DocumentError, SarathiTuneError, UsageError
from sarathi_tune.measure.design import Design, Label
from sarathi_tune.measure.samples import Collection
from sarathi_tune.measure.shapes import Shape, parse_shape

SCHEMA = "sarathi-tune/journal"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a journal held: the design, the samples, and whether measuring had come to its end."""

    design: Design
    collection: Collection
    complete: bool


class Journal:
    """An open journal. Use as a context manager; every `add_...` is on disk when it returns."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path = path
        self._file = file

    @classmethod
    def create(cls, path: Path, identity: Mapping[str, Any], design: Design) -> Self:
        """Begin a journal, in place of an older one. Raises UsageError when the file can't be written."""
        journal = cls(path, _open(path, "w"))
        journal._write(
            {
                "schema": SCHEMA,
                "version": SCHEMA_VERSION,
                "fingerprint": fingerprint(identity),
                "identity": dict(identity),
                "design": design.as_dict(),
            }
        )
        return journal

    @classmethod
    def resume(cls, path: Path, identity: Mapping[str, Any]) -> tuple[Self, Resumed]:
        """Go on with a journal of the same identity; a line that was cut off in the writing is dropped.

        Raises DocumentError for a file that is no journal or one of another run, and UsageError when it can't be
        written.
        """
        lines, whole_bytes = _read(path)
        resumed = _replay(path, lines, identity)
        file = _open(path, "r+")
        file.seek(whole_bytes)
        file.truncate()
        return cls(path, file), resumed

    def add_sample(self, round_index: int, shape: Shape, label: Label, time_ms: float) -> None:
        """One timed step."""
        self._write({"round": round_index, "shape": str(shape), "label": label, "ms": time_ms})

    def add_missing(self, shape: Shape, reason: str) -> None:
        """A shape that can't be timed, and why."""
        self._write({"shape": str(shape), "missing": reason})

    def add_conditions(self, round_index: int, conditions: Mapping[str, Any]) -> None:
        """What else happened during a round."""
        self._write({"round": round_index, "conditions": dict(conditions)})

    def complete(self) -> None:
        """Measuring has come to its end: resuming has nothing left to do."""
        self._write({"complete": True})

    def close(self) -> None:
        """Close the file; what was written stays."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise UsageError(f"Can't write the journal {self.path}: {error.strerror}.") from error


def fingerprint(identity: Mapping[str, Any]) -> str:
    """A short hash of what makes two runs the same, independent of the order of its fields."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _open(path: Path, mode: str) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: Any = path.open(mode, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"Can't write the journal {path}: {error.strerror}. Choose another place.") from error
    opened: TextIO = file
    return opened


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records up to the first torn line, and how many bytes they take."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"Can't resume from {path}: {error.strerror}. Start without --resume.") from error
    records, whole_bytes = [], 0
    for line in content.splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(record, dict):
            break
        records.append(record)
        whole_bytes += len(line)
    if content[whole_bytes:].count(b"\n") > 1:
        raise DocumentError(f"The journal {path} is damaged at byte {whole_bytes}: start without --resume.")
    return records, whole_bytes


def _replay(path: Path, records: list[dict[str, Any]], identity: Mapping[str, Any]) -> Resumed:
    header = records[0] if records else {}
    if header.get("schema") != SCHEMA or not isinstance(header.get("identity"), dict):
        raise DocumentError(f"{path} is not a journal of sarathi-tune: start without --resume.")
    if header.get("version") != SCHEMA_VERSION:
        raise DocumentError(
            f"The journal {path} has version {header.get('version')} and this sarathi-tune reads version "
            f"{SCHEMA_VERSION}: start without --resume."
        )
    if header.get("fingerprint") != fingerprint(identity):
        raise DocumentError(
            f"The journal {path} is of another run ({_difference(header['identity'], identity)}): "
            "give the same options as then, or start without --resume."
        )
    try:
        design = Design.from_dict(header["design"])
        collection, complete = _collect(records[1:])
    except (KeyError, TypeError, ValueError, SarathiTuneError) as error:
        raise DocumentError(f"The journal {path} is damaged ({error}): start without --resume.") from error
    return Resumed(design, collection, complete)


def _collect(records: list[dict[str, Any]]) -> tuple[Collection, bool]:
    collection, complete = Collection(), False
    for record in records:
        if "ms" in record:
            collection.add(int(record["round"]), parse_shape(record["shape"]), record["label"], float(record["ms"]))
        elif "missing" in record:
            collection.missing[parse_shape(record["shape"])] = str(record["missing"])
        elif "conditions" in record:
            collection.conditions.append(record["conditions"])
        complete = complete or bool(record.get("complete"))
    return collection, complete


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first field in which two identities differ, for the user."""
    # Through JSON and back, as the one from the file went.
    current = json.loads(json.dumps(now))
    name = next((name for name in (*then, *current) if then.get(name) != current.get(name)), None)
    return "its first line was changed" if name is None else f"{name} was {then.get(name)}, is {current.get(name)}"
