"""Tensor and pipeline parallel on gloo: several processes compute what one does, and what transformers does."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.parallel import Layout
from sarathi_tune.config.source import ModelSource
from sarathi_tune.engine.executor import Executor
from sarathi_tune.engine.loop import Engine
from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.request import Request, Sampling
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.shapes import parse_shape
from sarathi_tune.runtime.parallel.ranks import Ranks
from sarathi_tune.runtime.parallel.runner import ParallelRunner
from sarathi_tune.runtime.runner import Runner, RunnerOptions
from tests.hf_models import hf_greedy, hf_logits
from tests.runtime.conftest import ReferenceMaker, build_runner, chunk, decode, prompt_of, request_of

NUM_PAGES = 64
OPTIONS = RunnerOptions(NUM_PAGES, device="cpu", dtype="float32")
Build = Callable[[ModelSource], ParallelRunner]


@pytest.fixture(scope="module", params=[Layout(2, 1), Layout(1, 2), Layout(2, 2)], ids=str)
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    """Makes a runner over the processes of a layout, which are started once; for each model in turn."""
    ranks = Ranks.start(request.param, threads=1)
    latest: dict[ModelSource, ParallelRunner] = {}

    def make(source: ModelSource) -> ParallelRunner:
        if source not in latest:  # the followers hold one model at a time
            latest.clear()
            latest[source] = ParallelRunner.build(ranks, source, OPTIONS)
        return latest[source]

    yield make
    pids = ranks.process_ids
    assert len(pids) == request.param.num_ranks - 1
    ranks.close()


@pytest.mark.parametrize("family", ["llama", "llama-biased", "qwen2", "qwen3"])
def test_a_hybrid_step_is_what_transformers_computes(family: str, build: Build, reference: ReferenceMaker) -> None:
    """A decode, a chunk behind a prefix, a whole prompt and a chunk that samples nothing, in one step.

    llama-biased has biases on the row-parallel projections too, which count once and not once per rank
    (nano-vllm #125).
    """
    model = reference(family)
    runner = build(model.source)
    old, middle, new, unfinished = (prompt_of(length, seed=length) for length in (37, 50, 21, 64))
    decoding, chunked = request_of(old, [9, 3, 4], request_id=1), request_of(middle, [20, 21, 22, 23], request_id=2)
    runner.logits(StepPlan((Slice(decoding, 0, 36, False, False), Slice(chunked, 0, 30, False, False))))
    plan = StepPlan(
        (
            decode(decoding),
            chunk(chunked, 30, 20),
            chunk(request_of(new, [40, 60], request_id=3), 0, 21),
            chunk(request_of(unfinished, range(10, 14), request_id=4), 0, 17),
        )
    )
    expected = torch.stack([hf_logits(model.hf_model, prompt)[-1] for prompt in (old, middle, new)])
    torch.testing.assert_close(runner.logits(plan), expected, rtol=0, atol=1e-4)
    assert runner.execute(plan) == expected.argmax(dim=-1).tolist()


def test_greedy_tokens_are_transformers(build: Build, reference: ReferenceMaker) -> None:
    model = reference("qwen3")
    runner = build(model.source)
    prompt = prompt_of(33, seed=8)
    request = Request(5, prompt, 12, pages=[30, 31, 32])
    request.output += runner.execute(StepPlan((chunk(request, 0, 33),)))
    while len(request.output) < 12:
        request.output += runner.execute(StepPlan((decode(request),)))
    assert request.output == hf_greedy(model.hf_model, prompt, 12)


@pytest.mark.parametrize("tie", [False, True])
def test_one_key_head_is_kept_by_every_rank(build: Build, tie: bool) -> None:
    """More ranks than key heads, biases everywhere, random weights drawn part by part: as one process."""
    config = ModelConfig(
        "one-key-head",
        "qwen2",
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        max_model_len=256,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_embeddings=tie,
    )
    source = ModelSource(config)
    plan = StepPlan((chunk(request_of(prompt_of(40, vocab=101), [1, 2, 3]), 0, 40),))
    expected = Runner.build(source, num_pages=NUM_PAGES, device="cpu", dtype="float32").logits(plan)
    torch.testing.assert_close(build(source).logits(plan), expected, rtol=0, atol=1e-4)


def test_fifty_random_arrivals(build: Build, reference: ReferenceMaker) -> None:
    """Chunks, decodes, sampling, preemption by swapping: the tokens of one process, and every plan agreed on."""
    source = reference("llama").source
    runner = build(source)
    agreed_before = runner.num_agreed
    outputs, num_steps, num_preempted = _serve_fifty(runner)
    assert outputs == _serve_fifty(build_runner(reference("llama")))[0]
    assert num_preempted > 0
    assert runner.num_agreed - agreed_before == num_steps > 50


class _StandingClock:
    def now_s(self) -> float:
        return 0.0

    def sleep_until_s(self, when_s: float) -> None:
        raise AssertionError(f"nobody sleeps until {when_s}")


def _serve_fifty(executor: Executor) -> tuple[dict[int, list[int]], int, int]:
    """Serve 50 requests that arrive at random steps; tokens per request, steps and preemptions."""
    rng = random.Random(7)
    config = EngineConfig(token_budget=96, max_num_seqs=12, num_pages=24, max_model_len=256, preemption="swap")
    engine = Engine(config, executor, _StandingClock())
    requests = [
        Request(
            number,
            prompt_of(rng.randint(1, 90), seed=number),
            max_output_tokens=rng.randint(1, 40),
            sampling=Sampling(rng.choice([0.0, 0.8]), seed=rng.randint(-9, 2**65)),
        )
        for number in range(50)
    ]
    arrivals = sorted((rng.randint(0, 60), request.request_id) for request in requests)
    tick = num_steps = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= tick:
            engine.add(requests[arrivals.pop(0)[1]])
        num_steps += engine.step() is not None
        tick += 1
    engine.check_idle()
    return {request.request_id: request.output for request in requests}, num_steps, engine.num_preemptions


def test_it_can_be_measured_like_any_runner(build: Build, reference: ReferenceMaker) -> None:
    source = reference("llama").source
    runner = build(source)
    bench = Bench.build(runner, vocab_size=source.config.vocab_size)
    assert all(bench.time_shape(parse_shape(text)) > 0 for text in ("4x64", "40@0", "4x64+20@16"))
    description = runner.description
    assert description["ranks"] == description["tensor_parallel"] * description["pipeline_parallel"]
    assert description["collectives"] == "gloo"
    if description["pipeline_parallel"] > 1:
        times = description["pipeline"]
        assert times["micro_batches"] > 1
        assert 0 < times["stage_period_ms"] < times["rotation_ms"]
        assert 0 < times["bubble"] < 1
    else:
        assert "pipeline" not in description
