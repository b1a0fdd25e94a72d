"""The order of execution: interleaved, shuffled per round, first steps dropped, resumed without repetition."""

from collections import Counter
from pathlib import Path

import pytest

from sarathi_tune.errors import OutOfMemoryError
from sarathi_tune.machine.cgroup import Throttling
from sarathi_tune.machine.conditions import ConditionsProbe, CpuSeconds, Snapshot
from sarathi_tune.measure.design import Design, DesignPoint, design_for_shapes
from sarathi_tune.measure.journal import Journal
from sarathi_tune.measure.rounds import Progress, measure_all, round_order
from sarathi_tune.measure.shapes import Shape
from tests.measure.doubles import FakeTimer, laptop_ms

SHAPES = (Shape(8, 1024), Shape(chunk=512), Shape(8, 512, 504), Shape(1, 128), Shape(chunk=64, prefix=256))


def test_rounds_interleave_all_shapes_and_warm_up_from_small_to_large() -> None:
    timer = FakeTimer()
    measure_all(timer, design_for_shapes(SHAPES, repeats=4), clock_s=timer.clock_s)
    rounds = [timer.calls[start : start + 5] for start in range(0, len(timer.calls), 5)]
    assert len(rounds) == 5
    assert all(set(order) == set(SHAPES) for order in rounds)
    assert rounds[0] == [SHAPES[3], SHAPES[0], SHAPES[4], SHAPES[1], SHAPES[2]]


def test_every_round_is_shuffled_in_its_own_way_and_the_seed_decides() -> None:
    def orders(seed: int) -> list[list[Shape]]:
        design = design_for_shapes(SHAPES, repeats=8, seed=seed)
        return [[point.shape for point in round_order(design, index)] for index in range(1, 9)]

    assert len({tuple(order) for order in orders(0)}) >= 6
    assert orders(0) == orders(0)
    assert orders(0) != orders(1)


def test_the_first_step_of_each_shape_is_dropped() -> None:
    # SGLang PR #17198: an un-warmed first sample (7,234 ms against about 220) ruined the fit.
    timer = FakeTimer()
    measurement = measure_all(timer, design_for_shapes(SHAPES, repeats=3), clock_s=timer.clock_s)
    assert all(len(sample.times_ms) == 3 for sample in measurement.samples)
    for sample in measurement.samples:
        assert max(sample.times_ms) == pytest.approx(laptop_ms(sample.shape), rel=1e-5)
    assert [sample.shape for sample in measurement.samples] == list(SHAPES)


def test_a_point_of_every_third_round() -> None:
    control = DesignPoint(Shape(chunk=2048), every=3)
    design = Design((DesignPoint(SHAPES[0]), control), min_rounds=7, max_rounds=7, seconds=None)
    timer = FakeTimer()
    measure_all(timer, design, clock_s=timer.clock_s)
    # The warm-up and rounds 1, 4 and 7.
    assert Counter(timer.calls) == {SHAPES[0]: 8, control.shape: 4}


def test_time_ends_the_rounds_between_least_and_most() -> None:
    def run(seconds: float) -> tuple[int, float]:
        design = Design(tuple(map(DesignPoint, SHAPES)), min_rounds=2, max_rounds=6, seconds=seconds)
        timer = FakeTimer()
        measurement = measure_all(timer, design, clock_s=timer.clock_s)
        return measurement.num_rounds, timer.now_s - 1000.0

    round_s = sum(map(laptop_ms, SHAPES)) / 1e3
    assert run(0.001)[0] == 2
    assert run(1000.0)[0] == 6
    rounds, spent_s = run(14.5 * round_s)
    # Warming up took 10 rounds' time here (the first step of each shape is ten times slower): 4 rounds are left.
    assert rounds == 4
    assert spent_s <= 14.5 * round_s


