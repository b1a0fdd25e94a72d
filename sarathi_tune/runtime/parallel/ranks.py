"""The processes of a parallel run as rank 0 has them: starting them, talking to them, ending them.

Under torchrun the processes are there already. Otherwise this process is rank 0 and starts the others on its own
machine; they are ended by their ids.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import torch

from sarathi_tune.config.parallel import Layout
from sarathi_tune.errors import RankError, UsageError
from sarathi_tune.machine.cpu import describe_cpu
from sarathi_tune.runtime.parallel.failure import ALL_ENDED, describe_error
from sarathi_tune.runtime.parallel.mesh import Backend, LostRankError, Mesh
from sarathi_tune.runtime.parallel.place import Place, threads_per_rank
from sarathi_tune.runtime.parallel.rendezvous import Board
from sarathi_tune.runtime.parallel.watch import Follower, Watch
from sarathi_tune.runtime.parallel.wire import NOTHING, Command, Words

#: What a follower runs; it knows from its environment that it is one.
FOLLOWER_COMMAND = (sys.executable, "-m", "sarathi_tune")
DEBUG_VARIABLE = "SARATHI_TUNE_DEBUG"
#: Longest that the ranks may take to meet: they import torch first, from a slow disk perhaps.
_JOIN_S = 120.0
_POLL_S = 0.05
#: How long a rank that was told to stop may take, and how long the watch may take to find out why a collective failed.
_STOP_S, _EXPLAIN_S = 1.0, 2.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What every rank must know to connect. `threads`: of a whole machine, None for what each machine allows."""

    layout: Layout
    backend: Backend
    threads: int | None

    def as_text(self) -> str:
        """For the store."""
        return json.dumps([self.layout.tensor, self.layout.pipeline, self.backend, self.threads])

    @classmethod
    def from_text(cls, text: str) -> "Setup":
        """What `as_text` wrote."""
        tensor, pipeline, backend, threads = json.loads(text)
        return cls(Layout(tensor, pipeline), backend, threads)


class Ranks:
    """All ranks of a run, seen from rank 0; this process is one of them."""

    def __init__(self, place: Place, setup: Setup, mesh: Mesh, watch: Watch) -> None:
        self.place = place
        self.setup = setup
        self.mesh = mesh
        self._watch = watch
        self._is_open = True

    @classmethod
    def start(
        cls,
        layout: Layout,
        *,
        backend: Backend = "gloo",
        threads: int | None = None,
        command: Sequence[str] = FOLLOWER_COMMAND,
    ) -> "Ranks":
        """Connect to the processes that torchrun started, or start `command` for each rank but this one.

        Sets this process's compute threads: each rank of a machine gets an equal part of `threads`. Raises UsageError
        when torchrun started another number of processes, and RankError when one of them fails.
        """
        setup = Setup(layout, backend, threads)
        place = Place.from_environment()
        followers: tuple[Follower, ...] = ()
        if place is None:
            board, port = Board.host()
            place = Place(0, layout.num_ranks, 0, layout.num_ranks, "127.0.0.1", port, parent=os.getpid())
            board.join(0)
            followers = _start_followers(place, command)
        else:
            check_launch(place, layout)
            board = Board.open(place)
            board.join(0)
        watch = Watch(_second_board(place), followers, layout.num_ranks)
        try:
            _wait_for(range(1, layout.num_ranks), board, watch, followers)
            board.start(setup.as_text())
            torch.set_num_threads(rank_threads(place, threads))
            watch.start(with_terminate=not followers)
            mesh = Mesh.connect(place, layout, board.groups_store(), backend)
        except BaseException as error:
            explained = _explained(error, watch)
            watch.stop()
            watch.end_all()
            watch.close()
            raise explained from None
        ranks = cls(place, setup, mesh, watch)
        watch.on_failure(ranks.close, mesh.abort)
        atexit.register(ranks.close)
        return ranks

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The processes that were started for the other ranks; none under a launcher."""
        return self._watch.process_ids

    def tell(self, command: Command, payload: Words, num_answers: int, digest: int = 0) -> None:
        """Tell the others what to do; inside `together`. They will answer with as many numbers."""
        self.mesh.expect_answers(num_answers)
        self.mesh.command(command, payload, digest)

    @contextlib.contextmanager
    def together(self, *, is_loading: bool = False) -> Iterator[None]:
        """What all ranks do together. When it fails on any of them, all are ended and the error says why.

        `is_loading`: a model is loaded; memory that runs out is then an OutOfMemoryError, later a RankError.
        """
        self._watch.raise_failure()
        self._watch.is_loading = is_loading
        assert self._is_open, "the ranks were ended"
        self._watch.operation += 1
        try:
            yield
            self._watch.operation += 1
        except BaseException as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """End the other ranks: by a command when they wait for one, else at once."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        with contextlib.suppress(LostRankError):
            if self._watch.failure is None and self._watch.operation % 2 == 0:
                self._watch.stop()
                self.mesh.command(Command.STOP, NOTHING, 0)
                self._watch.await_end(_STOP_S)
        self._watch.stop()
        self._watch.end_all()
        self.mesh.close()
        self._watch.close()

    def _failed(self, error: BaseException) -> BaseException:
        """The error to raise for one that came up inside `together`: the others' when they caused it."""
        explained: BaseException
        if isinstance(error, LostRankError):
            explained = _explained(error, self._watch)
        elif isinstance(error, Exception) and not isinstance(error, RankError):
            failure = describe_error(error, 0, self.place.num_ranks, while_loading=self._watch.is_loading)
            explained = error if self._watch.is_loading else failure.error()
        else:
            explained = error
        self.close()
        return explained


