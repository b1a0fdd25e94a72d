"""What was timed so far, and what it says: rows of the profile, the noise floor, and median and p99 per shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sarathi_tune.measure.design import Design, Label
from sarathi_tune.measure.profile import Sample
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.stats import median, quantile

#: Steps per label below which two medians say nothing about noise.
_MIN_FOR_NOISE = 3
#: Steps in a block when a row is set against itself.
_BLOCK = 5


@dataclass(slots=True)
class Collection:
    """Times in milliseconds by shape and label, reasons of missing shapes, and conditions per round. Grows while
    measuring; `last_round` is the round of the latest sample, `pairs` the (round, shape, label) that are there."""

    times_ms: dict[tuple[Shape, Label], list[float]] = field(default_factory=dict)
    missing: dict[Shape, str] = field(default_factory=dict)
    conditions: list[Mapping[str, Any]] = field(default_factory=list)
    done: set[tuple[int, Shape, Label]] = field(default_factory=set)

    @property
    def last_round(self) -> int:
        """The latest round of which a sample is there; 0 before the first."""
        return max((index for index, _, _ in self.done), default=0)

    @property
    def spent_s(self) -> float:
        """Seconds of all steps that count."""
        return sum(sum(times) for times in self.times_ms.values()) / 1e3

    def add(self, round_index: int, shape: Shape, label: Label, time_ms: float) -> None:
        """Keep one timed step."""
        self.times_ms.setdefault((shape, label), []).append(time_ms)
        self.done.add((round_index, shape, label))


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """One line of `profile --shapes`: median and p99 of `num_steps` steps in milliseconds, or why there are none."""

    shape: Shape
    num_steps: int
    median_ms: float | None
    p99_ms: float | None
    missing: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The line as it stands in a JSON document."""
        return {
            "shape": str(self.shape),
            "n": self.num_steps,
            "median_ms": self.median_ms,
            "p99_ms": self.p99_ms,
            "missing": self.missing,
        }


def profile_samples(design: Design, collection: Collection) -> tuple[Sample, ...]:
    """One row per shape of the design, in its order, both labels of an A/A pair together."""
    held_out = {point.shape: point.held_out for point in design.points}
    rows = []
    for shape, is_held_out in held_out.items():
        labels: tuple[Label, ...] = ("a", "b")
        times = tuple(time for label in labels for time in collection.times_ms.get((shape, label), ()))
        reason = None if times else collection.missing.get(shape, "not measured: the run ended before its turn")
        rows.append(Sample(shape, times, reason, is_held_out))
    return tuple(rows)


def noise_floor(collection: Collection) -> float | None:
    """The largest relative difference between the medians of the same shape under two labels, interleaved in the same
    rounds; None when no shape has both. Whatever differs by less may be noise."""
    differences = []
    for (shape, label), times in collection.times_ms.items():
        others = collection.times_ms.get((shape, "b"), [])
        if label == "a" and min(len(times), len(others)) >= _MIN_FOR_NOISE:
            first, second = median(times), median(others)
            differences.append(abs(first - second) / ((first + second) / 2))
    return max(differences, default=None)


def summarise(samples: Sequence[Sample]) -> tuple[ShapeTiming, ...]:
    """Median and p99 per sample. A p99 of few steps is their largest, nearly: `num_steps` stands beside it."""
    return tuple(
        ShapeTiming(sample.shape, len(sample.times_ms), sample.median_ms, quantile(sample.times_ms, 0.99))
        if sample.times_ms
        else ShapeTiming(sample.shape, 0, None, None, sample.missing)
        for sample in samples
    )


def noise_between_halves(times_ms: Sequence[float]) -> float | None:
    """How far the medians of two halves of the same step's times differ, taken in turns of a few steps; None with too
    few of them."""
    blocks = [times_ms[start : start + _BLOCK] for start in range(0, len(times_ms), _BLOCK)]
    first, second = ([time_ms for block in part for time_ms in block] for part in (blocks[::2], blocks[1::2]))
    if min(len(first), len(second)) < 2 * _BLOCK:
        return None
    return abs(median(first) - median(second)) / (0.5 * (median(first) + median(second)))
