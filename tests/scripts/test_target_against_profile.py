"""The table that sets a server's steps, seen from outside, beside the engine's own."""

from dataclasses import replace
from pathlib import Path

import pytest

from sarathi_tune.measure.profile import Profile, save_profile
from scripts.target_against_profile import Row, as_table, clocks, compare, counts, medians
from tests.profiles import cpu_like, measured


def scaled(profile: Profile, factor: float) -> Profile:
    samples = [replace(sample, times_ms=tuple(factor * ms for ms in sample.times_ms)) for sample in profile.samples]
    return replace(profile, samples=tuple(samples))


def test_every_step_is_set_beside_its_own_time(tmp_path: Path) -> None:
    own = measured(cpu_like, 0.0, 3, 0)
    save_profile(own, tmp_path / "own.json")
    save_profile(scaled(own, 1.08), tmp_path / "seen.json")
    rows = compare(tmp_path / "seen.json", tmp_path / "own.json")
    assert {row.name for row in rows} == {str(sample.shape) for sample in own.samples}
    assert [row.seen_error for row in rows] == pytest.approx([0.08] * len(rows), rel=1e-3)
    assert counts(rows).startswith(f"within 10 %: {len(rows)} of {len(rows)} as seen")
    save_profile(scaled(own, 1.12), tmp_path / "seen.json")
    assert counts(compare(tmp_path / "seen.json", tmp_path / "own.json")).startswith(f"within 10 %: 0 of {len(rows)}")


def test_the_table_by_hand() -> None:
    rows = [Row("8x384", 10.0, 11.1, 9.5, 3), Row("64@0", 20.0, 20.0, 21.9, 1)]
    assert as_table(rows).splitlines()[2:] == [
        "| 8x384 | 10.0 | 11.1 | +11 % | 9.5 | -5 % | 3 |",
        "| 64@0 | 20.0 | 20.0 | +0 % | 21.9 | +9 % | 1 |",
    ]
    assert counts(rows) == "within 10 %: 1 of 2 as seen, 2 of 2 as fitted"


def test_medians_over_rounds_by_hand() -> None:
    rounds = [
        [Row("8x384", 10.0, 11.5, 11.2, 3), Row("64@0", 20.0, 30.0, 30.0, 1)],
        [Row("8x384", 12.0, 12.6, 12.6, 2)],
        [Row("8x384", 11.0, 10.0, 11.0, 1)],
    ]
    (row,) = medians(rounds)
    assert (row.name, row.own_ms, row.count) == ("8x384", 11.0, 6)
    assert row.seen_error == pytest.approx(0.05)
    assert row.fitted_error == pytest.approx(0.05)


def test_both_clocks_by_hand() -> None:
    scenes = [{"name": "one", "own_ms": 7.51, "seen_ms": 7.5}, {"name": "few", "own_ms": None, "seen_ms": 50.0}]
    assert clocks(scenes) == "mean gap by the server's clock and from outside, ms: one 7.5, 7.5"
