"""y = x W^T by AVX-512's bfloat16 dot product, in tiles of six rows by four vectors of columns.

With few rows the weights are read as one stream per vector of columns, at the rate of the memory. With many, a tile's
columns stay in the second-level cache while blocks of rows pass by, and what is done to a result (bias, residual, the
gate of an MLP) is done while it is still in registers or the first-level cache.

Weights that `pack_tiles` has packed are multiplied by `kernels.amx_linear` instead.

Elements are `uint16`, the bits of a bfloat16. The functions without underscore take the number of threads first.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np
import torch

from sarathi_tune.runtime.kernels.amx import TILE_INPUTS
from sarathi_tune.runtime.kernels.amx_linear import apply_gated_by_amx, apply_linear_by_amx
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

#: Above so many rows, threads share out columns and rows; up to there columns alone, which all rows pass by.
COLUMNS_ONLY_ROWS = 16 * TILE_ROWS
#: From so many tiles of rows on, the first of them would wait for weights: those of the next columns are fetched ahead.
FETCHING_TILES = 8

#: By them the kernels know that a weight was packed by `pack_tiles`.
TILED_DIMENSIONS = 5

_TILE_COLUMNS = TILE_VECTORS * LANES


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [out / 16, in / 2, 16, 2]: a vector of 16 columns' pairs for each two inputs."""
    columns, inputs = weight.shape
    return weight.view(columns // LANES, LANES, inputs // 2, 2).permute(0, 2, 1, 3).contiguous()


def pack_tiles(weight: torch.Tensor) -> torch.Tensor:
    """The same for AMX, whose tiles are 16 such vectors: [out, in] -> [out / 16, in / 32, 16, 16, 2]."""
    columns, inputs = weight.shape
    return pack_weight(weight).view(columns // LANES, inputs // TILE_INPUTS, TILE_INPUTS // 2, LANES, 2)


def alternate(gate_up: torch.Tensor) -> torch.Tensor:
    """[2 * inner, ...], gate before up -> 16 rows of gate, 16 rows of up, and so on, as `apply_gated` wants columns."""
    halves = gate_up.view(2, -1, LANES, *gate_up.shape[1:])
    return halves.transpose(0, 1).reshape(gate_up.shape)


@numba.njit(**OPTIONS)
def _num_items(num_rows, num_vectors, unit):
    """What the functions below are dealt out in: with many rows tiles, those of the same columns one behind the other;
    otherwise vectors of columns, `unit` at a time."""
    if num_rows > COLUMNS_ONLY_ROWS:
        return (num_vectors + TILE_VECTORS - 1) // TILE_VECTORS * ((num_rows + TILE_ROWS - 1) // TILE_ROWS)
    return num_vectors // unit


@numba.njit(**OPTIONS)
def _place(item, end, num_rows, num_vectors, unit):
    """The first vector, how many vectors, the first row and the one behind the last, and how many items were taken."""
    if num_rows > COLUMNS_ONLY_ROWS:
        num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
        first, tile = item // num_tiles * TILE_VECTORS, item % num_tiles
        taken = min(num_tiles - tile, end - item)
        stop = min((tile + taken) * TILE_ROWS, num_rows)
        return first, min(TILE_VECTORS, num_vectors - first), tile * TILE_ROWS, stop, taken
    taken = min(TILE_VECTORS // unit, end - item)
    return item * unit, taken * unit, 0, num_rows, taken


@numba.njit(**OPTIONS)
def _fetching(first_vector, vectors, num_rows, inputs):
    """Where the weights of the columns behind these begin, and how many cache lines of them to ask for with each tile
    of rows, so that they are there when their turn comes; none with few tiles, which read weights at the rate of the
    memory anyway."""
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    num_lines = vectors * LANES * inputs // LINE_ELEMENTS
    behind = (first_vector + vectors) * LANES * inputs
    return behind, (num_lines + num_tiles - 1) // num_tiles if num_tiles >= FETCHING_TILES else 0


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
        first_vector, vectors, first_row, stop, taken = _place(item, end, num_rows, packed.shape[0], 1)
        item += taken
        first = first_vector * LANES
        behind, lines = _fetching(first_vector, vectors, num_rows, inputs)
        for row in range(first_row, stop, TILE_ROWS):
            rows, at, out_at = min(TILE_ROWS, stop - row), row * inputs, row * columns + first
            fetch_lines(flat_weights, behind + row // TILE_ROWS * lines * LINE_ELEMENTS, lines)
            if has_bias or has_residual:
                for r in range(rows):
                    if not has_residual:
                        for c in range(vectors * LANES):
                            start[r * _TILE_COLUMNS + c] = widen(bias[first + c])
                    elif not has_bias:
                        for c in range(vectors * LANES):
                            start[r * _TILE_COLUMNS + c] = widen(flat_residual[out_at + r * columns + c])
                    else:
                        for c in range(vectors * LANES):
                            start[r * _TILE_COLUMNS + c] = widen(bias[first + c]) + widen(
                                flat_residual[out_at + r * columns + c]
                            )
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
    """x: [rows, in] elements. packed: see `pack_weight` and `pack_tiles`. bias: [out] or [0]. residual: [rows, out] or
    [0, 0], added. out: [rows, out]."""
    if packed.ndim == TILED_DIMENSIONS:  # known when this is compiled
        apply_linear_by_amx(threads, x, packed, bias, residual, out)
        return
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
        first_vector, vectors, first_row, stop, taken = _place(item, end, num_rows, packed.shape[0], 2)
        item += taken
        first = first_vector * LANES
        behind, lines = _fetching(first_vector, vectors, num_rows, inputs)
        if has_bias:
            for r in range(TILE_ROWS):
                for c in range(vectors * LANES):
                    start[r * _TILE_COLUMNS + c] = widen(bias[first + c])
        for row in range(first_row, stop, TILE_ROWS):
            rows, at = min(TILE_ROWS, stop - row), row * inputs
            fetch_lines(flat_weights, behind + row // TILE_ROWS * lines * LINE_ELEMENTS, lines)
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
    if packed.ndim == TILED_DIMENSIONS:
        apply_gated_by_amx(threads, x, packed, bias, out)
        return
    num_items = _num_items(x.shape[0], packed.shape[0], 2)
    parallel_for(_apply_gated_items, num_items, threads, (x, packed, bias, out))
