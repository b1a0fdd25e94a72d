"""Who is still there. A collective can't tell: on a GPU it waits for ever, on a CPU it fails without a reason.

Rank 0 looks at its followers' processes ten times a second, and at everybody's signs of life; followers look at rank
0's. A rank without one for some seconds is taken for dead, so that everything is gone within ten.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from subprocess import Popen
from types import FrameType
from typing import IO, Any

from sarathi_tune.errors import ExitCode, RankError, SarathiTuneError
from sarathi_tune.runtime.parallel.failure import ALL_ENDED, Failure, describe_death, describe_silence
from sarathi_tune.runtime.parallel.place import PARENT_GONE
from sarathi_tune.runtime.parallel.rendezvous import Board

LOOK_S = 0.1
BEAT_S = 0.5
#: Longest that a rank may give no sign of life.
SILENCE_S = 6.0
#: From the end of the followers to the moment when rank 0's own collective must have failed, else the process ends.
RELEASE_S = 2.5
#: How long an interrupted rank 0 may stay inside a collective.
INTERRUPT_S = 0.8
#: Signals that ask rank 0 to end; it can't obey while it waits inside a collective.
_ENDING = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
#: What a failed process may tell, at most.
_LAST_WORDS = 300


class Follower:
    """A process that this one started. `errors`: the file that it writes stderr to."""

    def __init__(self, rank: int, process: "Popen[bytes]", errors: IO[bytes] | None) -> None:
        self.rank = rank
        self.process = process
        self._errors = errors

    def kill(self) -> None:
        """End it now; it holds nothing that is worth saving."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def last_words(self) -> str:
        """The last line on its stderr."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:_LAST_WORDS] if lines else ""

    def close(self) -> None:
        """Forget what it wrote."""
        if self._errors is not None:
            self._errors.close()


class Watch:
    """Rank 0's look at the others. The first failure that it finds ends them, and is raised on the main thread."""

    def __init__(self, board: Board, followers: Sequence[Follower], num_ranks: int) -> None:
        self.failure: Failure | None = None
        self.is_loading = True
        #: Counts what the main thread does with the ranks: odd while it is at it.
        self.operation = 0
        self._board = board
        self._followers = followers
        self._num_ranks = num_ranks
        self._release: Callable[[], None] = lambda: None
        self._abort: Callable[[], None] = lambda: None
        self._found = threading.Event()
        self._is_told = False
        self._is_stopped = False
        #: What the signal handler raised last; and what of that never reached the main thread's code.
        self._raised: SarathiTuneError | None = None
        self._lost: SarathiTuneError | None = None
        self._stop, self._wake = socket.socketpair()
        self._signals: _Signals | None = None
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._seen: dict[int, tuple[bytes, float]] = {}

    def on_failure(self, release: Callable[[], None], abort: Callable[[], None]) -> None:
        """What to do on a failure: `release` gives up, on the main thread, what the ranks hold; `abort` frees a main
        thread that waits for a GPU's collective."""
        self._release, self._abort = release, abort

    def start(self, *, with_terminate: bool) -> None:
        """Begin. `with_terminate`: a launcher may send SIGTERM because another rank ended, and the user is to read
        why."""
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGUSR1, signal.SIGTERM) if with_terminate else (signal.SIGUSR1,)
            self._signals = _Signals(numbers, self._on_signal, self._notice_lost)
        self._thread.start()

    def stop(self) -> None:
        """End the watch; signals are as they were before."""
        self._tell()
        if self._is_stopped:
            return
        self._is_stopped = True
        self._wake.send(b"x")
        if self._thread.is_alive():
            self._thread.join(timeout=RELEASE_S)
        if self._signals is not None:
            self._signals.restore()

    def raise_failure(self) -> None:
        """On the main thread: raise what was found, if anything was."""
        if self.failure is not None:
            self._tell()
            self._release()
            raise self.failure.error()

    def explain(self, seconds: float) -> Failure | None:
        """Why a collective failed: waits so long for the watch to find it. The caller raises it."""
        self._tell()
        if self._thread.is_alive():
            self._found.wait(seconds)
        return self.failure

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The processes that this one started."""
        return tuple(follower.process.pid for follower in self._followers)

    def look_at_processes(self) -> None:
        """Before the watch has begun: see whether a process ended."""
        self.failure = self._look(time.monotonic(), with_beats=False)

    def await_end(self, seconds: float) -> None:
        """Until our own processes have ended, at most so long."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and any(item.process.poll() is None for item in self._followers):
            time.sleep(LOOK_S / 10)

    def close(self) -> None:
        """Give up what the watch holds; all processes have ended."""
        for follower in self._followers:
            follower.close()
        for end in (self._stop, self._wake):
            end.close()

    def end_all(self) -> None:
        """End every other rank: our own processes at once, those elsewhere by word."""
        for follower in self._followers:
            follower.kill()
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it whoever needed it
            self._board.end()

    def _tell(self) -> None:
        """The main thread has the failure, or none is to be raised any more."""
        self._is_told, self._lost = True, None

    def _run(self) -> None:
        last_beat_s, interrupted = 0.0, None
        while True:
            signals = self._signals.reader if self._signals is not None else None
            readable, _, _ = select.select([self._stop, *([signals] if signals else [])], [], [], LOOK_S)
            if self._stop in readable:
                return
            self._raise_lost_again()
            now_s = time.monotonic()
            if signals in readable and signals is not None and _ENDING.intersection(signals.recv(64)):
                interrupted = (self.operation, now_s)
            if interrupted is not None and self._is_stuck(*interrupted, now_s):
                self.end_all()
                interrupted = None
                return
            try:
                failure = self._look(now_s, with_beats=now_s - last_beat_s > BEAT_S)
            except RuntimeError:
                failure = Failure(f"The store that ranks meet at is gone. {ALL_ENDED}")
            if failure is not None:
                self._fail(failure)
                return
            last_beat_s = now_s if now_s - last_beat_s > BEAT_S else last_beat_s

    def _is_stuck(self, operation: int, since_s: float, now_s: float) -> bool:
        """Whether the main thread, interrupted in this operation, is still in it."""
        return operation % 2 == 1 and operation == self.operation and now_s - since_s > INTERRUPT_S

    def _look(self, now_s: float, *, with_beats: bool) -> Failure | None:
        dead = next((follower for follower in self._followers if follower.process.poll() is not None), None)
        reported = self._board.failure()
        if reported is not None:
            return reported
        if dead is not None:
            return describe_death(
                dead.rank,
                self._num_ranks,
                dead.process.returncode,
                dead.last_words(),
                while_loading=self.is_loading,
            )
        return self._look_for_silence(now_s) if with_beats else None

    def _look_for_silence(self, now_s: float) -> Failure | None:
        self._board.beat(0)
        ranks = list(range(1, self._num_ranks))
        for rank, beat in zip(ranks, self._board.beats(ranks), strict=True):
            known, since_s = self._seen.get(rank, (b"", now_s))
            if beat != known:
                self._seen[rank] = (beat, now_s)
            elif now_s - since_s > SILENCE_S:
                return describe_silence(rank, self._num_ranks, now_s - since_s)
        return None

    def _fail(self, failure: Failure) -> None:
        self.failure = failure
        self.end_all()
        self._found.set()
        if self._signals is not None:
            self._signals.interrupt_main()
        if self._wait_until_told():
            return
        self._abort()
        if not self._wait_until_told():
            print(f"error: {failure.message}", file=sys.stderr, flush=True)
            os._exit(failure.exit_code)

    def _wait_until_told(self) -> bool:
        """Whether the main thread has raised the failure in time. One that isn't inside an operation and can't be
        interrupted is at some work of its own, and meets the failure at its next step."""
        until_s = time.monotonic() + RELEASE_S
        while time.monotonic() < until_s:
            was_told = self._is_told
            time.sleep(LOOK_S)
            self._raise_lost_again()
            if was_told and self._is_told:
                return True
        return self._signals is None and self.operation % 2 == 0

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        error, self._lost = self._lost, None
        if error is None and self.failure is not None and not self._is_told:
            error = self.failure.error()
        if error is None and number == signal.SIGTERM:
            error = RankError(
                f"This run was told to end (SIGTERM): another rank ended, or the launcher was stopped. {ALL_ENDED}"
            )
        if error is not None:
            self._is_told, self._raised = True, error
            raise error

    def _notice_lost(self, error: BaseException | None) -> bool:
        """On the main thread: Python drops an exception that comes up inside a finaliser or a callback of the garbage
        collector, and a signal handler may run there. Whether it was ours that was dropped."""
        if error is None or error is not self._raised:
            return False
        self._lost, self._raised, self._is_told = self._raised, None, False
        return True

    def _raise_lost_again(self) -> None:
        if self._lost is not None and self._signals is not None:
            self._signals.interrupt_main()


