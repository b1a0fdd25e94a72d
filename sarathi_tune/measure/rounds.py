"""Running a design: shapes interleaved and shuffled in rounds, so that a machine that slows down for ten seconds makes
every shape a little noisy instead of one shape wrong."""

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from sarathi_tune.machine.conditions import Conditions, ConditionsProbe, condition_notices, noise_notices
from sarathi_tune.measure.design import Design, DesignPoint
from sarathi_tune.measure.failures import out_of_memory_reason
from sarathi_tune.measure.journal import Journal, Resumed
from sarathi_tune.measure.profile import Sample
from sarathi_tune.measure.samples import Collection, noise_floor, profile_samples
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.notices import Notice

#: The round in which every shape is run once to warm up, and whose times are dropped.
WARM_UP = 0
#: When steps take longer than was planned with (the machine became busy), the design's least number of rounds is given
#: up beyond this multiple of the time, but for so many rounds.
_OVERTIME, _LEAST_ROUNDS = 1.25, 3


class StepTimer(Protocol):
    """Times one step of a shape; `measure.bench.Bench`, or a script in tests."""

    def time_shape(self, shape: Shape) -> float:
        """Run one step and return its milliseconds."""
        ...

    def recover(self) -> None:
        """Give back what a step that ran out of memory left behind."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far measuring is: steps done, steps expected in all, seconds left (None as long as a shape has neither been
    timed nor estimated), and the shape that was timed last."""

    done: int
    total: int
    eta_s: float | None
    shape: Shape


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a design gave: rows for the profile, the A/A noise floor, conditions per round, and warnings."""

    samples: tuple[Sample, ...]
    noise: float | None
    conditions: tuple[Mapping[str, Any], ...]
    notices: tuple[Notice, ...]
    num_rounds: int


def round_order(design: Design, index: int) -> list[DesignPoint]:
    """The points of round `index` in the order they are run. Round 0 holds all of them, the smallest first, so that
    the first that is too large for the device bounds the rest; later rounds are shuffled, each in its own way."""
    if index == WARM_UP:
        return sorted(design.points, key=lambda point: (point.shape.num_tokens, point.shape.num_kv_tokens))
    points = [point for point in design.points if (index - 1) % point.every == 0]
    # Seeding with a text is the same on every platform and Python version.
    random.Random(f"{design.seed}:{index}").shuffle(points)
    return points


def measure_all(
    timer: StepTimer,
    design: Design,
    *,
    journal: Journal | None = None,
    resumed: Resumed | None = None,
    probe: ConditionsProbe | None = None,
    progress: Callable[[Progress], None] | None = None,
    clock_s: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Run the design's rounds, and those that `resumed` lacks only.

    The first step of each shape is dropped, after resuming too: the process is cold again. A shape that is too large
    becomes a missing one with its reason, and larger ones aren't tried. KeyboardInterrupt passes through; what was
    timed until then is in the journal.
    """
    run = _Run(timer, design, journal, resumed.collection if resumed else Collection(), progress, clock_s)
    seen: list[Conditions] = []
    if not (resumed and resumed.complete):
        with _quiet_heap():
            run.warm_up()
            while run.has_time():
                seen += _observed(run, probe)
        if journal:
            journal.complete()
    collection = run.collection
    noise = noise_floor(collection)
    return Measurement(
        samples=profile_samples(design, collection),
        noise=noise,
        conditions=tuple(collection.conditions),
        notices=(*condition_notices(seen), *noise_notices(noise)),
        num_rounds=collection.last_round,
    )


def _observed(run: "_Run", probe: ConditionsProbe | None) -> list[Conditions]:
    """Run the next round and record its conditions."""
    if probe is None:
        run.next_round()
        return []
    probe.start()
    index = run.next_round()
    conditions = probe.stop()
    document = {"round": index} | conditions.as_dict()
    run.collection.conditions.append(document)
    if run.journal:
        run.journal.add_conditions(index, document)
    return [conditions]


