"""The CPU's description and the number of threads that follows from it."""

import os
from pathlib import Path

import pytest

from sarathi_tune.machine.cpu import clock_mhz, describe_cpu, usable_threads
from tests.machine.layouts import write, write_cores, write_v1, write_v2


@pytest.mark.parametrize(
    ("cores", "quota", "threads"),
    [
        (8, None, 8),
        (8, 2.5, 2),  # ollama #17916: more threads than whole CPUs of quota are 45 times slower
        (8, 16.0, 8),
        (8, 0.5, 1),
        (1, 1.0, 1),
        (64, 7.999, 7),
    ],
)
def test_threads_are_the_minimum_of_affinity_and_whole_quota(cores: int, quota: float | None, threads: int) -> None:
    assert usable_threads(cores, quota) == threads


def test_a_container_with_a_quota_on_a_large_host_v2(tmp_path: Path) -> None:
    write_cores(tmp_path, ["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7"])
    write(write_v2(tmp_path), "cpu.max", "350000 100000\n")
    cpu = describe_cpu(tmp_path, cores=frozenset(range(8)))
    assert (cpu.threads, cpu.quota, cpu.physical_cores) == (3, 3.5, 4)


def test_a_container_with_a_quota_on_a_large_host_v1(tmp_path: Path) -> None:
    write_cores(tmp_path, [str(core) for core in range(8)])
    directory, _ = write_v1(tmp_path, "/docker/abc", "/docker/abc")
    write(directory, "cpu.cfs_quota_us", "200000\n")
    write(directory, "cpu.cfs_period_us", "100000\n")
    cpu = describe_cpu(tmp_path, cores=frozenset(range(8)))
    assert (cpu.threads, cpu.physical_cores) == (2, 8)


def test_affinity_counts_and_not_the_machine(tmp_path: Path) -> None:
    write_cores(tmp_path, ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"])
    cpu = describe_cpu(tmp_path, cores=frozenset({0, 4, 5}))
    assert (cpu.threads, cpu.physical_cores, cpu.cores) == (3, 2, (0, 4, 5))


def test_model_instructions_and_cache(tmp_path: Path) -> None:
    write_cores(tmp_path, ["0"])
    cpu = describe_cpu(tmp_path, cores=frozenset({0}))
    assert cpu.model == "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"
    assert set(cpu.isa) == {
        *("avx2", "avx512f", "avx512_vnni", "avx512_bf16"),
        *("avx512_fp16", "amx_int8", "amx_bf16"),
    }
    assert cpu.last_level_cache_bytes == 105 << 20


def test_arm_names_its_flags_differently(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n\n")
    cpu = describe_cpu(tmp_path, cores=frozenset({0}))
    assert cpu.isa == ("asimd", "sve", "bf16", "i8mm")
    assert cpu.model


def test_nothing_readable_is_still_a_cpu(tmp_path: Path) -> None:
    cpu = describe_cpu(tmp_path, cores=frozenset({0, 1}))
    assert (cpu.threads, cpu.isa, cpu.physical_cores, cpu.last_level_cache_bytes) == (2, (), None, None)


def test_clock_is_the_scaling_frequency_where_there_is_one(tmp_path: Path) -> None:
    write_cores(tmp_path, ["0", "1"], mhz=2500.0)
    assert clock_mhz((0, 1), tmp_path) == 2500.0
    write(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "3100000\n")
    write(tmp_path, "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq", "2900000\n")
    assert clock_mhz((0, 1), tmp_path) == 3000.0


def test_this_machine() -> None:
    cpu = describe_cpu()
    assert 1 <= cpu.threads <= (os.cpu_count() or 1)
    assert cpu.as_dict()["threads"] == cpu.threads
