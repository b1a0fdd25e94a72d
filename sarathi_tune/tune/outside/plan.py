"""What to send to a live server, and in which order, so that it tells the most in the seconds allowed.

alone    prompts on an idle server: what a prompt costs, and how long the others may be
one      a single stream: the smallest decode step
few      a few streams, prompts in a ladder up to the longest: where they are cut
full     all decodes at the asked context, prompts around the objective: the steps that the advice is about
half     half of the decodes, and
short    all of them at a short context: what a decode costs apart from its keys
refine   a few streams again, prompts on both sides of multiples of the budget
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sarathi_tune.config.outside import OutsideConfig
from sarathi_tune.errors import UsageError
from sarathi_tune.stats import median
from sarathi_tune.tune.outside.running import RunningBudget
from sarathi_tune.tune.outside.seen import Alone
from sarathi_tune.tune.settings import TAIL, batch_context, chunk_prefix
from sarathi_tune.workload.load import load_workload
from sarathi_tune.workload.spec import Workload

#: Decodes at once when nobody says how many: no server tells its --max-num-seqs.
DEFAULT_DECODES = 16
#: Streams beside which a budget is inferred: enough to see steps, few enough to leave it nearly whole.
FEW = 4
#: Prompts of the streams, where their context doesn't matter.
SHORT_TOKENS = 64
#: Lengths on an idle server; the first one computes what a decode step of one does.
ALONE_TOKENS = (1, 64, 256, 1024, 2048, 4096, 8192, 16384)
#: The longest prompt takes about this share of the time limit, and no prompt on an idle server takes longer than that.
_LONGEST_SHARE, _ALONE_SHARE = 0.05, 0.02
#: Beyond its measured length a prompt gets dearer by this factor.
_GROWTH = 1.5
#: Opening the full batch may take this share of the time limit.
_OPENING_SHARE = 0.2
#: Prompts beside the full batch may take this share of the time limit; and how often each of them is sent at most.
_FULL_SHARE, _MOST_ROUNDS = 0.3, 5
#: The full batch alone may take this share of the time limit; more steps than these tell no more about a p99.
_PLAIN_SHARE, _MOST_PLAIN = 0.1, 200
#: Steps of an assumed budget before one is known: streams must last for this many.
_SMALLEST_BUDGET = 128
_REFINING = (0.4, 0.6, 0.85, 0.95, 1.05, 1.2, 1.6, 1.95, 2.1, 2.5, 3.5)


@dataclass(frozen=True, slots=True)
class Question:
    """What the advice is about: so many decodes at that context, chunks behind that prefix, of that workload."""

    workload: Workload
    decodes: int
    context: int
    prefix: int
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server and the user allow. `kv_tokens` None: the server doesn't say."""

    max_model_len: int
    kv_tokens: int | None
    seconds: float

    @property
    def longest_prompt(self) -> int:
        """With room for its answer and a page of margin."""
        return max(1, self.max_model_len - 8)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What a prompt takes on the idle server, from (tokens, ms) in ascending order."""

    knots: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, alone: Sequence[Alone]) -> "PromptCost":
        """From what was measured."""
        lengths = sorted({item.tokens for item in alone})
        knots: list[tuple[int, float]] = []
        for tokens in lengths:
            centre_ms = median([item.ttft_ms for item in alone if item.tokens == tokens])
            knots.append((tokens, max(centre_ms, knots[-1][1] if knots else 0.0)))
        return cls(tuple(knots))

    def ms(self, tokens: float) -> float:
        """About how long a prompt of this length takes."""
        if tokens <= self.knots[0][0]:
            return self.knots[0][1]
        for (low, low_ms), (high, high_ms) in pairwise(self.knots):
            if tokens <= high:
                return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)
        last, last_ms = self.knots[-1]
        return last_ms + _GROWTH * (tokens - last) * last_ms / last

    def tokens_within(self, limit_ms: float, most: int) -> int:
        """The longest prompt, up to `most`, that takes at most about that long."""
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.ms(middle) <= limit_ms else (low, middle - 1)
        return low


def settle(config: OutsideConfig, max_model_len: int) -> Question:
    """What is asked, with a value and an origin for everything that was left open. Raises UsageError."""
    workload = load_workload(config.workload).fit_to_context(max_model_len)
    decodes = config.max_num_seqs or DEFAULT_DECODES
    for flag, tokens in (("--context", config.context_tokens), ("--prefix", config.prefix_tokens)):
        if tokens is not None and tokens > max_model_len:
            raise UsageError(f"{flag} {tokens:,} is longer than the server's context of {max_model_len:,} tokens.")
    by_workload = f"p{TAIL * 100:g} of workload {workload.name}"
    context, prefix = config.context_tokens, config.prefix_tokens
    return Question(
        workload=workload,
        decodes=decodes,
        context=batch_context(workload, decodes) if context is None else context,
        prefix=chunk_prefix(workload) if prefix is None else prefix,
        origins={
            "max_num_seqs": "given" if config.max_num_seqs else "default; give the server's own with --max-num-seqs",
            "context": "given" if context is not None else f"mean of the batch, {by_workload}",
            "prefix": "given" if prefix is not None else f"prompt tokens before a chunk, {by_workload}",
        },
    )


def alone_limit_ms(limits: Limits) -> float:
    """On an idle server no longer prompts are tried once one took this long."""
    return _ALONE_SHARE * limits.seconds * 1e3


def longest_prompt(limits: Limits, cost: PromptCost) -> int:
    """The longest prompt worth its time, within the context and a half of the KV cache."""
    most = limits.longest_prompt
    if limits.kv_tokens is not None:
        most = min(most, max(1, limits.kv_tokens // 2))
    return cost.tokens_within(_LONGEST_SHARE * limits.seconds * 1e3, most)


def ladder(longest: int) -> list[int]:
    """Prompt lengths from 32 on, each twice the last, and the longest."""
    lengths = [1 << power for power in range(5, 20) if 1 << power < 0.8 * longest]
    return [*lengths, longest]


def refining_prompts(running: RunningBudget, decodes: int, longest: int) -> list[tuple[int, ...]]:
    """Injections that tell apart the budgets that are still believed: on both sides of multiples of it. When no prompt
    filled a step, several at once."""
    if running.is_bound:
        return [(longest,) * 2, (longest,) * 3]
    width = max(1, running.budget - decodes)
    lengths = [max(1, round(factor * width)) for factor in _REFINING]
    return [(length,) for length in lengths if length <= longest]


def full_context(question: Question, limits: Limits, cost: PromptCost, longest: int) -> tuple[int, str]:
    """The prompt length of the full batch's streams, and why it is shorter than asked (empty: it isn't)."""
    asked = max(1, min(question.context, limits.max_model_len - 300))
    by_time = cost.tokens_within(_OPENING_SHARE * limits.seconds * 1e3 / question.decodes, limits.longest_prompt)
    by_cache = asked
    if limits.kv_tokens is not None:
        by_cache = max(1, (int(0.9 * limits.kv_tokens) - longest) // question.decodes - 200)
    context = min(asked, by_time, by_cache)
    if context >= 0.9 * asked:
        return context, ""
    return context, "opening them takes too long" if by_time < by_cache else "the KV cache holds no more"


def full_prompts(
    running: RunningBudget | None, question: Question, slo_ms: float, decode_ms: float, cost: PromptCost, longest: int
) -> list[int]:
    """Prompts beside the full batch, each computed in one step: a ladder up to the least budget that is believed,
    closer around the objective, but none so large that it takes many times the objective."""
    widest = min(longest, (running.interval[0] if running else longest) - question.decodes)
    at_slo = cost.tokens_within(max(1.0, slo_ms - decode_ms), max(1, widest))
    most = cost.tokens_within(4.0 * slo_ms + cost.ms(1), max(1, widest))
    around = [round(at_slo * factor) for factor in (0.6, 0.8, 1.0, 1.25, 1.6)]
    lengths = {*ladder(max(1, most))[::2], *around, most}
    return sorted(length for length in lengths if 16 <= length <= most)


def affordable_rounds(lengths: Sequence[int], step_ms: float, pause: int, cost: PromptCost, limits: Limits) -> int:
    """How often each prompt can be sent beside the full batch; once in any case."""
    round_ms = sum((pause + 2) * step_ms + cost.ms(length) for length in lengths)
    return max(1, min(_MOST_ROUNDS, int(_FULL_SHARE * limits.seconds * 1e3 / max(1.0, round_ms))))


def full_plain_steps(least: int, step_ms: float, limits: Limits) -> int:
    """Decode steps of the full batch before the first prompt: the p99 of the advice comes from their scatter."""
    return max(least, min(_MOST_PLAIN, int(_PLAIN_SHARE * limits.seconds * 1e3 / max(1.0, step_ms))))


def stream_tokens(num_plain: int, prompts: Sequence[int], budget: int | None, pause: int, limits: Limits) -> int:
    """How many tokens a stream must have to outlast its scene: plain steps, pauses, and the steps of all prompts."""
    width = max(16, (budget or _SMALLEST_BUDGET) // 2)
    steps = num_plain + sum(pause + 4 + -(-length // width) for length in prompts)
    return max(8, min(2 * steps + 64, limits.max_model_len // 2))


def in_turns(lengths: Sequence[int], rounds: int, seed: int) -> list[int]:
    """Each length once per round, in another order every time."""
    order: list[int] = []
    for turn in range(rounds):
        shuffled = list(lengths)
        random.Random(f"{seed}/{turn}").shuffle(shuffled)
        order += shuffled
    return order
