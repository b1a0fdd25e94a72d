"""y = x W^T by AMX, in blocks of 32 rows by two vectors of columns.

With few rows the weights are read as one stream, at the rate of the memory. With many, two vectors of columns stay in
the caches while the blocks of rows of a panel pass by, which stay in the second-level cache while all columns pass by.
What is done to a result (bias, residual, the gate of an MLP) is done while it is in the first-level cache.

Elements are `uint16`, the bits of a bfloat16. Called by `kernels.linear`.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np

from sarathi_tune.runtime.kernels.amx import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    BLOCK_VECTORS,
    MOST_LINES,
    configure,
    gate_block,
    multiply_block,
    release,
    round_block,
)
from sarathi_tune.runtime.kernels.availability import KERNEL_LANES as LANES
from sarathi_tune.runtime.kernels.buffers import LINE_BYTES, empty_bytes
from sarathi_tune.runtime.kernels.intrinsics import widen
from sarathi_tune.runtime.kernels.options import OPTIONS
from sarathi_tune.runtime.kernels.parallel import parallel_for

#: Bytes of a panel of rows: what of a second-level cache of two megabytes it may take.
PANEL_BYTES = 768 << 10
#: How far ahead, in elements, the only block of rows asks for weights; best of 2,048 to 16,384 on an Emerald Rapids.
AHEAD = 8192


@numba.njit(**OPTIONS)
def _panel_blocks(num_rows, inputs):
    """How many blocks of rows the largest panel has: panels are about equal."""
    blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    most = max(1, PANEL_BYTES // (2 * inputs * BLOCK_ROWS))
    panels = (blocks + most - 1) // most
    return (blocks + panels - 1) // panels


@numba.njit(**OPTIONS)
def _num_items(num_rows, inputs, num_vectors, unit):
    """Blocks of the columns' `unit` vectors and of rows: those of the same columns one behind the other, then the next
    columns, then the next panel. The last panel may have fewer blocks than are counted."""
    blocks, most = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS, _panel_blocks(num_rows, inputs)
    return (blocks + most - 1) // most * ((num_vectors + unit - 1) // unit) * most


@numba.njit(**OPTIONS)
def _place(item, num_rows, inputs, num_vectors, unit):
    """The item's first vector, number of vectors, first row, and block within the panel; and how many lines of weights
    to ask for with each 32 inputs, and from where on.

    Several blocks ask for the next columns, each for its part; a single one for what comes soon.
    """
    blocks, most = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS, _panel_blocks(num_rows, inputs)
    units = (num_vectors + unit - 1) // unit
    block, place = item % most, item // most
    vector, panel = place % units * unit, place // units * most
    vectors, row = min(unit, num_vectors - vector), (panel + block) * BLOCK_ROWS
    if blocks == 1 and vectors == 1:
        return vector, vectors, row, MOST_LINES // 2, vector * LANES * inputs + AHEAD
    lines = 1
    while lines * min(most, blocks - panel) < MOST_LINES:
        lines *= 2
    return vector, vectors, row, lines, (vector + unit) * LANES * inputs + block * lines * inputs


@numba.njit(**OPTIONS)
def _apply_items(begin, end, unit, x, packed, bias, residual, out):
    num_rows, inputs = x.shape
    columns = out.shape[1]
    flat_x, flat_weights = x.reshape(-1), packed.reshape(-1)
    flat_residual, flat_out = residual.reshape(-1), out.reshape(-1)
    sums = empty_bytes(4 * BLOCK_ROWS * BLOCK_COLUMNS).view(np.float32)
    start = np.zeros(BLOCK_COLUMNS, np.float32)
    config, configured = np.zeros(LINE_BYTES, np.uint8), 0
    has_bias, has_residual = bias.shape[0] > 0, residual.shape[0] > 0
    for item in range(begin, end):
        vector, vectors, row, lines, ahead = _place(item, num_rows, inputs, packed.shape[0], unit)
        rows = min(BLOCK_ROWS, num_rows - row)
        if rows <= 0:
            continue
        if rows != configured:
            configure(config, rows)
            configured = rows
        first = vector * LANES
        at = first * inputs
        multiply_block(flat_x, row * inputs, inputs, rows, flat_weights, at, vectors, ahead, lines, sums)
        if has_bias:
            for c in range(vectors * LANES):
                start[c] = widen(bias[first + c])
        out_at = row * columns + first
        if has_residual:
            round_block(sums, rows, vectors, start, flat_residual, out_at, flat_out, out_at, columns)
        else:
            round_block(sums, rows, vectors, start, start, 0, flat_out, out_at, columns)
    release()


@numba.njit(**OPTIONS)
def apply_linear_by_amx(threads, x, packed, bias, residual, out):
    """As `kernels.linear.apply_linear`, over weights as `pack_tiles` puts them."""
    num_rows, inputs = x.shape
    unit = 1 if num_rows <= BLOCK_ROWS else BLOCK_VECTORS
    num_items = _num_items(num_rows, inputs, packed.shape[0], unit)
    parallel_for(_apply_items, num_items, threads, (unit, x, packed, bias, residual, out))


@numba.njit(**OPTIONS)
def _apply_gated_items(begin, end, x, packed, bias, out):
    num_rows, inputs = x.shape
    columns = out.shape[1]
    flat_x, flat_weights, flat_out = x.reshape(-1), packed.reshape(-1), out.reshape(-1)
    sums = empty_bytes(4 * BLOCK_ROWS * BLOCK_COLUMNS).view(np.float32)
    start = np.zeros(BLOCK_COLUMNS, np.float32)
    config, configured = np.zeros(LINE_BYTES, np.uint8), 0
    has_bias = bias.shape[0] > 0
    for item in range(begin, end):
        vector, vectors, row, lines, ahead = _place(item, num_rows, inputs, packed.shape[0], BLOCK_VECTORS)
        rows = min(BLOCK_ROWS, num_rows - row)
        if rows <= 0:
            continue
        if rows != configured:
            configure(config, rows)
            configured = rows
        first = vector * LANES
        at = first * inputs
        multiply_block(flat_x, row * inputs, inputs, rows, flat_weights, at, vectors, ahead, lines, sums)
        if has_bias:
            for c in range(BLOCK_COLUMNS):
                start[c] = widen(bias[first + c])
        gate_block(sums, rows, start, flat_out, row * columns + first // 2, columns)
    release()


@numba.njit(**OPTIONS)
def apply_gated_by_amx(threads, x, packed, bias, out):
    """As `kernels.linear.apply_gated`, over weights as `pack_tiles` puts them."""
    num_items = _num_items(x.shape[0], x.shape[1], packed.shape[0], BLOCK_VECTORS)
    parallel_for(_apply_gated_items, num_items, threads, (x, packed, bias, out))
