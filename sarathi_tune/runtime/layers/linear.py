"""y = x W^T + b (+ residual), plain or with weights repacked for oneDNN.

A bfloat16 matmul on a CPU first copies its weight into blocks, at every call. Done once, ahead, a decode step over the
same weights takes half the time; a 512-token chunk gains a tenth.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional


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


#: Above so many rows a step is filled up to a multiple of ROW_MULTIPLE: oneDNN generates code for each new number of
#: rows, which costs 2 to 4 ms, and live steps would meet ever new ones. Its own blocks make 257 rows as slow as 264.
EXACT_ROWS, ROW_MULTIPLE = 32, 8


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """Which linear layer is used on a device and why."""

    packed: bool
    name: str
    reason: str

    def padded_rows(self, num_tokens: int) -> int:
        """How many rows a step of so many tokens is best computed with."""
        if not self.packed or num_tokens <= EXACT_ROWS:
            return num_tokens
        return -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE

    def build(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """The layer over `weight` [out, in] and `bias` [out]."""
        return PackedLinear(weight, bias) if self.packed else PlainLinear(weight, bias)


def pick_linear(device: torch.device, dtype: torch.dtype) -> LinearChoice:
    """Packed bfloat16 weights where oneDNN has a fast bfloat16 matmul, plain ones everywhere else."""
    if device.type != "cpu":
        return LinearChoice(False, "torch", f"{device.type} matmuls need no repacked weights")
    if dtype is not torch.bfloat16:
        return LinearChoice(False, "torch", f"{str(dtype).removeprefix('torch.')} weights are used as they are")
    if not torch._C._has_mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return LinearChoice(False, "torch", "oneDNN has no bfloat16 matmul for this CPU")
    return LinearChoice(True, "onednn-packed", "bfloat16 weights packed once for oneDNN")
