"""Large pages of memory, where the kernel gives them on request: fewer address translations while the cache is read."""

import ctypes
import sys

import torch

_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2 << 20
_SMALL_PAGE_BYTES = 4096


def ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for them for a CPU tensor that hasn't been written yet. A kernel that has none goes on as before."""
    num_bytes = tensor.numel() * tensor.element_size()
    if sys.platform != "linux" or num_bytes < 2 * _HUGE_PAGE_BYTES:
        return
    first = -(-tensor.data_ptr() // _SMALL_PAGE_BYTES) * _SMALL_PAGE_BYTES
    length = (tensor.data_ptr() + num_bytes - first) // _SMALL_PAGE_BYTES * _SMALL_PAGE_BYTES
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
