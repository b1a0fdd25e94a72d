"""What is asked of a derivation, and what it answers. Plain values; `derive` fills them in."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sarathi_tune.budget.rule_of_thumb import RuleOfThumb
from sarathi_tune.errors import UsageError
from sarathi_tune.measure.profile import Profile
from sarathi_tune.notices import Notice

Verdict = Literal["recommended", "infeasible", "not-binding", "not-the-budget", "inconclusive"]

#: One page of KV: a chunk narrower than this isn't worth a step.
MIN_CHUNK_TOKENS = 16
#: A chunk must compute prompts at this share of the best rate that the same device reaches beside the same decodes.
MIN_USEFUL_SHARE = 0.125
#: A measured profile is a minute of a machine's life, and other minutes are slower: seldom by more than this share
#: (docs/decisions/025-headroom-for-slower-minutes.md).
USUAL_HEADROOM = 0.05


@dataclass(frozen=True, slots=True)
class BudgetQuestion:
    """Which budget keeps a step of `decodes` decodes at `context` keys beside a chunk behind `prefix` tokens within
    `slo_itl_ms` at `percentile`?

    `overhead_ms` is what a token gap has besides the step. `headroom` is the share by which steps may take longer than
    while they were measured without breaking the SLO; see `settled_headroom`. `max_num_seqs` (default: `decodes`),
    speculation, multimodal items and chunking enter through the engine's rules. `max_model_len` overrides the
    profile's. `default_budget` is the engine's, for comparison. `resamples` 0 leaves the interval out.
    """

    slo_itl_ms: float
    decodes: int
    context: int
    prefix: int = 0
    overhead_ms: float = 0.0
    headroom: float = 0.0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    percentile: float = 0.99
    default_budget: int = 2048
    reference_prompt_tokens: int | None = None
    min_chunk_tokens: int = MIN_CHUNK_TOKENS
    min_useful_share: float = MIN_USEFUL_SHARE
    speculative_tokens: int = 0
    largest_mm_item: int | None = None
    chunked_prefill: bool = True
    resamples: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.slo_itl_ms < float("inf"):
            raise UsageError(f"The SLO must be greater than zero and finite, not {self.slo_itl_ms} ms.")
        if not 0.0 < self.percentile < 1.0:
            raise UsageError(f"The percentile must lie between 0 and 1 (0.99 for p99), not {self.percentile}.")
        for name, least in (("decodes", 1), ("context", 1), ("prefix", 0), ("default_budget", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        for name in ("max_model_len", "max_num_seqs", "reference_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")
        if not 0.0 <= self.overhead_ms < float("inf"):
            raise UsageError(f"overhead_ms must be zero or more, not {self.overhead_ms}.")
        if not 0.0 <= self.headroom <= 1.0:
            raise UsageError(f"headroom must be a share from 0 to 1, not {self.headroom}.")

    @property
    def slo_step_ms(self) -> float:
        """What the SLO leaves for a step: all but the overhead."""
        return self.slo_itl_ms - self.overhead_ms

    @property
    def limit_ms(self) -> float:
        """What a step may take while it is measured, so that it meets the SLO when it takes `headroom` longer."""
        return self.slo_step_ms / (1.0 + self.headroom)

    def smallest_slo_for_ms(self, step_ms: float) -> float:
        """The smallest SLO whose `limit_ms` is at least `step_ms`, rounded up to a microsecond."""
        slo_ms = step_ms * (1.0 + self.headroom) + self.overhead_ms
        return math.ceil(slo_ms * 1e3 + 1e-6) / 1e3

    @property
    def headroom_words(self) -> str:
        """The headroom as a person says it, empty when there is none."""
        return f"{100 * self.headroom:g} % headroom" if self.headroom else ""


def settled_headroom(profile: Profile, asked: float | None = None) -> float:
    """The headroom that was asked for; else `USUAL_HEADROOM`, or the noise of the profile where that is larger. None
    for a profile that doesn't say its noise: written by hand, its times mean what they say."""
    if asked is not None:
        return asked
    return 0.0 if profile.noise is None else max(USUAL_HEADROOM, profile.noise)


@dataclass(frozen=True, slots=True)
class LimitingStep:
    """The step that decides: full decode batch beside the widest chunk. `chunk` 0 is the decode-only step."""

    decodes: int
    context: int
    chunk: int
    prefix: int
    centre_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another budget and its price. `p99_step_ms` is at the question's percentile, overhead excluded; `ttft_ms` is
    that of an uncontended prompt of `prompt_tokens` beside the full decode batch, over `prompt_steps` typical steps."""

    label: str
    budget: int
    chunk_tokens: int
    p99_step_ms: float
    meets_slo: bool
    prompt_tokens: int
    prompt_steps: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Derivation:
    """The answer. What a verdict doesn't know is None; `why` is the reason in one or two sentences.

    recommended     `budget` is the largest that holds
    not-binding     `budget` computes the longest prompt in one step, and even that step meets the SLO
    infeasible      no useful chunk fits; `largest_batch` and `smallest_slo_ms` say what would do (None: nothing would)
    not-the-budget  decode alone meets the SLO, a hybrid step never does, however small its chunk
    inconclusive    the profile or its noise can't decide

    `largest_batch` is the largest number of decodes for which the same question is answered with a budget, and
    `largest_decode_batch` the largest whose decode-only step meets the SLO, with no room for prompts beside it;
    `smallest_slo_ms` the smallest SLO for which it is, with these decodes. `largest_max_num_seqs` is set when the
    engine's floor on the budget, not the step time, is what fails. `unaligned_budget` is the budget before alignment.
    `fitted_budget`: where scatter, noise or a wide interval make it inconclusive, the budget by the fit alone; worth a
    try under load, not a recommendation. None elsewhere, and where the fit has none either.
    `serial_chunk`: the largest chunk for an engine in which a chunk *delays* a decode step; None if there is none.
    """

    verdict: Verdict
    budget: int | None
    chunk_tokens: int | None
    interval: tuple[int, int] | None
    interval_level: float
    rule_of_thumb: RuleOfThumb
    limiting: LimitingStep
    decode_step: LimitingStep
    largest_batch: int | None
    largest_decode_batch: int | None
    largest_max_num_seqs: int | None
    smallest_slo_ms: float | None
    unaligned_budget: int | None
    fitted_budget: int | None
    alignment: str
    floor: int
    min_chunk_tokens: int
    serial_chunk: int | None
    neighbours: tuple[Neighbour, ...]
    why: str
    notices: tuple[Notice, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The derivation as a JSON-ready dictionary."""
        document = asdict(self)
        document["interval"] = list(self.interval) if self.interval else None
        document["rule_of_thumb"] = self.rule_of_thumb.as_dict()
        document["neighbours"] = [asdict(neighbour) for neighbour in self.neighbours]
        document["notices"] = [notice.as_dict() for notice in self.notices]
        return document
