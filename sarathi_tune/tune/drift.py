"""Whether the machine is still as fast as while it was profiled.

Clocks, neighbours on the same host and heat change over minutes, and a profile of one minute can't show it. So a few of
its steps are timed again right before and right after each verification run; the prediction of that run is scaled by
what they show, and the scale is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.profile import Profile, Sample
from sarathi_tune.stats import median
from sarathi_tune.stepmodel.fit import Spread, StepModel

#: Timed steps per anchor, behind one that is dropped.
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Drift:
    """Step times now over those of the profile: of decode-only steps, and of steps with a chunk."""

    decode: float
    chunk: float


@dataclass(frozen=True, slots=True)
class Anchors:
    """Two rows of the profile that are timed again: the decode batch, and the hybrid step nearest to the budget."""

    decode: Sample
    hybrid: Sample

    @classmethod
    def of(cls, profile: Profile, budget_tokens: int) -> "Anchors | None":
        """The anchors for a budget; None when the profile lacks such rows."""
        timed = [sample for sample in profile.samples if len(sample.times_ms) >= 3]
        decodes = [sample for sample in timed if sample.shape.kind == "decode"]
        hybrids = [sample for sample in timed if sample.shape.kind == "hybrid"]
        if not decodes or not hybrids:
            return None
        return cls(
            decode=max(decodes, key=lambda sample: (sample.shape.decodes, sample.shape.context)),
            hybrid=min(hybrids, key=lambda sample: abs(sample.shape.num_tokens - budget_tokens)),
        )


def measure_drift(bench: Bench, anchors: Anchors) -> Drift:
    """Time the anchors again, in turn."""
    decode, hybrid = [], []
    for _ in range(_REPEATS + 1):
        decode.append(bench.time_shape(anchors.decode.shape))
        hybrid.append(bench.time_shape(anchors.hybrid.shape))
    return Drift(
        decode=median(decode[1:]) / anchors.decode.median_ms, chunk=median(hybrid[1:]) / anchors.hybrid.median_ms
    )


def mean_drift(drifts: Sequence[Drift]) -> Drift:
    """The middle of what was seen before and after a run."""
    count = len(drifts)
    return Drift(sum(drift.decode for drift in drifts) / count, sum(drift.chunk for drift in drifts) / count)


def drifted(model: StepModel, drift: Drift) -> StepModel:
    """The model of the machine as it is now: every time scaled, medians and tails alike."""
    spread = model.spread
    return replace(
        model,
        spread=Spread(
            decode=tuple(ratio * drift.decode for ratio in spread.decode),
            chunk=tuple(ratio * drift.chunk for ratio in spread.chunk),
            n_decode=spread.n_decode,
            n_chunk=spread.n_chunk,
        ),
    )
