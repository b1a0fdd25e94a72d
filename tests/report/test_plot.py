"""The bars: as long as the step takes, with the SLO at one place."""

from sarathi_tune.report.glyphs import ASCII, UNICODE
from sarathi_tune.report.plot import step_plot
from sarathi_tune.report.result import CurvePoint

CURVE = (
    CurvePoint(128, 40.0, 50.0),
    CurvePoint(512, 90.0, 100.0),
    CurvePoint(1024, 140.0, 150.0),
    CurvePoint(2048, 480.0, 505.0),
)


def lines(glyphs=ASCII, width: int = 60, slo_ms: float = 100.0) -> list[str]:
    return [line.plain for line in step_plot(CURVE, slo_ms, 512, width, glyphs)]


def test_a_bar_is_as_long_as_its_step() -> None:
    _, half, exact, over, cut = lines()
    slo_column = exact.index("|") - exact.index("#")
    assert half.count("#") == round(slo_column / 2)
    assert exact.count("#") == slo_column
    assert over.count("#") == round(1.5 * slo_column)
    assert cut.endswith(">")


def test_the_slo_is_at_the_same_place_in_every_line() -> None:
    for glyphs, sign in ((ASCII, "|"), (UNICODE, "│┃")):
        head, *bars = lines(glyphs)
        places = {next(index for index, char in enumerate(bar) if char in sign) for bar in bars}
        assert len(places) == 1
        assert head.index("SLO") <= places.pop() <= head.index("SLO") + 3


def test_the_chosen_budget_is_pointed_at() -> None:
    assert [bar.startswith(">") for bar in lines()[1:]] == [False, True, False, False]


def test_no_line_is_wider_than_asked() -> None:
    for width in (40, 60, 79, 100):
        assert max(map(len, lines(width=width))) <= width


def test_parts_of_a_cell_are_shown_where_the_encoding_has_them() -> None:
    full, partial = "█", "▏▎▍▌▋▊▉"
    bar = lines(UNICODE, width=60, slo_ms=300.0)[1]
    cells = bar.count(full) + sum((partial.index(char) + 1) / 8 for char in bar if char in partial)
    slo_cells = bar.index("│") - bar.index(full)
    assert abs(cells - slo_cells * 50 / 300) <= 1 / 16
