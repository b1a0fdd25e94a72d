"""The result document: everything one run decided, and what it rests on (docs/result.md).

Tokens, milliseconds and requests per second, as the names say. Fractions are 0 to 1. A figure that wasn't measured or
can't be known is None, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = "sarathi-tune/result"
SCHEMA_VERSION = 1

Verdict = Literal["recommended", "infeasible", "not-binding", "not-the-budget", "inconclusive"]
#: Why a run was made: the advice itself at a working rate, the engine's default beside it, the advice at its predicted
#: capacity, another budget, or a cell of a full sweep.
RunRole = Literal["recommended", "control", "capacity", "neighbour", "sweep"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The SLO as promised, at `percentile`. `overhead_ms` per token is taken off for what the engine's steps don't
    show: HTTP, tokenisation, the network. Steps may take `headroom` longer than while they were measured."""

    itl_ms: float
    ttft_ms: float | None = None
    percentile: float = 0.99
    overhead_ms: float = 0.0
    headroom: float = 0.0

    @property
    def limit_ms(self) -> float:
        """What a step could take while it was measured."""
        return (self.itl_ms - self.overhead_ms) / (1.0 + self.headroom)


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """The three steps, and where the first two come from. `budget_tokens` is None when prefill costs nothing per token.

    `additive_bias` is the median signed error of adding decode and prefill up, on `additive_n` measured hybrid steps:
    +0.31 overstates by 31 %.
    """

    decode_step_ms: float
    decode_source: str
    prefill_ms_per_token: float
    prefill_source: str
    budget_tokens: int | None
    additive_bias: float | None = None
    additive_n: int = 0


