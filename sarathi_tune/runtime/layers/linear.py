"""y = x W^T + b (+ residual), plain or with weights repacked for oneDNN.

A bfloat16 matmul on a CPU first copies its weight into blocks, at every call. Done once, ahead, a decode step over the
same weights takes half the time; a 512-token chunk gains a tenth. Where `kernels.linear` can use AMX, or
AVX-512's dot product is the fastest there is, it computes the layers; elsewhere steps of few rows at least, over a copy
of their own.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.nn import functional

from sarathi_tune.runtime.kernels.arrays import as_array
from sarathi_tune.runtime.kernels.availability import (
    AMX_INPUTS,
    KERNEL_LANES,
    amx_obstacle,
    has_bfloat16_dot,
    has_dot_tiles,
)
from sarathi_tune.runtime.layers.elementwise import Elementwise


class Linear(Protocol):
    """A linear layer. `x`: [tokens, in]; `residual`: [tokens, out], added to the result; returns [tokens, out]."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The layer as torch computes it on any device."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer."""
        y = functional.linear(x, self.weight, self.bias)
        return y if residual is None else residual + y


class PackedLinear:
    """The layer over weights in oneDNN's own blocked layout; the residual is added inside the matmul."""

    #: The number of rows the layout is made for; oneDNN picks the same blocks for other counts.
    ROWS_HINT = 512

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS_HINT)
        self._bias = bias
        self._plain = torch.ops.mkldnn._linear_pointwise.default
        self._with_residual = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer."""
        y: torch.Tensor
        if residual is None:
            y = self._plain(x, self._weight, self._bias, "none", [], "")
        else:
            y = self._with_residual(x, residual, self._weight, self._bias, "add")
        return y


class TiledLinear:
    """A layer that `kernels.linear` computes: all numbers of rows, or up to `most_rows` and more by `many`."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        most_rows: int,
        many: Linear | None,
        *,
        amx: bool = False,
    ) -> None:
        from sarathi_tune.runtime.kernels.linear import apply_linear

        #: The packed weight and the bias, as kernels take them.
        self.arrays = as_array(_packed(weight, amx)), as_array(_or_empty(bias, weight))
        self.most_rows = most_rows
        self._no_residual = as_array(torch.empty(0, 0, dtype=weight.dtype))
        self._num_columns = weight.shape[0]
        self._apply: Any = apply_linear
        self._many = many

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer."""
        if self._many is not None and len(x) > self.most_rows:
            return self._many(x, residual)
        y = torch.empty(len(x), self._num_columns, dtype=x.dtype)
        added = self._no_residual if residual is None else as_array(residual.contiguous())
        self._apply(torch.get_num_threads(), as_array(x.contiguous()), *self.arrays, added, as_array(y))
        return y


class Gated(Protocol):
    """The first half of a gated MLP. `x`: [tokens, hidden]; returns silu(gate) * up, [tokens, inner]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        ...


@dataclass(frozen=True, slots=True)
class PlainGated:
    """One matmul for gate and up, and the product behind it."""

    gate_up: Linear
    ops: Elementwise

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return self.ops.silu_mul(self.gate_up(x))


