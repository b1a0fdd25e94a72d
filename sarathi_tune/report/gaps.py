"""Token gaps over time, one strip per scheduler: the picture in which stalls are seen.

Time runs to the right, the gap's length upwards on a log scale that all strips share. In the terminal a strip is a few
lines of braille dots (of `*` where only ASCII can be shown); `save_plot` draws the same as PNG or SVG.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from sarathi_tune.errors import UsageError
from sarathi_tune.report.comparison import Comparison, Contender
from sarathi_tune.report.figures import ms_figure
from sarathi_tune.report.glyphs import ASCII, Glyphs
from sarathi_tune.units import format_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Lines of a strip in the terminal, and the dots of a braille cell across and down.
STRIP_LINES = 4
_DOTS_X, _DOTS_Y = 2, 4
#: Bit of the dot in column x, row y (from the top) of a braille cell.
_BRAILLE_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE_BLANK = 0x2800
#: Room on each side of the smallest and largest gap, as a factor.
_MARGIN = 1.15
#: File types of a picture.
PICTURES = (".png", ".svg")


@dataclass(frozen=True, slots=True)
class Scale:
    """Seconds 0 to `end_s` across, `low_ms` to `high_ms` upwards, logarithmic."""

    end_s: float
    low_ms: float
    high_ms: float

    @classmethod
    def of(cls, comparison: Comparison) -> "Scale":
        """What holds all gaps and the objective."""
        points = [point for contender in comparison.contenders for point in contender.outcome.trace]
        lengths = [gap for _, gap in points if gap > 0] + [comparison.slo_itl_ms]
        return cls(
            end_s=max((time for time, _ in points), default=1.0),
            low_ms=min(lengths) / _MARGIN,
            high_ms=max(lengths) * _MARGIN,
        )

    def column(self, time_s: float, columns: int) -> int:
        """The column, 0 to `columns` - 1, of a time."""
        return min(columns - 1, max(0, int(time_s / self.end_s * columns)))

    def row(self, gap_ms: float, rows: int) -> int:
        """The row of a gap; row 0 is the top one."""
        share = math.log(max(gap_ms, self.low_ms) / self.low_ms) / math.log(self.high_ms / self.low_ms)
        return min(rows - 1, max(0, int((1.0 - share) * rows)))


def gap_strips(comparison: Comparison, width: int, glyphs: Glyphs) -> list[Text]:
    """A strip per scheduler, each line at most `width` cells wide, and the axis of time below."""
    scale = Scale.of(comparison)
    labels = [format_ms(scale.high_ms), format_ms(comparison.slo_itl_ms), format_ms(scale.low_ms)]
    margin = max(map(len, labels)) + 1
    columns = max(20, width - margin - 1)
    lines: list[Text] = []
    for contender in comparison.contenders:
        lines += _strip(contender, comparison, scale, (margin, columns), glyphs)
    return [*lines, _axis(scale, margin, columns)]


def _strip(
    contender: Contender, comparison: Comparison, scale: Scale, size: tuple[int, int], glyphs: Glyphs
) -> list[Text]:
    margin, columns = size
    is_ascii = glyphs is ASCII
    dots = (1, 1) if is_ascii else (_DOTS_X, _DOTS_Y)
    grid = _grid(contender.outcome.trace, scale, columns * dots[0], STRIP_LINES * dots[1])
    slo_line = scale.row(comparison.slo_itl_ms, STRIP_LINES)
    title = Text(f"  {contender.scheduler}", style="bold")
    title.append(f"  longest {format_ms(contender.outcome.itl_max_ms or 0.0)}", style="dim")
    lines = [title]
    for line in range(STRIP_LINES):
        label = {0: format_ms(scale.high_ms), STRIP_LINES - 1: format_ms(scale.low_ms)}.get(line, "")
        if line == slo_line:
            label = "SLO"
        row = Text(f"{label:>{margin}}", style="dim")
        row.append(glyphs.line, style="dim")
        for column in range(columns):
            row.append(*_cell(grid, column, line, dots, is_slo=line == slo_line, glyphs=glyphs))
        row.rstrip()
        lines.append(row)
    return lines


def _grid(points: Sequence[tuple[float, float]], scale: Scale, columns: int, rows: int) -> set[tuple[int, int]]:
    return {(scale.column(time, columns), scale.row(gap, rows)) for time, gap in points}


def _cell(
    grid: set[tuple[int, int]], column: int, line: int, dots: tuple[int, int], *, is_slo: bool, glyphs: Glyphs
) -> tuple[str, str]:
    """The sign of one cell, and its style."""
    across, down = dots
    lit = [(x, y) for x in range(across) for y in range(down) if (column * across + x, line * down + y) in grid]
    if not lit:
        return (glyphs.dash, "dim") if is_slo else (" ", "")
    if glyphs is ASCII:
        return "*", ""
    return chr(_BRAILLE_BLANK + sum(_BRAILLE_BITS[x][y] for x, y in lit)), ""


def _axis(scale: Scale, margin: int, columns: int) -> Text:
    end = f"{scale.end_s:.3g} s"
    return Text(f"{'':>{margin}} 0{end:>{columns - 1}}", style="dim")


def check_picture(path: Path) -> None:
    """Prove that a picture can be drawn there, before anything is run. Raises UsageError."""
    from importlib.util import find_spec

    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"--plot {path} must end in {' or '.join(PICTURES)}.")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'sarathi-tune[report]'; or leave --plot away.")


def save_plot(comparison: Comparison, path: Path) -> None:
    """Draw the strips into a PNG or SVG file. Raises UsageError when it can't be written."""
    from matplotlib.figure import Figure  # the figure picks its own canvas: no display, no global state

    scale = Scale.of(comparison)
    count = len(comparison.contenders)
    figure = Figure(figsize=(10, 1.4 + 1.55 * count), dpi=120, layout="constrained")
    axes = figure.subplots(count, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, contender in zip(axes, comparison.contenders, strict=True):
        _draw(axis, contender, comparison, scale)
    axes[-1].set_xlabel("seconds since the start")
    figure.supylabel("gap between two tokens of a request, ms (log scale)", fontsize=9)
    figure.suptitle(_title(comparison), fontsize=11, x=0.01, ha="left")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"Can't write the picture {path}: {error.strerror}; choose another place.") from error


