"""How much host memory there is, the container's limit included."""

from dataclasses import dataclass
from pathlib import Path

from sarathi_tune.machine.cgroup import find_cgroup


@dataclass(frozen=True, slots=True)
class MemoryDescription:
    """Host memory in bytes: what the machine (or the container) has, and what can be had now without swapping."""

    total_bytes: int
    available_bytes: int

    def as_dict(self) -> dict[str, int]:
        """The description as it stands in a JSON document."""
        return {"total_bytes": self.total_bytes, "available_bytes": self.available_bytes}


def describe_memory(root: Path = Path("/")) -> MemoryDescription:
    """Read the memory; the tighter of machine and container counts. `root` is where `/proc` and `/sys` hang."""
    import psutil

    memory = psutil.virtual_memory()
    cgroup = find_cgroup(root)
    limit, room = cgroup.memory_limit_bytes(), cgroup.memory_room_bytes()
    return MemoryDescription(
        total_bytes=min(memory.total, memory.total if limit is None else limit),
        available_bytes=min(memory.available, memory.available if room is None else room),
    )
