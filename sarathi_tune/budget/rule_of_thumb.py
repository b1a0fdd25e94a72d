"""The three steps that the source text gives, as it gives them, and how far off they are.

1. measure the decode-only step at the expected batch; 2. measure pure prefill per token; 3. budget = 1 / 2, so that
decode and prefill work *added up* make a step of at most two decode steps. The sum overstates a hybrid step, whose
decodes share the weights with the chunk; and no SLO enters. It is printed beside the derived budget, not instead of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sarathi_tune.measure.profile import Profile
from sarathi_tune.stepmodel.features import Observation
from sarathi_tune.stepmodel.model import StepModel
from sarathi_tune.stepmodel.rows import observations
from sarathi_tune.units import format_ms


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """The three numbers and where they come from.

    `budget_tokens` is None when step 2 gives no cost per token. `additive_bias` is the median signed error of
    decode step + prefill step against `additive_n` measured hybrid steps (+0.31 overstates by 31 %), NaN without any.
    """

    decode_step_ms: float
    decode_source: str
    prefill_ms_per_token: float
    prefill_source: str
    budget_tokens: int | None
    additive_bias: float
    additive_n: int

    @property
    def steps(self) -> tuple[str, str, str]:
        """The three steps as sentences."""
        budget = "no budget" if self.budget_tokens is None else f"{self.budget_tokens:,} tokens"
        return (
            f"decode_step_ms = {format_ms(self.decode_step_ms)} ({self.decode_source})",
            f"prefill_ms_per_token = {self.prefill_ms_per_token:.4g} ms ({self.prefill_source})",
            f"budget = decode_step_ms / prefill_ms_per_token = {budget}{self._overstatement}",
        )

    @property
    def _overstatement(self) -> str:
        if not self.additive_n or math.isnan(self.additive_bias):
            return ""
        verb = "overstates" if self.additive_bias >= 0 else "understates"
        return f"; adding the two {verb} the measured hybrid steps by {abs(self.additive_bias):.0%}"

    def as_dict(self) -> dict[str, Any]:
        """The rule as it stands in a document; what is unknown is null."""
        document = asdict(self)
        if math.isnan(self.additive_bias):
            document["additive_bias"] = None
        return document | {"steps": list(self.steps)}


def rule_of_thumb(profile: Profile, model: StepModel, decodes: int, context: int) -> RuleOfThumb:
    """The rule of thumb for `decodes` decodes at `context` keys each.

    prefill_ms_per_token is the cheapest time / tokens among the pure prefill rows without a prefix, that is prefill
    with the device full: 43.51 ms / 2048 = 0.0212 for Llama-3-8B on an H100. Without such a row it is the model's.
    """
    rows = [row for row, _ in observations(profile) if row.label not in model.rejected]
    decode_ms, decode_source = _decode_step(rows, model, decodes, context)
    per_token_ms, prefill_source = _prefill_per_token(rows, model)
    return RuleOfThumb(
        decode_step_ms=decode_ms,
        decode_source=decode_source,
        prefill_ms_per_token=per_token_ms,
        prefill_source=prefill_source,
        budget_tokens=round(decode_ms / per_token_ms) if per_token_ms > 0.0 else None,
        additive_bias=model.error.additive_bias,
        additive_n=model.error.additive_n,
    )


def _decode_step(rows: Sequence[Observation], model: StepModel, decodes: int, context: int) -> tuple[float, str]:
    for row in rows:
        load = row.load
        if not load.chunks and load.decodes == decodes and load.context_sum == decodes * context:
            return row.centre_ms, f"measured, {row.label}"
    return model.centre_ms(decodes, decodes * context, ()), f"fitted, {decodes}x{context}"


def _prefill_per_token(rows: Sequence[Observation], model: StepModel) -> tuple[float, str]:
    pure = [row for row in rows if row.load.chunks and not row.load.decodes]
    unprefixed = [row for row in pure if all(prefix == 0 for prefix, _ in row.load.chunks)]
    if unprefixed:
        best = min(unprefixed, key=lambda row: row.centre_ms / row.load.tokens)
        return best.centre_ms / best.load.tokens, f"measured, {best.centre_ms:.4g} ms / {best.load.tokens:,} tokens"
    widest = max((row.load.chunk_tokens for row in rows), default=0) or max(row.load.tokens for row in rows)
    return model.centre_ms(0, 0, ((0, widest),)) / widest, f"fitted, a pure chunk of {widest:,} tokens"
