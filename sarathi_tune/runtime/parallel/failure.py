"""What ended a parallel run: how a rank says it, and the sentence that the user reads."""

import json
import signal
import traceback
from dataclasses import dataclass

from sarathi_tune.errors import ExitCode, OutOfMemoryError, RankError, SarathiTuneError
from sarathi_tune.machine.processes import OUT_OF_MEMORY_KILL, how_it_ended

#: How torch's allocators say it; `torch.OutOfMemoryError` is a RuntimeError and the CPU's is a plain one.
_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")
ALL_ENDED = "All ranks were ended."


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the run ended, as one sentence, and the exit code. `while_loading`: no step was computed yet."""

    message: str
    exit_code: ExitCode = ExitCode.TARGET_FAILED
    while_loading: bool = False

    def error(self) -> SarathiTuneError:
        """The error to raise on rank 0."""
        if self.while_loading and self.exit_code == ExitCode.OUT_OF_MEMORY:
            return OutOfMemoryError(self.message)
        return RankError(self.message, self.exit_code)

    def as_text(self) -> str:
        """For the store."""
        return json.dumps([self.message, int(self.exit_code), self.while_loading])

    @classmethod
    def from_text(cls, text: str) -> "Failure":
        """What `as_text` wrote."""
        message, exit_code, while_loading = json.loads(text)
        return cls(message, ExitCode(exit_code), while_loading)


def describe_error(error: BaseException, rank: int, num_ranks: int, *, while_loading: bool) -> Failure:
    """An exception on one rank."""
    who = f"Rank {rank} of {num_ranks}"
    if isinstance(error, SarathiTuneError):
        return Failure(f"{who}: {error} {ALL_ENDED}", ExitCode(error.exit_code), while_loading)
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, MemoryError) or any(phrase in str(error).lower() for phrase in _MEMORY_PHRASES):
        return Failure(
            f"{who} ran out of memory ({said}). {ALL_ENDED} Use fewer KV pages, smaller steps or more ranks.",
            ExitCode.OUT_OF_MEMORY,
            while_loading,
        )
    frames = traceback.extract_tb(error.__traceback__)
    place = f", in {frames[-1].name}, line {frames[-1].lineno}" if frames else ""
    return Failure(
        f"{who} failed ({type(error).__name__}: {said}{place}). {ALL_ENDED} Run again with SARATHI_TUNE_DEBUG=1 for "
        "its traceback.",
        while_loading=while_loading,
    )


def describe_death(rank: int, num_ranks: int, return_code: int, last_words: str, *, while_loading: bool) -> Failure:
    """A process that ended without saying why. `return_code` is negative for a signal, as in `subprocess`;
    `last_words`: the last line it wrote to stderr."""
    who = f"Rank {rank} of {num_ranks}"
    remedy = "Run again."
    if return_code == -signal.SIGKILL:
        remedy = OUT_OF_MEMORY_KILL
    elif return_code >= 0:
        remedy = "Run again with SARATHI_TUNE_DEBUG=1 for what it printed."
    said = f" ({last_words})" if last_words else ""
    return Failure(f"{who} {how_it_ended(return_code)}{said}. {ALL_ENDED} {remedy}", while_loading=while_loading)


def describe_silence(rank: int, num_ranks: int, seconds: float) -> Failure:
    """A rank that is there, or was, and gives no sign of life."""
    return Failure(
        f"Rank {rank} of {num_ranks} hasn't answered for {seconds:.0f} s: it is stopped, or its machine or the network "
        f"is down. {ALL_ENDED}"
    )
