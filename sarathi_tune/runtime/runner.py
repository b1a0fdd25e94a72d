"""The runner: the executor that really computes a step, on whatever device is there."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from sarathi_tune.config.model import DtypeName, ModelConfig
from sarathi_tune.config.source import ModelSource
from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.request import Request
from sarathi_tune.errors import UsageError
from sarathi_tune.runtime.attention.base import AttentionShape
from sarathi_tune.runtime.attention.pick import pick_attention
from sarathi_tune.runtime.batch import build_batch, pad_rows
from sarathi_tune.runtime.graphs import GraphedStep, graph_obstacle
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.layers.elementwise import pick_elementwise
from sarathi_tune.runtime.layers.linear import pick_linear
from sarathi_tune.runtime.layers.parallel import TensorGroup
from sarathi_tune.runtime.layers.warming import warm_up_linears
from sarathi_tune.runtime.memory import kv_cache_bytes, max_kv_pages, require_memory, resident_weight_bytes
from sarathi_tune.runtime.model import Model, build_model
from sarathi_tune.runtime.sampling import sample_tokens
from sarathi_tune.runtime.shard import WHOLE, Shard
from sarathi_tune.runtime.swap import SwapSpace
from sarathi_tune.runtime.weights import (
    TORCH_DTYPES,
    available_bytes,
    load_weights,
    random_weights,
    shard_weight_bytes,
)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What is loaded, and where: see `Runner.build`."""

    num_pages: int
    page_tokens: int = 16
    device: str = "auto"
    dtype: DtypeName | None = None
    attention: str = "auto"
    seed: int = 0
    max_num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or one rank's part of it, with its KV cache on its device; `description` says what computes it."""

    config: ModelConfig
    model: Model
    cache: KVCache
    device: torch.device
    description: Mapping[str, Any]


def load_model(
    source: ModelSource,
    options: RunnerOptions,
    shard: Shard = WHOLE,
    group: TensorGroup | None = None,
    memory_share: float = 1.0,
) -> LoadedModel:
    """Load (or draw, with the seed) what `shard` keeps of the weights, and allocate the pages of KV cache.

    `group`: the ranks that share the layers. `memory_share`: how much of the device's free memory this process may
    take. Raises OutOfMemoryError when it doesn't fit, ModelError for unusable weights, UsageError for a device or an
    attention back end that isn't there.
    """
    config = with_dtype(source.config, options.dtype)
    local = shard.local(config)
    place, dtype = resolve_device(options.device), TORCH_DTYPES[config.dtype]
    linear = pick_linear(place, dtype)
    elementwise = pick_elementwise(place, dtype)
    choice = pick_attention(AttentionShape.of(local), place, dtype, options.page_tokens, options.attention)
    free_bytes = int(available_bytes(place) * memory_share)
    weight_bytes = (
        resident_weight_bytes(local)
        if shard.is_whole
        else shard_weight_bytes(config, dtype, shard) + shard.packed_head_bytes(config)
    )
    require_memory(local, options.num_pages, options.page_tokens, free_bytes, str(place), weight_bytes)
    cache_bytes = kv_cache_bytes(local, options.num_pages, options.page_tokens)
    linear = linear.with_tiles(local.most_inputs, weight_bytes, free_bytes - weight_bytes - cache_bytes)
    with torch.inference_mode():
        if source.directory is None:
            weights = random_weights(config, dtype, place, options.seed, shard)
        else:
            weights = load_weights(source.directory, config, dtype, place, shard)
        num_positions = min(config.max_model_len, options.num_pages * options.page_tokens)
        model = build_model(config, weights, choice.attention, elementwise.ops, linear, num_positions, shard, group)
        cache = KVCache(local, options.num_pages, options.page_tokens, place, dtype)
    description = {
        "model": config.name,
        "weights": "random" if source.directory is None else str(source.directory),
        "dtype": config.dtype,
        "device": str(place),
        "device_name": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "attention": choice.name,
        "attention_reason": choice.reason,
        "linear": linear.name,
        "linear_reason": linear.reason,
        "elementwise": elementwise.name,
        "elementwise_reason": elementwise.reason,
        "num_pages": options.num_pages,
        "page_tokens": options.page_tokens,
        "tensor_parallel": shard.layout.tensor,
        "pipeline_parallel": shard.layout.pipeline,
    }
    if linear.row_multiple > 1:
        description |= {"exact_rows": linear.exact_rows, "row_multiple": linear.row_multiple}
    return LoadedModel(config, model, cache, place, description)


