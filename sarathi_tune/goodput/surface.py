"""Goodput over budget and rate, predicted: the real scheduler, page pool and load generator over the step model.

All cells of a surface see the same requests, and arrivals of the same pattern stretched to their rate, so that
neighbours differ by budget and rate and not by luck.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.config.slo import Slo
from sarathi_tune.engine.loop import Engine
from sarathi_tune.engine.plan import StepShape
from sarathi_tune.goodput.objective import SUSTAINABLE_DELAY_MS, Criterion, shortfalls
from sarathi_tune.goodput.search import Capacity, search_capacity
from sarathi_tune.loadgen.inprocess import TimedRequest, run_load, timed
from sarathi_tune.loadgen.latency import LatencyReport, summarise
from sarathi_tune.loadgen.record import LoadResult
from sarathi_tune.stepmodel.fit import StepModel
from sarathi_tune.stepmodel.virtual import VirtualClock, VirtualExecutor
from sarathi_tune.workload.arrivals import poisson_exactly
from sarathi_tune.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is predicted: an engine (its budget is replaced), its step times, what it is asked, and what is promised.

    `overhead_ms` is added to every step. `num_requests` per cell; None takes as many as make 8,000 output tokens, 60 to
    300, which a cell predicts in about 0.1 s.
    """

    model: StepModel
    config: EngineConfig
    workload: Workload
    slo: Slo
    criterion: Criterion = "every-step"
    overhead_ms: float = 0.0
    num_requests: int | None = None
    seed: int = 0

    @property
    def requests_per_cell(self) -> int:
        """How many requests each cell sees."""
        if self.num_requests is not None:
            return self.num_requests
        return min(300, max(60, round(8000 / self.workload.mean_output_tokens)))


