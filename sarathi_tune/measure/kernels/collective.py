"""All-reduce over the processes that torchrun started: what tensor parallelism adds to each layer.

The ceiling is the link: the best rate at which one process sends to another, measured here. An all-reduce over n
processes moves 2 (n - 1) / n of its tensor through it (the bandwidth-optimal ring).
"""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from sarathi_tune.measure.kernels.figure import KernelFigure
from sarathi_tune.measure.kernels.setting import Setting

#: Rows of hidden states: a decode batch, and a chunk.
TOKENS = (8, 512)
_LINK_BYTES = 32 << 20
_RUNS = 20


def join_group() -> int | None:
    """Join the process group that torchrun describes in the environment, and return this process's rank; None when the
    process was started alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def leave_group() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce_figures(setting: Setting) -> Iterator[KernelFigure]:
    """An all-reduce of the hidden states of some tokens, in every process at once."""
    if not dist.is_initialized():
        reason = "one process: start it with torchrun --nproc-per-node 2 -m kernels_bench"
        yield KernelFigure("all-reduce", "hidden states", 0, skipped=reason)
        return
    size = dist.get_world_size()
    link = _link_gb_per_s(setting) if size > 1 else None
    for tokens in TOKENS:
        tensor = torch.zeros(tokens, setting.config.hidden_size, device=setting.device, dtype=setting.dtype)
        times = [_timed(setting, tensor) for _ in range(_RUNS + 1)][1:]
        yield KernelFigure(
            "all-reduce",
            f"{tokens} tokens, {size} process{'es' if size > 1 else ''}",
            tokens,
            median_ms=sorted(times)[len(times) // 2],
            best_ms=min(times),
            num_bytes=tensor.numel() * tensor.element_size() * 2.0 * (size - 1) / size,
            bound="link",
            ceiling=link,
        )


def _timed(setting: Setting, tensor: torch.Tensor) -> float:
    """All processes begin together, or the first would be billed for the last one's delay."""
    dist.barrier()
    return setting.timer.time_ms(lambda: dist.all_reduce(tensor))


def _link_gb_per_s(setting: Setting) -> float:
    """The best rate from rank 0 to rank 1; every rank takes part and gets the same number."""
    rank = dist.get_rank()
    block = torch.zeros(_LINK_BYTES // 4, dtype=torch.float32, device=setting.device)
    best = torch.full((1,), torch.inf, device=setting.device)
    for _ in range(5):
        dist.barrier()
        if rank < 2:
            took_ms = setting.timer.time_ms(lambda: dist.send(block, 1) if rank == 0 else dist.recv(block, 0))
            best = torch.minimum(best, torch.full_like(best, took_ms)) if rank == 1 else best
    dist.all_reduce(best, op=dist.ReduceOp.MIN)
    return _LINK_BYTES / float(best) / 1e6