def test_a_machine_that_became_slow_does_not_take_for_ever() -> None:
    # Planned for 8 rounds in the time, and each takes ten times as long.
    round_s = sum(map(laptop_ms, SHAPES)) / 1e3
    design = Design(tuple(map(DesignPoint, SHAPES)), min_rounds=8, max_rounds=25, seconds=8 * round_s)
    timer = FakeTimer(lambda shape: 10 * laptop_ms(shape))
    assert measure_all(timer, design, clock_s=timer.clock_s).num_rounds == 3


def test_progress_counts_up_to_the_end_and_knows_the_time_left() -> None:
    seen: list[Progress] = []
    timer = FakeTimer()
    measure_all(timer, design_for_shapes(SHAPES, repeats=3), progress=seen.append, clock_s=timer.clock_s)
    assert [step.done for step in seen] == list(range(1, 21))
    assert (seen[-1].done, seen[-1].total, seen[-1].eta_s) == (20, 20, 0.0)
    assert {step.total for step in seen} == {20}
    assert [step.eta_s is None for step in seen] == [True] * 4 + [False] * 16
    # From the second round on all costs are known without the cold first steps: after its first step, two rounds less
    # that step are left.
    two_rounds_s = 2 * sum(map(laptop_ms, SHAPES)) / 1e3
    assert seen[10].eta_s == pytest.approx(two_rounds_s - laptop_ms(seen[10].shape) / 1e3)


def test_a_shape_that_runs_out_of_memory_bounds_the_larger_ones() -> None:
    shapes = (Shape(1, 64), Shape(chunk=512), Shape(chunk=1024), Shape(chunk=2048), Shape(32, 8192))
    timer = FakeTimer(fails=lambda shape: shape.chunk >= 1024)
    measurement = measure_all(timer, design_for_shapes(shapes, repeats=2), clock_s=timer.clock_s)
    assert timer.calls.count(Shape(chunk=1024)) == 1
    assert Shape(chunk=2048) not in timer.calls
    assert timer.num_recovered == 1
    reasons = {str(sample.shape): sample.missing for sample in measurement.samples}
    assert reasons == {
        "1x64": None,
        "512@0": None,
        "1024@0": "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "2048@0": "not tried: 1024@0, which is no larger, ran out of memory",
        # More keys and fewer tokens: not larger in every way, so it was tried.
        "32x8192": None,
    }


