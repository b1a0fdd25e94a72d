"""Whether the compiled kernels can run here."""

from importlib.util import find_spec

import torch

#: Vectors of the kernels have this many lanes: heads and pages must be multiples of it.
KERNEL_LANES = 16
#: AMX's tiles take so many inputs of a product at a time.
AMX_INPUTS = 32


def kernels_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels can't run, as the end of a sentence, or None."""
    if device.type != "cpu":
        return f"the compiled kernels are for CPUs and this is {device.type}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the compiled kernels know bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if find_spec("numba") is None:
        return "numba is not installed"
    from sarathi_tune.runtime.kernels.parallel import connect_openmp

    return connect_openmp()


def has_bfloat16_dot() -> bool:
    """Whether kernels may use AVX-512's bfloat16 dot product."""
    cpu = torch.device("cpu")
    return torch.cpu._is_avx512_bf16_supported() and kernels_obstacle(cpu, torch.bfloat16) is None


def amx_obstacle() -> str | None:
    """Why kernels can't use AMX's tiles, as the end of a sentence, or None. Asks Linux for permission, which it gives
    to the whole process: must come before a kernel runs on any thread."""
    cpu = torch.cpu
    if not cpu._is_amx_tile_supported() or not cpu._is_avx512_bf16_supported():
        return "this CPU has no AMX"
    obstacle = kernels_obstacle(torch.device("cpu"), torch.bfloat16)
    if obstacle is not None:
        return obstacle
    import llvmlite.binding  # type: ignore[import-untyped]  # comes with numba

    if not llvmlite.binding.get_host_cpu_features().get("amx-bf16", False):
        return "this CPU's AMX has no bfloat16"
    return None if cpu._init_amx() else "Linux doesn't permit AMX to this process"


def has_dot_tiles() -> bool:
    """Whether tiles by AVX-512's bfloat16 dot product are the fastest way to multiply small matrices here: the CPU has
    the instruction and no AMX, whose tiles are several times faster, by us or by oneDNN."""
    cpu = torch.cpu
    return cpu._is_avx512_bf16_supported() and not cpu._is_amx_tile_supported()
