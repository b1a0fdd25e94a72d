"""The steps that the server computed, as a profile: what real traffic cost, by the engine's own clock."""

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sarathi_tune.config.source import ModelSource
from sarathi_tune.engine.loop import StepResult
from sarathi_tune.engine.plan import StepShape
from sarathi_tune.machine.description import describe_machine
from sarathi_tune.machine.gpu import open_gpu
from sarathi_tune.measure.profile import Profile, Sample, describe_model, save_profile
from sarathi_tune.measure.samples import noise_between_halves
from sarathi_tune.measure.shapes import Shape, rounded_context

#: The last steps that are kept: some tens of megabytes, and an hour of steps of 70 ms.
MOST_STEPS = 50_000


class StepRecord:
    """The last steps of an engine, each with the time from before scheduling to the end of its execution."""

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._steps: deque[tuple[StepShape, float]] = deque(maxlen=most_steps)

    def add(self, result: StepResult) -> None:
        """Keep a step. One that preempted a request isn't like others, and is left out."""
        if not result.num_preempted:
            self._steps.append((result.shape, result.duration_ms))

    def samples(self) -> tuple[Sample, ...]:
        """A row per shape, decode steps first. Contexts are the mean of a step's decodes, rounded to a few per cent. A
        row has one chunk at most, so steps with more are left out."""
        rows: dict[Shape, list[float]] = {}
        for step, time_ms in self._steps:
            if len(step.chunks) <= 1:
                rows.setdefault(_rounded(step), []).append(time_ms)
        ordered = sorted(rows, key=lambda shape: (shape.chunk > 0, shape.decodes == 0, shape))
        return tuple(Sample(shape, tuple(rows[shape])) for shape in ordered)


def save_record(record: StepRecord, path: Path, source: ModelSource, description: Mapping[str, Any]) -> str:
    """Write the steps as a profile; what to tell the user of it. `description`: of what computed them.

    Raises UsageError when the file can't be written.
    """
    samples = record.samples()
    if not samples:
        return f"No step was computed, so there is nothing to write to {path}."
    gpu, _ = open_gpu() if str(description["device"]).startswith("cuda") else (None, ())
    profile = Profile(
        samples=samples,
        machine=describe_machine(gpu).as_dict(),
        model=describe_model(source, description),
        engine=description,
        noise=noise_of(samples),
        max_model_len=source.config.max_model_len,
        source="sarathi-tune serve --record",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    save_profile(profile, path)
    num_steps = sum(len(sample.times_ms) for sample in samples)
    return f"{num_steps:,} steps of {len(samples):,} shapes are in {path}; `sarathi-tune derive` takes it."


def noise_of(samples: Sequence[Sample]) -> float | None:
    """How far the decode step that was computed most often differs between two halves of its times."""
    plain = [sample.times_ms for sample in samples if not sample.shape.chunk]
    return noise_between_halves(max(plain, key=len)) if plain else None


def _rounded(step: StepShape) -> Shape:
    contexts = step.decode_contexts
    (prefix, chunk), *_ = (*step.chunks, (0, 0))
    context = rounded_context(sum(contexts) / len(contexts)) if contexts else 0
    return Shape(len(contexts), context, chunk, prefix)