@contextmanager
def _quiet_heap() -> Iterator[None]:
    """Without garbage collection: a pause of some milliseconds in a step would be billed to its shape."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _rounded_ms(time_ms: float) -> float:
    """Six significant digits: finer than any clock. Rounded before anything is made of it, so that a run that goes on
    from the journal computes with the very numbers of the run that wrote it."""
    return float(f"{time_ms:.6g}")


@dataclass(slots=True)
class _Run:
    """A design being run: what was timed, what failed, and how much time is left."""

    timer: StepTimer
    design: Design
    journal: Journal | None
    collection: Collection
    progress: Callable[[Progress], None] | None
    clock_s: Callable[[], float]
    round_index: int = 0
    started_s: float = 0.0
    num_done: int = 0
    known_ms: dict[Shape, float] = field(default_factory=dict)
    #: Shapes that ran out of memory; nothing as large is tried again.
    bounds: list[Shape] = field(default_factory=list)
    #: What is left of the round that is being run, and steps and seconds of the rounds after it.
    pending: deque[Shape] = field(default_factory=deque)
    later: tuple[int, float] = (0, 0.0)

    def __post_init__(self) -> None:
        # The latest round may have been cut off in the middle; what it has is skipped.
        self.round_index = max(1, self.collection.last_round)
        while self.round_index <= self.design.max_rounds and not self._left(self.round_index):
            self.round_index += 1
        self.started_s = self.clock_s() - self.collection.spent_s
        self.known_ms = {point.shape: point.estimate_ms for point in self.design.points}
        self.bounds = list(self.collection.missing)

    def warm_up(self) -> None:
        """Run every shape that is still to be timed once, and drop the time."""
        ahead = range(self.round_index, self.design.max_rounds + 1)
        needed = {point.shape for index in ahead for point in self._left(index)}
        ordered = dict.fromkeys(point.shape for point in round_order(self.design, WARM_UP))
        self._begin([shape for shape in ordered if shape in needed], self.round_index)
        while self.pending:
            shape = self.pending.popleft()
            if not self._is_out(shape) and self._time(shape) is not None:
                self._tell(shape)

    def has_time(self) -> bool:
        """Whether another round is to be run."""
        spent_s = self.clock_s() - self.started_s
        return self.round_index <= self.design.max_rounds and self._has_time_for(self.round_index, spent_s)

    def next_round(self) -> int:
        """Run the next round and return its number."""
        index = self.round_index
        points = self._left(index)
        self._begin([point.shape for point in points], index + 1)
        for point in points:
            self.pending.popleft()
            time_ms = None if self._is_out(point.shape) else self._time(point.shape)
            if time_ms is not None:
                self.collection.add(index, point.shape, point.label, time_ms)
                if self.journal:
                    self.journal.add_sample(index, point.shape, point.label, time_ms)
                self._tell(point.shape)
        self.round_index += 1
        return index

    def _left(self, index: int) -> list[DesignPoint]:
        done = self.collection.done
        return [point for point in round_order(self.design, index) if (index, point.shape, point.label) not in done]

    def _time(self, shape: Shape) -> float | None:
        try:
            time_ms = _rounded_ms(self.timer.time_shape(shape))
        except Exception as error:
            reason = out_of_memory_reason(error)
            if reason is None:
                raise
            self._leave_out(shape, reason)
        else:
            self.known_ms[shape] = time_ms
            return time_ms
        # Outside of the handler: the traceback would keep the tensors of the failed step alive.
        self.timer.recover()
        return None

    def _is_out(self, shape: Shape) -> bool:
        """Whether the shape, or one that is no larger, ran out of memory."""
        for bound in self.bounds:
            if shape.num_tokens >= bound.num_tokens and shape.num_kv_tokens >= bound.num_kv_tokens:
                if shape not in self.bounds:
                    self._leave_out(shape, f"not tried: {bound}, which is no larger, ran out of memory")
                return True
        return False

    def _leave_out(self, shape: Shape, reason: str) -> None:
        self.bounds.append(shape)
        self.collection.missing[shape] = reason
        if self.journal:
            self.journal.add_missing(shape, reason)

    def _tell(self, shape: Shape) -> None:
        self.num_done += 1
        if self.progress:
            steps, seconds = self.later
            steps, seconds = steps + self._count(self.pending), seconds + self._cost_s(self.pending)
            is_known = all(time_ms for known, time_ms in self.known_ms.items() if known not in self.bounds)
            self.progress(Progress(self.num_done, self.num_done + steps, seconds if is_known else None, shape))

    def _begin(self, shapes: list[Shape], next_index: int) -> None:
        """Note what is to be run now, and estimate what comes in the rounds from `next_index` on."""
        self.pending = deque(shapes)
        spent_s = before_s = self.clock_s() - self.started_s + self._cost_s(shapes)
        steps = 0
        for index in range(next_index, self.design.max_rounds + 1):
            if not self._has_time_for(index, spent_s):
                break
            left = [point.shape for point in self._left(index)]
            steps += self._count(left)
            spent_s += self._cost_s(left)
        self.later = (steps, spent_s - before_s)

    def _has_time_for(self, index: int, spent_s: float) -> bool:
        design = self.design
        if design.seconds is None or index <= min(design.min_rounds, _LEAST_ROUNDS):
            return True
        limit_s = design.seconds * (_OVERTIME if index <= design.min_rounds else 1.0)
        return spent_s + self._cost_s(point.shape for point in self._left(index)) <= limit_s

    def _count(self, shapes: Iterable[Shape]) -> int:
        return sum(shape not in self.bounds for shape in shapes)

    def _cost_s(self, shapes: Iterable[Shape]) -> float:
        return sum(self.known_ms[shape] for shape in shapes if shape not in self.bounds) / 1e3
