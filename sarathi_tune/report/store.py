"""Results on their way to disk: written whole or not at all."""

import tempfile
from pathlib import Path
from typing import Any

from sarathi_tune.errors import UsageError
from sarathi_tune.measure.documents import write_json
from sarathi_tune.report.codec import to_json
from sarathi_tune.report.result import SCHEMA, SCHEMA_VERSION, Result


def result_as_dict(result: Result) -> dict[str, Any]:
    """The result document, schema and version first."""
    return {"schema": SCHEMA, "version": SCHEMA_VERSION, **to_json(result)}


def save_result(result: Result, path: Path) -> None:
    """Write the document. Raises UsageError when the place can't be written."""
    write_json(path, result_as_dict(result), "result")


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
