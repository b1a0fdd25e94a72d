"""The table that sets a server's steps, seen from outside, beside the engine's own."""

from dataclasses import replace
from pathlib import Path

import pytest

from sarathi_tune.measure.profile import Profile, Sample, save_profile
from sarathi_tune.measure.shapes import Shape, parse_shape
from scripts.target_against_profile import (
    FITTED_OWN,
    SEEN_OWN,
    SEEN_SERVED,
    SERVED_OWN,
    Row,
    as_table,
    change,
    clocks,
    compare,
    counts,
    error,
    medians,
    served_time,
)
from tests.profiles import cpu_like, measured


def scaled(profile: Profile, factor: float) -> Profile:
    samples = [replace(sample, times_ms=tuple(factor * ms for ms in sample.times_ms)) for sample in profile.samples]
    return replace(profile, samples=tuple(samples))


def test_every_step_is_set_beside_its_own_time(tmp_path: Path) -> None:
    own = measured(cpu_like, 0.0, 3, 0)
    paths = [tmp_path / name for name in ("seen.json", "own.json", "served.json")]
    for path, factor in zip(paths, (1.08, 1.0, 1.2), strict=True):
        save_profile(scaled(own, factor), path)
    rows = compare(*paths)
    assert {row.name for row in rows} == {str(sample.shape) for sample in own.samples}
    assert [error(row, SEEN_OWN) for row in rows] == pytest.approx([0.08] * len(rows), rel=1e-3)
    assert [error(row, SERVED_OWN) for row in rows] == pytest.approx([0.2] * len(rows), rel=1e-3)
    # 1.08 / 1.2 is 0.9
    assert [error(row, SEEN_SERVED) for row in rows] == pytest.approx([-0.1] * len(rows), rel=1e-3)
    assert f"of the profile: {len(rows)} as seen" in counts(rows)
    assert counts(rows).endswith("and 0 as the engine itself served them")
    save_profile(scaled(own, 1.12), paths[0])
    rows = compare(*paths)
    assert "of the profile: 0 as seen" in counts(rows)
    assert f"as they were served: {len(rows)} as seen" in counts(rows)


def test_how_much_the_machine_changed_is_told_by_the_steps_timed_twice(tmp_path: Path) -> None:
    own = measured(cpu_like, 0.0, 3, 0)
    before, behind = tmp_path / "before.json", tmp_path / "behind.json"
    save_profile(replace(own, samples=own.samples[:3]), before)
    slower = replace(own.samples[1], times_ms=tuple(1.07 * ms for ms in own.samples[1].times_ms))
    faster = replace(own.samples[2], times_ms=tuple(0.9 * ms for ms in own.samples[2].times_ms))
    other = replace(own.samples[5], times_ms=tuple(3 * ms for ms in own.samples[5].times_ms))
    save_profile(replace(own, samples=(own.samples[0], slower, faster, other)), behind)
    assert change(before, behind) == pytest.approx(0.1, rel=1e-3)


def test_the_table_by_hand() -> None:
    rows = [Row("8x384", 10.0, 10.9, 11.1, 9.5, 3), Row("64@0", 20.0, 25.0, 20.0, 21.9, 1)]
    assert as_table(rows).splitlines()[2:] == [
        "| 8x384 | 10.0 | 10.9 | +9 % | 11.1 | +11 % | +2 % | 9.5 | -5 % | -13 % | 3 |",
        "| 64@0 | 20.0 | 25.0 | +25 % | 20.0 | +0 % | -20 % | 21.9 | +9 % | -12 % | 1 |",
    ]
    assert counts(rows) == (
        "of 2 within 10 % of the steps as they were served: 1 as seen, 0 as fitted; of the profile: 1 as seen, "
        "2 as fitted, and 1 as the engine itself served them"
    )


def test_medians_over_rounds_by_hand() -> None:
    rounds = [
        [Row("8x384", 10.0, 11.0, 11.5, 11.2, 3), Row("64@0", 20.0, 20.0, 30.0, 30.0, 1)],
        [Row("8x384", 12.0, 12.0, 12.6, 12.6, 2)],
        [Row("8x384", 11.0, 11.22, 10.0, 11.0, 1)],
    ]
    (row,) = medians(rounds)
    assert (row.name, row.own_ms, row.count) == ("8x384", 11.0, 6)
    assert error(row, SEEN_OWN) == pytest.approx(0.05)
    assert error(row, FITTED_OWN) == pytest.approx(0.05)
    assert error(row, SERVED_OWN) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("15x640", 20.0),
        ("15x660", 20.0),  # 3 % from 640
        ("15x720", None),
        ("14x640", None),
        ("4x120+252@252", 75.0),  # two steps, the same distance away
        ("4x120+252@1260", None),
        ("64@0", None),
    ],
)
def test_the_step_of_the_server_that_is_most_like_it(wanted: str, expected: float | None) -> None:
    shapes = {
        "15x640": (19.0, 20.0, 30.0),
        "15x576": (5.0,),
        "4x120+252@252": (70.0,),
        "4x118+252@252": (10.0,),
        "4x120+240@252": (1.0,),
    }
    samples = [Sample(parse_shape(name), times) for name, times in shapes.items()]
    samples.append(Sample(Shape(4, 120, 252, 252), (80.0,)))
    assert served_time(parse_shape(wanted), Profile(tuple(samples))) == expected


def test_both_clocks_by_hand() -> None:
    scenes = [{"name": "one", "own_ms": 7.51, "seen_ms": 7.5}, {"name": "few", "own_ms": None, "seen_ms": 50.0}]
    assert clocks(scenes) == "mean gap by the server's clock and from outside, ms: one 7.5, 7.5"
