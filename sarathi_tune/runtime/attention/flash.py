"""FlashAttention-2's varlen kernel: the whole ragged batch in one call, over the pages or over gathered keys.

CUDA only. The kernel's block table wants pages of a multiple of 256 tokens; smaller pages are gathered first.
"""

from typing import Any

import numpy as np
import torch

from sarathi_tune.runtime.attention.base import AttentionShape
from sarathi_tune.runtime.batch import RaggedBatch
from sarathi_tune.runtime.kvcache import LayerCache

#: FlashAttention 2.8, `mha_varlen_fwd`: "Paged KV cache block size must be divisible by 256".
PAGE_MULTIPLE = 256


class FlashAttention:
    """`flash_attn_varlen_func`; its causal mask is aligned to the bottom right corner since 2.1, as chunks need it."""

    def __init__(self, shape: AttentionShape, page_tokens: int) -> None:
        from flash_attn import flash_attn_varlen_func

        self._kernel: Any = flash_attn_varlen_func
        self._shape = shape
        self._page_tokens = page_tokens
        self._gathered: tuple[RaggedBatch, torch.Tensor] | None = None

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: RaggedBatch) -> torch.Tensor:
        """See Attention."""
        window = self._shape.window
        keys, values, block_table = self._keys_and_values(cache, batch)
        attended: torch.Tensor = self._kernel(
            query.flatten(1, 2),
            keys,
            values,
            cu_seqlens_q=batch.query_starts,
            cu_seqlens_k=batch.key_starts,
            max_seqlen_q=batch.max_count,
            max_seqlen_k=batch.max_key_length,
            softmax_scale=self._shape.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=block_table,
        )
        return attended.flatten(1)

    def _keys_and_values(
        self, cache: LayerCache, batch: RaggedBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if self._page_tokens % PAGE_MULTIPLE == 0:
            pages = (-1, self._page_tokens, self._shape.num_kv_heads, self._shape.head_dim)
            return cache.keys.view(pages), cache.values.view(pages), batch.page_table
        slots = self._key_slots(batch)
        return cache.keys.index_select(0, slots), cache.values.index_select(0, slots), None

    def _key_slots(self, batch: RaggedBatch) -> torch.Tensor:
        """The slots of all keys, sequence by sequence; made once per batch, used by every layer."""
        if self._gathered is None or self._gathered[0] is not batch:
            runs = (run for sequence in batch.sequences for run in sequence.runs)
            slots = np.concatenate([np.arange(slot, slot + tokens) for slot, tokens in runs])
            self._gathered = batch, torch.from_numpy(slots).to(batch.slots.device)
        return self._gathered[1]
