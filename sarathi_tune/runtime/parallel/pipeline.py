"""Micro-batches: a step cut into parts of equal tokens, so that the stages of a pipeline work at the same time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sarathi_tune.engine.plan import Slice, StepPlan


def split_plan(plan: StepPlan, num_parts: int) -> list[StepPlan]:
    """Cut a step into at most `num_parts` micro-batches of equal tokens (to within one), in order.

    A chunk may be cut: its second part attends to the first one's keys, which every stage has written by then. Only the
    part that ends the slice samples. Swaps aren't part of micro-batches.
    """
    total = plan.num_tokens
    num_parts = min(num_parts, total)
    bounds = [total * (part + 1) // num_parts for part in range(num_parts)]
    parts: list[list[Slice]] = [[]]
    done = 0
    for piece in plan:
        rest = piece
        while done + rest.count > bounds[len(parts) - 1]:
            count = bounds[len(parts) - 1] - done
            if count:
                parts[-1].append(replace(rest, count=count, samples=False))
                rest = replace(rest, start=rest.start + count, count=rest.count - count)
            done = bounds[len(parts) - 1]
            parts.append([])
        parts[-1].append(rest)
        done += rest.count
    return [StepPlan(tuple(part)) for part in parts]


@dataclass(slots=True)
class PipelineTimes:
    """How the stages of a pipeline kept each other busy, summed over steps; times in milliseconds.

    period: what the slowest stage takes for one micro-batch. rotation: from the first micro-batch's start on the first
    stage to the last one's end on the last. A step of M micro-batches on S stages can't be shorter than
    (M + S - 1) periods when the stages are equal: the S - 1 are its bubble, the time to fill and drain the pipeline.
    """

    num_steps: int = 0
    num_micro_batches: int = 0
    period_ms: float = 0.0
    rotation_ms: float = 0.0
    busy_ms: float = 0.0

    def add(self, rotation_ms: float, num_micro_batches: int, busy_ms: Sequence[float]) -> None:
        """One step; `busy_ms`: how long each stage computed."""
        self.num_steps += 1
        self.num_micro_batches += num_micro_batches
        self.rotation_ms += rotation_ms
        self.period_ms += max(busy_ms) / num_micro_batches
        self.busy_ms += sum(busy_ms) / len(busy_ms)

    def as_dict(self) -> dict[str, float | int]:
        """Means per step, and the share of the stages' time in which they had nothing to do."""
        if not self.num_steps:
            return {"steps": 0}
        return {
            "steps": self.num_steps,
            "micro_batches": self.num_micro_batches / self.num_steps,
            "stage_period_ms": self.period_ms / self.num_steps,
            "rotation_ms": self.rotation_ms / self.num_steps,
            "bubble": 1.0 - self.busy_ms / self.rotation_ms,
        }
