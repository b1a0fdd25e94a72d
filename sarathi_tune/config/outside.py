"""What `sarathi-tune --target URL` is asked to do."""

from dataclasses import dataclass
from pathlib import Path

from sarathi_tune.config.run import DEFAULT_OUT_DIR, DEFAULT_WORKLOAD
from sarathi_tune.config.slo import Slo
from sarathi_tune.errors import UsageError


@dataclass(frozen=True, slots=True)
class OutsideConfig:
    """A live server and the objective that it should meet. None means: found out from the server or the workload, and
    said in the result. `time_limit_s` is aimed at, slow servers included."""

    target: str
    slo: Slo
    model: str | None = None
    workload: str = DEFAULT_WORKLOAD
    max_num_seqs: int | None = None
    context_tokens: int | None = None
    prefix_tokens: int | None = None
    #: Taken off the SLO for what lies between the place of measuring and the users.
    overhead_ms: float = 0.0
    #: How much longer steps may take than measured; None: what is usual for the profile.
    headroom: float | None = None
    #: Of the order of prompts; their tokens are new in every run, so that no cache knows them.
    seed: int = 0
    out_dir: Path = DEFAULT_OUT_DIR
    time_limit_s: float = 100.0
    #: The command line as typed, for the result document.
    command: str = ""

    def __post_init__(self) -> None:
        if self.time_limit_s < 5:
            raise UsageError(f"--time-limit must leave a live server at least 5 s, not {self.time_limit_s:g} s.")
