"""The process groups of a run, and everything that ranks say to each other.

Commands, answers and tokens go over one gloo group of all ranks; partial sums, logits and hidden states over groups of
the device's own back end (gloo on a CPU, NCCL on GPUs). Rank = stage * tensor-parallel size + tensor rank.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from sarathi_tune.config.parallel import Layout
from sarathi_tune.runtime.parallel.place import Place
from sarathi_tune.runtime.parallel.wire import MESSAGE_WORDS, Command, Words, make_messages, read_message
from sarathi_tune.runtime.shard import Shard

Backend = Literal["gloo", "nccl"]

#: Followers wait for the next command as long as it takes; a rank that dies meanwhile closes its connections.
_COMMAND_TIMEOUT = timedelta(days=7)
#: Within a step nobody waits longer than the slowest rank's share of it: the watch finds dead ranks long before.
_STEP_TIMEOUT = timedelta(seconds=120)
#: Parts up to this size are exchanged directly, n - 1 messages at once, where gloo's ring needs 2 (n - 1) one after the
#: other; for larger ones the ring sends fewer bytes. Between two ranks both send the same.
_EXCHANGED_BYTES = 256 * 1024
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


class LostRankError(Exception):
    """A collective failed, because another rank is gone or doesn't answer. The watch knows which."""


