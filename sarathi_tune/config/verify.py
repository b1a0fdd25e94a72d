"""What `sarathi-tune verify` is asked to do."""

from dataclasses import dataclass
from typing import Any, Literal

from sarathi_tune.config.slo import Slo
from sarathi_tune.errors import UsageError

ArrivalsName = Literal["poisson", "constant", "gamma", "ramp", "trace"]
EndpointName = Literal["auto", "completions", "chat"]
CriterionName = Literal["every-step", "pooled", "per-request"]


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """A server and a load. With `rate_per_s` that rate is tried, with `concurrency` a closed loop; with neither, the
    largest rate that meets the objective is searched. `seconds` is the length of one run, `time_limit_s` that of a
    search. `vocab_size` bounds the token ids of prompts; 30,000 is below every common vocabulary.

    `arrivals` None are those of the workload: a trace is replayed at its times unless a rate or a concurrency is given,
    anything else comes at Poisson times. The fields of the trace stand in for those of a workload file."""

    target: str
    slo: Slo
    workload: str = "chat-small"
    model: str | None = None
    rate_per_s: float | None = None
    concurrency: int | None = None
    seconds: float = 30.0
    time_limit_s: float = 300.0
    tolerance: float = 0.05
    arrivals: ArrivalsName | None = None
    burstiness_cv: float = 1.0
    #: Requests per second at the start and at the end of a ramp.
    ramp_per_s: tuple[float, float] | None = None
    endpoint: EndpointName = "auto"
    criterion: CriterionName = "every-step"
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    workload_format: str | None = None
    trace_speed: float | None = None
    trace_start_s: float | None = None
    max_requests: int | None = None
    #: None: as many processes as the expected streams need.
    workers: int | None = None
    vocab_size: int = 30_000
    #: Of lengths and arrivals; prompts are new in every run all the same, so that no cache knows them.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate_per_s is not None and self.concurrency is not None:
            raise UsageError("Give --rate or --concurrency, not both: one is an open loop, the other a closed one.")
        if self.arrivals == "ramp" and (self.rate_per_s is not None or self.concurrency is not None):
            raise UsageError("--arrivals ramp:FROM:TO has rates of its own: leave out --rate and --concurrency.")
        if self.vocab_size < 256:
            raise UsageError(f"--vocab must be at least 256, not {self.vocab_size}.")

    @property
    def trace_overrides(self) -> dict[str, Any]:
        """What the command line says about the trace, as fields of its options."""
        fields = {
            "format": self.workload_format,
            "speed": self.trace_speed,
            "start_s": self.trace_start_s,
            "max_requests": self.max_requests,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """The settings as they stand in a result document."""
        return {
            "rate_per_s": self.rate_per_s,
            "concurrency": self.concurrency,
            "seconds": self.seconds,
            "time_limit_s": self.time_limit_s,
            "tolerance": self.tolerance,
            "arrivals": self.arrivals,
            "burstiness_cv": self.burstiness_cv if self.arrivals == "gamma" else None,
            "ramp_per_s": list(self.ramp_per_s) if self.ramp_per_s else None,
            "trace": self.trace_overrides or None,
            "criterion": self.criterion,
            "request_timeout_s": self.request_timeout_s,
            "stall_timeout_s": self.stall_timeout_s,
            "vocab_size": self.vocab_size,
            "seed": self.seed,
        }
