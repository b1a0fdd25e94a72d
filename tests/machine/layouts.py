"""Machines made of files: `/proc` and `/sys` as the kernel writes them, below a temporary directory."""

from pathlib import Path

CPUINFO = """processor\t: {core}
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse2 avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8 ht

"""


def write(root: Path, name: str, text: str) -> None:
    """Put a file below `root`."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_cores(root: Path, siblings: list[str], mhz: float = 2700.0) -> None:
    """One logical core per entry of `siblings`, which is its `thread_siblings_list`."""
    write(root, "proc/cpuinfo", "".join(CPUINFO.format(core=core, mhz=mhz) for core in range(len(siblings))))
    for core, listed in enumerate(siblings):
        write(root, f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{listed}\n")
        write(root, f"sys/devices/system/cpu/cpu{core}/cache/index3/size", "107520K\n")


def write_v2(root: Path, group: str = "/") -> Path:
    """A cgroup v2 mount, this process in `group` (container with its own namespace: "/")."""
    write(root, "proc/self/cgroup", f"0::{group}\n")
    write(
        root,
        "proc/self/mountinfo",
        "22 27 0:21 / /proc rw - proc proc rw\n"
        "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    )
    directory = root / "sys/fs/cgroup" / group.strip("/")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def write_v1(root: Path, group: str, mounted_group: str) -> tuple[Path, Path]:
    """cgroup v1 CPU and memory mounts. Docker without a namespace shows the group itself at the mount point."""
    write(root, "proc/self/cgroup", f"4:memory:{group}\n3:cpu,cpuacct:{group}\n1:name=systemd:{group}\n")
    write(
        root,
        "proc/self/mountinfo",
        f"31 23 0:28 {mounted_group} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        f"32 23 0:29 {mounted_group} /sys/fs/cgroup/cpu,cpuacct ro master:14 - cgroup cgroup rw,cpu,cpuacct\n",
    )
    cpu, memory = root / "sys/fs/cgroup/cpu,cpuacct", root / "sys/fs/cgroup/memory"
    cpu.mkdir(parents=True, exist_ok=True)
    memory.mkdir(parents=True, exist_ok=True)
    return cpu, memory
