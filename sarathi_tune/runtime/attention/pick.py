"""Which attention back end runs, and why: the answer stands in every profile and result."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from sarathi_tune.errors import UsageError
from sarathi_tune.runtime.attention.base import Attention, AttentionShape
from sarathi_tune.runtime.attention.flash import PAGE_MULTIPLE as FLASH_PAGE_MULTIPLE
from sarathi_tune.runtime.attention.reference import ReferenceAttention
from sarathi_tune.runtime.attention.sdpa import SdpaAttention
from sarathi_tune.runtime.attention.triton_paged import triton_obstacle
from sarathi_tune.runtime.kernels.availability import KERNEL_LANES, kernels_obstacle


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A back end and the sentence that says why it was taken."""

    attention: Attention
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A back end that might be picked. `obstacle`: why it can't run here, or None."""

    name: str
    reason: str
    obstacle: str | None
    build: Callable[[], Attention]


def pick_attention(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, page_tokens: int, requested: str = "auto"
) -> AttentionChoice:
    """The requested back end, or with "auto" the first one that can run.

    Raises UsageError when the requested one is unknown or can't run here.
    """
    candidates = attention_candidates(shape, device, dtype, page_tokens)
    if requested == "auto":
        chosen = next(candidate for candidate in candidates if candidate.obstacle is None)
        return AttentionChoice(chosen.build(), chosen.name, chosen.reason)
    for candidate in candidates:
        if candidate.name == requested:
            if candidate.obstacle is not None:
                raise UsageError(f"The attention back end {requested!r} can't be used: {candidate.obstacle}.")
            return AttentionChoice(candidate.build(), candidate.name, "asked for by name")
    names = ", ".join(["auto", *(candidate.name for candidate in candidates)])
    raise UsageError(f"There is no attention back end {requested!r}: choose one of {names}.")


def attention_candidates(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, page_tokens: int
) -> tuple[Candidate, ...]:
    """Every back end, the fastest on such a device first, each with what keeps it from running there."""
    candidates = (
        Candidate(
            "flash",
            "FlashAttention-2 is installed and computes a ragged batch in one call",
            _flash_obstacle(device, dtype),
            lambda: _flash(shape, page_tokens),
        ),
        Candidate(
            "triton",
            "a Triton kernel reads pages of any size where they are, without gathering keys first",
            triton_obstacle(device, dtype),
            lambda: _triton(shape, page_tokens),
        ),
        Candidate(
            "cpu",
            "compiled kernels for decodes and, where the CPU multiplies bfloat16, for chunks",
            kernels_obstacle(device, dtype) or _shape_obstacle(shape, page_tokens),
            lambda: _cpu(shape, page_tokens),
        ),
        Candidate(
            "sdpa",
            "torch's scaled_dot_product_attention runs on every device",
            None,
            lambda: SdpaAttention(shape),
        ),
        Candidate("reference", "the float32 oracle for tests; slow", None, lambda: ReferenceAttention(shape)),
    )
    order = _order(device, page_tokens)
    return tuple(sorted(candidates, key=lambda candidate: order.index(candidate.name)))


def _order(device: torch.device, page_tokens: int) -> tuple[str, ...]:
    """Names of the back ends, fastest first."""
    if device.type == "cpu":
        # Triton's interpreter is behind whatever else there is: it is for tests.
        return ("cpu", "sdpa", "triton", "flash", "reference")
    if page_tokens % FLASH_PAGE_MULTIPLE:
        # Flash would gather all keys of the batch in every layer.
        return ("triton", "flash", "sdpa", "cpu", "reference")
    return ("flash", "triton", "sdpa", "cpu", "reference")


def _flash(shape: AttentionShape, page_tokens: int) -> Attention:
    from sarathi_tune.runtime.attention.flash import FlashAttention

    return FlashAttention(shape, page_tokens)


def _triton(shape: AttentionShape, page_tokens: int) -> Attention:
    from sarathi_tune.runtime.attention.triton_paged import TritonAttention

    return TritonAttention(shape, page_tokens)


def _cpu(shape: AttentionShape, page_tokens: int) -> Attention:
    from sarathi_tune.runtime.attention.cpu import CpuAttention

    return CpuAttention(shape, page_tokens)


def _shape_obstacle(shape: AttentionShape, page_tokens: int) -> str | None:
    if shape.head_dim % KERNEL_LANES or page_tokens % KERNEL_LANES:
        return (
            f"its vectors have {KERNEL_LANES} lanes, and heads of {shape.head_dim} numbers or pages of {page_tokens} "
            "tokens don't divide into them"
        )
    return None


def _flash_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device and this is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16 only"
    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed (pip install 'sarathi-tune[flash]')"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs an Ampere or newer GPU (compute capability 8.0)"
    return None
