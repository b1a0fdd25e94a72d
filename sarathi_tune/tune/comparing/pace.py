"""The steady load, sized for the machine: prompts that take about half of the time, and answers that outlast them."""

import math
from dataclasses import dataclass

from sarathi_tune.config.compare import SteadyConfig
from sarathi_tune.engine.plan import StepShape
from sarathi_tune.report.comparison import BudgetedStep
from sarathi_tune.stepmodel.fit import StepModel
from sarathi_tune.tune.comparing.load import PROMPT_ANSWER_TOKENS, STREAM_PROMPT_TOKENS, SteadyPace

#: A prompt arrives every so many times what computing it takes beside the answers: the paper's servers are about half
#: busy with prefill when they are near their capacity.
PACE = 2.2
#: But there is a prompt in so many steps, so that a scheduler that stops all answers for each of them does so to more
#: than 1 % of their gaps: else its p99 would lie among undisturbed steps, at the edge of the stalls, and say nothing.
#: Where chunks alone take more steps, prompts come nearly one behind the other.
STEPS_PER_PROMPT, LEAST_PACE = 50, 1.2
#: When the first prompt may come, in paces behind the answers' start.
FIRST_ARRIVAL = (0.15, 0.6)
#: The answers run longer than the prompts need, by this factor.
OUTLAST = 1.05
#: The prompt when none is given: long, and in reach of small models.
DEFAULT_PROMPT_TOKENS = 2000


def default_prompt_tokens(max_model_len: int) -> int:
    """A long prompt that leaves room in the model's context."""
    return min(DEFAULT_PROMPT_TOKENS, max(1, max_model_len // 2 - PROMPT_ANSWER_TOKENS))


@dataclass(frozen=True, slots=True)
class Pacer:
    """Step times of `streams` answers at `context` keys, alone and with chunks, under one budget."""

    model: StepModel
    streams: int
    context: int
    budget_tokens: int
    loop_ms: float

    @property
    def decode_step_ms(self) -> float:
        """A step of the answers alone."""
        return self.model.predict_ms(StepShape((self.context,) * self.streams)) + self.loop_ms

    @property
    def start_ms(self) -> float:
        """The step that computes the prompts of all answers at once."""
        shape = StepShape((), ((0, STREAM_PROMPT_TOKENS),) * self.streams)
        return self.model.predict_ms(shape) + self.loop_ms

    def prefill(self, prompt_tokens: int) -> tuple[int, float]:
        """(steps, ms) that a prompt takes in chunks beside the answers."""
        chunk = max(1, self.budget_tokens - self.streams)
        steps, total_ms = 0, 0.0
        for start in range(0, prompt_tokens, chunk):
            shape = StepShape((self.context,) * self.streams, ((start, min(chunk, prompt_tokens - start)),))
            total_ms += self.model.predict_ms(shape) + self.loop_ms
            steps += 1
        return steps, total_ms

    def budgeted_step(self, prompt_tokens: int, longest_context: int) -> BudgetedStep:
        """The longest step that the budget allows: all answers at their longest context, and beside them a full chunk
        at the end of a prompt, where it sees most keys."""
        chunk = min(prompt_tokens, max(1, self.budget_tokens - self.streams))
        prefix = prompt_tokens - chunk
        shape = StepShape((longest_context,) * self.streams, ((prefix, chunk),))
        return BudgetedStep(
            decodes=self.streams,
            context=longest_context,
            chunk=chunk,
            prefix=prefix,
            p50_ms=self.model.predict_ms(shape) + self.loop_ms,
            p99_ms=self.model.quantile_ms(shape, 0.99) + self.loop_ms,
        )


def settle_pace(steady: SteadyConfig, pacer: Pacer, prompt_tokens: int) -> SteadyPace:
    """The steady load with what was left open."""
    steps, prefill_ms = pacer.prefill(prompt_tokens)
    often_ms = prefill_ms + (STEPS_PER_PROMPT - steps) * pacer.decode_step_ms
    every_s = steady.every_s or max(LEAST_PACE * prefill_ms, min(PACE * prefill_ms, often_ms)) / 1e3
    tokens = answer_tokens(pacer, (steps, prefill_ms), every_s, steady.num_prompts)
    return SteadyPace(
        streams=steady.streams,
        answer_tokens=tokens,
        prompt_tokens=prompt_tokens,
        every_s=every_s,
        num_prompts=steady.num_prompts,
        first_s=_first_arrival((pacer.start_ms + tokens * pacer.decode_step_ms) / 1e3, every_s),
    )


def _first_arrival(end_s: float, every_s: float) -> float:
    """Seconds to the first prompt.

    A batch that takes no prompt before its end (decode-first) and ends at `end_s` does so as far from every arrival as
    may be: else a few percent of a machine's speed would decide whether a prompt catches it.
    """
    low, high = FIRST_ARRIVAL
    steps = 20
    candidates = [every_s * (low + (high - low) * step / steps) for step in range(steps + 1)]
    return max(candidates, key=lambda first_s: min((end_s - first_s) % every_s, (first_s - end_s) % every_s))


def answer_tokens(pacer: Pacer, prefill: tuple[int, float], every_s: float, num_prompts: int) -> int:
    """Tokens that an answer gets while `num_prompts` prompts come and are computed, one every `every_s` seconds."""
    steps, prefill_ms = prefill
    whole_ms = max((num_prompts + 0.5) * every_s * 1e3, num_prompts * prefill_ms)
    alone = (whole_ms - num_prompts * prefill_ms) / pacer.decode_step_ms
    return max(2, math.ceil(OUTLAST * (alone + num_prompts * steps)))


def mean_context(answer: int) -> int:
    """Keys of a running answer in the middle of it."""
    return STREAM_PROMPT_TOKENS + answer // 2
