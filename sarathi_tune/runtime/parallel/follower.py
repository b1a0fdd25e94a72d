"""What every rank but the first does: wait for rank 0, compute its part of each step, and end when rank 0 does."""

import os
import signal
import sys
import time
import traceback

import torch

from sarathi_tune.errors import ExitCode
from sarathi_tune.runtime.parallel.failure import ALL_ENDED, Failure, describe_error
from sarathi_tune.runtime.parallel.mesh import LostRankError, Mesh
from sarathi_tune.runtime.parallel.place import Place
from sarathi_tune.runtime.parallel.ranks import DEBUG_VARIABLE, Setup, rank_threads
from sarathi_tune.runtime.parallel.rendezvous import Board
from sarathi_tune.runtime.parallel.runner import read_build_document
from sarathi_tune.runtime.parallel.watch import follow_rank_0
from sarathi_tune.runtime.parallel.wire import Command, decode_plan, encode_plan
from sarathi_tune.runtime.parallel.worker import Worker

_POLL_S = 0.1
#: How long a rank that failed stays, so that rank 0 reads its reason before it sees its connections closed; and how
#: long one that only lost its connection leaves the word to the rank that knows why.
_STAY_S, _DEFER_S = 1.5, 1.0


def follow(place: Place) -> int:
    """Run as a follower; returns the exit code of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        board = Board.open(place)
        board.join(place.rank)
        setup = _wait_for_setup(board)
        if setup is None:
            return ExitCode.MET
        follow_rank_0(Board.open(place), place.rank)
    except RuntimeError:
        return ExitCode.TARGET_FAILED  # rank 0 is gone before anything was to be done
    loop = _Loop(place, setup, board)
    try:
        loop.run()
    except LostRankError as error:
        time.sleep(_DEFER_S)
        board.report(Failure(f"Rank {place.rank} lost its connection to another rank ({error}). {ALL_ENDED}"))
        return ExitCode.TARGET_FAILED
    except Exception as error:
        return _report(error, place, board, while_loading=loop.is_loading)
    return ExitCode.MET


def _report(error: Exception, place: Place, board: Board, *, while_loading: bool) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error, file=sys.stderr)
    failure = describe_error(error, place.rank, place.num_ranks, while_loading=while_loading)
    board.report(failure)
    time.sleep(_STAY_S)
    return failure.exit_code


def _wait_for_setup(board: Board) -> Setup | None:
    """What rank 0 has in mind, or None when it ends without any need for others."""
    while not board.has_ended():
        text = board.setup()
        if text is not None:
            return Setup.from_text(text)
        time.sleep(_POLL_S)
    return None


class _Loop:
    """Command after command."""

    def __init__(self, place: Place, setup: Setup, board: Board) -> None:
        self.is_loading = True
        self._place = place
        self._setup = setup
        self._board = board

    def run(self) -> None:
        """Until rank 0 says stop."""
        torch.set_num_threads(rank_threads(self._place, self._setup.threads))
        mesh = Mesh.connect(self._place, self._setup.layout, self._board.groups_store(), self._setup.backend)
        worker: Worker | None = None
        while True:
            command, payload, digest = mesh.next_command()
            if command is Command.STOP:
                mesh.close()
                return
            if command is Command.BUILD:
                self.is_loading, worker = True, None
                worker = Worker.build(mesh, self._place, *read_build_document(payload))
                mesh.answer([1])
                self.is_loading = False
                continue
            assert worker is not None, "rank 0 builds before it steps"
            plan = decode_plan(payload)
            # Of what will be computed, not of what was received: a fault in between would go unseen otherwise.
            own_digest = worker.digest(encode_plan(plan, worker.loaded.cache.page_tokens))
            worker.check(own_digest, digest)
            worker.step(plan, own_digest, wants_logits=command is Command.LOGITS)