@dataclass(frozen=True, slots=True)
class LimitingStep:
    """The step that decides: so many decodes at that context, and that chunk behind that prefix."""

    decodes: int
    context_tokens: int
    chunk_tokens: int
    prefix_tokens: int
    step_ms: float
    step_p99_ms: float


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The worst hybrid step at one budget: the curve that the SLO line cuts."""

    budget_tokens: int
    step_ms: float
    step_p99_ms: float


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A budget beside the recommended one, and its price. `ttft_alone_ms` is that of a prompt of `prompt_tokens` which
    has every chunk for itself; the figures below it are predictions at `rate_per_s`."""

    budget_tokens: int
    step_p99_ms: float
    meets_slo: bool
    label: str = ""
    prompt_tokens: int | None = None
    ttft_alone_ms: float | None = None
    rate_per_s: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    goodput_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """The verdict and its reason. `budget_tokens` is None unless a budget is advised.

    `largest_batch` (beside a useful chunk), `largest_decode_batch` (decodes alone), `largest_max_num_seqs` and
    `smallest_slo_ms` say what would be in reach when the objective isn't.
    `fitted_tokens`: the budget by the fit alone where that is too uncertain to be advised; the load can try it.
    `smallest_tokens`: the smallest budget that is legal and computes prompts at a useful rate.
    `serial_chunk_tokens`: the largest chunk that may run between two decode steps, for engines that don't mix the two.
    """

    verdict: Verdict
    why: str
    max_num_seqs: int
    budget_tokens: int | None = None
    fitted_tokens: int | None = None
    smallest_tokens: int | None = None
    interval_tokens: tuple[int, int] | None = None
    interval_level: float = 0.9
    decode_step: LimitingStep | None = None
    limiting: LimitingStep | None = None
    rule_of_thumb: RuleOfThumb | None = None
    curve: tuple[CurvePoint, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    largest_batch: int | None = None
    largest_decode_batch: int | None = None
    largest_max_num_seqs: int | None = None
    smallest_slo_ms: float | None = None
    serial_chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative error of the step model on `shapes` shapes that the fit has not seen. `method` says how they were kept
    from it: "held-out" or "k-fold". `additive_*` is the error of adding decode and prefill up; its bias is signed."""

    method: str
    median: float | None = None
    p95: float | None = None
    shapes: int = 0
    hybrid_median: float | None = None
    hybrid_p95: float | None = None
    additive_median: float | None = None
    additive_bias: float | None = None


@dataclass(frozen=True, slots=True)
class Latency:
    """What requests saw at one budget and rate. `itl_p99_ms` pools all gaps; `itl_p99_per_request_ms` is the p99 over
    requests of each one's own p99; `itl_p99_stalled_ms` only counts gaps whose step held prefill tokens."""

    requests: int
    gaps: int
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    itl_p99_interval_ms: tuple[float, float] | None = None
    itl_p999_ms: float | None = None
    itl_max_ms: float | None = None
    itl_p99_per_request_ms: float | None = None
    itl_p99_stalled_ms: float | None = None
    stalled_share: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    goodput_per_s: float | None = None
    attained_share: float | None = None
    preemptions: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One budget at one rate: predicted on the virtual clock, measured for real, or both."""

    role: RunRole
    budget_tokens: int
    rate_per_s: float
    predicted: Latency | None = None
    measured: Latency | None = None
    #: Whether the measured (else the predicted) latencies meet the objective; None when the run can't tell.
    meets_slo: bool | None = None
    #: Why a measured run doesn't count, in words. Empty: valid.
    problems: tuple[str, ...] = ()
    #: What of the objective is missed, one clause each: `p99 TTFT 1200 ms > 1000 ms`.
    misses: tuple[str, ...] = ()
    #: Profiled steps timed again around the run, over their profiled time; `predicted` is scaled by it.
    drift_decode: float | None = None
    drift_chunk: float | None = None
    seed: int = 0
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The predicted largest rate that still meets the objective at one budget."""

    budget_tokens: int
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """How long a part of the run took."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PromptAlone:
    """The median time to the first token of a prompt on the idle server."""

    tokens: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The median decode-only step of so many decodes at about that context, of `steps` steps."""

    decodes: int
    context_tokens: int
    step_ms: float
    steps: int


@dataclass(frozen=True, slots=True)
class SceneGaps:
    """The mean gap between the tokens of so many streams, `gaps` of them, from outside and by the server's histogram
    (None: it has none). With no `prompts` beside the streams all of them are decode steps, otherwise the steps of the
    prompts count too, and those in which the streams began."""

    name: str
    decodes: int
    prompts: int
    gaps: int
    seen_ms: float
    own_ms: float | None = None


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A live server as it was found. `budget_tokens` is the budget it seems to run with (with `is_lower_bound`: at
    least that), None when it can't be told; `interval_tokens` those that explain `prompts` prompts nearly as well, by
    `full_steps` full steps; `misfit` the median relative error of the explanation.

    `step_ms`: a full step beside the decodes of the question. `ttft_ms` and `ttft_advised_ms`: of a prompt of
    `prompt_tokens` that has every chunk for itself, now and with the advised budget. `own_gap_ms` and `seen_gap_ms`:
    the mean gap between tokens while it was measured, by the server's own histogram (None: it has none) and from
    outside, and in `scenes` for each number of streams. `is_doubted`: something spoiled what was seen, and neither
    steps nor the budget can be trusted.
    """

    url: str
    budget_tokens: int | None
    interval_tokens: tuple[int, int] | None = None
    is_lower_bound: bool = False
    misfit: float | None = None
    full_steps: int = 0
    prompts: int = 0
    step_ms: float | None = None
    prompt_tokens: int | None = None
    ttft_ms: float | None = None
    ttft_advised_ms: float | None = None
    alone: tuple[PromptAlone, ...] = ()
    decode_steps: tuple[DecodeStep, ...] = ()
    client_lag_p99_ms: float | None = None
    is_stamped_on_arrival: bool = False
    has_metrics: bool = False
    own_gap_ms: float | None = None
    seen_gap_ms: float | None = None
    scenes: tuple[SceneGaps, ...] = ()
    is_doubted: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `machine`, `model`, `engine` and `workload` describe what was used, for the reader and for comparing."""

    objective: Objective
    advice: Advice
    fit_error: FitError | None = None
    capacities: tuple[Capacity, ...] = ()
    #: Predicted cells of budget x rate, as `goodput.surface.Cell` writes them.
    surface: tuple[Mapping[str, Any], ...] = ()
    runs: tuple[Run, ...] = ()
    notices: tuple[Mapping[str, str], ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    #: What was asked, and in `origins` where each value came from that the user left open.
    settings: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[PhaseTime, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    command: str = ""
    created: str = ""
    #: The live server that was measured over HTTP; None: steps were timed on this machine.
    server: RunningServer | None = None
    #: The profile that this rests on: a path, relative to `folder` when a run has one.
    profile: str = ""
    #: Where the run keeps its journal, profile and result.
    folder: str = ""

    def run(self, role: RunRole) -> Run | None:
        """The run of that role at the highest rate, if one was made."""
        candidates = [run for run in self.runs if run.role == role]
        return max(candidates, key=lambda run: run.rate_per_s, default=None)

    @property
    def model_name(self) -> str:
        """What to hand to `vllm serve`: the hub id or directory if one is known."""
        return str(self.model.get("serve_name") or self.model.get("name") or "MODEL")
