"""What the container allows: CPU quota, throttling and memory limit, from cgroup v2, v1, or both at once.

Limits of all visible ancestors count: a pod without a limit may sit in a slice that has one. Every path hangs on
`root`, so that a test can lay out a machine of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: cgroup v1 writes "no limit" as the largest multiple of the page size; no machine has that much memory.
_V1_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Throttling:
    """Counters of a CPU controller since the group was made: periods in which it ran out of quota, and seconds lost."""

    num_periods: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The directories of this process's CPU and memory controllers, the process's own group first, then its parents.

    Empty where there is no cgroup file system (macOS, Windows).
    """

    cpu_dirs: tuple[Path, ...] = ()
    memory_dirs: tuple[Path, ...] = ()

    def cpu_quota(self) -> float | None:
        """CPUs' worth of time per period, the tightest of all levels; None without a limit."""
        quotas = [quota for directory in self.cpu_dirs if (quota := _quota(directory)) is not None]
        return min(quotas, default=None)

    def memory_limit_bytes(self) -> int | None:
        """The tightest memory limit of all levels; None without a limit."""
        limits = [limit for directory in self.memory_dirs if (limit := _memory_limit(directory)) is not None]
        return min(limits, default=None)

    def memory_room_bytes(self) -> int | None:
        """Bytes until the tightest limit, file cache that the kernel can drop counted as free; None without one."""
        rooms = []
        for directory in self.memory_dirs:
            limit, used = _memory_limit(directory), _memory_used(directory)
            if limit is not None and used is not None:
                rooms.append(max(0, limit - used))
        return min(rooms, default=None)

    def throttling(self) -> Throttling:
        """The counters of the level that was throttled longest."""
        return max((_throttling(directory) for directory in self.cpu_dirs), key=_seconds, default=Throttling())


def find_cgroup(root: Path = Path("/")) -> Cgroup:
    """The control groups of this process, as `/proc/self/cgroup` and `/proc/self/mountinfo` name them."""
    groups = dict(_groups(root))
    cpu: list[Path] = []
    memory: list[Path] = []
    for mount, mounted_group, controllers in _mounts(root):
        group = next((groups[name] for name in controllers if name in groups), None)
        if group is None:
            continue
        directories = _levels(root / mount.lstrip("/"), mounted_group, group)
        if "cpu" in controllers or controllers == ("",):
            cpu += directories
        if "memory" in controllers or controllers == ("",):
            memory += directories
    return Cgroup(tuple(cpu), tuple(memory))


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """(controller, group path) pairs; the controller of the v2 hierarchy is the empty string."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            yield controller, path


def _mounts(root: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(mount point, group at the mount point, controllers) of every cgroup file system."""
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 5 or not tail:
            continue
        if tail[0] == "cgroup2":
            yield fields[4], fields[3], ("",)
        elif tail[0] == "cgroup":
            yield fields[4], fields[3], tuple(tail[-1].split(","))


def _levels(mount: Path, mounted_group: str, group: str) -> list[Path]:
    """The group's directory and its parents up to the mount point, the group first.

    Inside a container without a namespace of its own the group's path is the host's, and only the mount point shows it.
    """
    below = Path(group)
    if below.is_relative_to(mounted_group):
        below = below.relative_to(mounted_group)
    elif mounted_group != "/" or ".." in below.parts:
        below = Path()
    below = Path(*(part for part in below.parts if part != "/"))
    levels = [mount / below, *(mount / parent for parent in below.parents)]
    return [level for level in dict.fromkeys(levels) if level.is_dir()] or [mount]


def _quota(directory: Path) -> float | None:
    v2 = _text(directory / "cpu.max").split()
    if len(v2) == 2:
        quota, period = v2
    else:
        quota, period = _text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")
    # v2 writes "max" and v1 writes -1 where there is no limit.
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _memory_limit(directory: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _text(directory / name)
        if text.isdecimal() and int(text) < _V1_UNLIMITED_BYTES:
            return int(text)
    return None


def _memory_used(directory: Path) -> int | None:
    for name, cache in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        text = _text(directory / name)
        if text.isdecimal():
            return max(0, int(text) - _counters(directory / "memory.stat").get(cache, 0))
    return None


def _throttling(directory: Path) -> Throttling:
    counters = _counters(directory / "cpu.stat")
    # v2 counts microseconds (throttled_usec), v1 nanoseconds (throttled_time).
    seconds = counters.get("throttled_usec", 0) / 1e6 + counters.get("throttled_time", 0) / 1e9
    return Throttling(counters.get("nr_throttled", 0), seconds)


def _seconds(throttling: Throttling) -> float:
    return throttling.seconds


def _counters(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    """The file's text; empty when it isn't there or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
