"""Ragged attention inputs in a paged cache whose every other slot is NaN."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.request import Request
from sarathi_tune.runtime.attention.base import AttentionShape
from sarathi_tune.runtime.batch import RaggedBatch, build_batch
from sarathi_tune.runtime.kvcache import LayerCache

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Pages:
    """As much of a KV cache as a batch is built from: its numbers."""

    page_tokens: int
    dummy_page: int

    @property
    def dummy_slot(self) -> int:
        return self.dummy_page * self.page_tokens


@dataclass(frozen=True, slots=True)
class Ragged:
    """The arguments of an attention back end."""

    query: torch.Tensor
    cache: LayerCache
    batch: RaggedBatch
    pages: Pages


def ragged(
    shape: AttentionShape,
    lengths: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 16,
    seed: int = 0,
    by_head: bool = False,
) -> Ragged:
    """A batch of slices of (prefix, count) tokens over pages in random order. `by_head`: the cache's memory layout."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(-(-(prefix + count) // page_tokens) for prefix, count in lengths) + 3
    free = list(range(1, num_pages))  # page 0 stays NaN: masked loads that go wrong go there
    random.Random(seed).shuffle(free)
    cache = LayerCache(*(_nan((num_pages + 1) * page_tokens, shape, dtype, by_head) for _ in range(2)))
    slices = []
    for number, (prefix, count) in enumerate(lengths):
        keys = prefix + count
        owned = [free.pop() for _ in range(-(-keys // page_tokens))]
        position = torch.arange(keys)
        slots = torch.tensor(owned)[position // page_tokens] * page_tokens + position % page_tokens
        for tensor in (cache.keys, cache.values):
            tensor[slots] = torch.randn(keys, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
        request = Request(number, [1] * (keys + 1), 1, pages=owned)
        slices.append(Slice(request, prefix, count, is_decode=count == 1, samples=count == 1))
    pages = Pages(page_tokens, num_pages)
    batch = build_batch(StepPlan(tuple(slices)), pages, CPU)  # type: ignore[arg-type]
    heads = (shape.num_kv_heads, shape.group, shape.head_dim)
    query = torch.randn(batch.num_tokens, *heads, generator=generator).to(dtype)
    return Ragged(query, cache, batch, pages)


def _nan(slots: int, shape: AttentionShape, dtype: torch.dtype, by_head: bool) -> torch.Tensor:
    heads, head_dim = shape.num_kv_heads, shape.head_dim
    if by_head:
        return torch.full((heads, slots, head_dim), float("nan"), dtype=dtype).permute(1, 0, 2)
    return torch.full((slots, heads, head_dim), float("nan"), dtype=dtype)
