"""The comparison document: one load through several schedulers (docs/compare.md).

Tokens, milliseconds and seconds, as the names say. What wasn't run or can't be known is None, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SCHEMA = "sarathi-tune/comparison"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class BudgetedStep:
    """The longest step that the budget allows on this load, the engine's loop included, as the step model has it: its
    median and its p99. All running answers at their longest context, and a full chunk behind the deepest prefix."""

    decodes: int
    context: int
    chunk: int
    prefix: int
    p50_ms: float
    p99_ms: float

    def timed(self, median_ms: float) -> "BudgetedStep":
        """The same step where its median is that: a p99 is as far above it as the model has it."""
        return replace(self, p50_ms=median_ms, p99_ms=self.p99_ms * median_ms / self.p50_ms)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one scheduler made of the load. TTFT is that of the requests that arrive while others run.

    A gap is stalled when prefill tokens were computed in it. `largest_gap_steps`: engine steps between the two tokens
    of the largest gap; `largest_gap_p99_units`: its length over the budgeted step's p99, which is what a budget is
    derived from and what it promises; `largest_gap_units`: over its median. `trace`: (seconds, ms) of the gaps, each
    once however many requests saw it at that moment.
    """

    requests: int
    finished: int
    gaps: int
    duration_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None
    stalled_gaps: int
    gaps_over_slo: int
    largest_gap_steps: int | None
    largest_gap_units: float | None
    largest_gap_p99_units: float | None
    output_tokens_per_s: float
    preemptions: int
    cached_tokens: int
    prompt_tokens: int
    trace: tuple[tuple[float, float], ...] = ()

    @property
    def stalled_share(self) -> float | None:
        """Share of the gaps that are stalled."""
        return self.stalled_gaps / self.gaps if self.gaps else None

    @property
    def over_slo_share(self) -> float | None:
        """Share of the gaps that are longer than the objective."""
        return self.gaps_over_slo / self.gaps if self.gaps else None


@dataclass(frozen=True, slots=True)
class Contender:
    """One scheduler. `token_budget` is what its engine got; `capacity_per_s` the largest rate that meets the objective
    under the virtual clock, None when none does, and `capacity_note` why. `measured` is one real run: of several, the
    one whose longest gap is in the middle of `longest_gaps_ms`, which has those of all in the order they were run.
    `budgeted_step` is the comparison's, as long as it took around that run: what its longest gap stands over."""

    scheduler: str
    token_budget: int
    measured: Outcome | None = None
    predicted: Outcome | None = None
    #: Profiled steps timed again around the real run, over their profiled time; `predicted` is scaled by it.
    drift_decode: float | None = None
    drift_chunk: float | None = None
    longest_gaps_ms: tuple[float | None, ...] = ()
    budgeted_step: BudgetedStep | None = None
    capacity_per_s: float | None = None
    capacity_note: str = ""

    @property
    def outcome(self) -> Outcome:
        """The measured one, or the predicted one where nothing was run for real."""
        outcome = self.measured or self.predicted
        assert outcome is not None, "a contender has run"
        return outcome


@dataclass(frozen=True, slots=True)
class Comparison:
    """The whole comparison.

    `decode_step_ms` is a step of all running answers without prefill. `arrivals_s` is when the long prompts, or the
    workload's requests, were sent.
    """

    slo_itl_ms: float
    budget_tokens: int
    budgeted_step: BudgetedStep
    decode_step_ms: float
    contenders: tuple[Contender, ...]
    load: Mapping[str, Any] = field(default_factory=dict)
    arrivals_s: tuple[float, ...] = ()
    percentile: float = 0.99
    notices: tuple[Mapping[str, str], ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    scheduling: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    command: str = ""
    created: str = ""

    @property
    def is_real(self) -> bool:
        """Whether anything was run for real."""
        return any(contender.measured is not None for contender in self.contenders)

    def find(self, scheduler: str) -> Contender | None:
        """The contender of that name, if it took part."""
        return next((contender for contender in self.contenders if contender.scheduler == scheduler), None)


def comparison_as_dict(comparison: Comparison) -> dict[str, Any]:
    """The document, schema and version first."""
    from sarathi_tune.report.codec import to_json

    return {"schema": SCHEMA, "version": SCHEMA_VERSION, **to_json(comparison)}
