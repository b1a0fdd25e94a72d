"""Tensors as the arrays that the kernels take, and how many threads a kernel is worth."""

from typing import Any

import numpy as np
import torch


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as float32, or as the uint16 bits of its bfloat16; no copy."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


#: Below this many elements a kernel takes a few microseconds: less than waking the other threads costs.
_ELEMENTS_WORTH_A_THREAD = 8192


def threads_for(num_elements: int) -> int:
    """All of torch's threads, or only the calling one for little work. Nothing in between: OpenMP ends the threads that
    a smaller team leaves over, and the next matmul would start them again."""
    return torch.get_num_threads() if num_elements > _ELEMENTS_WORTH_A_THREAD else 1
