"""A decoder layer by the kernels of `kernels.layer`: two compiled calls and the attention between them."""

import numpy as np
import torch

from sarathi_tune.runtime.attention.base import Attention
from sarathi_tune.runtime.batch import RaggedBatch
from sarathi_tune.runtime.kernels.arrays import as_array
from sarathi_tune.runtime.kernels.layer import after_attention, before_attention
from sarathi_tune.runtime.kvcache import LayerCache
from sarathi_tune.runtime.layers.decoder import DecoderLayer
from sarathi_tune.runtime.layers.fused import head_norms
from sarathi_tune.runtime.layers.linear import TiledGated, TiledLinear
from sarathi_tune.runtime.layers.rotary import RotaryTable


class TiledLayer:
    """The same weights and results as `DecoderLayer`, for up to `most_rows` rows."""

    def __init__(
        self, layer: DecoderLayer, qkv: TiledLinear, output: TiledLinear, gated: TiledGated, down: TiledLinear
    ) -> None:
        self.most_rows = gated.most_rows
        self._heads = layer.heads
        self._head_norms = head_norms(layer.heads, layer.input_norm.dtype)
        self._norms = as_array(layer.input_norm), as_array(layer.mlp_norm)
        self._eps, self._head_eps = np.float32(layer.norm_eps), np.float32(layer.heads.norm_eps)
        self._qkv, self._output, self._gated, self._down = (part.arrays for part in (qkv, output, gated, down))

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
            self._gated,
            self._down,
            as_array(out),
        )
        return out


def tiled_layer(layer: DecoderLayer) -> TiledLayer | None:
    """The same layer by kernels, if they compute all its parts."""
    qkv, output, gated, down = layer.qkv, layer.output, layer.gated, layer.down
    if not isinstance(qkv, TiledLinear) or not isinstance(output, TiledLinear) or not isinstance(down, TiledLinear):
        return None
    return TiledLayer(layer, qkv, output, gated, down) if isinstance(gated, TiledGated) else None
