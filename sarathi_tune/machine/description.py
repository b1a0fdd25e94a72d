"""The machine in one value: CPU, memory, GPU, system; and what could not be found out about it."""

import platform
from dataclasses import dataclass
from typing import Any

from sarathi_tune.machine.cpu import CpuDescription, describe_cpu
from sarathi_tune.machine.gpu import Gpu, GpuDescription
from sarathi_tune.machine.memory import MemoryDescription, describe_memory


@dataclass(frozen=True, slots=True)
class MachineDescription:
    """What steps ran on. `gpu` is None on a CPU."""

    cpu: CpuDescription
    memory: MemoryDescription
    gpu: GpuDescription | None
    system: str

    @property
    def name(self) -> str:
        """The device in a few words: `AMD EPYC, 2 threads` or `NVIDIA H100 80GB HBM3`."""
        if self.gpu is not None:
            return self.gpu.name
        threads = self.cpu.threads
        return f"{self.cpu.model}, {threads} thread{'s' if threads > 1 else ''}"

    def as_dict(self) -> dict[str, Any]:
        """The description as it stands in a JSON document."""
        return {
            "name": self.name,
            "cpu": self.cpu.as_dict(),
            "memory": self.memory.as_dict(),
            "gpu": self.gpu.as_dict() if self.gpu else None,
            "system": self.system,
        }


def describe_machine(gpu: Gpu | None = None) -> MachineDescription:
    """Read the machine. `gpu` is the open GPU that steps run on (see `open_gpu`), None on a CPU; its notices stay
    with it."""
    return MachineDescription(
        cpu=describe_cpu(),
        memory=describe_memory(),
        gpu=gpu.describe() if gpu else None,
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    )
