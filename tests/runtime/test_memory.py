"""What the runtime believes it may take: the tighter of the machine's memory and the container's."""

from pathlib import Path

import psutil
import pytest

from sarathi_tune.config.presets import resolve_model
from sarathi_tune.errors import OutOfMemoryError
from sarathi_tune.machine.memory import describe_memory
from sarathi_tune.runtime.memory import free_host_bytes, max_kv_pages, require_memory, resident_weight_bytes
from tests.machine.layouts import write, write_v1, write_v2

MIB = 1 << 20


def contained(root: Path, version: int) -> None:
    """A container of 800 MiB, of which 400 MiB are used; a quarter of that is file cache that can be dropped."""
    if version == 2:
        group = write_v2(root)
        write(group, "memory.max", f"{800 * MIB}\n")
        write(group, "memory.current", f"{400 * MIB}\n")
        write(group, "memory.stat", f"anon {300 * MIB}\ninactive_file {100 * MIB}\n")
    else:
        _, group = write_v1(root, "/docker/0123", "/docker/0123")
        write(group, "memory.limit_in_bytes", f"{800 * MIB}\n")
        write(group, "memory.usage_in_bytes", f"{400 * MIB}\n")
        write(group, "memory.stat", f"rss {300 * MIB}\ntotal_inactive_file {100 * MIB}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_bounds_what_may_be_taken(tmp_path: Path, version: int) -> None:
    contained(tmp_path, version)
    assert psutil.virtual_memory().available > 500 * MIB, "the machine has more than the container"
    memory = describe_memory(tmp_path)
    assert (memory.total_bytes, memory.available_bytes) == (800 * MIB, 500 * MIB)
    assert free_host_bytes(tmp_path) == 500 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_that_fits_the_machine_and_not_the_container_is_refused(tmp_path: Path, version: int) -> None:
    contained(tmp_path, version)
    model = resolve_model("smollm2-135m").config
    weights, free = resident_weight_bytes(model), free_host_bytes(tmp_path)
    fitting = max_kv_pages(model, 16, free)
    require_memory(model, fitting, 16, free, "cpu", weights)
    with pytest.raises(OutOfMemoryError, match=rf"cpu has 500.0 MiB free: use at most {fitting * 16} tokens"):
        require_memory(model, fitting + 1, 16, free, "cpu", weights)


@pytest.mark.parametrize("version", [1, 2])
def test_without_a_limit_the_machine_counts(tmp_path: Path, version: int) -> None:
    if version == 2:
        group = write_v2(tmp_path)
        write(group, "memory.max", "max\n")
        write(group, "memory.current", f"{400 * MIB}\n")
    else:
        _, group = write_v1(tmp_path, "/", "/")
        write(group, "memory.limit_in_bytes", "9223372036854771712\n")
        write(group, "memory.usage_in_bytes", f"{400 * MIB}\n")
    assert describe_memory(tmp_path).total_bytes == psutil.virtual_memory().total
    assert free_host_bytes(tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.1)