class Runner:
    """A model, its KV cache and its device. Implements `engine.executor.Executor`.

    `description`: what computed the steps (model, dtype, device, back ends with their reasons, threads, how many steps
    so far were replayed from CUDA graphs), for profiles and results.
    """

    def __init__(self, model: Model, cache: KVCache, device: torch.device, description: Mapping[str, Any]) -> None:
        self.cache = cache
        self._description = dict(description)
        self._swap_space = SwapSpace(cache)
        self._model = model
        self._graphs: GraphedStep | None = None
        self._no_graphs = "no number of requests was given to capture them for"
        self._device = device

    @property
    def description(self) -> Mapping[str, Any]:
        """See the class."""
        if self._graphs is None:
            graphs: dict[str, Any] = {"captured": [], "reason": self._no_graphs}
        else:
            graphs = {"captured": list(self._graphs.sizes), **self._graphs.coverage.as_dict()}
        return MappingProxyType(self._description | {"graphs": graphs})

    @classmethod
    def build(
        cls,
        source: ModelSource,
        *,
        num_pages: int,
        page_tokens: int = 16,
        device: str = "auto",
        dtype: DtypeName | None = None,
        attention: str = "auto",
        seed: int = 0,
        max_num_seqs: int = 0,
    ) -> "Runner":
        """Load (or draw, with `seed`) the weights, allocate `num_pages` pages of KV cache, and warm up.

        Decode steps of up to `max_num_seqs` requests are captured in CUDA graphs where the device and the attention
        back end can; 0 captures none. Raises OutOfMemoryError when it doesn't fit, ModelError for unusable weights,
        UsageError for a device or an attention back end that isn't there.
        """
        loaded = load_model(source, RunnerOptions(num_pages, page_tokens, device, dtype, attention, seed))
        runner = cls(loaded.model, loaded.cache, loaded.device, loaded.description)
        runner.warm_up()
        if max_num_seqs:
            runner.capture_decodes(max_num_seqs)
        return runner

    def capture_decodes(self, max_num_seqs: int) -> None:
        """Capture decode steps of up to so many requests in CUDA graphs, if that is possible here. Raises
        OutOfMemoryError when there is no room left for them."""
        obstacle = graph_obstacle(self._model.attention, self._device)
        if obstacle is not None:
            self._no_graphs = obstacle
            return
        max_key_length = min(len(self._model.rotary.cos), self.cache.num_pages * self.cache.page_tokens)
        with torch.inference_mode():
            self._graphs = GraphedStep.build(
                self._model, self.cache, self._device, max_rows=max_num_seqs, max_key_length=max_key_length
            )

    def execute(self, plan: StepPlan) -> list[int]:
        """Compute a step and return one token id per slice that samples, in the plan's order.

        Returns when the device is done.
        """
        with torch.inference_mode():
            logits = self._forward(plan)
            sampling = [piece for piece in plan if piece.samples]
            tokens = sample_tokens(logits, sampling) if sampling else []
            self._synchronise()
        return tokens

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step and return its logits instead, [slices that sample, vocab] float32 on the host."""
        with torch.inference_mode():
            return self._forward(plan).float().cpu()

    def warm_up(self) -> None:
        """Run a chunk and a decode once, so that no kernel is compiled or buffer allocated in a timed step.

        Uses the first pages, which nobody owns yet.
        """
        for plan in warm_up_plans(self.cache.num_pages, self.cache.page_tokens):
            self.execute(plan)
        if self._model.linear.packed:
            with torch.inference_mode():
                model = self._model
                warm_up_linears(model.layers[0], model.head, model.linear, self.cache.layers[0].keys.dtype)

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        for swap in plan.swaps:
            self._swap_space.apply(swap)
        batch = build_batch(plan, self.cache, self._device)
        padded = pad_rows(batch, self._model.linear.padded_rows(batch.num_tokens), self.cache)
        step = self._model if self._graphs is None else self._graphs
        return step(padded, self.cache)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def warm_up_plans(num_pages: int, page_tokens: int) -> tuple[StepPlan, ...]:
    """A chunk and a decode on the first pages; none when the cache is too small for them."""
    count = min(2 * page_tokens, num_pages * page_tokens - 1)
    if count < 1:
        return ()
    request = Request(0, [0] * (count + 1), 1, pages=list(range(num_pages)))
    chunk = Slice(request, 0, count, is_decode=False, samples=False)
    decode = Slice(request, count, 1, is_decode=True, samples=True)
    return StepPlan((chunk,)), StepPlan((decode,))


def with_dtype(config: ModelConfig, dtype: DtypeName | None) -> ModelConfig:
    """The config computed in another dtype than its own."""
    return config if dtype is None else replace(config, dtype=dtype)


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA if there is a GPU, else the CPU. Raises UsageError for a device that isn't there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"There is no device {name!r}: use auto, cpu, cuda or cuda:0.") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"The device {name!r} isn't supported: use auto, cpu, cuda or cuda:0.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"The device {name!r} isn't there: torch sees {torch.cuda.device_count()} CUDA devices. Use --device cpu."
        )
    return device


def fitting_kv_pages(
    source: ModelSource, page_tokens: int, device: str = "auto", dtype: DtypeName | None = None
) -> int:
    """How many KV pages fit beside the weights into the memory that is free on the device now."""
    return max_kv_pages(with_dtype(source.config, dtype), page_tokens, available_bytes(resolve_device(device)))
