"""The journal on disk: complete at every moment, tolerant of a torn end, and of no other run."""

from pathlib import Path

import pytest

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.measure.design import design_for_shapes
from sarathi_tune.measure.journal import Journal, fingerprint
from sarathi_tune.measure.shapes import Shape

DESIGN = design_for_shapes((Shape(8, 1024), Shape(chunk=512)), repeats=3)
IDENTITY = {"model": "smollm2-135m", "device": "cpu", "threads": 2, "seed": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "journal.jsonl"


def write(path: Path) -> None:
    """A journal of three samples and a missing shape."""
    with Journal.create(path, IDENTITY, DESIGN) as journal:
        journal.add_sample(1, Shape(8, 1024), "a", 18.5)
        journal.add_sample(1, Shape(8, 1024), "b", 18.75)
        journal.add_missing(Shape(chunk=512), "out of memory")
        journal.add_sample(2, Shape(8, 1024), "a", 19.0)


def test_every_sample_is_on_disk_at_once(path: Path) -> None:
    with Journal.create(path, IDENTITY, DESIGN) as journal:
        for count in (1, 2, 3):
            journal.add_sample(count, Shape(8, 1024), "a", 18.5)
            assert len(path.read_text().splitlines()) == 1 + count


def test_resume_gives_back_what_was_written(path: Path) -> None:
    write(path)
    journal, resumed = Journal.resume(path, IDENTITY)
    journal.close()
    assert resumed.design == DESIGN
    assert resumed.collection.times_ms == {(Shape(8, 1024), "a"): [18.5, 19.0], (Shape(8, 1024), "b"): [18.75]}
    assert resumed.collection.missing == {Shape(chunk=512): "out of memory"}
    assert resumed.collection.last_round == 2
    assert not resumed.complete


@pytest.mark.parametrize(
    "torn", [b'{"round": 2, "sha', b'{"round": 2, "shape": "8x1024", "label": "b", "ms": 1', b"\x00\x00"]
)
def test_a_torn_last_line_is_dropped_and_written_over(path: Path, torn: bytes) -> None:
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    journal, resumed = Journal.resume(path, IDENTITY)
    with journal:
        assert len(resumed.collection.done) == 3
        journal.add_sample(2, Shape(8, 1024), "b", 20.0)
    assert path.read_bytes().startswith(whole + b'{"round": 2')
    journal, resumed = Journal.resume(path, IDENTITY)
    journal.close()
    assert resumed.collection.times_ms[Shape(8, 1024), "b"] == [18.75, 20.0]


def test_a_whole_line_without_its_line_end_is_torn_too(path: Path) -> None:
    write(path)
    path.write_bytes(path.read_bytes()[:-1])
    journal, resumed = Journal.resume(path, IDENTITY)
    journal.close()
    assert resumed.collection.times_ms[Shape(8, 1024), "a"] == [18.5]


def test_completed(path: Path) -> None:
    with Journal.create(path, IDENTITY, DESIGN) as journal:
        journal.complete()
    journal, resumed = Journal.resume(path, IDENTITY)
    journal.close()
    assert resumed.complete


def test_a_journal_of_another_run_is_refused_with_the_difference(path: Path) -> None:
    write(path)
    with pytest.raises(DocumentError, match=r"is of another run \(threads was 2, is 4\)"):
        Journal.resume(path, IDENTITY | {"threads": 4})
    with pytest.raises(DocumentError, match=r"context was None, is 8"):
        Journal.resume(path, IDENTITY | {"context": 8})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a journal"),
        (b'{"a": 1}\n', "is not a journal"),
        (b"[1]\n", "is not a journal"),
        (b"plain text\nmore\n", "damaged at byte 0"),
    ],
)
def test_other_files(path: Path, content: bytes, message: str) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DocumentError, match=message):
        Journal.resume(path, IDENTITY)


def test_damage_in_the_middle_is_not_a_torn_end(path: Path) -> None:
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"garbage\n", *lines[2:]]))
    with pytest.raises(DocumentError, match="damaged at byte"):
        Journal.resume(path, IDENTITY)


@pytest.mark.parametrize("line", ['{"ms": 3}', '{"round": 1, "shape": "8y", "label": "a", "ms": 1}', '{"ms": "x"}'])
def test_a_record_that_makes_no_sense(path: Path, line: str) -> None:
    write(path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DocumentError, match="is damaged"):
        Journal.resume(path, IDENTITY)


def test_another_version(path: Path) -> None:
    write(path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(DocumentError, match="has version 2"):
        Journal.resume(path, IDENTITY)


def test_nothing_to_resume(path: Path) -> None:
    with pytest.raises(DocumentError, match="Can't resume"):
        Journal.resume(path, IDENTITY)


def test_unwritable_place(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(UsageError, match="Can't write the journal"):
        Journal.create(blocker / "journal.jsonl", IDENTITY, DESIGN)


def test_the_fingerprint_depends_on_content_and_not_on_order() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
