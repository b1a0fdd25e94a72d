"""The paged KV cache: one tensor of keys and one of values per layer.

Slot `page * page_tokens + offset` holds one token, so that a run of contiguous pages is a plain view. One page more
than the pool knows is allocated: the dummy page, where padded rows write. A slot of -1 would silently overwrite the
last slot of the last page (vLLM #43810), so there is none.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.errors import OutOfMemoryError
from sarathi_tune.runtime.hugepages import ask_for_huge_pages
from sarathi_tune.runtime.kernels.arrays import as_array
from sarathi_tune.units import format_bytes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, each [num_slots, num_kv_heads, head_dim]; strides differ between devices.

    On a CPU the same memory also as the arrays that compiled kernels take, [num_kv_heads, num_slots, head_dim]: making
    them anew for each layer of each step costs a twentieth of a small decode step.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_array: np.ndarray[Any, Any] | None = field(init=False)
    value_array: np.ndarray[Any, Any] | None = field(init=False)

    def __post_init__(self) -> None:
        for name, tensor in (("key_array", self.keys), ("value_array", self.values)):
            object.__setattr__(self, name, _by_head(tensor))


class KVCache:
    """Keys and values of all layers in `num_pages` pages and one dummy page."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        num_slots = (num_pages + 1) * page_tokens
        shape = (num_slots, config.num_kv_heads, config.head_dim)
        try:
            self.layers = tuple(
                LayerCache(_allocate(shape, device, dtype), _allocate(shape, device, dtype))
                for _ in range(config.num_layers)
            )
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            wanted = 2 * config.num_layers * num_slots * config.num_kv_heads * config.head_dim * dtype.itemsize
            raise OutOfMemoryError(
                f"{format_bytes(wanted)} of KV cache ({num_pages} pages of {page_tokens} tokens) can't be allocated on "
                f"{device}: use fewer pages or a smaller model."
            ) from error

    @property
    def dummy_page(self) -> int:
        """The page that belongs to nobody: padded rows write there."""
        return self.num_pages

    @property
    def dummy_slot(self) -> int:
        """The first slot of the dummy page."""
        return self.num_pages * self.page_tokens


def _by_head(tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    by_head = tensor.permute(1, 0, 2)
    if tensor.device.type != "cpu" or not by_head.is_contiguous():
        return None
    return as_array(by_head)


def _allocate(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros, so that every byte is touched now and no step pays for a page fault later.

    In memory a CPU has all slots of one head behind each other, since its kernels read head by head; the paged kernels
    of a GPU want token by token.
    """
    slots, heads, head_dim = shape
    if device.type == "cpu":
        cache = torch.empty(heads, slots, head_dim, device=device, dtype=dtype)
        ask_for_huge_pages(cache)
        return cache.zero_().permute(1, 0, 2)
    return torch.zeros(slots, heads, head_dim, device=device, dtype=dtype)