class _Signals:
    """How the watch gets at the main thread: a signal whose handler raises, and word of Ctrl-C while it can't run.

    `notice_lost` is asked about every exception that Python drops; one that it takes for its own isn't reported.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        handler: Callable[[int, FrameType | None], None],
        notice_lost: Callable[[BaseException | None], bool],
    ) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._main = threading.main_thread().ident
        self._previous: dict[int, Any] = {}
        for number in numbers:
            self._previous[number] = signal.signal(number, handler)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._notice_lost = notice_lost
        self._previous_hook = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable

    def interrupt_main(self) -> None:
        """Run the handler on the main thread as soon as it runs Python code."""
        assert self._main is not None
        signal.pthread_kill(self._main, signal.SIGUSR1)

    def restore(self) -> None:
        """On the main thread: as it was before."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(self._previous_wakeup)
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._previous_hook
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self.reader.close()
        self._writer.close()

    def _on_unraisable(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not self._notice_lost(unraisable.exc_value):
            self._previous_hook(unraisable)


def follow_rank_0(board: Board, rank: int) -> None:
    """On a follower: give signs of life, and end this process when rank 0 gives none, is gone, or has ended."""

    def run() -> None:
        known, since_s = b"", time.monotonic()
        while True:
            try:
                board.beat(rank)
                beat = board.beats([0])[0]
                if board.has_ended():
                    os._exit(ExitCode.MET)
            except RuntimeError:
                os._exit(PARENT_GONE)
            now_s = time.monotonic()
            known, since_s = (beat, now_s) if beat != known else (known, since_s)
            if now_s - since_s > SILENCE_S:
                os._exit(PARENT_GONE)
            time.sleep(BEAT_S)

    threading.Thread(target=run, name="rank-0-watch", daemon=True).start()
