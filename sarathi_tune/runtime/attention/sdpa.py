"""Torch's own scaled_dot_product_attention over each slice's keys: runs on every device, and needs nothing else.

Decodes: the query heads that share a key head become rows of one small query matrix, so that keys are read once per
group. Chunks: an explicit mask, unless the chunk has no prefix and SDPA's causal flag means the right thing.
"""

import torch
from torch.nn import functional

from sarathi_tune.runtime.attention.base import AttentionShape, allowed, cached
from sarathi_tune.runtime.batch import RaggedBatch, Sequence
from sarathi_tune.runtime.kvcache import LayerCache


class SdpaAttention:
    """One SDPA call per slice."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: RaggedBatch) -> torch.Tensor:
        """See Attention."""
        query = query.flatten(1, 2)
        output = torch.empty_like(query)
        for sequence in batch.sequences:
            rows = slice(sequence.row, sequence.row + sequence.count)
            if sequence.count == 1:
                output[rows] = self.decode(query[rows], cache, sequence)
            else:
                output[rows] = self.chunk(query[rows], cache, sequence)
        return output.flatten(1)

    def decode(self, query: torch.Tensor, cache: LayerCache, sequence: Sequence) -> torch.Tensor:
        """One query row, [1, num_heads, head_dim], over all keys it sees; no mask needed."""
        shape = self._shape
        first = shape.first_key(sequence.prefix)
        keys = cached(cache.keys, sequence, first).transpose(0, 1).unsqueeze(0)
        values = cached(cache.values, sequence, first).transpose(0, 1).unsqueeze(0)
        folded = query.view(1, shape.num_kv_heads, shape.group, shape.head_dim)
        return functional.scaled_dot_product_attention(folded, keys, values).view(1, shape.num_heads, shape.head_dim)

    def chunk(self, query: torch.Tensor, cache: LayerCache, sequence: Sequence) -> torch.Tensor:
        """Several query rows, [count, num_heads, head_dim], over the prefix and causally over themselves."""
        shape = self._shape
        first = shape.first_key(sequence.prefix)
        keys = self._spread(cached(cache.keys, sequence, first))
        values = self._spread(cached(cache.values, sequence, first))
        is_plain = sequence.prefix == 0 and (shape.window is None or shape.window >= sequence.count)
        mask = None if is_plain else allowed(sequence, shape, first, query.device)
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0), keys, values, attn_mask=mask, is_causal=is_plain
        )
        return attended.squeeze(0).transpose(0, 1)

    def _spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """[keys, num_kv_heads, head_dim] -> [1, num_heads, keys, head_dim], each key head repeated for its group."""
        shape, num_keys = self._shape, tensor.shape[0]
        by_head = tensor.transpose(0, 1).unsqueeze(1).expand(-1, shape.group, -1, -1)
        return by_head.reshape(1, shape.num_heads, num_keys, shape.head_dim)
