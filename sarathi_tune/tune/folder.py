"""Where a run keeps what it has: the journal of measured steps, the profile, each finished verification, the result."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.measure.documents import read_json, write_json
from sarathi_tune.notices import Notice
from sarathi_tune.report.codec import from_json, to_json
from sarathi_tune.report.result import Run

JOURNAL, STATE, PROFILE, RESULT = "journal.jsonl", "state.json", "profile.json", "result.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's directory."""

    path: Path
    is_resumed: bool = False

    @property
    def journal(self) -> Path:
        """Every measured step, as it was measured."""
        return self.path / JOURNAL

    @property
    def profile(self) -> Path:
        """The profile document."""
        return self.path / PROFILE

    @property
    def result(self) -> Path:
        """The result document; a run that has one is finished."""
        return self.path / RESULT

    def remove_if_empty(self) -> bool:
        """Remove the directory if nothing was written into it; whether it was."""
        try:
            self.path.rmdir()
        except OSError:
            return False
        return True

    def recall(self, name: str, measure: Callable[[], float]) -> float:
        """A number that an interrupted run measured, or a fresh one that is kept: resuming must not decide anew what
        was decided."""
        path = self.path / STATE
        known = read_json(path, "state of the run") if path.exists() else {}
        if not isinstance(known, dict) or not isinstance(known.get(name), float):
            known = {**(known if isinstance(known, dict) else {}), name: measure()}
            write_json(path, known, "state of the run")
        return float(known[name])

    def save_run(self, key: Mapping[str, Any], run: Run, notices: Sequence[Notice]) -> None:
        """Keep a finished verification run and what there was to say about it, so that resuming doesn't repeat it."""
        told = [notice.as_dict() for notice in notices]
        write_json(self._run_path(key), {"key": dict(key), "run": to_json(run), "notices": told}, "verification run")

    def saved_run(self, key: Mapping[str, Any]) -> tuple[Run, tuple[Notice, ...]] | None:
        """The verification run of exactly this key, if it was finished before an interruption."""
        path = self._run_path(key)
        if not self.is_resumed or not path.exists():
            return None
        document = read_json(path, "verification run")
        if not isinstance(document, dict) or document.get("key") != json.loads(json.dumps(key)):
            return None
        told = document.get("notices")
        if not isinstance(told, list):
            return None
        notices = tuple(from_json(Notice, notice, f"notices[{index}]") for index, notice in enumerate(told))
        return from_json(Run, document.get("run"), "run"), notices

    def _run_path(self, key: Mapping[str, Any]) -> Path:
        return self.path / f"verify-{key['role']}-{key['budget_tokens']}-{key['rate_per_s']:.4g}.json"


def new_folder(out_dir: Path, model: str) -> RunFolder:
    """A folder of its own for a new run, named by time and model. Raises UsageError when it can't be made."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in Path(model).name) or "model"
    for attempt in range(100):
        path = out_dir / (f"{stamp}-{name}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"Can't make {path}: {error.strerror}; choose another place with --out.") from error
        return RunFolder(path)
    raise UsageError(f"Can't make a folder for the run in {out_dir}: too many exist already.")


def interrupted_folder(out_dir: Path) -> RunFolder:
    """The folder of the latest run that has a journal and no result. Raises DocumentError when there is none."""
    candidates = sorted(path.parent for path in out_dir.glob(f"*/{JOURNAL}") if not (path.parent / RESULT).exists())
    if not candidates:
        raise DocumentError(f"There is no interrupted run in {out_dir}: start without --resume, or give its --out.")
    return RunFolder(candidates[-1], is_resumed=True)
