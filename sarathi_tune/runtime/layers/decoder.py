"""One decoder layer: norm, attention, norm, gated MLP, each added to the residual stream."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sarathi_tune.runtime.attention.base import Attention
from sarathi_tune.runtime.batch import RaggedBatch
from sarathi_tune.runtime.kvcache import LayerCache
from sarathi_tune.runtime.layers.elementwise import Elementwise, HeadShape
from sarathi_tune.runtime.layers.linear import Gated, Linear
from sarathi_tune.runtime.layers.rotary import RotaryTable

if TYPE_CHECKING:
    from sarathi_tune.runtime.layers.tiled import TiledLayer


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer; q, k and v are one matmul, and so are gate and up.

    `tiled`: what computes steps of up to `tiled.most_rows` rows, if there is something better for them.
    """

    input_norm: torch.Tensor
    qkv: Linear
    heads: HeadShape
    output: Linear
    mlp_norm: torch.Tensor
    gated: Gated
    down: Linear
    norm_eps: float
    tiled: "TiledLayer | None" = None

    def __call__(
        self,
        hidden: torch.Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        table: RotaryTable,
        attention: Attention,
        ops: Elementwise,
        kept: RaggedBatch | None = None,
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]; writes the step's keys and values into `cache`.

        `kept`: the batch's rows that are sampled from, in the last layer: of the others only keys and values are used.
        Then the result has these rows only.
        """
        if self.tiled is not None and kept is None and len(hidden) <= self.tiled.most_rows:
            return self.tiled(hidden, batch, cache, table, attention)
        normed = ops.rms_norm(hidden, self.input_norm, self.norm_eps)
        query = ops.rotate_and_store(self.qkv(normed), self.heads, table, batch, cache)
        if kept is not None:
            query, hidden, batch = query[batch.sample_rows], hidden[batch.sample_rows], kept
            if not len(hidden):
                return hidden
        hidden = self.output(attention(query, cache, batch), residual=hidden)
        normed = ops.rms_norm(hidden, self.mlp_norm, self.norm_eps)
        return self.down(self.gated(normed), residual=hidden)
