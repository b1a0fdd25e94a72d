"""What the device can do at most: reading memory, and multiplying matrices. Every step stands beside these two.

A ceiling must be one: each is the best of several sizes, and on a CPU of one thread and all of them, because the best
size differs between devices and a kernel that reads faster than its "ceiling" says nothing.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sarathi_tune.config.model import DtypeName
from sarathi_tune.measure.timer import Timer, make_timer

if TYPE_CHECKING:
    import torch

#: Several times the last-level cache of any CPU that serves models from its own memory, and of any GPU.
_CPU_READ_BYTES = (256 << 20, 512 << 20)
_GPU_READ_BYTES = (1 << 30, 4 << 30)
#: (rows, columns in, columns out). Long inner dimensions for large caches, short ones for small ones.
_CPU_GEMM = ((1024, 1024, 1024), (512, 1536, 576), (512, 2048, 2048), (2048, 1024, 1024))
_GPU_GEMM = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 14336))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best of many short runs: memory read in GB/s (10^9 bytes), a GEMM at `dtype` in TFLOP/s (10^12)."""

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
    """Measure both on a torch device, in about `seconds` in all, with up to the threads that torch is set to."""
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

    sizes = _CPU_READ_BYTES if device.type == "cpu" else _GPU_READ_BYTES
    # Written, not just allocated: never-written memory may be one page of zeros that sits in the cache.
    buffer = torch.ones(max(sizes) // 4, dtype=torch.float32, device=device)
    best = 0.0
    threads = _thread_counts(device)
    share = seconds / (len(sizes) * len(threads))
    for num_bytes in sizes:
        part = buffer[: num_bytes // 4]
        for _ in _with_threads(threads):
            # A sum was the fastest read of all that torch offers: dot, max and matrix times vector read at 1/5 to 9/10
            # of it, and a compiled loop of our own within 3 %.
            best = max(best, num_bytes / _best_ms(part.sum, timer, share) / 1e6)
    return best


def _gemm_tflop_per_s(device: "torch.device", dtype: "torch.dtype", timer: Timer, seconds: float) -> float:
    import torch

    from sarathi_tune.runtime.layers.linear import PlainLinear, pick_linear

    shapes = _CPU_GEMM if device.type == "cpu" else _GPU_GEMM
    generator = torch.Generator(device=device).manual_seed(0)
    choice = pick_linear(device, dtype)
    best = 0.0
    for rows, width, out in shapes:
        x, weight = (torch.randn(n, width, generator=generator, device=device).to(dtype) for n in (rows, out))
        flops = 2 * rows * width * out
        # As the engine multiplies and as torch does: the faster one counts.
        tiled = choice.with_tiles(width, weight_bytes=0, free_bytes=1)
        layers = [each.build(weight) for each in dict.fromkeys((choice, tiled))]
        layers += [PlainLinear(weight, None)] if choice.packed else []
        for layer in layers:
            best_ms = _best_ms(partial(layer, x), timer, seconds / len(shapes) / len(layers))
            best = max(best, flops / best_ms / 1e9)
    return best


def _thread_counts(device: "torch.device") -> tuple[int, ...]:
    """All threads, and one where that may be faster: two may share a core or a memory channel."""
    import torch

    return (torch.get_num_threads(), 1) if device.type == "cpu" and torch.get_num_threads() > 1 else (0,)


def _with_threads(counts: tuple[int, ...]) -> Iterator[None]:
    """Each thread count in turn, and what was set before in the end; 0 leaves it alone."""
    import torch

    before = torch.get_num_threads()
    try:
        for count in counts:
            if count:
                torch.set_num_threads(count)
            yield
    finally:
        torch.set_num_threads(before)


def _best_ms(work: Callable[[], object], timer: Timer, seconds: float) -> float:
    """The shortest of as many runs as the seconds hold, two at least; the first one warms up."""
    end_s = time.perf_counter() + seconds
    timer.time_ms(work)
    best_ms = timer.time_ms(work)
    while time.perf_counter() < end_s:
        best_ms = min(best_ms, timer.time_ms(work))
    return best_ms
