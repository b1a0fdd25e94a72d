"""The CPU as far as step times depend on it: model, vector and matrix instructions, cores that we may use, threads."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_tune.machine.cgroup import find_cgroup

#: Instruction sets that decide which GEMM kernels a CPU build of torch picks, widest last (x86, then Arm).
ISA_FLAGS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "sve",
    "sve2",
    "bf16",
    "i8mm",
    "svebf16",
)


@dataclass(frozen=True, slots=True)
class CpuDescription:
    """The CPU that steps run on. `cores` are the logical ones this process may run on; `physical_cores` is how many
    real ones stand behind them, or None where the system doesn't tell; `quota` is in CPUs."""

    model: str
    isa: tuple[str, ...]
    cores: tuple[int, ...]
    physical_cores: int | None
    quota: float | None
    last_level_cache_bytes: int | None

    @property
    def threads(self) -> int:
        """Compute threads to use."""
        return usable_threads(len(self.cores), self.quota)

    def as_dict(self) -> dict[str, Any]:
        """The description as it stands in a JSON document."""
        return {
            "model": self.model,
            "isa": list(self.isa),
            "cores": len(self.cores),
            "physical_cores": self.physical_cores,
            "quota": self.quota,
            "threads": self.threads,
            "last_level_cache_bytes": self.last_level_cache_bytes,
        }


def usable_threads(cores: int, quota: float | None) -> int:
    """min(cores, floor(quota)), at least 1.

    With more threads than quota the kernel stops all of them for the rest of each period while each waits for the
    others: 45 times slower was seen (ollama #17916).
    """
    return max(1, cores if quota is None else min(cores, int(quota)))


def describe_cpu(root: Path = Path("/"), cores: frozenset[int] | None = None) -> CpuDescription:
    """Read the CPU. `root` is where `/proc` and `/sys` hang; `cores` overrides the affinity (both for tests)."""
    allowed = tuple(sorted(cores if cores is not None else affinity()))
    info = _cpuinfo(root)
    flags = frozenset((info.get("flags") or info.get("Features") or "").split())
    return CpuDescription(
        model=info.get("model name") or platform.processor() or platform.machine(),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        cores=allowed,
        physical_cores=_physical_cores(root, allowed),
        quota=find_cgroup(root).cpu_quota(),
        last_level_cache_bytes=_last_level_cache_bytes(root, allowed),
    )


def affinity() -> frozenset[int]:
    """Logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def clock_mhz(cores: tuple[int, ...], root: Path = Path("/")) -> float | None:
    """Mean current clock of `cores`; None where the system doesn't tell (Arm, most virtual machines of other kinds)."""
    clocks = []
    for core in cores:
        khz = _text(root / f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq")
        if khz.isdecimal():
            clocks.append(int(khz) / 1e3)
    if not clocks:
        text = _text(root / "proc/cpuinfo")
        by_core = zip(re.findall(r"^processor\s*:\s*(\d+)", text, re.M), _mhz(text), strict=False)
        clocks = [mhz for core_id, mhz in by_core if int(core_id) in cores]
    return sum(clocks) / len(clocks) if clocks else None


def _mhz(cpuinfo: str) -> list[float]:
    return [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", cpuinfo, re.M)]


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first processor's fields."""
    first = _text(root / "proc/cpuinfo").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _physical_cores(root: Path, cores: tuple[int, ...]) -> int | None:
    siblings = {_text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores}
    siblings.discard("")
    return len(siblings) or None


def _last_level_cache_bytes(root: Path, cores: tuple[int, ...]) -> int | None:
    if not cores:
        return None
    sizes = []
    for size in (root / f"sys/devices/system/cpu/cpu{cores[0]}/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM])", _text(size))
        if match:
            sizes.append(int(match[1]) << (10 if match[2] == "K" else 20))
    return max(sizes, default=None)


def _text(path: Path) -> str:
    """The file's text; empty when it isn't there or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
