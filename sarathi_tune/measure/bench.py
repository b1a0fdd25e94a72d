"""Timing one step of a given shape on the real runner, with requests that look as they do in the middle of a run."""

import gc
import random
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sarathi_tune.engine.pages import PagePool
from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.request import Request, RequestState
from sarathi_tune.errors import OutOfMemoryError
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.measure.timer import CpuTimer, Timer, make_timer

if TYPE_CHECKING:
    import torch

#: Token ids that prompts are cut from; a prompt longer than this repeats itself, which costs nothing.
_NUM_IDS = 65_536
_FILL_SLOTS = 2048


class KvLayer(Protocol):
    """Keys and values of one layer, [slots, heads, head_dim]."""

    @property
    def keys(self) -> "torch.Tensor":
        """The layer's keys."""
        ...

    @property
    def values(self) -> "torch.Tensor":
        """The layer's values."""
        ...


class KvStore(Protocol):
    """The runner's KV cache: layers of `num_pages` pages of `page_tokens` tokens."""

    num_pages: int
    page_tokens: int

    @property
    def layers(self) -> Iterable[KvLayer]:
        """The layers' tensors."""
        ...


class BenchRunner(Protocol):
    """What the bench needs of a runner: `runtime.runner.Runner` has it."""

    @property
    def description(self) -> Mapping[str, Any]:
        """What computes; `device` is read."""
        ...

    @property
    def cache(self) -> KvStore:
        """The KV cache."""
        ...

    def execute(self, plan: StepPlan) -> list[int]:
        """Compute a step; returns when the device is done."""
        ...


class StepExecutor(Protocol):
    """Computes a step; returns when the device is done."""

    def execute(self, plan: StepPlan) -> list[int]:
        """Compute a step."""
        ...


class Bench:
    """Times steps on `runner`, whose KV cache has the pages of `pool`. The pool is the bench's own: it must be whole
    between two steps. `vocab_size` bounds the random token ids."""

    def __init__(
        self, runner: StepExecutor, pool: PagePool, *, vocab_size: int, timer: Timer | None = None, seed: int = 0
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._timer: Timer = timer if timer is not None else CpuTimer()
        self._ids = random.Random(seed).choices(range(vocab_size), k=_NUM_IDS)
        self._num_requests = 0

    @classmethod
    def build(cls, runner: BenchRunner, *, vocab_size: int, seed: int = 0) -> "Bench":
        """A bench over the whole KV cache of a runner that nothing else uses, filled with random keys and values."""
        cache = runner.cache
        fill_kv(cache.layers, seed)
        pool = PagePool(cache.num_pages, cache.page_tokens)
        return cls(runner, pool, vocab_size=vocab_size, timer=make_timer(runner.description["device"]), seed=seed)

    def time_shape(self, shape: Shape) -> float:
        """Run one step of the shape and return its milliseconds.

        Raises OutOfMemoryError when the KV cache can't hold it, and whatever the runner raises.
        """
        needed, free = shape.num_pages(self._pool.page_tokens), self._pool.num_free
        if needed > free:
            raise OutOfMemoryError(f"{shape} needs {needed} pages of KV cache and there are {free}.")
        plan = self.make_plan(shape)
        try:
            return self._timer.time_ms(lambda: self._runner.execute(plan))
        finally:
            for piece in plan:
                self._pool.release(piece.request.pages)

    def make_plan(self, shape: Shape) -> StepPlan:
        """A step of this shape over new requests that own their pages: decodes with one token of output whose keys but
        the last are computed, and one prompt whose prefix is and whose last chunk is to be."""
        decodes = [self._decode(shape.context) for _ in range(shape.decodes)]
        slices = [Slice(request, shape.context - 1, 1, is_decode=True, samples=True) for request in decodes]
        if shape.chunk:
            prompt = self._request(shape.prefix + shape.chunk, num_computed=shape.prefix)
            # The last chunk of a prompt samples: it costs most, and some chunk of every prompt is the last.
            slices.append(Slice(prompt, shape.prefix, shape.chunk, is_decode=False, samples=True))
        return StepPlan(tuple(slices))

    def recover(self) -> None:
        """Give back what a step that ran out of memory left behind: tracebacks hold tensors, torch caches blocks."""
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _decode(self, context: int) -> Request:
        request = self._request(context, num_computed=context - 1)
        request.output.append(request.prompt[-1])
        request.prompt = request.prompt[:-1]
        request.max_output_tokens = 2
        return request

    def _request(self, num_tokens: int, num_computed: int) -> Request:
        self._num_requests += 1
        start = (self._num_requests * 7919) % _NUM_IDS
        ids = self._ids[start : start + num_tokens]
        while len(ids) < num_tokens:
            ids += self._ids[: num_tokens - len(ids)]
        return Request(
            self._num_requests,
            ids,
            max_output_tokens=1,
            num_computed=num_computed,
            pages=self._pool.allocate(self._pool.pages_for(num_tokens)),
            state=RequestState.RUNNING,
        )


def fill_kv(layers: Iterable[KvLayer], seed: int = 0) -> None:
    """Write normally distributed keys and values into every slot.

    Never-written memory may be one shared page of zeros, which is read from the cache instead of from memory; NaN and
    denormals, which uninitialised memory holds, would slow down or spoil the arithmetic.
    """
    import torch

    block: torch.Tensor | None = None
    with torch.inference_mode():
        for layer in layers:
            # Some thousand slots are drawn and copied on: drawing all of a large cache would take minutes on a CPU.
            num_slots, heads, head_dim = layer.keys.shape
            size = (min(num_slots, _FILL_SLOTS), heads, head_dim)
            if block is None or block.shape != size:
                block = torch.randn(size, generator=torch.Generator().manual_seed(seed))
            _tile(layer.keys, block)
            _tile(layer.values, block.flip(0))


def _tile(tensor: "torch.Tensor", block: "torch.Tensor") -> None:
    block = block.to(tensor.device, tensor.dtype)
    for start in range(0, len(tensor), len(block)):
        part = tensor[start : start + len(block)]
        part.copy_(block[: len(part)])
