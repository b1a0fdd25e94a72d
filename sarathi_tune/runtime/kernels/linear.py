"""y = x W^T by AVX-512's bfloat16 dot product, in tiles of six rows by four vectors of columns.

With few rows the weights are read as one stream per vector of columns, at the rate of the memory. With many, a tile's
columns stay in the second-level cache while blocks of rows pass by, and what is done to a result (bias, residual, the
gate of an MLP) is done while it is still in registers or the first-level cache.

Elements are `uint16`, the bits of a bfloat16. The functions without underscore take the number of threads first.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np
import torch

from sarathi_tune.runtime.kernels.availability import KERNEL_LANES as LANES
from sarathi_tune.runtime.kernels.intrinsics import widen
from sarathi_tune.runtime.kernels.options import OPTIONS
from sarathi_tune.runtime.kernels.parallel import parallel_for
from sarathi_tune.runtime.kernels.tiles import (
    LINE_ELEMENTS,
    TILE_ROWS,
    TILE_VECTORS,
    fetch_lines,
    product_tile,
    silu_mul_vectors,
)

#: Rows that are dealt out to threads together where there are more; a multiple of TILE_ROWS.
BLOCK_ROWS = 16 * TILE_ROWS
#: From so many tiles of rows on, the first of them would wait for weights: those of the next columns are fetched ahead.
FETCHING_TILES = 8

_TILE_COLUMNS = TILE_VECTORS * LANES
_f32 = np.float32


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [out / 16, in / 2, 16, 2]: a vector of 16 columns' pairs for each two inputs."""
    columns, inputs = weight.shape
    return weight.view(columns // LANES, LANES, inputs // 2, 2).permute(0, 2, 1, 3).contiguous()


def alternate(gate_up: torch.Tensor) -> torch.Tensor:
    """[2 * inner, ...], gate before up -> 16 rows of gate, 16 rows of up, and so on, as `apply_gated` wants columns."""
    halves = gate_up.view(2, -1, LANES, *gate_up.shape[1:])
    return halves.transpose(0, 1).reshape(gate_up.shape)


@numba.njit(**OPTIONS)
def _num_items(num_rows, num_vectors, unit):
    """What the functions below are dealt out in: blocks of rows by the columns of a tile, or, where there is a single
    block, vectors of columns, `unit` at a time."""
    num_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    return (num_vectors + TILE_VECTORS - 1) // TILE_VECTORS * num_blocks if num_blocks > 1 else num_vectors // unit


@numba.njit(**OPTIONS)
def _place(item, end, num_rows, num_vectors, unit):
    """The first vector and row of an item, how many vectors, and how many items were taken."""
    num_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    if num_blocks > 1:
        first = item // num_blocks * TILE_VECTORS
        return first, item % num_blocks * BLOCK_ROWS, min(TILE_VECTORS, num_vectors - first), 1
    taken = min(TILE_VECTORS // unit, end - item)
    return item * unit, 0, taken * unit, taken


@numba.njit(**OPTIONS)
def _fetch_next(weights, first_column, vectors, inputs, tile, num_rows):
    """With each tile of rows, ask for its part of the weights of the columns behind these, so that they are there when
    their turn comes; with few tiles not, which read weights at the rate of the memory anyway."""
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    if num_tiles >= FETCHING_TILES:
        num_lines = (vectors * LANES * inputs // LINE_ELEMENTS + num_tiles - 1) // num_tiles
        behind = (first_column + vectors * LANES) * inputs
        fetch_lines(weights, behind + tile * num_lines * LINE_ELEMENTS, num_lines)


@numba.njit(**OPTIONS)
def _apply_items(begin, end, x, packed, bias, residual, out):
    num_rows, inputs = x.shape
    columns = out.shape[1]
    flat_x, flat_weights = x.reshape(-1), packed.reshape(-1)
    flat_residual, flat_out = residual.reshape(-1), out.reshape(-1)
    start = np.empty(TILE_ROWS * _TILE_COLUMNS, np.float32)
    has_bias, has_residual = bias.shape[0] > 0, residual.shape[0] > 0
    item = begin
    while item < end:
        first_vector, first_row, vectors, taken = _place(item, end, num_rows, packed.shape[0], 1)
        item += taken
        first, stop = first_vector * LANES, min(first_row + BLOCK_ROWS, num_rows)
        for row in range(first_row, stop, TILE_ROWS):
            rows, at, out_at = min(TILE_ROWS, stop - row), row * inputs, row * columns + first
            _fetch_next(flat_weights, first, vectors, inputs, row // TILE_ROWS, num_rows)
            if has_bias or has_residual:
                for r in range(rows):
                    for c in range(vectors * LANES):
                        start[r * _TILE_COLUMNS + c] = widen(bias[first + c]) if has_bias else _f32(0)
                    if has_residual:
                        for c in range(vectors * LANES):
                            start[r * _TILE_COLUMNS + c] += widen(flat_residual[out_at + r * columns + c])
                product_tile(
                    flat_x,
                    at,
                    inputs // 2,
                    rows,
                    flat_weights,
                    first * inputs,
                    vectors,
                    start,
                    flat_out,
                    out_at,
                    columns,
                )
            else:
                product_tile(
                    flat_x,
                    at,
                    inputs // 2,
                    rows,
                    flat_weights,
                    first * inputs,
                    vectors,
                    flat_x,
                    flat_out,
                    out_at,
                    columns,
                )


@numba.njit(**OPTIONS)
def apply_linear(threads, x, packed, bias, residual, out):
    """x: [rows, in] elements. packed: see `pack_weight`. bias: [out] or [0]. residual: [rows, out] or [0, 0], added.
    out: [rows, out]."""
    num_items = _num_items(x.shape[0], packed.shape[0], 1)
    parallel_for(_apply_items, num_items, threads, (x, packed, bias, residual, out))


@numba.njit(**OPTIONS)
def _apply_gated_items(begin, end, x, packed, bias, out):
    num_rows, inputs = x.shape
    columns = out.shape[1]
    flat_x, flat_weights, flat_out = x.reshape(-1), packed.reshape(-1), out.reshape(-1)
    start = np.zeros(TILE_ROWS * _TILE_COLUMNS, np.float32)
    tile = np.empty(TILE_ROWS * _TILE_COLUMNS, np.uint16)
    has_bias = bias.shape[0] > 0
    item = begin
    while item < end:
        first_vector, first_row, vectors, taken = _place(item, end, num_rows, packed.shape[0], 2)
        item += taken
        first, stop = first_vector * LANES, min(first_row + BLOCK_ROWS, num_rows)
        if has_bias:
            for r in range(TILE_ROWS):
                for c in range(vectors * LANES):
                    start[r * _TILE_COLUMNS + c] = widen(bias[first + c])
        for row in range(first_row, stop, TILE_ROWS):
            rows, at = min(TILE_ROWS, stop - row), row * inputs
            _fetch_next(flat_weights, first, vectors, inputs, row // TILE_ROWS, num_rows)
            if has_bias:
                product_tile(
                    flat_x, at, inputs // 2, rows, flat_weights, first * inputs, vectors, start, tile, 0, _TILE_COLUMNS
                )
            else:
                product_tile(
                    flat_x, at, inputs // 2, rows, flat_weights, first * inputs, vectors, flat_x, tile, 0, _TILE_COLUMNS
                )
            for r in range(rows):
                silu_mul_vectors(tile, r * _TILE_COLUMNS, vectors // 2, flat_out, (row + r) * columns + first // 2)


@numba.njit(**OPTIONS)
def apply_gated(threads, x, packed, bias, out):
    """silu(gate) * up of x's products. x: [rows, in] elements. packed, bias: as `apply_linear` takes them, of weights
    and biases as `alternate` puts them. out: [rows, inner]."""
    num_items = _num_items(x.shape[0], packed.shape[0], 2)
    parallel_for(_apply_gated_items, num_items, threads, (x, packed, bias, out))
