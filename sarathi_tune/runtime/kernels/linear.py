"""y = x W^T for few rows, by AVX-512's bfloat16 dot product.

A decode step reads every weight once for a handful of rows. oneDNN's matmul reaches half of the memory's bandwidth
there; this one reads the weights as one stream per vector of columns.

Elements are `uint16`, the bits of a bfloat16. `apply_linear` takes the number of threads first.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np
import torch

from sarathi_tune.runtime.kernels.availability import KERNEL_LANES as LANES
from sarathi_tune.runtime.kernels.dot import TILE_ROWS, TILE_VECTORS, product_tile
from sarathi_tune.runtime.kernels.intrinsics import narrow, widen
from sarathi_tune.runtime.kernels.options import OPTIONS
from sarathi_tune.runtime.kernels.parallel import parallel_for


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [out / 16, in / 2, 16, 2]: a vector of 16 columns' pairs for each two inputs."""
    columns, inputs = weight.shape
    return weight.view(columns // LANES, LANES, inputs // 2, 2).permute(0, 2, 1, 3).contiguous()


@numba.njit(**OPTIONS)
def _apply_groups(begin, end, x, packed, bias, residual, out):
    num_rows, inputs = x.shape
    flat_x, flat_weights = x.reshape(-1), packed.reshape(-1)
    tile = np.empty((TILE_ROWS, TILE_VECTORS * LANES), np.float32)
    like = np.uint16(0)
    has_bias, has_residual = bias.shape[0] > 0, residual.shape[0] > 0
    for group in range(begin, end, TILE_VECTORS):
        vectors = min(TILE_VECTORS, end - group)
        first = group * LANES
        for row in range(0, num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, num_rows - row)
            product_tile(flat_x, row * inputs, inputs // 2, rows, flat_weights, first * inputs, vectors, tile)
            for r in range(rows):
                if has_bias:
                    for c in range(vectors * LANES):
                        tile[r, c] += widen(bias[first + c])
                if has_residual:
                    for c in range(vectors * LANES):
                        tile[r, c] += widen(residual[row + r, first + c])
                for c in range(vectors * LANES):
                    out[row + r, first + c] = narrow(tile[r, c], like)


@numba.njit(**OPTIONS)
def apply_linear(threads, x, packed, bias, residual, out):
    """x: [rows, in] elements. packed: see `pack_weight`. bias: [out] or [0]. residual: [rows, out] or [0, 0], added.
    out: [rows, out]."""
    parallel_for(_apply_groups, packed.shape[0], threads, (x, packed, bias, residual, out))