def _draw(axis: "Axes", contender: Contender, comparison: Comparison, scale: Scale) -> None:
    outcome = contender.outcome
    slo = comparison.slo_itl_ms
    axis.set_yscale("log")
    axis.set_ylim(scale.low_ms, scale.high_ms)
    axis.set_xlim(0, scale.end_s * 1.01)
    for arrival_s in comparison.arrivals_s:
        axis.axvline(arrival_s, color="#d0d0d0", linewidth=0.7, zorder=0)
    axis.axhline(slo, color="#b03030", linewidth=0.9, linestyle="--", zorder=1)
    for is_over, colour in ((False, "#2f6f9f"), (True, "#c0392b")):
        points = [point for point in outcome.trace if (point[1] > slo) is is_over]
        if points:
            times, gaps = zip(*points, strict=True)
            axis.scatter(times, gaps, s=7 if not is_over else 16, color=colour, linewidths=0, zorder=2)
    axis.set_title(
        f"{contender.scheduler}: p99 {ms_figure(outcome.itl_p99_ms)} ms, longest {ms_figure(outcome.itl_max_ms)} ms, "
        f"TTFT p99 {ms_figure(outcome.ttft_p99_ms)} ms",
        fontsize=9,
        loc="left",
    )
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _title(comparison: Comparison) -> str:
    model = comparison.model.get("name", "")
    how = "measured" if comparison.is_real else "virtual clock"
    return (
        f"Token gaps by scheduler ({', '.join(part for part in (str(model), how) if part)}). Dashed: objective "
        f"{format_ms(comparison.slo_itl_ms)}. Grey: arrivals."
    )
