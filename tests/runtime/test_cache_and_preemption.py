"""The prefix cache and preemption with real arithmetic: whatever happens to a request, its logits stay the same."""

from collections import defaultdict

import pytest
import torch

from sarathi_tune.config.engine import EngineConfig, PreemptionMode, SchedulerName
from sarathi_tune.engine.loop import Engine
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.engine.request import Request
from sarathi_tune.runtime.runner import Runner
from tests.engine.doubles import ManualClock
from tests.hf_models import hf_greedy
from tests.runtime.conftest import PAGE_TOKENS, ReferenceMaker, build_runner, poison, prompt_of

OUTPUT_TOKENS = 6


class LogitsExecutor:
    """Greedy decoding that keeps the logits behind every token of every request."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.logits: dict[int, list[torch.Tensor]] = defaultdict(list)

    def execute(self, plan: StepPlan) -> list[int]:
        rows = self.runner.logits(plan)
        sampling = [piece for piece in plan if piece.samples]
        for piece, row in zip(sampling, rows, strict=True):
            self.logits[piece.request.request_id].append(row)
        return [int(row.argmax()) for row in rows]


def make_engine(
    runner: Runner,
    *,
    budget: int = 24,
    prefix_cache: bool = False,
    preemption: PreemptionMode = "recompute",
    scheduler: SchedulerName = "sarathi",
    num_pages: int | None = None,
) -> tuple[Engine, LogitsExecutor]:
    executor = LogitsExecutor(runner)
    config = EngineConfig(
        budget,
        4,
        num_pages or runner.cache.num_pages,
        PAGE_TOKENS,
        max_model_len=1024,
        scheduler=scheduler,
        prefix_cache=prefix_cache,
        preemption=preemption,
    )
    return Engine(config, executor, ManualClock()), executor


def answer(engine: Engine, request_id: int, prompt: list[int]) -> Request:
    request = Request(request_id, prompt, OUTPUT_TOKENS)
    engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    return request


@pytest.mark.parametrize("family", ["llama3", "mistral-sliding", "qwen2", "qwen3"])
def test_logits_are_the_same_cold_warm_partly_warm_fully_cached_and_after_eviction(
    family: str, reference: ReferenceMaker
) -> None:
    model = reference(family)
    runner = build_runner(model, num_pages=16)
    prompt = prompt_of(4 * PAGE_TOKENS, seed=1)  # exactly four pages: fully cached but for its last token
    half = prompt[: 2 * PAGE_TOKENS] + prompt_of(20, seed=2)
    cold: dict[str, list[torch.Tensor]] = {}
    for name, ids in (("prompt", prompt), ("half", half)):
        poison(runner)
        engine, executor = make_engine(runner)
        request = answer(engine, 0, ids)
        assert request.output == hf_greedy(model.hf_model, ids, OUTPUT_TOKENS)
        cold[name] = executor.logits[0]
    poison(runner)
    engine, executor = make_engine(runner, prefix_cache=True)
    cases = [
        ("prompt", prompt, 0),  # cold
        ("prompt", prompt, 3 * PAGE_TOKENS),  # fully cached: the last page is computed again for its last token
        ("half", half, 2 * PAGE_TOKENS),  # partly warm
        ("half", half, 3 * PAGE_TOKENS),  # warm
    ]
    for request_id, (name, ids, cached) in enumerate(cases):
        assert answer(engine, request_id, ids).num_cached == cached
        torch.testing.assert_close(torch.stack(executor.logits[request_id]), torch.stack(cold[name]), rtol=0, atol=1e-4)
    # all 16 pages: everything that was cached has to go
    answer(engine, 90, prompt_of(16 * PAGE_TOKENS - OUTPUT_TOKENS + 1, seed=9))
    assert answer(engine, 91, prompt).num_cached == 0
    torch.testing.assert_close(torch.stack(executor.logits[91]), torch.stack(cold["prompt"]), rtol=0, atol=1e-4)
    engine.check_idle()


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("scheduler", ["sarathi", "sarathi-single", "prefill-first", "decode-first", "orca"])
def test_forced_preemption_at_every_step_changes_nothing(
    scheduler: SchedulerName, preemption: PreemptionMode, prefix_cache: bool, reference: ReferenceMaker
) -> None:
    model = reference("qwen2")
    prompts = [prompt_of(length, seed=length) for length in (5, PAGE_TOKENS, 40, 3 * PAGE_TOKENS + 1)]
    expected = [hf_greedy(model.hf_model, prompt, OUTPUT_TOKENS) for prompt in prompts]
    runner = build_runner(model, num_pages=32)
    engine, _ = make_engine(runner, prefix_cache=prefix_cache, preemption=preemption, scheduler=scheduler)
    requests = [Request(index, prompt, OUTPUT_TOKENS) for index, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        for request in [request for request in engine._queue.running if request.is_decoding]:
            engine._queue.preempt(request)
        steps += 1
        assert steps < 1000, "no progress"
    engine.check_idle()
    # each request is preempted behind each of its tokens but the last, which ends it
    assert engine.num_preemptions >= 4 * (OUTPUT_TOKENS - 1)
    assert [request.output for request in requests] == expected


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_pool_that_is_too_small_preempts_and_changes_nothing(
    preemption: PreemptionMode, reference: ReferenceMaker
) -> None:
    model = reference("llama3")
    prompts = [prompt_of(15, seed=seed) for seed in (1, 2, 3)]
    runner = build_runner(model, num_pages=5)
    engine, _ = make_engine(runner, preemption=preemption, num_pages=5)
    requests = [Request(index, prompt, 30) for index, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    engine.check_idle()
    assert engine.num_preemptions > 0
    assert [request.output for request in requests] == [hf_greedy(model.hf_model, p, 30) for p in prompts]
