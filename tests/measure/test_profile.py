"""The profile document: written, read back, and refused with a sentence that names what is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.measure.profile import (
    SCHEMA_FILE,
    Profile,
    Sample,
    load_profile,
    profile_as_dict,
    profile_from_dict,
    save_profile,
)
from sarathi_tune.measure.shapes import Shape

PAGE = Path(__file__).parents[2] / "docs" / "profile.md"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))

FULL = Profile(
    samples=(
        Sample(Shape(8, 1024), (18.5, 18.25, 19.125)),
        Sample(Shape(chunk=512), (150.0,)),
        Sample(Shape(8, 1024, 504), (69.1, 70.2), held_out=True),
        Sample(Shape(chunk=65536), missing="out of memory"),
    ),
    machine={"name": "AMD EPYC, 2 threads"},
    model={"name": "smollm2-135m"},
    engine={"attention": "sdpa"},
    conditions=({"round": 1, "other_cores": 0.02},),
    notices=({"code": "noise-high", "severity": "warning", "cause": "c", "remedy": "r"},),
    noise=0.011,
    tile_tokens=32,
    graph_sizes=(8, 16),
    max_model_len=8192,
    source="sarathi-tune 0.1.0",
    created="2026-01-02T03:04:05+00:00",
)


def document(**changes: Any) -> dict[str, Any]:
    """A small valid document with some fields changed; None removes a field."""
    fields = {
        "schema": "sarathi-tune/profile",
        "version": 1,
        "samples": [{"decodes": 8, "context": 1024, "ms": 18.5}, {"chunk": 512, "ms": [150.0, 151.0]}],
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    save_profile(FULL, path)
    assert load_profile(path) == FULL
    assert list(path.parent.iterdir()) == [path]


def test_what_we_write_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(FULL, path)
    VALIDATOR.validate(json.loads(path.read_text()))
    VALIDATOR.validate(profile_as_dict(Profile(samples=(Sample(Shape(1, 1), (1.0,)),))))


def test_a_row_of_the_table_is_a_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(FULL, path)
    lines = [line for line in path.read_text().splitlines() if '"decodes"' in line]
    assert len(lines) == 4
    assert '"ms": [18.5, 18.25, 19.125]' in lines[0]


TIMES = st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=5).map(tuple)
SAMPLES = st.lists(
    st.builds(Sample, st.builds(Shape, st.integers(1, 99), st.integers(1, 9999), st.integers(0, 999)), TIMES),
    min_size=1,
    max_size=5,
    unique_by=lambda sample: sample.shape,
)


@given(SAMPLES)
def test_any_profile_survives_to_six_digits_and_is_valid(samples: list[Sample]) -> None:
    written = json.loads(json.dumps(profile_as_dict(Profile(tuple(samples)))))
    VALIDATOR.validate(written)
    read = profile_from_dict(written)
    for before, after in zip(samples, read.samples, strict=True):
        assert after.shape == before.shape
        assert after.times_ms == pytest.approx(before.times_ms, rel=1e-5)


def test_nan_in_descriptions_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(Profile(FULL.samples, machine={"clock": float("nan")}), path)
    assert "NaN" not in path.read_text()
    assert load_profile(path).machine == {"clock": None}


def test_the_example_of_the_page() -> None:
    block = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    written = json.loads(block)
    VALIDATOR.validate(written)
    medians = {str(sample.shape): sample.median_ms for sample in profile_from_dict(written).samples}
    # AIConfigurator 0.12.0, Llama-3.1-8B bf16 on an H100 SXM.
    assert medians == {
        "32x1024": 8.34,
        "256@0": 8.73,
        "512@0": 12.02,
        "1024@0": 22.11,
        "2048@0": 43.51,
        "4096@0": 90.07,
        "8192@0": 199.7,
    }


def test_the_page_names_every_field_of_the_schema() -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    text = PAGE.read_text()
    for name in (*schema["properties"], *schema["$defs"]["sample"]["properties"]):
        assert f"`{name}`" in text, name


def test_defaults_of_a_document_written_by_hand() -> None:
    profile = profile_from_dict(document())
    assert (profile.tile_tokens, profile.graph_sizes, profile.max_model_len, profile.noise) == (16, (), None, None)
    assert profile.samples[0] == Sample(Shape(8, 1024), (18.5,))


def test_same_shapes_are_merged_and_unknown_fields_ignored() -> None:
    rows = [
        {"chunk": 512, "ms": 150, "held_out": True, "note": "first"},
        {"chunk": 256, "ms": 80},
        {"chunk": 512, "prefix": 0, "ms": [151.5, 152.5]},
        {"chunk": 512, "missing": "the third time"},
    ]
    profile = profile_from_dict(document(samples=rows, remark="by hand"))
    assert profile.samples == (Sample(Shape(chunk=512), (150.0, 151.5, 152.5)), Sample(Shape(chunk=256), (80.0,)))


def test_held_out_stays_when_only_a_missing_row_says_otherwise() -> None:
    rows = [{"chunk": 512, "ms": 150, "held_out": True}, {"chunk": 512, "missing": "later"}]
    assert profile_from_dict(document(samples=rows)).samples[0].held_out


REFUSED = [
    ({"schema": None}, "the field schema is missing"),
    ({"schema": "sarathi-tune/result"}, "the schema is 'sarathi-tune/result'"),
    ({"version": None}, "the field version is missing"),
    ({"version": "1"}, "version must be a whole number"),
    ({"version": 0}, "version must be a whole number"),
    ({"samples": None}, "the field samples is missing"),
    ({"samples": {}}, "samples must be a list, not an object"),
    ({"samples": []}, "holds no row with a time"),
    ({"samples": [{"chunk": 16, "missing": "out of memory"}]}, "holds no row with a time"),
    ({"samples": [7]}, "samples[0] must be an object, not a number"),
    ({"samples": [{"chunk": 16, "ms": 1}, {"chunk": 16}]}, "samples[1].ms is missing"),
    ({"samples": [{"ms": 3}]}, "samples[0] has neither decodes nor a chunk"),
    ({"samples": [{"decodes": 8, "ms": 3}]}, "samples[0] has 8 decodes and no context"),
    ({"samples": [{"chunk": "16", "ms": 3}]}, "samples[0].chunk must be a whole number of tokens, not '16'"),
    ({"samples": [{"chunk": 16, "ms": "3"}]}, "samples[0].ms must be a time in milliseconds, a number, not a text"),
    ({"samples": [{"chunk": 16, "ms": True}]}, "samples[0].ms must be a time"),
    ({"samples": [{"chunk": 16, "ms": 0}]}, "samples[0].ms must be greater than zero"),
    ({"samples": [{"chunk": 16, "ms": [3, -1]}]}, "samples[0].ms[1] must be greater than zero"),
    ({"samples": [{"chunk": 16, "ms": float("nan")}]}, "samples[0].ms must be greater than zero and finite, not nan"),
    ({"samples": [{"chunk": 16, "ms": 10**400}]}, "samples[0].ms must be greater than zero and finite"),
    ({"samples": [{"chunk": 16, "ms": 3, "held_out": "no"}]}, "samples[0].held_out must be true or false"),
    ({"samples": [{"chunk": 16, "missing": 3}]}, "samples[0].missing must be the reason"),
    ({"machine": "H100"}, "machine must be an object, not a text"),
    ({"conditions": [3]}, "conditions[0] must be an object"),
    ({"noise": -0.1}, "noise must be a fraction"),
    ({"noise": float("nan")}, "noise must be a fraction"),
    ({"tile_tokens": 0}, "tile_tokens must be a whole number of tokens from 1"),
    ({"graph_sizes": [8, "16"]}, "graph_sizes[1] must be a whole number"),
    ({"max_model_len": 1.5}, "max_model_len must be a whole number"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_with_the_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError) as error:
        profile_from_dict(document(**changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [changes for changes, _ in REFUSED if all(text not in str(changes) for text in ("nan", "missing': 'out", "0000"))],
    ids=str,
)
def test_the_schema_refuses_the_same(changes: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(document(**changes))


def test_a_newer_version_asks_for_an_upgrade() -> None:
    with pytest.raises(DocumentError, match=r"version 7 and this sarathi-tune reads up to version 1: upgrade"):
        profile_from_dict(document(version=7))


@pytest.mark.parametrize("value", [None, [], "text", 3, True])
def test_no_object_at_all(value: object) -> None:
    with pytest.raises(DocumentError, match="a profile is a JSON object"):
        profile_from_dict(value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "is not JSON"),
        (b"\x1f\x8b\x08\x00", "is not UTF-8"),
        (b"[" * 200_000, "is not JSON that can be read"),
        (b'{"schema": ' + b"1" * 5000 + b"}", "is not JSON that can be read"),
        (json.dumps(document())[:-9].encode(), "is not JSON"),
        (json.dumps(document(samples=[{"chunk": 16, "ms": float("nan")}])).encode(), "samples[0].ms must be"),
    ],
    ids=["empty", "blank", "cut", "gzip", "nested", "digits", "truncated", "nan"],
)
def test_bad_files_name_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(DocumentError) as error:
        load_profile(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(document()).encode())
    assert len(load_profile(path).samples) == 2


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(DocumentError, match="Can't read the profile"):
            load_profile(path)


def test_unwritable_place_is_a_sentence_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with pytest.raises(UsageError, match="Can't write the profile to"):
        save_profile(FULL, blocker / "profile.json")
    path = tmp_path / "profile.json"
    path.write_text("old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UsageError, match="No space left on device"):
        save_profile(FULL, path)
    assert path.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "profile.json"]


def test_reading_needs_neither_torch_nor_jsonschema_nor_numpy() -> None:
    code = (
        "import sys, sarathi_tune.measure.profile, sarathi_tune.measure.shapes;"
        "print([name for name in ('torch', 'jsonschema', 'numpy', 'scipy', 'psutil') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
