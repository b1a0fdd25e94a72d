"""Kernels beside their ceilings, in the terminal and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from sarathi_tune.errors import UsageError
from sarathi_tune.measure.kernels.figure import GROUPS, KernelFigure, KernelReport
from sarathi_tune.report.console import WIDE, figure_table, print_facts, print_heading, print_notices, print_prose
from sarathi_tune.report.figures import count_figure, percent_figure
from sarathi_tune.report.glyphs import Glyphs, glyphs_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Cells of a full bar: the ceiling.
BAR, WIDE_BAR = 8, 45
#: From these shares of the ceiling on, a bar is green, or yellow; below it is red.
GOOD, FAIR = 0.6, 0.3
_COLOURS = {"green": "#2e8b57", "yellow": "#d4a017", "red": "#c0392b"}


def print_kernels(report: KernelReport, console: Console) -> None:
    """Print the ceilings, and every kernel with its share of the one that bounds it."""
    glyphs = glyphs_for(console)
    ceilings = report.ceilings
    print_heading("Ceilings", console)
    print_prose(
        Text(
            f"memory read {ceilings.read_gb_per_s:.1f} GB/s, {ceilings.dtype} GEMM "
            f"{ceilings.gemm_tflop_per_s:.3g} TFLOP/s: the best of several sizes and thread counts"
        ),
        console,
    )
    for group in GROUPS:
        figures = report.of(group)
        if figures:
            _print_group(group, figures, console, glyphs)
    facts = [
        ("model", f"{report.model}, {report.engine.get('dtype', '')}"),
        ("machine", str(report.machine.get("name", ""))),
        ("engine", ", ".join(f"{name} {report.engine[name]}" for name in _ENGINE if name in report.engine)),
    ]
    print_facts("Rests on", [(name, value) for name, value in facts if value], console)
    print_notices(report.notices, console, glyphs)


_ENGINE = ("device", "threads", "attention", "linear", "elementwise")


def _print_group(group: str, figures: Sequence[KernelFigure], console: Console, glyphs: Glyphs) -> None:
    print_heading(group.capitalize(), console)
    timed = [figure for figure in figures if not figure.skipped]
    if timed:
        table = figure_table(glyphs, "tokens", "ms", "achieved", "ceiling", "share", text=("bound by", ""))
        table.columns[0].width = None
        for column in table.columns:
            column.no_wrap = True
        bar = WIDE_BAR if console.width >= WIDE else BAR
        last = ""
        for figure in timed:
            name = f"{figure.name}, {figure.kernel}" if figure.kernel else figure.name
            table.add_row(
                name if name != last else "",
                count_figure(figure.tokens),
                _significant(figure.median_ms),
                f"{_significant(figure.achieved)} {figure.unit}",
                _significant(figure.ceiling),
                percent_figure(figure.share),
                figure.bound,
                _bar(figure.share, bar, glyphs),
            )
            last = name
        console.print(table)
    for figure in figures:
        if figure.skipped:
            print_prose(Text(f"{figure.name}: skipped, {figure.skipped}", style="dim"), console)


def _bar(share: float | None, width: int, glyphs: Glyphs) -> Text:
    """A share of the ceiling as a bar. Beyond the ceiling (data in a cache) it is full."""
    if share is None:
        return Text()
    parts = len(glyphs.eighths)
    whole, rest = divmod(round(min(share, 1.0) * width * parts), parts)
    return Text(glyphs.eighths[-1] * whole + (glyphs.eighths[rest - 1] if rest else ""), style=_colour(share))


def _colour(share: float) -> str:
    return "green" if share >= GOOD else "yellow" if share >= FAIR else "red"


def _significant(value: float | None) -> str:
    """Three significant figures without an exponent."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def save_kernel_plot(report: KernelReport, path: Path) -> None:
    """Bars of every group into a PNG or SVG file. Raises UsageError when it can't be written."""
    from matplotlib.figure import Figure

    groups = [(group, [f for f in report.of(group) if f.share is not None]) for group in GROUPS]
    groups = [(group, figures) for group, figures in groups if figures]
    if not groups:
        raise UsageError("There is nothing to draw: no kernel has a time and a ceiling.")
    heights = [len(figures) + 2 for _, figures in groups]
    figure = Figure(figsize=(9, 0.19 * sum(heights) + 1.0), dpi=120, layout="constrained")
    axes = figure.subplots(len(groups), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (group, figures) in zip(axes, groups, strict=True):
        _draw(axis, group, figures)
    axes[-1].set_xlabel("share of the device's measured ceiling")
    ceilings = report.ceilings
    figure.suptitle(
        f"Kernels of {report.model}: read {ceilings.read_gb_per_s:.1f} GB/s, GEMM {ceilings.gemm_tflop_per_s:.3g} "
        f"TFLOP/s ({ceilings.dtype})",
        fontsize=10,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"Can't write the picture {path}: {error.strerror}; choose another place.") from error


def _draw(axis: "Axes", group: str, figures: Sequence[KernelFigure]) -> None:
    shares = [figure.share or 0.0 for figure in figures]
    names = [f"{figure.name}" + (f" x {figure.tokens}" if group == "linear" else "") for figure in figures]
    places = range(len(figures))
    axis.barh(places, shares, color=[_COLOURS[_colour(share)] for share in shares], height=0.75)
    axis.set_yticks(places, names, fontsize=7)
    axis.invert_yaxis()
    axis.set_ylim(len(figures) - 0.4, -0.6)
    axis.set_title(group, fontsize=9, loc="left")
    axis.set_xlim(0, 1.15)
    axis.axvline(1.0, color="#606060", linewidth=0.8)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    for place, figure in zip(places, figures, strict=True):
        label = f"{_significant(figure.achieved)} {figure.unit}"
        axis.text(min(figure.share or 0.0, 1.0) + 0.01, place, label, va="center", fontsize=6)