class TiledGated:
    """The same by `kernels.linear`, gate and up never leaving the cache; more than `most_rows` rows by `many`."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        most_rows: int,
        many: Gated | None,
        *,
        amx: bool = False,
    ) -> None:
        from sarathi_tune.runtime.kernels.linear import alternate, apply_gated

        #: The packed weight and the bias, as kernels take them.
        self.arrays = as_array(_packed(alternate(weight), amx)), as_array(alternate(_or_empty(bias, weight)))
        self.most_rows = most_rows
        self._num_columns = weight.shape[0] // 2
        self._apply: Any = apply_gated
        self._many = many

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        if self._many is not None and len(x) > self.most_rows:
            return self._many(x)
        y = torch.empty(len(x), self._num_columns, dtype=x.dtype)
        self._apply(torch.get_num_threads(), as_array(x.contiguous()), *self.arrays, as_array(y))
        return y


def _packed(weight: torch.Tensor, amx: bool) -> torch.Tensor:
    from sarathi_tune.runtime.kernels.linear import pack_tiles, pack_weight

    return pack_tiles(weight) if amx else pack_weight(weight)


def _or_empty(bias: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=weight.dtype) if bias is None else bias


#: More rows than any step has.
ALL_ROWS = sys.maxsize
#: Inputs of a matmul up to which a tile's columns leave room in a second-level cache of one megabyte.
MOST_INPUTS = 5120
#: Up to so many rows the kernel is used beside oneDNN where that is better with many: rows whose products take no
#: longer than reading the weights. AMX multiplies so fast that this is a handful.
FEW_ROWS, FEW_ROWS_BESIDE_AMX = 32, 8
#: A second copy of the weights may take this part of the free memory.
COPY_FRACTION = 1 / 8

#: Above so many rows a step is filled up to a multiple of ROW_MULTIPLE where oneDNN computes it: that generates code
#: for each new number of rows, which costs 2 to 4 ms, and live steps would meet ever new ones. Its own blocks make 257
#: rows as slow as 264.
EXACT_ROWS, ROW_MULTIPLE = 32, 8


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """Which linear layer is used on a device and why. `tiled_rows`: up to so many rows by `kernels.linear`, with
    AMX's tiles if `amx`."""

    packed: bool
    name: str
    reason: str
    tiled_rows: int = 0
    amx: bool = False

    @property
    def exact_rows(self) -> int:
        """Up to so many tokens a step is computed with as many rows."""
        return max(EXACT_ROWS, self.tiled_rows)

    @property
    def row_multiple(self) -> int:
        """Larger steps are filled up to a multiple of so many rows."""
        return ROW_MULTIPLE if self.packed and self.tiled_rows < ALL_ROWS else 1

    def padded_rows(self, num_tokens: int) -> int:
        """How many rows a step of so many tokens is best computed with."""
        return num_tokens if num_tokens <= self.exact_rows else -(-num_tokens // self.row_multiple) * self.row_multiple

    def build(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_head: bool = False) -> Linear:
        """The layer over `weight` [out, in] and `bias` [out]; `is_head`: it is the LM head."""
        if not self.packed:
            return PlainLinear(weight, bias)
        if is_head or not self._fits(weight, KERNEL_LANES):
            return PackedLinear(weight, bias)
        return TiledLinear(weight, bias, self.tiled_rows, self._many(weight, bias), amx=self.amx)

    def build_gated(self, weight: torch.Tensor, bias: torch.Tensor | None, ops: Elementwise) -> Gated:
        """The layer over gate above up, `weight` [2 * inner, in] and `bias` [2 * inner]."""
        if not self.packed or not self._fits(weight, 2 * KERNEL_LANES):
            return PlainGated(self.build(weight, bias), ops)
        many = self._many(weight, bias)
        rest = None if many is None else PlainGated(many, ops)
        return TiledGated(weight, bias, self.tiled_rows, rest, amx=self.amx)

    def _many(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
        return None if self.tiled_rows == ALL_ROWS else PackedLinear(weight, bias)

    def _fits(self, weight: torch.Tensor, multiple: int) -> bool:
        columns, inputs = weight.shape
        return self.tiled_rows > 0 and columns % multiple == 0 and inputs % (AMX_INPUTS if self.amx else 2) == 0

    def with_tiles(self, most_inputs: int, weight_bytes: int, free_bytes: int) -> "LinearChoice":
        """The choice with tiles of our own: for all steps where they are the fastest, otherwise for those of few rows,
        if there is memory for a second copy of the weights.

        `most_inputs`: of any layer's matmul; `weight_bytes`: of all layers; `free_bytes`: of the device, beside
        everything else that is kept there.
        """
        if not self.packed or not has_bfloat16_dot():
            return self
        if has_dot_tiles() and most_inputs <= MOST_INPUTS:
            reason = "bfloat16 weights laid out for AVX-512's dot product"
            return LinearChoice(True, "dot-tiles", reason, ALL_ROWS)
        obstacle = "a matmul has more inputs than its tiles take" if most_inputs > MOST_INPUTS else amx_obstacle()
        if obstacle is None:
            return LinearChoice(True, "amx-tiles", "bfloat16 weights laid out for AMX's tiles", ALL_ROWS, amx=True)
        if weight_bytes > free_bytes * COPY_FRACTION:
            return self if has_dot_tiles() else replace(self, reason=f"{self.reason}; no AMX tiles of ours: {obstacle}")
        rows, why = (FEW_ROWS, "") if has_dot_tiles() else (FEW_ROWS_BESIDE_AMX, f"; no AMX tiles of ours: {obstacle}")
        reason = f"{self.reason}; up to {rows} rows by a kernel of our own{why}"
        return replace(self, tiled_rows=rows, reason=reason)


def pick_linear(device: torch.device, dtype: torch.dtype) -> LinearChoice:
    """Packed bfloat16 weights where oneDNN has a fast bfloat16 matmul, plain ones everywhere else."""
    if device.type != "cpu":
        return LinearChoice(False, "torch", f"{device.type} matmuls need no repacked weights")
    if dtype is not torch.bfloat16:
        return LinearChoice(False, "torch", f"{str(dtype).removeprefix('torch.')} weights are used as they are")
    if not torch._C._has_mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return LinearChoice(False, "torch", "oneDNN has no bfloat16 matmul for this CPU")
    return LinearChoice(True, "onednn-packed", "bfloat16 weights packed once for oneDNN")
