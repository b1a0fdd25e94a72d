"""Engines whose steps take a scripted time on a clock that moves only when told."""

from collections.abc import Callable

from sarathi_tune.config.engine import UNLIMITED_TOKENS, EngineConfig, SchedulerName
from sarathi_tune.engine.loop import Engine
from sarathi_tune.engine.plan import StepPlan, StepShape
from sarathi_tune.loadgen.inprocess import TimedRequest
from sarathi_tune.workload.spec import RequestSpec


class ScriptedClock:
    """Seconds that pass only by sleeping and by executing; `oversleep_s` makes every sleep late."""

    def __init__(self, oversleep_s: float = 0.0) -> None:
        self.time_s = 100.0  # not zero: a run counts from its own start
        self.oversleep_s = oversleep_s

    def now_s(self) -> float:
        return self.time_s

    def sleep_until_s(self, when_s: float) -> None:
        if when_s > self.time_s:
            self.time_s = when_s + self.oversleep_s


class ScriptedExecutor:
    """Every step takes `cost_s(shape)` seconds."""

    def __init__(self, clock: ScriptedClock, cost_s: Callable[[StepShape], float]) -> None:
        self.clock, self.cost_s = clock, cost_s

    def execute(self, plan: StepPlan) -> list[int]:
        self.clock.time_s += self.cost_s(plan.shape)
        return [7 for piece in plan if piece.samples]


def make_engine(
    cost_s: Callable[[StepShape], float] = lambda _: 1.0,
    *,
    clock: ScriptedClock | None = None,
    budget: int = UNLIMITED_TOKENS,
    max_num_seqs: int = 64,
    num_pages: int = 10_000,
    max_model_len: int = 1 << 20,
    scheduler: SchedulerName = "sarathi",
) -> tuple[Engine, ScriptedClock]:
    """An engine over scripted steps, and its clock."""
    clock = clock or ScriptedClock()
    config = EngineConfig(
        token_budget=budget,
        max_num_seqs=max_num_seqs,
        num_pages=num_pages,
        max_model_len=max_model_len,
        scheduler=scheduler,
    )
    return Engine(config, ScriptedExecutor(clock, cost_s), clock), clock


def at(*times_s: float | None, prompt_tokens: int = 8, output_tokens: int = 1, first_id: int = 0) -> list[TimedRequest]:
    """Requests of one size at these times."""
    return [
        TimedRequest(RequestSpec(first_id + index, range(prompt_tokens), output_tokens), time_s)
        for index, time_s in enumerate(times_s)
    ]