class _Talking:
    """Turns a failed collective into LostRankError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, RuntimeError):
            raise LostRankError(str(error).strip().splitlines()[0]) from error


_TALKING = _Talking()


class Mesh:
    """This rank's connections. Implements `layers.parallel.TensorGroup`."""

    def __init__(
        self,
        shard: Shard,
        backend: Backend,
        tensor_group: dist.ProcessGroup | None,
        stage_group: dist.ProcessGroup | None,
    ) -> None:
        self.shard = shard
        self._backend = backend
        self._tensor_group = tensor_group
        self._stage_group = stage_group
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._expected: list[tuple[dist.Work, torch.Tensor]] = []

    @classmethod
    def connect(cls, place: Place, layout: Layout, store: Store, backend: Backend) -> "Mesh":
        """Make the groups; returns when every rank has."""
        shard = Shard(place.rank, layout)
        with _TALKING, _loopback(place.is_single_machine):
            dist.init_process_group(
                "gloo", store=store, rank=place.rank, world_size=place.num_ranks, timeout=_COMMAND_TIMEOUT
            )
            tensor_group: dist.ProcessGroup | None = None
            for stage in range(layout.pipeline):
                first = stage * layout.tensor
                ranks = list(range(first, first + layout.tensor))
                group = dist.new_group(ranks, timeout=_STEP_TIMEOUT, backend=backend)
                tensor_group = group if stage == shard.stage else tensor_group
            stages = dist.new_group(timeout=_STEP_TIMEOUT, backend=backend) if layout.pipeline > 1 else None
        return cls(shard, backend, tensor_group if layout.tensor > 1 else None, stages)

    def close(self) -> None:
        """Give the connections up."""
        self._sent.clear()
        self._expected.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self) -> None:
        """Make collectives that wait on a GPU fail; gloo's fail by themselves when a rank is gone."""
        for group in (self._tensor_group, self._stage_group):
            if isinstance(group, dist.ProcessGroup) and hasattr(group, "abort"):
                group.abort()

    # The layers of a stage.

    @property
    def shares_layers(self) -> bool:
        """Whether other ranks compute the same layers."""
        return self._tensor_group is not None

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """See TensorGroup."""
        part = part.contiguous()
        is_small = part.nbytes <= _EXCHANGED_BYTES or self.shard.layout.tensor == 2
        if self._backend == "gloo" and is_small:
            return self._exchange(part)
        with _TALKING:
            dist.all_reduce(part, group=self._tensor_group)
        return part

    def _exchange(self, part: torch.Tensor) -> torch.Tensor:
        """Everybody sends to everybody. Parts are added in the order of ranks, so that all get the same bits."""
        own, size = self.shard.tensor_rank, self.shard.layout.tensor
        first = self.shard.rank - own
        parts = [part if number == own else torch.empty_like(part) for number in range(size)]
        others = [number for number in range(size) if number != own]
        with _TALKING:
            works = [_started(dist.irecv(parts[other], first + other, self._tensor_group)) for other in others]
            works += [_started(dist.isend(part, first + other, self._tensor_group)) for other in others]
            for work in works:
                work.wait()
        return parts[0] + parts[1] if size == 2 else torch.stack(parts).sum(0)

    def collect_columns(self, part: torch.Tensor) -> torch.Tensor | None:
        """See TensorGroup."""
        is_first = self.shard.tensor_rank == 0
        parts = [torch.empty_like(part) for _ in range(self.shard.layout.tensor)] if is_first else None
        with _TALKING:
            dist.gather(
                part.contiguous(), parts, dst=self.shard.rank - self.shard.tensor_rank, group=self._tensor_group
            )
        return None if parts is None else torch.cat(parts, dim=-1)

    # From stage to stage: each rank hands on to the rank of the next stage that has the same part.

    def hand_on(self, hidden: torch.Tensor) -> None:
        """Start sending hidden states to the next stage."""
        hidden = hidden.contiguous()
        with _TALKING:
            work = _started(dist.isend(hidden, self.shard.rank + self.shard.layout.tensor, self._stage_group))
        self._sent.append((work, hidden))

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """Hidden states from the stage before, into `like`."""
        with _TALKING:
            dist.recv(like, self.shard.rank - self.shard.layout.tensor, group=self._stage_group)
        return like

    def finish_sending(self) -> None:
        """Wait until everything is sent."""
        with _TALKING:
            for work, _ in self._sent:
                work.wait()
        self._sent.clear()

    # Commands and answers, over gloo between rank 0 and each other rank.

    def command(self, command: Command, payload: Words, digest: int) -> None:
        """On rank 0: tell all others."""
        works = []
        with _TALKING:
            for message in make_messages(command, payload, digest):
                if len(message):
                    words = torch.from_numpy(message)
                    works += [_started(dist.isend(words, rank)) for rank in range(1, self.shard.layout.num_ranks)]
            for work in works:
                work.wait()

    def next_command(self) -> tuple[Command, Words, int]:
        """On the others: wait for rank 0; its command, the payload and the digest."""
        first = torch.empty(MESSAGE_WORDS, dtype=torch.int64)
        with _TALKING:
            dist.recv(first, 0)
        command, digest, payload, num_missing = read_message(first.numpy())
        if num_missing:
            rest = torch.empty(num_missing, dtype=torch.int64)
            with _TALKING:
                dist.recv(rest, 0)
            payload = np.concatenate((payload, rest.numpy()))
        return command, payload, digest

    def expect_answers(self, num_numbers: int) -> None:
        """On rank 0, before it computes: be ready for as many numbers from each of the others."""
        assert not self._expected, "answers of an earlier command are still missing"
        with _TALKING:
            for rank in range(1, self.shard.layout.num_ranks):
                numbers = torch.empty(num_numbers, dtype=torch.int64)
                self._expected.append((_started(dist.irecv(numbers, rank)), numbers))

    def answer(self, numbers: list[int]) -> list[list[int]]:
        """Give rank 0 these numbers; returns everybody's there, in the order of ranks, and nothing elsewhere. Rank 0 so
        waits for the slowest."""
        with _TALKING:
            if self.shard.rank != 0:
                dist.send(torch.tensor(numbers, dtype=torch.int64), 0)
                return []
            for work, _ in self._expected:
                work.wait()
        answers = [numbers, *(received.tolist() for _, received in self._expected)]
        self._expected.clear()
        return answers

    def send_logits(self, logits: torch.Tensor) -> None:
        """To rank 0, in float32."""
        with _TALKING:
            dist.send(logits.float().cpu().contiguous(), 0)

    def receive_logits(self, num_rows: int, vocab_size: int, sender: int) -> torch.Tensor:
        """On rank 0, from the rank that has them."""
        logits = torch.empty(num_rows, vocab_size)
        with _TALKING:
            dist.recv(logits, sender)
        return logits


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is a member of the group"
    return work


@contextmanager
def _loopback(is_single_machine: bool) -> Iterator[None]:
    """On one machine gloo stays on the loopback interface: a host name that resolves to nowhere doesn't matter then."""
    names = {name for _, name in _interfaces()}
    if not is_single_machine or "lo" not in names or _INTERFACE_VARIABLE in os.environ:
        yield
        return
    os.environ[_INTERFACE_VARIABLE] = "lo"
    try:
        yield
    finally:
        del os.environ[_INTERFACE_VARIABLE]


def _interfaces() -> list[tuple[int, str]]:
    import socket

    return socket.if_nameindex()
