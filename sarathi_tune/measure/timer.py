"""How long a step takes: from before its launch until the device has finished it."""

import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """Times one piece of work."""

    def time_ms(self, work: Callable[[], object]) -> float:
        """Run `work` and return the milliseconds until the device was done with it."""
        ...


class CpuTimer:
    """The CPU computes while the call lasts: a monotonic clock is enough."""

    def time_ms(self, work: Callable[[], object]) -> float:
        """Run `work` and return its milliseconds."""
        start_s = time.perf_counter()
        work()
        return (time.perf_counter() - start_s) * 1e3


class DeviceTimer:
    """A device that computes behind the caller's back.

    Waits for it on both sides: before, so that earlier work isn't billed to this step; after, because the launch
    returns long before the execution ends (vllm-ascend #8769 timed the launch). Host time counts, as it does in a
    server, which is why this is a clock around two synchronisations and not a pair of events.
    """

    def __init__(self, synchronise: Callable[[], None], clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._synchronise = synchronise
        self._clock_s = clock_s

    def time_ms(self, work: Callable[[], object]) -> float:
        """Run `work` and return the milliseconds until the device was done with it."""
        self._synchronise()
        start_s = self._clock_s()
        work()
        self._synchronise()
        return (self._clock_s() - start_s) * 1e3


def make_timer(device: str) -> Timer:
    """The timer for a torch device name (`cpu`, `cuda`, `cuda:1`)."""
    if not device.startswith("cuda"):
        return CpuTimer()
    import torch

    return DeviceTimer(lambda: torch.cuda.synchronize(device))
