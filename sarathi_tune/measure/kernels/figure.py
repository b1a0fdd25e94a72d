"""What is reported of a kernel: its time, and what that is of the device's ceiling."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sarathi_tune.measure.ceilings import Ceilings

SCHEMA = "sarathi-tune/kernels"
SCHEMA_VERSION = 1

Group = Literal["attention", "linear", "kv-write", "sampling", "all-reduce"]
Bound = Literal["memory", "compute", "link"]

GROUPS: tuple[Group, ...] = ("attention", "linear", "kv-write", "sampling", "all-reduce")


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """One kernel at one size. `median_ms` is per call; `num_bytes` must be moved and `num_flops` computed in it.

    `kernel` is what computed it where that depends on the size. `ceiling` is what the device does at most of what
    bounds the kernel, in GB/s or TFLOP/s; None when nothing was measured for it. `skipped` says why there is no time.
    """

    group: Group
    name: str
    tokens: int
    median_ms: float | None = None
    best_ms: float | None = None
    num_bytes: float = 0.0
    num_flops: float = 0.0
    bound: Bound = "memory"
    ceiling: float | None = None
    kernel: str = ""
    skipped: str = ""

    @property
    def unit(self) -> str:
        """What the kernel achieves is counted in."""
        return "TFLOP/s" if self.bound == "compute" else "GB/s"

    @property
    def achieved(self) -> float | None:
        """GB/s or TFLOP/s at the median time."""
        if not self.median_ms:
            return None
        work = self.num_flops / 1e9 if self.bound == "compute" else self.num_bytes / 1e6
        return work / self.median_ms if work else None

    @property
    def share(self) -> float | None:
        """Achieved over the ceiling."""
        if self.achieved is None or not self.ceiling:
            return None
        return self.achieved / self.ceiling

    def as_dict(self) -> dict[str, Any]:
        """The figure as it stands in a document."""
        if self.skipped:
            return {"group": self.group, "name": self.name, "tokens": self.tokens, "skipped": self.skipped}
        return {
            "group": self.group,
            "name": self.name,
            "tokens": self.tokens,
            **({"kernel": self.kernel} if self.kernel else {}),
            "median_ms": _rounded(self.median_ms),
            "best_ms": _rounded(self.best_ms),
            "bytes": round(self.num_bytes),
            "flops": round(self.num_flops),
            "bound": self.bound,
            "achieved": _rounded(self.achieved),
            "ceiling": _rounded(self.ceiling),
            "unit": self.unit,
            "share": _rounded(self.share),
        }


def bounded(
    group: Group,
    name: str,
    tokens: int,
    times_ms: tuple[float, float],
    work: tuple[float, float],
    ceilings: Ceilings,
) -> KernelFigure:
    """A figure of (median, best) milliseconds and (bytes, flops), against the ceiling that takes longer: a roofline."""
    num_bytes, num_flops = work
    read_ms = num_bytes / ceilings.read_gb_per_s / 1e6
    compute_ms = num_flops / ceilings.gemm_tflop_per_s / 1e9
    is_compute = compute_ms > read_ms
    return KernelFigure(
        group=group,
        name=name,
        tokens=tokens,
        median_ms=times_ms[0],
        best_ms=times_ms[1],
        num_bytes=num_bytes,
        num_flops=num_flops,
        bound="compute" if is_compute else "memory",
        ceiling=ceilings.gemm_tflop_per_s if is_compute else ceilings.read_gb_per_s,
    )


@dataclass(frozen=True, slots=True)
class KernelReport:
    """All figures of one device and one model's shapes."""

    figures: tuple[KernelFigure, ...]
    ceilings: Ceilings
    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[Mapping[str, str], ...] = ()

    def of(self, group: Group) -> tuple[KernelFigure, ...]:
        """The figures of a group, in the order of measuring."""
        return tuple(figure for figure in self.figures if figure.group == group)

    def as_dict(self) -> dict[str, Any]:
        """The document."""
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "model": self.model,
            "engine": dict(self.engine),
            "machine": dict(self.machine),
            "ceilings": self.ceilings.as_dict(),
            "figures": [figure.as_dict() for figure in self.figures],
            "notices": list(self.notices),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
