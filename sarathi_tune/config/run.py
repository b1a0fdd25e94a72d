"""What one command is asked to do: every flag, already parsed, with its default written here and nowhere else."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sarathi_tune.config.engine import PreemptionMode, SchedulerName
from sarathi_tune.config.model import DtypeName
from sarathi_tune.config.parallel import Layout
from sarathi_tune.config.slo import Slo
from sarathi_tune.errors import UsageError

DeviceName = Literal["auto", "cpu", "cuda"]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_WORKLOAD = "chat-small"
#: vLLM's default of an OpenAI-compatible server on devices below 70 GiB (0.32.0): the control that is verified beside
#: the recommendation.
DEFAULT_BUDGET_TOKENS = 2048
DEFAULT_OUT_DIR = Path("results/runs")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where and how steps are computed. `dtype` None is the model's own, `threads` None what the machine allows; the
    processes on a machine share its threads."""

    device: DeviceName = "auto"
    attention: str = "auto"
    dtype: DtypeName | None = None
    threads: int | None = None
    page_tokens: int = 16
    layout: Layout = field(default_factory=Layout)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads must be at least 1, not {self.threads}.")


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """How the built-in engine schedules. The prefix cache is off while measuring: a hit would hide what a prompt
    costs."""

    scheduler: SchedulerName = "sarathi"
    prefix_cache: bool = False
    preemption: PreemptionMode = "recompute"

    def as_dict(self) -> dict[str, Any]:
        """The settings as they stand in a result document."""
        return {"scheduler": self.scheduler, "prefix_cache": self.prefix_cache, "preemption": self.preemption}


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """The main job. None means: derived from the model, the workload or the machine, and said in the result."""

    slo: Slo
    model: str = DEFAULT_MODEL
    workload: str = DEFAULT_WORKLOAD
    max_num_seqs: int | None = None
    context_tokens: int | None = None
    prefix_tokens: int | None = None
    rate_per_s: float | None = None
    #: Taken off the SLO for what a step doesn't show: HTTP, detokenising, the network.
    overhead_ms: float = 0.0
    #: How much longer steps may take than measured; None: what is usual for the profile.
    headroom: float | None = None
    #: Verify this budget instead of the derived one.
    budget_tokens: int | None = None
    #: The budget that is run for comparison; None: vLLM's default on the device.
    control_budget_tokens: int | None = None
    device: DeviceConfig = field(default_factory=DeviceConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    seed: int = 0
    verify: bool = True
    resume: bool = False
    out_dir: Path = DEFAULT_OUT_DIR
    #: Wall-clock target of the whole run; measuring and verifying are cut to fit.
    time_limit_s: float = 150.0
    #: The command line as typed, for the result document.
    command: str = ""

    def __post_init__(self) -> None:
        if self.max_num_seqs is not None and self.max_num_seqs < 1:
            raise UsageError(f"--max-num-seqs must be at least 1, not {self.max_num_seqs}.")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise UsageError(f"--rate must be a positive number of requests per second, not {self.rate_per_s}.")


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """A full real sweep: every budget at every rate. Empty means: chosen around the derived budget and its capacity."""

    base: TuneConfig
    budgets_tokens: tuple[int, ...] = ()
    rates_per_s: tuple[float, ...] = ()
