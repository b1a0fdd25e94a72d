"""Step time against budget as bars, with the SLO as a line across: the picture that the verdict comes from."""

from collections.abc import Sequence

from rich.text import Text

from sarathi_tune.report.figures import count_figure, ms_figure
from sarathi_tune.report.glyphs import Glyphs
from sarathi_tune.report.result import CurvePoint

#: The right edge of the plot in multiples of the SLO; a longer bar is cut and ends in an arrow.
EDGE = 2.0


def step_plot(
    curve: Sequence[CurvePoint], slo_ms: float, chosen_tokens: int | None, width: int, glyphs: Glyphs
) -> list[Text]:
    """One line per budget, at most `width` cells wide: pointer, budget, p99 step in ms, bar.

    The SLO's column is the same in every line. A step above it is drawn red from there on.
    """
    budgets = [count_figure(point.budget_tokens) for point in curve]
    times = [ms_figure(point.step_p99_ms) for point in curve]
    budget_width = max(len("budget"), *map(len, budgets))
    time_width = max(len("p99 ms"), *map(len, times))
    bar_width = max(10, width - budget_width - time_width - 8)
    slo_column = round(bar_width / EDGE)
    head = f"  {'budget':>{budget_width}}  {'p99 ms':>{time_width}}  {'SLO':>{slo_column + 2}}"
    lines = [Text(head, style="dim")]
    for point, budget, time in zip(curve, budgets, times, strict=True):
        is_chosen = point.budget_tokens == chosen_tokens
        style = "bold" if is_chosen else ""
        line = Text(
            f"{glyphs.pointer if is_chosen else ' '} {budget:>{budget_width}}  {time:>{time_width}}  ", style=style
        )
        line.append_text(_bar(point.step_p99_ms / slo_ms, slo_column, bar_width, glyphs))
        lines.append(line)
    return lines


def _bar(share: float, slo_column: int, width: int, glyphs: Glyphs) -> Text:
    """A bar of `share` times the SLO; the SLO's line stands at `slo_column`."""
    below = _blocks(min(share, 1.0) * slo_column, glyphs)
    bar = Text(below.ljust(slo_column), style="green" if share <= 1 else "yellow")
    bar.append(glyphs.line if share <= 1 else glyphs.crossing, style="bold")
    room = width - slo_column - 1
    if share > EDGE:
        bar.append(_blocks(room - 1, glyphs) + glyphs.more, style="red")
    elif share > 1:
        bar.append(_blocks(min(room, (share - 1.0) * slo_column), glyphs), style="red")
    return bar


def _blocks(cells: float, glyphs: Glyphs) -> str:
    """A bar `cells` cells long, to the nearest part of a cell that the glyphs can show."""
    parts = len(glyphs.eighths)
    whole, rest = divmod(max(0, round(cells * parts)), parts)
    return glyphs.eighths[-1] * whole + (glyphs.eighths[rest - 1] if rest else "")
