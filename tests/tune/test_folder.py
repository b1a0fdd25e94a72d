"""Where a run keeps what it has."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.notices import machine_busy, machine_drifted
from sarathi_tune.tune.folder import RunFolder, interrupted_folder, new_folder
from tests.report.examples import recommended

RUN = recommended().runs[0]
KEY = {"role": "recommended", "budget_tokens": 256, "rate_per_s": 1.5, "seed": 0, "scheduler": "sarathi"}


def interrupted(out: Path, name: str, *, finished: bool = False) -> Path:
    folder = out / name
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("{}\n")
    if finished:
        (folder / "result.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("model", "ending"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("/models/My Model:v1/", "My-Model-v1"),
        ("../..", ".."),
        ("模型", "模型"),
        (".", "model"),
    ],
)
def test_a_new_folder_is_named_by_time_and_model(tmp_path: Path, model: str, ending: str) -> None:
    folder = new_folder(tmp_path / "a" / "b", model)
    assert folder.path.is_dir()
    assert folder.path.parent == tmp_path / "a" / "b"
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{re.escape(ending)}", folder.path.name)
    assert not folder.is_resumed


def test_two_runs_in_the_same_second_have_two_folders(tmp_path: Path) -> None:
    paths = {new_folder(tmp_path, "m").path for _ in range(5)}
    assert len(paths) == 5


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another place with --out"):
        new_folder(tmp_path / "file", "m")


def test_the_latest_interrupted_run_is_resumed(tmp_path: Path) -> None:
    interrupted(tmp_path, "20260101-000000-a")
    wanted = interrupted(tmp_path, "20260101-000001-a")
    interrupted(tmp_path, "20260101-000002-a", finished=True)
    (tmp_path / "20260101-000003-a").mkdir()  # nothing was measured
    assert interrupted_folder(tmp_path) == RunFolder(wanted, is_resumed=True)


def test_nothing_is_resumed_where_nothing_is(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(DocumentError, match="no interrupted run in"):
            interrupted_folder(place)
    interrupted(tmp_path, "20260101-000002-a", finished=True)
    with pytest.raises(DocumentError, match="start without --resume"):
        interrupted_folder(tmp_path)


def test_an_empty_folder_goes_away_and_a_used_one_stays(tmp_path: Path) -> None:
    empty, used = new_folder(tmp_path, "m"), RunFolder(interrupted(tmp_path, "used"))
    assert empty.remove_if_empty()
    assert not empty.path.exists()
    assert not used.remove_if_empty()
    assert used.journal.exists()


def test_a_finished_verification_is_taken_from_a_resumed_folder_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    said = (machine_busy(1.9, 2, 0.8), machine_drifted(256, 1.1, 0.9))
    folder.save_run(KEY, RUN, said)
    assert folder.saved_run(KEY) is None
    assert RunFolder(tmp_path, is_resumed=True).saved_run(KEY) == (RUN, said)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"scheduler": "prefill-first"}, {"rate_per_s": 1.5001}, {"budget_tokens": 257}, {"more": 1}]
)
def test_a_verification_of_something_else_is_not_taken(tmp_path: Path, change: dict[str, object]) -> None:
    folder = RunFolder(tmp_path, is_resumed=True)
    folder.save_run(KEY, RUN, ())
    assert folder.saved_run(KEY | change) is None


def test_two_verifications_do_not_overwrite_each_other(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, is_resumed=True)
    other = KEY | {"role": "control", "budget_tokens": 2048}
    folder.save_run(KEY, RUN, ())
    folder.save_run(other, replace(RUN, role="control", budget_tokens=2048), ())
    saved = folder.saved_run(KEY), folder.saved_run(other)
    assert saved == ((RUN, ()), (replace(RUN, role="control", budget_tokens=2048), ()))


def test_what_was_measured_once_is_recalled(tmp_path: Path) -> None:
    fresh = RunFolder(tmp_path)
    assert fresh.recall("loop_ms", lambda: 0.25) == 0.25
    resumed = RunFolder(tmp_path, is_resumed=True)
    assert resumed.recall("loop_ms", lambda: pytest.fail("it is known")) == 0.25
    assert resumed.recall("other", lambda: 3.0) == 3.0
    assert resumed.recall("loop_ms", lambda: pytest.fail("it is still known")) == 0.25
    assert RunFolder(tmp_path / "next").recall("loop_ms", lambda: 0.5) == 0.5, "a new run measures anew"


@pytest.mark.parametrize("content", ["[]", '{"loop_ms": "fast"}', '{"loop_ms": null}', "{}"])
def test_a_state_without_the_number_is_measured_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    folder = RunFolder(tmp_path, is_resumed=True)
    assert folder.recall("loop_ms", lambda: 0.75) == 0.75
    assert json.loads((tmp_path / "state.json").read_text())["loop_ms"] == 0.75
