"""One load through one scheduler: under the virtual clock, or for real."""

import math
from dataclasses import dataclass, replace

from sarathi_tune.config.engine import EngineConfig, SchedulerName
from sarathi_tune.config.run import SchedulingConfig
from sarathi_tune.config.slo import Slo
from sarathi_tune.engine.executor import Executor
from sarathi_tune.engine.loop import Engine
from sarathi_tune.goodput.objective import SUSTAINABLE_DELAY_MS
from sarathi_tune.goodput.search import Capacity, search_capacity
from sarathi_tune.goodput.surface import Scenario, predict_capacity
from sarathi_tune.loadgen.clock import SystemClock
from sarathi_tune.loadgen.inprocess import run_load
from sarathi_tune.loadgen.latency import distribution, gaps_ms, scheduling_delay_ms
from sarathi_tune.loadgen.record import LoadResult
from sarathi_tune.report.progress import Phase
from sarathi_tune.stats import median
from sarathi_tune.stepmodel.fit import StepModel
from sarathi_tune.stepmodel.virtual import VirtualClock, VirtualExecutor
from sarathi_tune.tune.comparing.load import STREAM_PROMPT_TOKENS, Load, SteadyPace, steady_load
from sarathi_tune.tune.comparing.pace import Pacer, answer_tokens
from sarathi_tune.tune.telling import tell_requests
from sarathi_tune.workload.spec import Workload

#: Longest that a real run is followed behind its last arrival, in seconds.
DRAIN_S = 300.0
#: Schedulers that cut prompts, so that the budget limits their steps.
CHUNKED: frozenset[SchedulerName] = frozenset({"sarathi", "sarathi-single"})
#: Prompts that a rate is judged by, and the slowest rate that is tried as a share of the first.
_CAPACITY_PROMPTS, _CAPACITY_REACH = 18, 16.0
#: The answers of a judged rate run on behind the last prompt, for longer than a prompt may wait: whoever waits for
#: their end has waited too long.
_CAPACITY_EXTRA_MS = 1.5 * SUSTAINABLE_DELAY_MS


@dataclass(frozen=True, slots=True)
class Arena:
    """What all schedulers have in common. `loop_ms`: what the engine's loop adds to each modelled step."""

    budget_tokens: int
    max_num_seqs: int
    num_pages: int
    page_tokens: int
    max_model_len: int
    scheduling: SchedulingConfig
    slo: Slo
    loop_ms: float
    seed: int

    def engine_config(self, scheduler: SchedulerName) -> EngineConfig:
        """The engine of a scheduler. Those that don't chunk may put whole prompts of the model's context into a step,
        as vLLM did before chunked prefill: the budget would only stop short prompts from sharing a step."""
        budget = self.budget_tokens
        return EngineConfig(
            token_budget=budget if scheduler in CHUNKED else max(budget, self.max_model_len),
            max_num_seqs=self.max_num_seqs,
            num_pages=self.num_pages,
            page_tokens=self.page_tokens,
            max_model_len=self.max_model_len,
            scheduler=scheduler,
            prefix_cache=self.scheduling.prefix_cache,
            preemption=self.scheduling.preemption,
        )

    def play_virtually(self, model: StepModel, config: EngineConfig, load: Load) -> LoadResult:
        """The load under the virtual clock, to its end."""
        clock = VirtualClock()
        executor = VirtualExecutor(model, clock, seed=self.seed, overhead_ms=self.loop_ms)
        engine = Engine(config, executor, clock)
        result = run_load(engine, clock, load.requests, drain_s=math.inf, freeze_heap=False)
        engine.check_idle()
        return result


def play_really(config: EngineConfig, load: Load, executor: Executor, phase: Phase) -> LoadResult:
    """The load on the real engine, to its end. `phase` counts the requests."""
    clock = SystemClock()
    engine = Engine(config, executor, clock)
    result = run_load(engine, clock, load.requests, drain_s=DRAIN_S, on_progress=tell_requests(phase, config.scheduler))
    engine.check_idle()
    return result


def workload_capacity(
    arena: Arena, model: StepModel, scheduler: SchedulerName, workload: Workload
) -> tuple[float | None, str]:
    """The largest rate of a workload's requests whose pooled p99 ITL meets the objective, or why there is none."""
    config = arena.engine_config(scheduler)
    scenario = Scenario(
        model=model,
        config=config,
        workload=workload,
        slo=arena.slo,
        criterion="pooled",
        overhead_ms=arena.loop_ms,
        seed=arena.seed,
    )
    return _told(predict_capacity(scenario, config.token_budget))


def steady_capacity(
    arena: Arena, model: StepModel, scheduler: SchedulerName, pacer: Pacer, pace: SteadyPace
) -> tuple[float | None, str]:
    """The largest rate of long prompts beside running answers at which the pooled p99 ITL meets the objective and the
    median prompt starts within two seconds, or why there is none."""
    prefill = pacer.prefill(pace.prompt_tokens)
    longest_tokens = arena.max_model_len - STREAM_PROMPT_TOKENS
    longest_s = pacer.decode_step_ms * longest_tokens / 1e3
    slowest = _CAPACITY_PROMPTS / longest_s
    first = max(slowest, 0.7e3 / prefill[1])

    def ask(rate_per_s: float, _attempt: int) -> bool:
        every_s = 1 / rate_per_s
        tokens = answer_tokens(pacer, prefill, every_s, _CAPACITY_PROMPTS)
        tokens += math.ceil(_CAPACITY_EXTRA_MS / pacer.decode_step_ms)
        tried = replace(
            pace,
            every_s=every_s,
            first_s=every_s / 2,
            num_prompts=_CAPACITY_PROMPTS,
            answer_tokens=min(tokens, longest_tokens),
        )
        load = steady_load(tried, arena.seed, vocab_size=None, max_model_len=arena.max_model_len)
        config = replace(
            arena.engine_config(scheduler),
            num_pages=load.num_pages(arena.page_tokens),
            prefix_cache=False,
        )
        return _meets(arena.play_virtually(model, config, load), load, arena.slo, prefill[1])

    return _told(search_capacity(ask, first, reach=min(_CAPACITY_REACH, max(1.0, first / slowest))))


def _meets(result: LoadResult, load: Load, slo: Slo, prefill_ms: float) -> bool:
    """Whether gaps and waits are within their limits, and the last prompts don't wait longer than the first ones by
    more than computing one takes."""
    itl = distribution((gap for record in result.records for gap in gaps_ms(record)), slo.percentile)
    judged = [record for record in result.records if record.request_id in load.judged]
    delays = [delay for record in judged if (delay := scheduling_delay_ms(record)) is not None]
    assert itl.tail_ms is not None, "answers have gaps"
    assert len(delays) == _CAPACITY_PROMPTS, "every prompt was computed"
    third = _CAPACITY_PROMPTS // 3
    grows = sum(delays[-third:]) / third > sum(delays[:third]) / third + prefill_ms
    return itl.tail_ms <= slo.itl_ms and median(delays) <= SUSTAINABLE_DELAY_MS and not grows


def _told(capacity: Capacity) -> tuple[float | None, str]:
    if capacity.rate_per_s is not None:
        return capacity.rate_per_s, "" if capacity.upper_per_s is not None else "or more"
    slowest = min(probe.rate_per_s for probe in capacity.probes)
    return None, f"not even {slowest:.3g} requests per second"
