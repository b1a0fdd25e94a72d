"""Decode graphs without a GPU: sizes, padding, buffers, counting; a "graph" here is the work itself, run again."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.request import Request
from sarathi_tune.runtime.attention.base import Attention, AttentionShape
from sarathi_tune.runtime.attention.reference import ReferenceAttention
from sarathi_tune.runtime.attention.sdpa import SdpaAttention
from sarathi_tune.runtime.attention.triton_paged import TritonAttention
from sarathi_tune.runtime.batch import RaggedBatch, build_batch
from sarathi_tune.runtime.graphs import (
    GraphedStep,
    StepBuffers,
    graph_obstacle,
    graph_sizes,
    is_decode_step,
    padded_size,
)
from sarathi_tune.runtime.kvcache import KVCache, LayerCache
from sarathi_tune.runtime.layers.elementwise import TorchElementwise
from sarathi_tune.runtime.layers.linear import pick_linear
from sarathi_tune.runtime.model import Model, build_model
from sarathi_tune.runtime.weights import random_weights
from tests.hf_models import hf_greedy
from tests.runtime.conftest import ReferenceMaker, build_runner, chunk, poison, prompt_of, request_of

CPU = torch.device("cpu")
PAGE_TOKENS = 16
MAX_KEYS = 128

TINY = ModelConfig(
    name="tiny",
    family="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=MAX_KEYS,
    dtype="float32",
)


class DeviceOnlyAttention:
    """Attention that knows of a batch what a captured kernel knows: its tensors."""

    graph_safe = True

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: RaggedBatch) -> torch.Tensor:
        rows = []
        for row, pages in enumerate(batch.page_table.long()):
            keys = int(batch.key_starts[row + 1] - batch.key_starts[row])
            position = torch.arange(keys)
            slots = pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
            scores = torch.einsum("hgd,khd->hgk", query[row], cache.keys[slots]) * self._shape.scale
            rows.append(torch.einsum("hgk,khd->hgd", scores.softmax(-1), cache.values[slots]).flatten())
        return torch.stack(rows)


class Switch:
    """Chunks need the oracle, captured decodes what a kernel knows."""

    graph_safe = True

    def __init__(self, shape: AttentionShape) -> None:
        self._chunks, self._decodes = ReferenceAttention(shape), DeviceOnlyAttention(shape)

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: RaggedBatch) -> torch.Tensor:
        attention: Attention = self._decodes if batch.max_count == 1 else self._chunks
        return attention(query, cache, batch)


@dataclass
class Rerun:
    """Stands for a CUDA graph."""

    work: Callable[[], object]

    def replay(self) -> None:
        self.work()


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    return random_weights(TINY, torch.float32, CPU, seed=3)


def model(attention: Attention) -> Model:
    return build_model(TINY, dict(weights()), attention, TorchElementwise(), pick_linear(CPU, torch.float32), MAX_KEYS)


def kv_cache() -> KVCache:
    cache = KVCache(TINY, 40, PAGE_TOKENS, CPU, torch.float32)
    for layer in cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    return cache


def requests(*lengths: int) -> list[Request]:
    """Requests of these lengths; the first one owns the last pages of the pool."""
    free = list(range(40))
    return [
        Request(number, [(7 * number + i) % 97 for i in range(length)], 9, pages=[free.pop() for _ in range(8)])
        for number, length in enumerate(lengths)
    ]


def prefill(of: list[Request]) -> StepPlan:
    return StepPlan(tuple(Slice(one, 0, one.num_tokens - 1, is_decode=False, samples=False) for one in of))


def decode(of: list[Request]) -> StepPlan:
    return StepPlan(tuple(Slice(one, one.num_tokens - 1, 1, is_decode=True, samples=True) for one in of))


@pytest.fixture
def graphed() -> tuple[GraphedStep, KVCache]:
    """A tiny model with decode steps of 1, 2 and 4 "captured"."""
    cache = kv_cache()
    step = GraphedStep(model(Switch(AttentionShape.of(TINY))), StepBuffers(cache, 4, MAX_KEYS, CPU))
    step.capture(cache, (1, 2, 4), Rerun)
    return step, cache


def test_sizes_are_those_that_vllm_captures() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(30) == (1, 2, 4, 8, 16, 24, 30)
    assert graph_sizes(512)[:5] == (1, 2, 4, 8, 16)
    assert graph_sizes(512)[-3:] == (480, 496, 512)
    assert len(graph_sizes(512)) == 51  # 1, 2, 4; 8 to 248 by 8: 31; 256 to 512 by 16: 17


def test_a_step_is_padded_to_the_next_size() -> None:
    assert [padded_size(rows, (1, 2, 4)) for rows in range(1, 6)] == [1, 2, 4, 4, None]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_replay_computes_what_the_model_does_at_other_lengths(
    graphed: tuple[GraphedStep, KVCache], rows: int
) -> None:
    step, cache = graphed
    eager, eager_cache = model(ReferenceAttention(AttentionShape.of(TINY))), kv_cache()
    for lengths in ((33, 16, 100, 2), (17, 64, 5, 128)):
        running = requests(*lengths)
        step(build_batch(prefill(running), cache, CPU), cache)
        eager(build_batch(prefill(running), eager_cache, CPU), eager_cache)
        plan = decode(running[:rows])
        replayed = step(build_batch(plan, cache, CPU), cache)
        expected = eager(build_batch(plan, eager_cache, CPU), eager_cache)
        assert replayed.shape == (rows, TINY.vocab_size)
        torch.testing.assert_close(replayed, expected, rtol=1e-4, atol=1e-4)
    assert step.coverage.replayed == 2


def test_padded_rows_write_to_the_dummy_page_only(graphed: tuple[GraphedStep, KVCache]) -> None:
    step, cache = graphed
    running = requests(16 * 8, 20, 30)  # the first one fills the last page of the pool
    step(build_batch(prefill(running), cache, CPU), cache)
    before = [layer.keys.clone() for layer in cache.layers]
    batch = build_batch(decode(running), cache, CPU)
    step(batch, cache)
    for layer, keys in zip(cache.layers, before, strict=True):
        changed = (layer.keys != keys) & ~(layer.keys.isnan() & keys.isnan())
        slots = set(changed.flatten(1).any(1).nonzero().flatten().tolist())
        assert slots <= {*batch.slots.tolist(), cache.dummy_slot}


def test_steps_in_and_outside_of_graphs_are_counted(graphed: tuple[GraphedStep, KVCache]) -> None:
    step, cache = graphed
    running = requests(20, 20, 20, 20, 20)
    step(build_batch(prefill(running), cache, CPU), cache)
    step(build_batch(decode(running[:3]), cache, CPU), cache)
    step(build_batch(decode(running), cache, CPU), cache)
    assert step.coverage.as_dict() == {"replayed": 1, "eager_decode": 1, "eager_prefill": 1}
    assert step.coverage.num_steps == 3


def test_longer_requests_than_the_buffers_hold_run_outside_of_graphs() -> None:
    cache = kv_cache()
    step = GraphedStep(model(Switch(AttentionShape.of(TINY))), StepBuffers(cache, 4, 32, CPU))
    step.capture(cache, (4,), Rerun)
    running = requests(33)
    step(build_batch(prefill(running), cache, CPU), cache)
    step(build_batch(decode(running), cache, CPU), cache)
    assert step.coverage.eager_decode == 1


def test_the_largest_size_is_captured_first() -> None:
    cache = kv_cache()
    captured: list[int] = []

    def recorded(batch: RaggedBatch, _: KVCache) -> torch.Tensor:
        captured.append(batch.num_tokens)
        return torch.zeros(batch.num_tokens, 5)

    step = GraphedStep(recorded, StepBuffers(cache, 4, MAX_KEYS, CPU))
    step.capture(cache, (1, 2, 4), Rerun)
    assert list(dict.fromkeys(captured)) == [4, 2, 1]
    assert step.sizes == (1, 2, 4)


def test_replaying_moves_no_buffer() -> None:
    cache = kv_cache()
    buffers = StepBuffers(cache, 4, MAX_KEYS, CPU)
    tensors = ("token_ids", "positions", "slots", "query_starts", "key_starts", "page_table", "sample_rows")
    before = [getattr(buffers.view(4), name).data_ptr() for name in tensors]
    buffers.fill(build_batch(decode(requests(30, 40)), cache, CPU), 4)
    view = buffers.view(4)
    assert [getattr(view, name).data_ptr() for name in tensors] == before
    assert view.key_starts.tolist() == [0, 30, 70, 71, 72]
    assert view.slots.tolist()[2:] == [cache.dummy_slot, cache.dummy_slot]


def test_only_steps_of_single_sampling_tokens_are_decode_steps() -> None:
    cache = kv_cache()
    running = requests(20, 20)
    batch = build_batch(decode(running), cache, CPU)
    assert is_decode_step(batch)
    assert not is_decode_step(build_batch(prefill(running), cache, CPU))
    assert not is_decode_step(replace(batch, sample_rows=batch.sample_rows[:1])), "a chunk of one token"


def test_what_stands_in_the_way_of_graphs_is_said() -> None:
    shape = AttentionShape.of(TINY)
    on_cpu = graph_obstacle(SdpaAttention(shape), CPU)
    assert on_cpu is not None
    assert "CUDA" in on_cpu
    on_gpu = graph_obstacle(SdpaAttention(shape), torch.device("cuda"))
    assert on_gpu is not None
    assert "host" in on_gpu
    assert TritonAttention.graph_safe


def test_a_runner_replays_decode_steps_and_says_how_many(
    reference: ReferenceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill 40 tokens in two chunks, then decode: transformers' ids, and the decodes are counted as replayed."""
    monkeypatch.setattr("sarathi_tune.runtime.runner.graph_obstacle", lambda *_: None)
    monkeypatch.setattr("sarathi_tune.runtime.graphs._CudaCapture", lambda _device: Rerun)
    hf = reference("llama")
    runner = build_runner(hf, attention="reference")
    runner._model = replace(runner._model, attention=Switch(AttentionShape.of(hf.source.config)))
    runner.capture_decodes(3)
    poison(runner)
    prompt = prompt_of(40, seed=4)
    request = request_of(prompt, range(4))
    assert runner.execute(StepPlan((chunk(request, 0, 33),))) == []
    output = runner.execute(StepPlan((chunk(request, 33, 7),)))
    for _ in range(5):
        request = request_of([*prompt, *output], range(4))
        output += runner.execute(StepPlan((Slice(request, request.num_tokens - 1, 1, is_decode=True, samples=True),)))
    assert output == hf_greedy(hf.hf_model, prompt, 6)
    assert runner.description["graphs"] == {
        "captured": [1, 2, 3],
        "replayed": 5,
        "eager_decode": 0,
        "eager_prefill": 2,
    }


def test_a_runner_on_a_cpu_says_why_it_has_no_graphs(reference: ReferenceMaker) -> None:
    runner = build_runner(reference("llama"), max_num_seqs=4)
    assert runner.description["graphs"] == {
        "captured": [],
        "reason": "CUDA graphs need a CUDA device and this is cpu",
    }
