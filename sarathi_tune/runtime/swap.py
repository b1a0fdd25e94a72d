"""Host memory for the K and V of preempted requests: copied out when their pages are taken, back in on return."""

import torch

from sarathi_tune.engine.plan import Swap
from sarathi_tune.runtime.kvcache import KVCache


class SwapSpace:
    """Copies by request id. One tensor per request: [layers, 2, tokens, num_kv_heads, head_dim] on the host."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._copies: dict[int, torch.Tensor] = {}

    def apply(self, swap: Swap) -> None:
        """Do one transfer of a plan."""
        if swap.direction == "out":
            assert swap.request_id not in self._copies, f"request {swap.request_id} is swapped out already"
            self._copies[swap.request_id] = self._copy_out(swap.pages)
        elif swap.direction == "in":
            self._copy_in(self._copies.pop(swap.request_id), swap.pages)
        else:
            del self._copies[swap.request_id]

    def _copy_out(self, pages: tuple[int, ...]) -> torch.Tensor:
        slots = self._slots(pages)
        return torch.stack(
            [torch.stack((layer.keys[slots], layer.values[slots])).cpu() for layer in self._cache.layers]
        )

    def _copy_in(self, copy: torch.Tensor, pages: tuple[int, ...]) -> None:
        """A request may come back with fewer pages than it left with, when the last one held no token."""
        slots = self._slots(pages)[: copy.shape[2]]
        for layer, (keys, values) in zip(self._cache.layers, copy[:, :, : len(slots)].unbind(0), strict=True):
            layer.keys.index_copy_(0, slots, keys.to(slots.device))
            layer.values.index_copy_(0, slots, values.to(slots.device))

    def _slots(self, pages: tuple[int, ...]) -> torch.Tensor:
        size = self._cache.page_tokens
        first = torch.tensor(pages, dtype=torch.int64) * size
        slots = first[:, None] + torch.arange(size)[None, :]
        return slots.flatten().to(self._cache.layers[0].keys.device)
