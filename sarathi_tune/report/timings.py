"""Step times per shape, for `sarathi-tune profile`."""

from collections.abc import Iterable, Mapping

from rich.console import Console

from sarathi_tune.measure.samples import ShapeTiming
from sarathi_tune.report.console import figure_table, print_notices
from sarathi_tune.report.figures import count_figure, ms_figure
from sarathi_tune.report.glyphs import glyphs_for


def print_timings(timings: Iterable[ShapeTiming], notices: Iterable[Mapping[str, str]], console: Console) -> None:
    """One line per shape: steps timed, median and p99 in milliseconds, or why there are none."""
    glyphs = glyphs_for(console)
    table = figure_table(glyphs, "shape", "steps", "median\nms", "p99\nms", text=("",))
    for timing in timings:
        table.add_row(
            "",
            str(timing.shape),
            count_figure(timing.num_steps),
            ms_figure(timing.median_ms),
            ms_figure(timing.p99_ms),
            timing.missing or "",
        )
    console.print(table)
    print_notices(notices, console, glyphs)
