"""Quota, throttling and memory limit, from files laid out as Docker and Kubernetes leave them."""

from pathlib import Path

import pytest

from sarathi_tune.machine.cgroup import find_cgroup
from tests.machine.layouts import write, write_v1, write_v2


def test_v2_quota(tmp_path: Path) -> None:
    write(write_v2(tmp_path), "cpu.max", "250000 100000\n")
    assert find_cgroup(tmp_path).cpu_quota() == 2.5


def test_v2_without_limit(tmp_path: Path) -> None:
    write(write_v2(tmp_path), "cpu.max", "max 100000\n")
    assert find_cgroup(tmp_path).cpu_quota() is None


def test_v2_parent_is_tighter(tmp_path: Path) -> None:
    group = write_v2(tmp_path, "/kubepods.slice/pod1")
    write(group, "cpu.max", "max 100000\n")
    write(group.parent, "cpu.max", "300000 100000\n")
    assert find_cgroup(tmp_path).cpu_quota() == 3.0


def test_v1_quota_of_the_group_that_is_mounted(tmp_path: Path) -> None:
    cpu, _ = write_v1(tmp_path, "/docker/0123abcd", "/docker/0123abcd")
    write(cpu, "cpu.cfs_quota_us", "150000\n")
    write(cpu, "cpu.cfs_period_us", "100000\n")
    assert find_cgroup(tmp_path).cpu_quota() == 1.5


def test_v1_host_path_that_is_not_visible(tmp_path: Path) -> None:
    # The group is named by the host's path and the mount shows another one: the mount point is what there is.
    cpu, _ = write_v1(tmp_path, "/system.slice/containerd/abc", "/docker/0123abcd")
    write(cpu, "cpu.cfs_quota_us", "400000\n")
    write(cpu, "cpu.cfs_period_us", "100000\n")
    assert find_cgroup(tmp_path).cpu_quota() == 4.0


def test_v1_without_limit(tmp_path: Path) -> None:
    cpu, _ = write_v1(tmp_path, "/", "/")
    write(cpu, "cpu.cfs_quota_us", "-1\n")
    write(cpu, "cpu.cfs_period_us", "100000\n")
    assert find_cgroup(tmp_path).cpu_quota() is None


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    cgroup = find_cgroup(tmp_path)
    assert (cgroup.cpu_quota(), cgroup.memory_limit_bytes(), cgroup.throttling().num_periods) == (None, None, 0)


def test_a_directory_that_may_not_be_read_is_no_limit(tmp_path: Path) -> None:
    write(write_v2(tmp_path), "cpu.max", "nonsense\n")
    assert find_cgroup(tmp_path).cpu_quota() is None


@pytest.mark.parametrize("version", [1, 2])
def test_throttling_counters(tmp_path: Path, version: int) -> None:
    if version == 1:
        # v1 counts nanoseconds.
        directory, _ = write_v1(tmp_path, "/", "/")
        write(directory, "cpu.stat", "nr_periods 100\nnr_throttled 40\nthrottled_time 1500000000\n")
    else:
        directory = write_v2(tmp_path)
        write(directory, "cpu.stat", "usage_usec 5\nnr_periods 100\nnr_throttled 40\nthrottled_usec 1500000\n")
    throttling = find_cgroup(tmp_path).throttling()
    assert (throttling.num_periods, throttling.seconds) == (40, 1.5)


def test_v2_memory_room_counts_droppable_cache_as_free(tmp_path: Path) -> None:
    group = write_v2(tmp_path)
    write(group, "memory.max", f"{8 << 30}\n")
    write(group, "memory.current", f"{5 << 30}\n")
    write(group, "memory.stat", f"anon 123\ninactive_file {2 << 30}\n")
    cgroup = find_cgroup(tmp_path)
    assert cgroup.memory_limit_bytes() == 8 << 30
    assert cgroup.memory_room_bytes() == 5 << 30


def test_v1_unlimited_memory(tmp_path: Path) -> None:
    _, memory = write_v1(tmp_path, "/", "/")
    # What Linux writes where there is no limit: the largest multiple of 4096 in a signed 64-bit number.
    write(memory, "memory.limit_in_bytes", "9223372036854771712\n")
    assert find_cgroup(tmp_path).memory_limit_bytes() is None
