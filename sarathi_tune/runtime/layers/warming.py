"""Have oneDNN generate its code for the usual numbers of rows before a step is timed or served."""

import time

import torch

from sarathi_tune.runtime.layers.decoder import DecoderLayer
from sarathi_tune.runtime.layers.linear import EXACT_ROWS, Linear, LinearChoice

#: Steps of more tokens meet a new number of rows with less than two percent of their time.
_MOST_ROWS = 512
#: For large models the time to run a layer over and over isn't worth it: a few milliseconds are nothing to their steps.
_LIMIT_S = 1.0


def warm_up_linears(layer: DecoderLayer, head: Linear | None, choice: LinearChoice, dtype: torch.dtype) -> None:
    """Apply the linears of one layer to each number of rows that steps of up to 512 tokens have, and the LM head to
    each small one; generated code is shared by all layers. Ends after a second: smaller numbers come first."""
    end_s = time.perf_counter() + _LIMIT_S
    hidden_size, heads = layer.input_norm.shape[0], layer.heads
    columns = (hidden_size, heads.num_heads * heads.head_dim)
    for num_rows in sorted({choice.padded_rows(count) for count in range(1, _MOST_ROWS + 1)}):
        if time.perf_counter() > end_s:
            return
        if num_rows <= choice.tiled_rows and (head is None or num_rows > EXACT_ROWS):
            continue
        hidden, attended = (torch.zeros(num_rows, width, dtype=dtype) for width in columns)
        if num_rows > choice.tiled_rows:
            layer.qkv(hidden)
            layer.output(attended, residual=hidden)
            layer.down(layer.gated(hidden), residual=hidden)
        if head is not None and num_rows <= EXACT_ROWS:
            head(hidden)
