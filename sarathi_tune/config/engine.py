"""How the engine schedules: the knobs that vLLM has under the same names."""

from dataclasses import dataclass
from typing import Literal

from sarathi_tune.errors import UsageError

SchedulerName = Literal["sarathi", "sarathi-single", "prefill-first", "decode-first", "orca"]
PreemptionMode = Literal["recompute", "swap"]

#: Budget meaning "no limit": a prompt is computed in one step, as with chunked prefill off.
UNLIMITED_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Token counts; `num_pages` pages of `page_tokens` tokens make the KV pool.

    `token_budget` limits the tokens of a step (chunks and decodes). `sarathi-single` takes it as its fixed chunk size;
    for the schedulers without chunking it only limits how many whole prompts share a step.
    """

    token_budget: int
    max_num_seqs: int
    num_pages: int
    page_tokens: int = 16
    max_model_len: int = 8192
    scheduler: SchedulerName = "sarathi"
    prefix_cache: bool = False
    preemption: PreemptionMode = "recompute"

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_num_seqs", "num_pages", "page_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}.")
