"""What else happened on the machine while steps were timed, and when that spoils the times.

The load average would count our own threads and lags by a minute. So CPU time is counted: what the cores that we may
use were busy with, less what this process and its other ranks used themselves.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sarathi_tune import notices
from sarathi_tune.machine.cgroup import Cgroup, Throttling, find_cgroup
from sarathi_tune.machine.cpu import affinity, clock_mhz
from sarathi_tune.machine.gpu import Gpu, GpuState
from sarathi_tune.notices import Notice

#: Shares of the cores' time from which on the times are doubted. An idle machine stays below a third of them.
OTHERS_LIMIT = 0.05
STEAL_LIMIT = 0.02
#: Share of the wall time that the process was stopped for want of quota.
THROTTLED_LIMIT = 0.01
#: Relative difference between two measurements of the same shape from which on results are called noisy.
NOISE_LIMIT = 0.05


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """CPU time so far of the cores that we may use: busy with anything (steal excluded), and stolen by the host."""

    busy: float
    stolen: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters at one moment."""

    wall_s: float
    cores: CpuSeconds
    own_cpu_s: float
    throttling: Throttling


class Counters(Protocol):
    """Where snapshots come from; the operating system, or a script in tests."""

    num_cores: int

    def snapshot(self) -> Snapshot:
        """The counters now."""
        ...

    def load_1m(self) -> float:
        """The load average over one minute; NaN where there is none."""
        ...

    def clock_mhz(self) -> float | None:
        """The cores' mean clock."""
        ...


class SystemCounters:
    """The operating system's counters for the cores that this process may use."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._cores = tuple(sorted(affinity()))
        self._cgroup: Cgroup = find_cgroup(root)
        self._root = root
        self.num_cores = len(self._cores)

    def snapshot(self) -> Snapshot:
        """The counters now."""
        return Snapshot(
            wall_s=time.perf_counter(),
            cores=self._core_seconds(),
            own_cpu_s=_own_cpu_s(),
            throttling=self._cgroup.throttling(),
        )

    def load_1m(self) -> float:
        """The load average over one minute; NaN where there is none."""
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")

    def clock_mhz(self) -> float | None:
        """The cores' mean clock."""
        return clock_mhz(self._cores, self._root)

    def _core_seconds(self) -> CpuSeconds:
        import psutil

        times = psutil.cpu_times(percpu=True)
        ours = [times[core] for core in self._cores if core < len(times)]
        # `guest` is part of `user` already; `irq`, `softirq` and `steal` exist on Linux only.
        busy = sum(
            core.user + core.system + sum(getattr(core, name, 0.0) for name in ("nice", "irq", "softirq"))
            for core in ours
        )
        return CpuSeconds(busy, sum(getattr(core, "steal", 0.0) for core in ours))


@dataclass(frozen=True, slots=True)
class Conditions:
    """What happened in one round of measuring. Shares are of all our cores' time, 0 to 1."""

    duration_s: float
    num_cores: int
    load_1m: float
    own_cores: float
    other_cores: float
    steal_share: float
    throttled_periods: int
    throttled_s: float
    cpu_clock_mhz: float | None
    gpu: GpuState | None = None

    def as_dict(self) -> dict[str, Any]:
        """The conditions as they stand in a JSON document; fields of an absent GPU are left out."""
        document: dict[str, Any] = {
            "duration_s": round(self.duration_s, 3),
            "cores": self.num_cores,
            "load_1m": round(self.load_1m, 2) if self.load_1m == self.load_1m else None,
            "own_cores": round(self.own_cores, 3),
            "other_cores": round(self.other_cores, 3),
            "steal_share": round(self.steal_share, 4),
            "throttled_periods": self.throttled_periods,
            "throttled_s": round(self.throttled_s, 3),
            "cpu_clock_mhz": round(self.cpu_clock_mhz) if self.cpu_clock_mhz is not None else None,
        }
        if self.gpu is not None:
            document["gpu"] = {
                "sm_clock_mhz": self.gpu.sm_clock_mhz,
                "memory_clock_mhz": self.gpu.memory_clock_mhz,
                "temperature_c": self.gpu.temperature_c,
                "power_w": self.gpu.power_w,
                "throttle_reasons": list(self.gpu.throttle_reasons),
                "num_processes": self.gpu.num_processes,
            }
        return document