def check_launch(place: Place | None, layout: Layout) -> None:
    """Raise UsageError when a launcher started another number of processes than the layout has ranks."""
    if place is not None and place.num_ranks != layout.num_ranks:
        raise UsageError(
            f"The launcher started {place.num_ranks} processes and --tensor-parallel {layout.tensor} with "
            f"--pipeline-parallel {layout.pipeline} needs {layout.num_ranks}: make the product of the two "
            f"{place.num_ranks}, or start {layout.num_ranks} (torchrun --nproc-per-node {layout.num_ranks})."
        )


def rank_threads(place: Place, threads: int | None) -> int:
    """Compute threads of one rank: its part of what was asked for, or of what this machine allows."""
    return threads_per_rank(threads or describe_cpu().threads, place.num_local)


def announce_end(place: Place) -> None:
    """On rank 0 of a launcher's run, at its end: followers that wait to hear from it can go."""
    with contextlib.suppress(RuntimeError):  # the launcher's store is gone, and so are they
        Board.open(place).end()


def _second_board(place: Place) -> Board:
    """The watch's own connection: the first one may be waiting."""
    return Board.open(Place(-1, place.num_ranks, 0, place.num_local, place.host, place.port, True, place.attempt))


def _start_followers(place: Place, command: Sequence[str]) -> tuple[Follower, ...]:
    followers: list[Follower] = []
    for rank in range(1, place.num_ranks):
        own = Place(rank, place.num_ranks, rank, place.num_local, place.host, place.port, parent=place.parent)
        # In debugging they may speak; otherwise only their last words are wanted, when they die without a reason.
        errors: IO[bytes] | None = None
        if not os.environ.get(DEBUG_VARIABLE):
            errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the follower)
        process = subprocess.Popen(
            command,
            env={**os.environ, **own.as_environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            process_group=0,  # Ctrl-C in a terminal is for rank 0, which ends the others
        )
        followers.append(Follower(rank, process, errors))
    return tuple(followers)


def _wait_for(ranks: Sequence[int], board: Board, watch: Watch, followers: Sequence[Follower]) -> None:
    """Until every rank has joined. Raises RankError when one can't, or takes too long."""
    until_s = time.monotonic() + _JOIN_S
    missing = list(ranks)
    while missing:
        missing = [rank for rank in missing if not board.has_joined(rank)]
        watch.look_at_processes()
        watch.raise_failure()
        if time.monotonic() > until_s:
            raise RankError(
                f"Rank {missing[0]} didn't join within {_JOIN_S:.0f} s: start it with the same MASTER_ADDR and "
                f"MASTER_PORT, or look at its machine. {ALL_ENDED}"
                if not followers
                else f"Rank {missing[0]} didn't start within {_JOIN_S:.0f} s: this machine is too busy. {ALL_ENDED}"
            )
        time.sleep(_POLL_S if missing else 0.0)


def _explained(error: BaseException, watch: Watch) -> BaseException:
    if not isinstance(error, LostRankError):
        return error
    failure = watch.explain(_EXPLAIN_S)
    if failure is not None:
        return failure.error()
    return RankError(f"Rank 0 lost its connection to another rank ({error}). {ALL_ENDED}")
