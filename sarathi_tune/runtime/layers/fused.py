"""The element-wise part of a layer by compiled kernels: one pass over memory each, instead of torch's three to ten."""

from typing import Any

import numpy as np
import torch

from sarathi_tune.runtime.batch import RaggedBatch
from sarathi_tune.runtime.kernels.arrays import as_array, threads_for
from sarathi_tune.runtime.kernels.elementwise import rms_norm, rotate_and_store, silu_mul
from sarathi_tune.runtime.kvcache import LayerCache
from sarathi_tune.runtime.layers.elementwise import HeadShape
from sarathi_tune.runtime.layers.rotary import RotaryTable


class FusedElementwise:
    """Implements `layers.elementwise.Elementwise` on a CPU, in bfloat16 or float32. The cache's layout is "heads"."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Elementwise."""
        out = torch.empty_like(x)
        rms_norm(threads_for(x.numel()), as_array(x), as_array(weight), np.float32(eps), as_array(out))
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: HeadShape, table: RotaryTable, batch: RaggedBatch, cache: LayerCache
    ) -> torch.Tensor:
        """See Elementwise. The queries of a key head lie one behind the other, as the CPU attention reads them."""
        group = heads.num_heads // heads.num_kv_heads
        query = torch.empty(heads.num_kv_heads, qkv.shape[0], group, heads.head_dim, dtype=qkv.dtype)
        rotate_and_store(
            threads_for(qkv.numel()),
            as_array(qkv),
            as_array(table.cos),
            as_array(table.sin),
            batch.positions.numpy(),
            batch.slots.numpy(),
            head_norms(heads, qkv.dtype),
            np.float32(heads.norm_eps),
            as_array(query),
            cache.key_array,
            cache.value_array,
        )
        return query.permute(1, 0, 2, 3)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Elementwise."""
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        silu_mul(threads_for(gate_up.numel()), as_array(gate_up), as_array(out))
        return out


def head_norms(heads: HeadShape, dtype: torch.dtype) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The weights of query and key norm as `rotate_and_store` takes them: empty where the model has none."""
    none = torch.empty(0, dtype=dtype)
    query, key = (as_array(none if norm is None else norm) for norm in (heads.query_norm, heads.key_norm))
    return query, key