def _own_cpu_s() -> float:
    """CPU time of this process, of those that it started, and under a launcher of the run's other ranks."""
    import psutil

    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    this = psutil.Process()
    family = this.children(recursive=True)
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and (launcher := this.parent()) is not None:
        family += [process for process in launcher.children() if process.pid != this.pid]
    for process in family:
        # One that has ended meanwhile counts among the children above.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class ConditionsProbe:
    """Watches one round after the other: `start`, measure, `stop`."""

    def __init__(self, counters: Counters | None = None, gpu: Gpu | None = None) -> None:
        self._counters: Counters = counters if counters is not None else SystemCounters()
        self._gpu = gpu
        self._start: Snapshot | None = None

    def start(self) -> None:
        """Begin a round."""
        self._start = self._counters.snapshot()

    def stop(self) -> Conditions:
        """End the round that `start` began. The GPU is read first, while its clocks are still those of the work."""
        gpu = self._gpu.state() if self._gpu else None
        assert self._start is not None, "stop without start"
        start, end, num_cores = self._start, self._counters.snapshot(), self._counters.num_cores
        self._start = None
        wall_s = max(end.wall_s - start.wall_s, 1e-9)
        own = (end.own_cpu_s - start.own_cpu_s) / wall_s
        busy = (end.cores.busy - start.cores.busy) / wall_s
        return Conditions(
            duration_s=wall_s,
            num_cores=num_cores,
            load_1m=self._counters.load_1m(),
            own_cores=own,
            # The system counts in ticks of 10 ms, so that a short round can come out a little below zero.
            other_cores=max(0.0, busy - own),
            steal_share=(end.cores.stolen - start.cores.stolen) / wall_s / num_cores,
            throttled_periods=end.throttling.num_periods - start.throttling.num_periods,
            throttled_s=end.throttling.seconds - start.throttling.seconds,
            cpu_clock_mhz=self._counters.clock_mhz(),
            gpu=gpu,
        )


def condition_notices(rounds: Sequence[Conditions]) -> tuple[Notice, ...]:
    """Warnings about all rounds together: other work, stolen time, throttling of CPU and GPU, a shared GPU."""
    duration_s = sum(conditions.duration_s for conditions in rounds)
    if duration_s <= 0:
        return ()
    others = _mean(rounds, "other_cores")
    steal = _mean(rounds, "steal_share")
    throttled_s = sum(conditions.throttled_s for conditions in rounds)
    num_cores, load_1m = rounds[-1].num_cores, rounds[-1].load_1m
    found = []
    if others > OTHERS_LIMIT * num_cores:
        found.append(notices.machine_busy(load_1m, num_cores, others))
    if steal > STEAL_LIMIT:
        found.append(notices.cpu_stolen(steal))
    if throttled_s > THROTTLED_LIMIT * duration_s:
        found.append(notices.cgroup_throttled(throttled_s, duration_s))
    return (*found, *_gpu_notices(rounds))


def thread_notices(threads: int, cores: int, quota: float | None) -> tuple[Notice, ...]:
    """A warning when `threads` compute threads are more than affinity and quota allow."""
    if threads > cores or (quota is not None and threads > max(1.0, quota)):
        return (notices.more_threads_than_allowed(threads, cores, quota),)
    return ()


def noise_notices(noise: float | None) -> tuple[Notice, ...]:
    """A warning when measuring the same shape twice gave two results."""
    return (notices.noise_high(noise, NOISE_LIMIT),) if noise is not None and noise > NOISE_LIMIT else ()


def _gpu_notices(rounds: Sequence[Conditions]) -> list[Notice]:
    states = [conditions.gpu for conditions in rounds if conditions.gpu is not None]
    found = []
    reasons = tuple(dict.fromkeys(reason for state in states for reason in state.throttle_reasons))
    if reasons:
        clocks = [state.sm_clock_mhz for state in states if state.sm_clock_mhz is not None]
        found.append(notices.gpu_throttled(reasons, min(clocks, default=None), max(clocks, default=None)))
    num_processes = max((state.num_processes or 0 for state in states), default=0)
    if num_processes > 1:
        found.append(notices.gpu_shared(num_processes))
    return found


def _mean(rounds: Sequence[Conditions], name: str) -> float:
    """Mean over the rounds, weighted with their durations."""
    total_s = sum(conditions.duration_s for conditions in rounds)
    return float(sum(getattr(conditions, name) * conditions.duration_s for conditions in rounds)) / total_s
