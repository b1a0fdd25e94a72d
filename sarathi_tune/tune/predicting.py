"""The predicting part of a run: capacity and prices on the virtual clock."""

from dataclasses import dataclass, replace

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.engine.loop import Engine
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.engine.request import Request
from sarathi_tune.goodput.objective import SUSTAINABLE_DELAY_MS
from sarathi_tune.goodput.surface import (
    Cell,
    Scenario,
    Surface,
    predict_capacity,
    predict_requests,
    predict_surface,
    saturation_rate,
)
from sarathi_tune.goodput.verification import VERIFY_SHARE, plan_verification
from sarathi_tune.loadgen.clock import SystemClock
from sarathi_tune.report.progress import Ui
from sarathi_tune.report.result import Capacity
from sarathi_tune.stats import median
from sarathi_tune.stepmodel.fit import StepModel
from sarathi_tune.tune.job import Job

#: Rates of the surface, as shares of the tested budget's capacity.
RATE_SHARES = (0.4, 0.6, 0.8, 1.0, 1.2)
#: A verification is planned so that this much more wouldn't queue up, and not below this share of the capacity.
_SPARE, _LOWEST_SHARE = 1.1, 0.5
_OVERHEAD_STEPS = 200


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted capacity of the tested budget (None: it meets the SLO at no rate), and every budget at every rate."""

    capacities: tuple[Capacity, ...]
    surface: Surface
    rate_per_s: float

    def at_rate(self) -> dict[int, Cell]:
        """The cells at the rate that the verification uses, by budget."""
        return {cell.budget_tokens: cell for cell in self.surface.cells if cell.rate_per_s == self.rate_per_s}


def play(job: Job, model: StepModel, loop_ms: float) -> Scenario:
    """What the virtual clock plays: this run's engine and workload over the step model, `loop_ms` beside each step."""
    return Scenario(
        model=model,
        config=job.engine_config(job.settings.control_budget),
        workload=job.settings.workload,
        slo=job.config.slo,
        criterion="every-step",
        overhead_ms=loop_ms,
        seed=job.config.seed,
    )


def predict(
    job: Job, played: Scenario, budgets_tokens: tuple[int, ...], tested_tokens: int, window_s: float, ui: Ui
) -> Prediction:
    """Search the capacity of the tested budget and of the control, and price `budgets_tokens` around it. `window_s`: of
    a verification, at most."""
    searched = tuple(dict.fromkeys((tested_tokens, job.settings.control_budget)))
    with ui.phase("predict", total=len(searched) + len(budgets_tokens)) as phase:
        capacities = []
        for budget in searched:
            phase.describe(f"capacity of {budget:,}")
            found = predict_capacity(played, budget)
            if found.rate_per_s is not None:
                capacities.append(Capacity(budget, found.rate_per_s))
            phase.advance()
        capacity = next((item.rate_per_s for item in capacities if item.budget_tokens == tested_tokens), None)
        rate = job.config.rate_per_s or working_rate(played, capacity, tested_tokens, window_s)
        rates = {rate, *(share * capacity for share in RATE_SHARES)} if capacity else {rate}
        cells: list[Cell] = []
        for budget in budgets_tokens:
            phase.describe(f"goodput of {budget:,}")
            cells += predict_surface(played, (budget,), tuple(rates)).cells
            phase.advance()
    return Prediction(tuple(capacities), Surface(tuple(cells)), rate)


def working_rate(played: Scenario, capacity_per_s: float | None, budget_tokens: int, window_s: float) -> float:
    """The rate to verify at: a share of the capacity, or of saturation where no rate meets the SLO.

    The few requests of a window may be heavier than the workload is in the long run. Then the queue would grow whatever
    the budget is, so the rate is lowered until these very requests are predicted not to queue up.
    """
    rate = VERIFY_SHARE * (capacity_per_s or 0.7 * saturation_rate(played, budget_tokens))
    if capacity_per_s is None:
        return rate
    lowest = _LOWEST_SHARE * capacity_per_s
    while rate > lowest and _queues_up(played, budget_tokens, _SPARE * rate, window_s):
        rate = max(lowest, rate / _SPARE)
    return rate


def _queues_up(played: Scenario, budget_tokens: int, rate_per_s: float, window_s: float) -> bool:
    plan = plan_verification(rate_per_s, played.workload, seconds=window_s, max_seconds=2 * window_s)
    limit = played.config.max_model_len
    requests, _ = plan.requests(played.workload, played.seed, vocab_size=None, max_model_len=limit)
    cell = predict_requests(played, budget_tokens, requests, plan.window_s)
    delay_ms = cell.report.scheduling_delay.p50_ms
    return cell.is_diverged or (delay_ms is not None and delay_ms > SUSTAINABLE_DELAY_MS)


class _NoDevice:
    """An executor that takes no time: what remains is the loop."""

    def execute(self, plan: StepPlan) -> list[int]:
        """One token per slice that samples."""
        return [0 for piece in plan if piece.samples]


def loop_overhead_ms(config: EngineConfig) -> float:
    """Milliseconds of scheduling and bookkeeping per step of a full decode batch, measured on this machine's Python."""
    decodes = config.max_num_seqs
    engine = Engine(replace(config, token_budget=max(config.token_budget, 2 * decodes)), _NoDevice(), SystemClock())
    for index in range(decodes):
        engine.add(Request(index, [0], min(_OVERHEAD_STEPS, config.max_model_len - 1)))
    times = []
    while engine.has_work:
        result = engine.step()
        assert result is not None
        times.append(result.duration_ms)
    return median(times)
