"""Results on disk: written whole or not at all, read with an error that names the field."""

import tempfile
from pathlib import Path
from typing import Any

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.measure.documents import read_json, write_json
from sarathi_tune.report.codec import from_json, to_json
from sarathi_tune.report.result import SCHEMA, SCHEMA_VERSION, Result


def result_as_dict(result: Result) -> dict[str, Any]:
    """The result document, schema and version first."""
    return {"schema": SCHEMA, "version": SCHEMA_VERSION, **to_json(result)}


def result_from_dict(document: object) -> Result:
    """A result from its parsed document. Raises DocumentError for anything else, a newer version included."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise DocumentError(f'this is no result, which has "schema": "{SCHEMA}".')
    version = document.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise DocumentError(f"version must be a whole number from 1, not {version!r}.")
    if version > SCHEMA_VERSION:
        raise DocumentError(
            f"the result has version {version} and this sarathi-tune reads up to version {SCHEMA_VERSION}: "
            "upgrade sarathi-tune."
        )
    return from_json(Result, document, "result")


def save_result(result: Result, path: Path) -> None:
    """Write the document. Raises UsageError when the place can't be written."""
    write_json(path, result_as_dict(result), "result")


def load_result(path: Path) -> Result:
    """Read a document. Raises DocumentError with the path in its text."""
    document = read_json(path, "result")
    try:
        return result_from_dict(document)
    except DocumentError as error:
        raise DocumentError(f"{path}: {error}") from error


def check_writable(directory: Path) -> None:
    """Make `directory` and prove that a file can be made in it: before the minutes of measuring, not after.

    Raises UsageError.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"Can't write into {directory}: {error.strerror}; choose another place.") from error
