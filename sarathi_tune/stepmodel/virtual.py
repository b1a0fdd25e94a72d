"""The fitted model in place of a device: minutes of traffic in milliseconds, under a clock that moves when told."""

from __future__ import annotations

import random

from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.stepmodel.model import StepModel

#: Token ids are arbitrary but repeatable; requests that are predicted have no stop tokens.
_NUM_TOKEN_IDS = 30_000


class VirtualClock:
    """Seconds that pass only when someone says so. Follows `engine.executor.Clock`."""

    __slots__ = ("_now_s",)

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """The current virtual time in seconds."""
        return self._now_s

    def sleep_until_s(self, when_s: float) -> None:
        """Jump to `when_s`; stay where we are if it has passed."""
        if when_s > self._now_s:
            self._now_s = when_s

    def advance_s(self, duration_s: float) -> None:
        """Let `duration_s` seconds pass."""
        assert duration_s >= 0.0, duration_s
        self._now_s += duration_s


class VirtualExecutor:
    """Executes a plan by letting its modelled time pass on the clock. Follows `engine.executor.Executor`.

    `overhead_ms` is what a step takes besides the device: scheduling, sampling, streaming out. The same seed and the
    same plans give the same times and the same token ids.
    """

    def __init__(self, model: StepModel, clock: VirtualClock, seed: int = 0, overhead_ms: float = 0.0) -> None:
        self._model = model
        self._clock = clock
        self._random = random.Random(seed)
        self._overhead_s = overhead_ms / 1e3

    def execute(self, plan: StepPlan) -> list[int]:
        """Advance the clock by one random step time; token ids depend on the request and its length only."""
        assert plan.slices, "an empty plan has no time"
        decodes = context_sum = 0
        chunks: list[tuple[int, int]] = []
        tokens: list[int] = []
        for piece in plan.slices:
            start, count = piece.start, piece.count
            if piece.is_decode:
                decodes += 1
                context_sum += start + count
            else:
                chunks.append((start, count))
            if piece.samples:
                tokens.append((piece.request.request_id * 7919 + start + count) % _NUM_TOKEN_IDS)
        model = self._model
        step_ms = model.centre_ms(decodes, context_sum, chunks) * model.draw_ratio(bool(chunks), self._random)
        self._clock.advance_s(step_ms / 1e3 + self._overhead_s)
        return tokens
