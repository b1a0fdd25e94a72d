"""What every attention back end does."""

from dataclasses import dataclass
from typing import Protocol

import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.runtime.batch import RaggedBatch, Sequence
from sarathi_tune.runtime.kvcache import LayerCache


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The numbers of a model that attention depends on. `window`: how many keys a query sees, itself included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None

    @classmethod
    def of(cls, config: ModelConfig) -> "AttentionShape":
        """The shape of a model's attention."""
        return cls(config.num_heads, config.num_kv_heads, config.head_dim, config.sliding_window)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return float(self.head_dim**-0.5)

    def first_key(self, query_position: int) -> int:
        """The oldest key that the query at this position sees."""
        return 0 if self.window is None else max(0, query_position - self.window + 1)


class Attention(Protocol):
    """Attention of every slice of a batch over its own request's keys, causal within the slice.

    The step's keys and values are in the cache already. Query row i of a slice sees the keys up to position
    `prefix + i` and nothing of any other request.
    """

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: RaggedBatch) -> torch.Tensor:
        """query: [tokens, num_kv_heads, group, head_dim] -> [tokens, num_heads * head_dim], same dtype."""
        ...


def cached(tensor: torch.Tensor, sequence: Sequence, first_key: int) -> torch.Tensor:
    """Keys or values `first_key` to the last of one sequence, [keys, num_kv_heads, head_dim]; a view where the pages
    are one run."""
    parts = []
    start = 0
    for slot, tokens in sequence.runs:
        skip = max(0, first_key - start)
        if skip < tokens:
            parts.append(tensor[slot + skip : slot + tokens])
        start += tokens
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def allowed(sequence: Sequence, shape: AttentionShape, first_key: int, device: torch.device) -> torch.Tensor:
    """Which keys from `first_key` on each query of a slice sees: [count, keys] bool.

    Built from positions: SDPA's own causal mask is aligned to the top left corner when there are fewer queries than
    keys (PyTorch #108503), which is wrong for a chunk behind a prefix.
    """
    queries = torch.arange(sequence.prefix, sequence.key_length, device=device)[:, None]
    keys = torch.arange(first_key, sequence.key_length, device=device)[None, :]
    seen = keys <= queries
    return seen if shape.window is None else seen & (keys > queries - shape.window)
