"""JSON documents that people hand us and that we leave behind: read with an error that says what is wrong, written
whole or not at all."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sarathi_tune.errors import DocumentError, UsageError


def read_json(path: Path, what: str) -> Any:
    """The parsed document at `path`; `what` names it in errors ("profile").

    Raises DocumentError when the file is missing, unreadable, empty, not UTF-8 or not JSON. NaN and Infinity, which
    are not JSON but which Python writes, are let through for the caller to refuse by name.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"Can't read the {what} {path}: {error.strerror}.") from error
    if not content.strip():
        raise DocumentError(f"The {what} {path} is empty: write it again or give another file.")
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"The {what} {path} is not UTF-8 text (byte {error.start}): give a JSON file, not compressed or binary."
        ) from error
    except json.JSONDecodeError as error:
        raise DocumentError(
            f"The {what} {path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits, and brackets nested thousands deep.
        raise DocumentError(f"The {what} {path} is not JSON that can be read: {error}.") from error


def check_version(version: object, newest: int, what: str) -> None:
    """Raises DocumentError for a version that isn't one, or that is above `newest`, the last that is read here."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise DocumentError(f"version must be a whole number from 1, not {version!r}.")
    if version > newest:
        raise DocumentError(
            f"the {what} has version {version} and this sarathi-tune reads up to version {newest}: "
            "upgrade sarathi-tune."
        )


def write_json(path: Path, document: Mapping[str, Any], what: str) -> None:
    """Write the document atomically, one line per field and per row of a table. NaN and infinities become null: they
    aren't JSON.

    Raises UsageError when the file can't be written; what was there before is then still there.
    """
    fields = (f"{_compact(name)}: {_table(value)}" for name, value in document.items())
    write_text_atomically(path, "{\n  " + ",\n  ".join(fields) + "\n}\n", what)


def write_text_atomically(path: Path, text: str, what: str) -> None:
    """Write to a temporary file beside `path` and rename it, so that a reader sees the old file or the new one, whole.

    Creates missing directories. Raises UsageError when that isn't possible.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise _unwritable(path, what, error) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner reads; a document gets the usual rights.
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(path, what, error) from error
        raise


def _unwritable(path: Path, what: str, error: OSError) -> UsageError:
    return UsageError(f"Can't write the {what} to {path}: {error.strerror}. Choose another place.")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def _table(value: Any) -> str:
    if isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
        return "[\n    " + ",\n    ".join(_compact(row) for row in value) + "\n  ]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