@dataclass(frozen=True, slots=True)
class Cell:
    """One budget at one rate. `misses` says why the SLO isn't met, and is empty when it is; `is_diverged`: the queue
    only grew and the run was given up."""

    budget_tokens: int
    rate_per_s: float
    report: LatencyReport
    misses: tuple[str, ...]
    mean_decodes: float
    is_diverged: bool

    @property
    def is_met(self) -> bool:
        """Whether the SLO is met."""
        return not self.misses

    def as_dict(self) -> dict[str, Any]:
        """The cell as it stands in a result document."""
        return {
            "budget_tokens": self.budget_tokens,
            "rate_per_s": self.rate_per_s,
            "met": self.is_met,
            "misses": list(self.misses),
            "mean_decodes": self.mean_decodes,
            "diverged": self.is_diverged,
            "latency": self.report.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Surface:
    """Cells by budget, then by rate, both rising."""

    cells: tuple[Cell, ...]

    @property
    def budgets_tokens(self) -> tuple[int, ...]:
        """The budgets, rising."""
        return tuple(sorted({cell.budget_tokens for cell in self.cells}))

    @property
    def rates_per_s(self) -> tuple[float, ...]:
        """The rates, rising."""
        return tuple(sorted({cell.rate_per_s for cell in self.cells}))

    def cell(self, budget_tokens: int, rate_per_s: float) -> Cell:
        """The cell of this budget and rate; KeyError when it isn't part of the surface."""
        for cell in self.cells:
            if cell.budget_tokens == budget_tokens and cell.rate_per_s == rate_per_s:
                return cell
        raise KeyError((budget_tokens, rate_per_s))


def predict_surface(scenario: Scenario, budgets_tokens: Sequence[int], rates_per_s: Sequence[float]) -> Surface:
    """Every budget at every rate."""
    return Surface(
        tuple(
            predict_cell(scenario, budget, rate)
            for budget in sorted(set(budgets_tokens))
            for rate in sorted(set(rates_per_s))
        )
    )


def predict_cell(scenario: Scenario, budget_tokens: int, rate_per_s: float) -> Cell:
    """One budget at one rate, over the scenario's own requests."""
    requests = draw_requests(scenario, rate_per_s)
    cell = predict_requests(scenario, budget_tokens, requests, scenario.requests_per_cell / rate_per_s)
    # To the last digit the rate that was asked for: cells are found by it.
    return replace(cell, rate_per_s=rate_per_s)


def predict_requests(scenario: Scenario, budget_tokens: int, requests: Sequence[TimedRequest], window_s: float) -> Cell:
    """One budget over given requests in a window of `window_s` seconds: the prediction of the very run that is
    measured. Prompts are not read."""
    result = run_virtual(scenario, budget_tokens, requests, window_s)
    report = summarise(result, scenario.slo, intervals=False)
    misses = shortfalls(report, scenario.criterion)
    if result.is_diverged:
        misses = (*misses, "the queue only grows")
    decodes = sum(step.shape.num_decodes for step in result.steps)
    return Cell(
        budget_tokens=budget_tokens,
        rate_per_s=len(requests) / window_s,
        report=report,
        misses=misses,
        mean_decodes=decodes / len(result.steps) if result.steps else 0.0,
        is_diverged=result.is_diverged,
    )


def run_virtual(
    scenario: Scenario, budget_tokens: int, requests: Sequence[TimedRequest], window_s: float
) -> LoadResult:
    """The whole run on a virtual clock, steps included."""
    clock = VirtualClock()
    executor = VirtualExecutor(scenario.model, clock, seed=scenario.seed, overhead_ms=scenario.overhead_ms)
    engine = Engine(replace(scenario.config, token_budget=budget_tokens), executor, clock)
    patience_ms = max(SUSTAINABLE_DELAY_MS, scenario.slo.ttft_ms or 0.0)
    return run_load(
        engine,
        clock,
        requests,
        stop_after_s=window_s,
        drain_s=math.inf,
        give_up_after_s=10 * patience_ms / 1e3,
        freeze_heap=False,
    )


def draw_requests(scenario: Scenario, rate_per_s: float) -> tuple[TimedRequest, ...]:
    """The scenario's requests at this rate, for an executor that reads no prompt."""
    count = scenario.requests_per_cell
    draw = scenario.workload.draw(scenario.seed, count, vocab_size=None, max_model_len=scenario.config.max_model_len)
    return timed(draw.requests, poisson_exactly(rate_per_s, scenario.seed, count))


def predict_capacity(scenario: Scenario, budget_tokens: int, *, tolerance: float = 0.05) -> Capacity:
    """The largest rate that meets the SLO at this budget, to `tolerance`. Rates are compared over the same requests;
    new ones are drawn only to confirm."""
    asked: Counter[float] = Counter()

    def ask(rate_per_s: float, _attempt: int) -> bool:
        seed = scenario.seed + asked[rate_per_s]
        asked[rate_per_s] += 1
        return predict_cell(replace(scenario, seed=seed), budget_tokens, rate_per_s).is_met

    first_per_s = 0.7 * saturation_rate(scenario, budget_tokens)
    return search_capacity(ask, first_per_s, tolerance=tolerance, reach=16.0)


def saturation_rate(scenario: Scenario, budget_tokens: int) -> float:
    """Requests per second of an engine that never idles, from mean lengths: an upper bound on any capacity.

    Each request brings P prompt tokens and D decodes. A full step holds decodes and chunk in that proportion, as far as
    the budget, the number of sequences and the KV cache allow.
    """
    config = scenario.config
    workload = scenario.workload.fit_to_context(config.max_model_len)
    prompt, decodes_each = workload.mean_prompt_tokens, max(workload.mean_output_tokens - 1, 1e-9)
    in_cache = config.num_pages * config.page_tokens / (prompt + workload.mean_output_tokens)
    seqs = max(1.0, min(config.max_num_seqs, in_cache))
    total = min(budget_tokens, seqs * (1 + prompt / decodes_each))
    chunk = total * prompt / (prompt + decodes_each)
    decodes = round(total - chunk)
    context = round(workload.mean_decode_context_tokens)
    shape = StepShape((context,) * decodes, ((0, max(1, round(chunk))),))
    step_s = (scenario.model.predict_ms(shape) + scenario.overhead_ms) / 1e3
    return chunk / prompt / step_s
