"""A decoder layer for steps of few rows: two compiled calls and the attention between them."""

import numpy as np
import torch

from sarathi_tune.runtime.attention.base import Attention
from sarathi_tune.runtime.batch import RaggedBatch
from sarathi_tune.runtime.kernels.arrays import as_array
from sarathi_tune.runtime.kernels.few_rows import after_attention, before_attention
from sarathi_tune.runtime.kvcache import LayerCache
from sarathi_tune.runtime.layers.elementwise import HeadShape
from sarathi_tune.runtime.layers.linear import FEW_ROWS, FewRowsLinear, Linear
from sarathi_tune.runtime.layers.rotary import RotaryTable


class FewRowsLayer:
    """The same weights and results as `DecoderLayer`, for up to FEW_ROWS rows."""

    MOST_ROWS = FEW_ROWS

    def __init__(
        self,
        input_norm: torch.Tensor,
        qkv: FewRowsLinear,
        heads: HeadShape,
        output: FewRowsLinear,
        mlp_norm: torch.Tensor,
        gate_up: FewRowsLinear,
        down: FewRowsLinear,
        norm_eps: float,
    ) -> None:
        no_norm = input_norm[:0]
        self._heads = heads
        self._head_norms = (
            as_array(no_norm if heads.query_norm is None else heads.query_norm),
            as_array(no_norm if heads.key_norm is None else heads.key_norm),
        )
        self._norms = as_array(input_norm), as_array(mlp_norm)
        self._eps, self._head_eps = np.float32(norm_eps), np.float32(heads.norm_eps)
        self._qkv, self._output, self._gate_up, self._down = (layer.arrays for layer in (qkv, output, gate_up, down))

    def __call__(
        self, hidden: torch.Tensor, batch: RaggedBatch, cache: LayerCache, table: RotaryTable, attention: Attention
    ) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]; writes the rows' keys and values into `cache`."""
        threads, heads, num_rows = torch.get_num_threads(), self._heads, len(hidden)
        group = heads.num_heads // heads.num_kv_heads
        query = torch.empty(heads.num_kv_heads, num_rows, group, heads.head_dim, dtype=hidden.dtype)
        rows = as_array(hidden)
        before_attention(
            threads,
            rows,
            self._norms[0],
            self._eps,
            self._qkv,
            as_array(table.cos),
            as_array(table.sin),
            batch.positions.numpy(),
            batch.slots.numpy(),
            self._head_norms,
            self._head_eps,
            as_array(query),
            cache.key_array,
            cache.value_array,
        )
        attended = as_array(attention(query.permute(1, 0, 2, 3), cache, batch))
        out = torch.empty_like(hidden)
        after_attention(
            threads,
            attended,
            rows,
            self._output,
            self._norms[1],
            self._eps,
            self._gate_up,
            self._down,
            as_array(out),
        )
        return out


def few_rows_layer(
    input_norm: torch.Tensor,
    qkv: Linear,
    heads: HeadShape,
    output: Linear,
    mlp_norm: torch.Tensor,
    gate_up: Linear,
    down: Linear,
    norm_eps: float,
) -> FewRowsLayer | None:
    """The layer, if all its parts have the kernel for few rows."""
    if not (
        isinstance(qkv, FewRowsLinear)
        and isinstance(output, FewRowsLinear)
        and isinstance(gate_up, FewRowsLinear)
        and isinstance(down, FewRowsLinear)
    ):
        return None
    return FewRowsLayer(input_norm, qkv, heads, output, mlp_norm, gate_up, down, norm_eps)