def test_our_own_out_of_memory_is_a_missing_row_and_other_errors_are_not() -> None:
    class Failing(FakeTimer):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

        def time_shape(self, shape: Shape) -> float:  # noqa: ARG002
            raise self.error

    timer = Failing(OutOfMemoryError("8x1024 needs 512 pages and there are 4."))
    (sample,) = measure_all(timer, design_for_shapes(SHAPES[:1], 2), clock_s=timer.clock_s).samples
    assert sample.missing == "8x1024 needs 512 pages and there are 4."
    broken = Failing(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        measure_all(broken, design_for_shapes(SHAPES[:1], 2), clock_s=broken.clock_s)


def test_a_shape_that_fails_late_keeps_its_times() -> None:
    timer = FakeTimer(fails=lambda shape: shape.chunk == 512 and len(timer.calls) > 12)
    measurement = measure_all(timer, design_for_shapes(SHAPES, repeats=4), clock_s=timer.clock_s)
    sample = measurement.samples[1]
    assert sample.missing is None
    assert 1 <= len(sample.times_ms) < 4


def test_interrupted_and_resumed_without_repeating_a_step(tmp_path: Path) -> None:
    path, identity = tmp_path / "journal.jsonl", {"model": "m", "seed": 0}
    design = design_for_shapes(SHAPES, repeats=4)
    timer = FakeTimer()
    timer.interrupt_at = 5 + 5 + 3
    with Journal.create(path, identity, design) as journal, pytest.raises(KeyboardInterrupt):
        measure_all(timer, design, journal=journal, clock_s=timer.clock_s)
    journal, resumed = Journal.resume(path, identity)
    assert sum(map(len, resumed.collection.times_ms.values())) == 8
    second = FakeTimer()
    with journal:
        measurement = measure_all(second, resumed.design, journal=journal, resumed=resumed, clock_s=second.clock_s)
    # 20 steps that count less 8 that were there, and one dropped step each in the cold process.
    assert len(second.calls) == 12 + 5
    assert [point.shape for point in round_order(design, 2)][3:] == second.calls[5:7]
    assert all(len(sample.times_ms) == 4 for sample in measurement.samples)
    third = FakeTimer()
    journal, resumed = Journal.resume(path, identity)
    with journal:
        again = measure_all(third, resumed.design, journal=journal, resumed=resumed, clock_s=third.clock_s)
    assert third.calls == []
    # To the last digit: what is derived from them names the verifications that needn't be repeated.
    assert again.samples == measurement.samples
    assert again.num_rounds == 4


def test_resuming_does_not_retry_what_ran_out_of_memory(tmp_path: Path) -> None:
    path, identity = tmp_path / "journal.jsonl", {"model": "m"}
    design = design_for_shapes((Shape(1, 64), Shape(chunk=1024), Shape(chunk=2048)), repeats=3)
    timer = FakeTimer(fails=lambda shape: shape.chunk > 0)
    timer.interrupt_at = 4
    with Journal.create(path, identity, design) as journal, pytest.raises(KeyboardInterrupt):
        measure_all(timer, design, journal=journal, clock_s=timer.clock_s)
    journal, resumed = Journal.resume(path, identity)
    second = FakeTimer()
    with journal:
        measurement = measure_all(second, design, journal=journal, resumed=resumed, clock_s=second.clock_s)
    assert set(second.calls) == {Shape(1, 64)}
    assert measurement.samples[2].missing is not None


def test_noise_floor_from_the_same_shape_under_two_labels() -> None:
    shape = Shape(8, 1024)
    design = Design((DesignPoint(shape), DesignPoint(shape, "b")), 5, 5, None)

    class Drifting(FakeTimer):
        def time_shape(self, shape: Shape) -> float:
            super().time_shape(shape)
            point = 0 if len(self.calls) < 2 else (len(self.calls) - 2) % 2
            return 100.0 if order[point + 2 * ((len(self.calls) - 2) // 2)] == "a" else 110.0

    order = [point.label for index in range(1, 6) for point in round_order(design, index)]
    timer = Drifting()
    measurement = measure_all(timer, design, clock_s=timer.clock_s)
    # 100 against 110: a tenth of 105.
    assert measurement.noise == pytest.approx(10 / 105)
    assert [notice.code for notice in measurement.notices] == ["noise-high"]
    (sample,) = measurement.samples
    assert len(sample.times_ms) == 10


def test_conditions_are_recorded_per_round_and_warned_about(tmp_path: Path) -> None:
    class Counters:
        num_cores = 2
        wall_s = 0.0

        def snapshot(self) -> Snapshot:
            Counters.wall_s += 1.0
            # One core is busy with somebody else's work all the time; we use none here.
            return Snapshot(self.wall_s, CpuSeconds(self.wall_s, 0.0), 0.0, Throttling())

        def load_1m(self) -> float:
            return 1.0

        def clock_mhz(self) -> float | None:
            return None

    path, design = tmp_path / "journal.jsonl", design_for_shapes(SHAPES, repeats=3)
    timer = FakeTimer()
    with Journal.create(path, {}, design) as journal:
        measurement = measure_all(
            timer, design, journal=journal, probe=ConditionsProbe(Counters()), clock_s=timer.clock_s
        )
    assert [(entry["round"], entry["other_cores"]) for entry in measurement.conditions] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
    ]
    assert [notice.code for notice in measurement.notices] == ["machine-busy"]
    journal, resumed = Journal.resume(path, {})
    journal.close()
    assert tuple(resumed.collection.conditions) == measurement.conditions
