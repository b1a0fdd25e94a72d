"""What `sarathi-tune compare` is asked to do: every flag, already parsed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from sarathi_tune.config.engine import SchedulerName
from sarathi_tune.config.run import DEFAULT_MODEL, DeviceConfig, SchedulingConfig

ALL_SCHEDULERS: tuple[SchedulerName, ...] = get_args(SchedulerName)

#: Real runs of each scheduler. The longest of some hundred gaps is one draw: of three runs the middle one tells more.
DEFAULT_PLAYS = 3


@dataclass(frozen=True, slots=True)
class SteadyConfig:
    """Running answers, and long prompts that arrive beside them: what makes schedulers differ.

    `streams` answers run from the start until the last of `num_prompts` prompts of `prompt_tokens` tokens is done; one
    arrives every `every_s` seconds. None of a length or a time is chosen to suit the machine and the model.
    """

    streams: int = 8
    prompt_tokens: int | None = None
    every_s: float | None = None
    num_prompts: int = 4


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """One load through several schedulers. Without a `workload` the load is `steady`.

    Each scheduler plays the load `num_plays` times for real. `slo_itl_ms` None is five decode steps,
    `budget_tokens` None what the profile gives for it. `virtual_profile`: play everything under the virtual clock
    with the step times of that document. `profile`: the step times for the predictions beside real runs; None
    measures them first. `kv_tokens` None: as much KV cache as the load needs.
    """

    slo_itl_ms: float | None = None
    budget_tokens: int | None = None
    schedulers: tuple[SchedulerName, ...] = ALL_SCHEDULERS
    steady: SteadyConfig = field(default_factory=SteadyConfig)
    workload: str | None = None
    rate_per_s: float | None = None
    num_requests: int | None = None
    num_plays: int = DEFAULT_PLAYS
    max_num_seqs: int | None = None
    kv_tokens: int | None = None
    model: str = DEFAULT_MODEL
    virtual_profile: Path | None = None
    profile: Path | None = None
    save_profile: Path | None = None
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    seed: int = 0
    #: The command line as typed, for the document.
    command: str = ""
