"""Kernels in the terminal: whole words at 80 and 120 columns, bars in proportion, and the picture."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sarathi_tune.errors import UsageError
from sarathi_tune.measure.ceilings import Ceilings
from sarathi_tune.measure.kernels.figure import KernelFigure, KernelReport, bounded
from sarathi_tune.report.kernels import BAR, print_kernels, save_kernel_plot

CEILINGS = Ceilings(50.0, 1.0, "bfloat16")


def report() -> KernelReport:
    return KernelReport(
        figures=(
            bounded("attention", "8x1024+504@1024", 512, (2.0, 1.9), (1e6, 1e9), CEILINGS),
            bounded("attention", "32x1024", 32, (1.0, 0.9), (50e6, 1e6), CEILINGS),
            replace(bounded("linear", "gate-up", 32, (0.1, 0.1), (4e6, 1e6), CEILINGS), kernel="tiles"),
            replace(bounded("linear", "gate-up", 64, (0.2, 0.2), (4e6, 1e6), CEILINGS), kernel="oneDNN"),
            replace(bounded("linear", "gate-up", 2048, (8.0, 7.9), (1e6, 7e9), CEILINGS), kernel="oneDNN"),
            KernelFigure("all-reduce", "hidden states", 0, skipped="one process"),
        ),
        ceilings=CEILINGS,
        model="tiny",
        engine={"dtype": "bfloat16", "threads": 2},
    )


@pytest.mark.parametrize("width", [80, 120])
def test_every_line_is_whole(width: int) -> None:
    stream = io.StringIO()
    print_kernels(report(), Console(file=stream, width=width, highlight=False, markup=False))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in stream.getvalue()
    assert "…" not in stream.getvalue()
    hybrid = next(line for line in lines if line.startswith("8x1024+504@1024"))
    assert "50 %  compute" in hybrid, "1 GFLOP in 2 ms is half of 1 TFLOP/s"
    full = next(line for line in lines if line.startswith("32x1024"))
    assert abs(full.count("█") - 2 * hybrid.count("█")) <= 1, "half of an odd number of cells ends in a half one"
    assert width != 80 or full.count("█") == BAR
    assert [line.split("  ")[0] for line in lines if "gate-up" in line] == ["gate-up, tiles", "gate-up, oneDNN"]
    assert any("hidden states: skipped, one process" in line for line in lines)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_kernel_plot(report(), tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")
    nothing = KernelReport((), CEILINGS, "tiny")
    with pytest.raises(UsageError, match="nothing to draw"):
        save_kernel_plot(nothing, tmp_path / "nothing.png")
