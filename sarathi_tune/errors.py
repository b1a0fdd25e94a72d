"""What can go wrong because of something a user gave, and the exit code of each.

    SarathiTuneError
    ├── UsageError            2   a flag, a number or a combination that can't be used
    │   ├── DocumentError     2   a profile, result, workload, trace or shapes file
    │   └── ModelError        2   a preset or a model directory
    ├── InfeasibleError       3   the SLO can't be met by any budget
    ├── InconclusiveError     4   too noisy or too few samples to decide
    ├── OutOfMemoryError      5   weights or KV cache don't fit
    ├── TargetError           6   the target server refused, failed or vanished
    ├── RankError             6   a process of a parallel run died (5 when its memory ran out)
    └── InterruptedRunError 130   Ctrl-C; what was measured is kept

The message is the sentence the user reads, so it says what is wrong *and* what to do. Broken invariants of our own are
`assert`s, never one of these.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """The process exit codes, as documented in README.md."""

    MET = 0
    MISSED = 1
    USAGE = 2
    INFEASIBLE = 3
    INCONCLUSIVE = 4
    OUT_OF_MEMORY = 5
    TARGET_FAILED = 6
    INTERRUPTED = 130


class SarathiTuneError(Exception):
    """Base of every error that a user can cause; `exit_code` is what the process ends with."""

    exit_code = ExitCode.USAGE


class UsageError(SarathiTuneError):
    """A flag, a number, or a combination of them that can't be used."""


class DocumentError(UsageError):
    """A file that can't be read as the document it should be."""


class ModelError(UsageError):
    """A model preset or directory that can't be used."""


class RequestRefusedError(UsageError):
    """A request that could never be served: larger than the model's context or than the whole KV pool."""


class InfeasibleError(SarathiTuneError):
    """No budget can meet the SLO."""

    exit_code = ExitCode.INFEASIBLE


class InconclusiveError(SarathiTuneError):
    """The measurement can't decide."""

    exit_code = ExitCode.INCONCLUSIVE


class OutOfMemoryError(SarathiTuneError):
    """The weights or the KV cache don't fit into the device's memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


class TargetError(SarathiTuneError):
    """The target server could not be used."""

    exit_code = ExitCode.TARGET_FAILED


class InterruptedRunError(SarathiTuneError):
    """The user pressed Ctrl-C; the message says where the journal is and how to go on."""

    exit_code = ExitCode.INTERRUPTED


class RankError(SarathiTuneError):
    """A process of a parallel run failed or went away, and all were ended; the exit code is that of the cause.

    It isn't an OutOfMemoryError when memory was the cause: no step can be computed any more, so measuring must not go
    on with a smaller one.
    """

    exit_code = ExitCode.TARGET_FAILED

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.TARGET_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
