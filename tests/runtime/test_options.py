"""Compiled kernels are of the sources that are there."""

from pathlib import Path

from sarathi_tune.runtime.kernels.options import forget_outdated


def compiled(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "__pycache__").glob("*.nb?"))


def test_compiled_code_goes_when_any_source_changes(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("a = 1\n")
    (tmp_path / "intrinsic.py").write_text("b = 1\n")
    assert not forget_outdated(tmp_path), "nothing was compiled"
    cache = tmp_path / "__pycache__"
    (cache / "kernel.f-1.py311.nbi").write_bytes(b"index")
    (cache / "kernel.f-1.py311.1.nbc").write_bytes(b"code")
    (cache / "kernel.cpython-311.pyc").write_bytes(b"python")
    assert not forget_outdated(tmp_path), "the sources are the same"
    assert compiled(tmp_path) == ["kernel.f-1.py311.1.nbc", "kernel.f-1.py311.nbi"]

    (tmp_path / "intrinsic.py").write_text("b = 2\n")
    assert forget_outdated(tmp_path)
    assert compiled(tmp_path) == []
    assert (cache / "kernel.cpython-311.pyc").exists()
    assert not forget_outdated(tmp_path)


def test_a_directory_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("a = 1\n")
    (tmp_path / "__pycache__").write_text("a file where the directory would be")
    assert not forget_outdated(tmp_path)
