"""What the device can do at most: reading memory, and multiplying matrices. Every step stands beside these two."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sarathi_tune.config.model import DtypeName
from sarathi_tune.measure.timer import Timer, make_timer

if TYPE_CHECKING:
    import torch

#: Larger than the last-level cache of any CPU that serves models from its own memory.
_CPU_READ_BYTES = 256 << 20
_GPU_READ_BYTES = 2 << 30
_CPU_GEMM, _GPU_GEMM = 1024, 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best of several short runs: memory read in GB/s (10^9 bytes), a square GEMM at `dtype` in TFLOP/s (10^12)."""

    read_gb_per_s: float
    gemm_tflop_per_s: float
    dtype: DtypeName

    def as_dict(self) -> dict[str, Any]:
        """The ceilings as they stand in a JSON document."""
        return {
            "read_gb_per_s": round(self.read_gb_per_s, 1),
            "gemm_tflop_per_s": round(self.gemm_tflop_per_s, 3),
            "dtype": self.dtype,
        }


def measure_ceilings(device: str, dtype: DtypeName, seconds: float = 1.0) -> Ceilings:
    """Measure both on a torch device, in about `seconds` in all, with the threads that torch is set to."""
    import torch

    timer = make_timer(device)
    with torch.inference_mode():
        return Ceilings(
            read_gb_per_s=_read_gb_per_s(torch.device(device), timer, seconds / 2),
            gemm_tflop_per_s=_gemm_tflop_per_s(torch.device(device), getattr(torch, dtype), timer, seconds / 2),
            dtype=dtype,
        )


def _read_gb_per_s(device: "torch.device", timer: Timer, seconds: float) -> float:
    import torch

    num_bytes = _CPU_READ_BYTES if device.type == "cpu" else _GPU_READ_BYTES
    # Written, not just allocated: never-written memory may be one page of zeros that sits in the cache.
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    # A sum was the fastest read of all that torch offers (dot, max and matrix times vector read at 1/5 to 9/10 of it).
    return num_bytes / _best_ms(buffer.sum, timer, seconds) / 1e6


def _gemm_tflop_per_s(device: "torch.device", dtype: "torch.dtype", timer: Timer, seconds: float) -> float:
    import torch

    size = _CPU_GEMM if device.type == "cpu" else _GPU_GEMM
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_ms(lambda: left @ right, timer, seconds) / 1e9


def _best_ms(work: Callable[[], object], timer: Timer, seconds: float) -> float:
    """The shortest of as many runs as the seconds hold, two at least; the first one warms up."""
    end_s = time.perf_counter() + seconds
    timer.time_ms(work)
    best_ms = timer.time_ms(work)
    while time.perf_counter() < end_s:
        best_ms = min(best_ms, timer.time_ms(work))
    return best_ms
