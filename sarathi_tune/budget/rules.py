"""Which token budgets an engine refuses, and why. The rules are data; each has its words and its smallest legal value.

Written for vLLM 0.32.0, read in its `config/scheduler.py`, `config/vllm.py`, `config/speculative.py` and
`v1/core/encoder_cache_manager.py`; the rule on speculation reserves what this version's own start-up check leaves to
the scheduler (1 + K tokens for every running decode) and what forks and other versions refuse outright.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: The version that the rules below were written for.
VLLM_VERSION = "0.32.0"

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings that meet the budget in a rule. `speculative_tokens` is K; `draft_slots` the additional slots that
    the drafter asks for (0 for EAGLE, MTP and n-gram, 1 for a draft model, up to K for parallel drafting);
    `largest_mm_item` the tokens of the largest multimodal item; `block_tokens` the aligned block of a hybrid
    (Mamba, gated delta net) model."""

    budget: int
    max_num_seqs: int = 1
    max_model_len: int | None = None
    chunked_prefill: bool = True
    speculative_tokens: int = 0
    draft_slots: int = 0
    largest_mm_item: int | None = None
    block_tokens: int | None = None
    long_prefill_token_threshold: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: `minimum` gives the smallest budget it allows, or None where it doesn't apply; `words` the reason."""

    name: str
    minimum: Callable[[EngineSettings], int | None]
    words: Callable[[EngineSettings], str]


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule. `smallest_legal` is the smallest budget that all rules allow, None when no budget helps."""

    rule: str
    severity: Severity
    message: str
    smallest_legal: int | None

    def as_dict(self) -> dict[str, Any]:
        """The violation as it stands in a document."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "message": self.message,
            "smallest_legal": self.smallest_legal,
        }


VLLM_RULES: tuple[Rule, ...] = (
    Rule(
        "max-num-seqs",
        lambda s: s.max_num_seqs,
        lambda s: f"max_num_batched_tokens must be at least max_num_seqs ({s.max_num_seqs:,})",
    ),
    Rule(
        "speculation",
        lambda s: (s.speculative_tokens + 1) * s.max_num_seqs if s.speculative_tokens else None,
        lambda s: (
            f"speculation with {s.speculative_tokens} tokens takes 1 + {s.speculative_tokens} tokens for each of "
            f"{s.max_num_seqs:,} running requests, {(s.speculative_tokens + 1) * s.max_num_seqs:,} in all"
        ),
    ),
    Rule(
        "draft-slots",
        lambda s: s.draft_slots + 1 if s.draft_slots else None,
        lambda s: f"the drafter reserves {s.draft_slots:,} slots, and at least one token must remain",
    ),
    Rule(
        "multimodal-item",
        lambda s: s.largest_mm_item,
        lambda s: f"the largest multimodal item has {s.largest_mm_item or 0:,} tokens and is computed in one step",
    ),
    Rule(
        "max-model-len",
        lambda s: None if s.chunked_prefill else s.max_model_len,
        lambda s: (
            f"with chunked prefill off, a prompt of max_model_len ({s.max_model_len or 0:,}) must fit into one step"
        ),
    ),
    Rule(
        "aligned-block",
        lambda s: s.block_tokens,
        lambda s: f"the model's aligned block of {s.block_tokens or 0:,} tokens is computed in one step",
    ),
)


def smallest_legal_budget(settings: EngineSettings) -> int:
    """The smallest budget that every rule allows with these settings (their own budget doesn't matter)."""
    return max((rule.minimum(settings) or 1 for rule in VLLM_RULES), default=1)


def binding_rule(settings: EngineSettings) -> Rule:
    """The rule that sets `smallest_legal_budget`."""
    return max(VLLM_RULES, key=lambda rule: rule.minimum(settings) or 0)


def check_settings(settings: EngineSettings) -> tuple[Violation, ...]:
    """Every rule that these settings break, errors first; empty when vLLM starts without complaint."""
    legal = smallest_legal_budget(settings)
    broken = [
        Violation(
            rule.name,
            "error",
            f"A budget of {settings.budget:,} tokens is refused by vLLM {VLLM_VERSION}: {rule.words(settings)}. "
            f"The smallest legal value is {legal:,}.",
            legal,
        )
        for rule in VLLM_RULES
        if settings.budget < (rule.minimum(settings) or 0)
    ]
    return tuple(broken) + _other_errors(settings) + _warnings(settings)


def _other_errors(settings: EngineSettings) -> tuple[Violation, ...]:
    limit = settings.max_model_len
    if limit is None or settings.long_prefill_token_threshold <= limit:
        return ()
    message = (
        f"long_prefill_token_threshold ({settings.long_prefill_token_threshold:,}) must not exceed max_model_len "
        f"({limit:,}): lower the threshold."
    )
    return (Violation("long-prefill-threshold", "error", message, None),)


def _warnings(settings: EngineSettings) -> tuple[Violation, ...]:
    found = []
    most = settings.max_num_seqs * settings.max_model_len if settings.max_model_len else None
    if most is not None and settings.budget > most:
        message = f"A budget of {settings.budget:,} is more than max_num_seqs x max_model_len ({most:,}) can ever fill."
        found.append(Violation("more-than-can-run", "warning", message, None))
    left = settings.budget - settings.draft_slots
    if settings.speculative_tokens and 0 < left < 8192:
        message = f"With speculation vLLM warns when fewer than 8,192 tokens can be scheduled; {left:,} can."
        found.append(Violation("speculation-below-8192", "warning", message, None))
    return tuple(found)


def default_budget(
    device: Literal["cuda", "cpu"], memory_gib: float | None = None, device_name: str = "", world_size: int = 1
) -> int:
    """The budget that vLLM 0.32.0's server takes by default. A device that can't be queried (memory None) gets the
    small one, as there."""
    if device == "cpu":
        return 2048 * world_size
    if memory_gib is not None and memory_gib >= 160:
        return 16384
    if memory_gib is not None and memory_gib >= 70 and "a100" not in device_name.lower():
        return 8192
    return 2048
