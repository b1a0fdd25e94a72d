"""y = x W^T + b (+ residual), plain or with weights repacked for oneDNN.

A bfloat16 matmul on a CPU first copies its weight into blocks, at every call. Done once, ahead, a decode step over the
same weights takes half the time; a 512-token chunk gains a tenth. Steps of few rows have a kernel and a copy of the
weights of their own, where memory is plenty.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.nn import functional

from sarathi_tune.runtime.kernels.arrays import as_array
from sarathi_tune.runtime.kernels.availability import KERNEL_LANES, has_bfloat16_dot


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


class FewRowsLinear:
    """A layer that computes up to FEW_ROWS rows by `kernels.linear` and more by another one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, many: Linear) -> None:
        from sarathi_tune.runtime.kernels.linear import apply_linear, pack_weight

        #: The packed weight and the bias, as kernels take them.
        self.arrays = (
            as_array(pack_weight(weight)),
            as_array(torch.empty(0, dtype=weight.dtype) if bias is None else bias),
        )
        self._no_residual = as_array(torch.empty(0, 0, dtype=weight.dtype))
        self._num_columns = weight.shape[0]
        self._apply: Any = apply_linear
        self._many = many

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer."""
        if len(x) > FEW_ROWS:
            return self._many(x, residual)
        y = torch.empty(len(x), self._num_columns, dtype=x.dtype)
        added = self._no_residual if residual is None else as_array(residual.contiguous())
        self._apply(torch.get_num_threads(), as_array(x.contiguous()), *self.arrays, added, as_array(y))
        return y


#: Up to so many rows the kernel is faster than oneDNN on all of a layer's matmuls (1.0 to 2.4 times at 1 to 32 rows of
#: SmolLM2-135M, Zen 5); the LM head, which is one large matmul, gains nothing.
FEW_ROWS = 32
#: A second copy of the weights may take this part of the free memory.
COPY_FRACTION = 1 / 8

#: Above so many rows a step is filled up to a multiple of ROW_MULTIPLE: oneDNN generates code for each new number of
#: rows, which costs 2 to 4 ms, and live steps would meet ever new ones. Its own blocks make 257 rows as slow as 264.
EXACT_ROWS, ROW_MULTIPLE = 32, 8


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """Which linear layer is used on a device and why."""

    packed: bool
    name: str
    reason: str
    few_rows: bool = False

    def padded_rows(self, num_tokens: int) -> int:
        """How many rows a step of so many tokens is best computed with."""
        if not self.packed or num_tokens <= EXACT_ROWS:
            return num_tokens
        return -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE

    def build(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_head: bool = False) -> Linear:
        """The layer over `weight` [out, in] and `bias` [out]; `is_head`: it is the LM head."""
        if not self.packed:
            return PlainLinear(weight, bias)
        many = PackedLinear(weight, bias)
        fits = weight.shape[0] % KERNEL_LANES == 0 and weight.shape[1] % 2 == 0
        return FewRowsLinear(weight, bias, many) if self.few_rows and fits and not is_head else many

    def with_copy_for_few_rows(self, weight_bytes: int, free_bytes: int) -> "LinearChoice":
        """The choice with a second copy of the weights, for steps of few rows, if there is memory and a kernel for it.

        `weight_bytes`: of all layers; `free_bytes`: of the device, beside everything else that is kept there.
        """
        if not self.packed or weight_bytes > free_bytes * COPY_FRACTION or not has_bfloat16_dot():
            return self
        return replace(self, few_rows=True, reason=f"{self.reason}; up to {FEW_ROWS} rows by a kernel of our own")


def pick_linear(device: torch.device, dtype: torch.dtype) -> LinearChoice:
    """Packed bfloat16 weights where oneDNN has a fast bfloat16 matmul, plain ones everywhere else."""
    if device.type != "cpu":
        return LinearChoice(False, "torch", f"{device.type} matmuls need no repacked weights")
    if dtype is not torch.bfloat16:
        return LinearChoice(False, "torch", f"{str(dtype).removeprefix('torch.')} weights are used as they are")
    if not torch._C._has_mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return LinearChoice(False, "torch", "oneDNN has no bfloat16 matmul for this CPU")
    return LinearChoice(True, "onednn-packed", "bfloat16 weights packed once for oneDNN")
