"""The oracle: gather the keys, one explicit block-diagonal mask over the whole ragged batch, softmax in float32.

Slow and plain on purpose: the other back ends are tested against it.
"""

import torch

from sarathi_tune.runtime.attention.base import AttentionShape, allowed, cached
from sarathi_tune.runtime.batch import RaggedBatch
from sarathi_tune.runtime.kvcache import LayerCache


class ReferenceAttention:
    """Attention by its definition, in float32 whatever the dtype of the model."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: RaggedBatch) -> torch.Tensor:
        """See Attention."""
        shape = self._shape
        keys = torch.cat([cached(cache.keys, sequence, 0) for sequence in batch.sequences]).float()
        values = torch.cat([cached(cache.values, sequence, 0) for sequence in batch.sequences]).float()
        mask = self._mask(batch, query.device)
        keys = keys.repeat_interleave(shape.group, dim=1)
        values = values.repeat_interleave(shape.group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.flatten(1, 2).float(), keys) * shape.scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1).to(query.dtype)

    def _mask(self, batch: RaggedBatch, device: torch.device) -> torch.Tensor:
        """[tokens, keys of all sequences] bool: each sequence's own block, nothing outside."""
        num_keys = sum(sequence.key_length for sequence in batch.sequences)
        mask = torch.zeros(batch.num_tokens, num_keys, dtype=torch.bool, device=device)
        column = 0
        for sequence in batch.sequences:
            rows = slice(sequence.row, sequence.row + sequence.count)
            mask[rows, column : column + sequence.key_length] = allowed(sequence, self._shape, 0, device)
            column += sequence.key_length
        return mask
