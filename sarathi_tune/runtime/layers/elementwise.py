"""What happens between the matmuls: RMS norm, rotary embedding with the write into the KV cache, SiLU gate.

`TorchElementwise` runs on every device; `kernels.elementwise` does the same in one pass over memory on a CPU.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from sarathi_tune.runtime.batch import RaggedBatch
from sarathi_tune.runtime.kernels.availability import kernels_obstacle
from sarathi_tune.runtime.kvcache import LayerCache
from sarathi_tune.runtime.layers.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a fused qkv row splits: `num_heads` query heads, then twice `num_kv_heads`, of `head_dim` each.

    `query_norm`, `key_norm`: [head_dim] weights of the per-head RMS norm that Qwen3 has, or None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


class Elementwise(Protocol):
    """The element-wise part of a layer. All tensors have the model's dtype; arithmetic is float32."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: HeadShape, table: RotaryTable, batch: RaggedBatch, cache: LayerCache
    ) -> torch.Tensor:
        """Norm (if the model has it) and rotate queries and keys of fused rows [tokens, (q + 2 kv) * head_dim], write
        keys and values into the batch's slots, return the queries [tokens, num_kv_heads, group, head_dim]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of fused rows [tokens, 2 * inner] -> [tokens, inner]."""
        ...


class TorchElementwise:
    """Plain torch operators, on any device."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As Hugging Face: normalise in float32, cast, then scale."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: HeadShape, table: RotaryTable, batch: RaggedBatch, cache: LayerCache
    ) -> torch.Tensor:
        """See Elementwise."""
        rows = qkv.view(qkv.shape[0], -1, heads.head_dim)
        first_key, first_value = heads.num_heads, heads.num_heads + heads.num_kv_heads
        query, key, value = rows[:, :first_key], rows[:, first_key:first_value], rows[:, first_value:]
        if heads.query_norm is not None and heads.key_norm is not None:
            query = self.rms_norm(query, heads.query_norm, heads.norm_eps)
            key = self.rms_norm(key, heads.key_norm, heads.norm_eps)
        cos = table.cos[batch.positions].unsqueeze(1)
        sin = table.sin[batch.positions].unsqueeze(1)
        cache.keys.index_copy_(0, batch.slots, _rotate(key, cos, sin))
        cache.values.index_copy_(0, batch.slots, value)
        return _rotate(query, cos, sin).view(len(qkv), heads.num_kv_heads, -1, heads.head_dim)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Elementwise."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's two halves against each other. x: [tokens, heads, head_dim]; cos, sin: [tokens, 1, half]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ElementwiseChoice:
    """Which element-wise kernels run and why."""

    ops: Elementwise
    name: str
    reason: str


def pick_elementwise(device: torch.device, dtype: torch.dtype) -> ElementwiseChoice:
    """Compiled kernels where they can run, torch's operators everywhere else."""
    obstacle = kernels_obstacle(device, dtype)
    if obstacle is None:
        from sarathi_tune.runtime.layers.fused import FusedElementwise

        return ElementwiseChoice(
            FusedElementwise(), "compiled", "one pass over memory per operation, compiled by numba"
        )
    return ElementwiseChoice(TorchElementwise(), "torch", f"torch's operators, because {obstacle}")
