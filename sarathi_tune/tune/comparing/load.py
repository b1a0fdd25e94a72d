"""The requests that every scheduler gets: running answers with long prompts beside them, or a workload."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sarathi_tune.errors import UsageError
from sarathi_tune.loadgen.inprocess import TimedRequest, timed
from sarathi_tune.notices import Notice
from sarathi_tune.workload.arrivals import poisson_exactly
from sarathi_tune.workload.lengths import Fixed
from sarathi_tune.workload.spec import Draw, Workload

#: Prompt of a running answer: short, so that the start costs little.
STREAM_PROMPT_TOKENS = 64
#: What a long prompt answers: enough to be a decode for a while.
PROMPT_ANSWER_TOKENS = 16
#: Answers of steady load start with ids from here on, so that prompts have the small ones.
_FIRST_STREAM_ID = 1_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with their times. `judged` are those whose TTFT counts: those that arrive while others run.

    `facts` says in the document what it is.
    """

    requests: tuple[TimedRequest, ...]
    judged: frozenset[int]
    facts: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()

    @property
    def arrivals_s(self) -> tuple[float, ...]:
        """When the judged requests are sent."""
        return tuple(item.at_s or 0.0 for item in self.requests if item.spec.request_id in self.judged)

    def num_pages(self, page_tokens: int) -> int:
        """Pages that hold every request at once: nothing is ever preempted with so many."""
        return sum(-(-(item.spec.prompt_tokens + item.spec.output_tokens) // page_tokens) for item in self.requests)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(item.spec.prompt_tokens for item in self.requests)

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer of the longest request."""
        return max(item.spec.prompt_tokens + item.spec.output_tokens for item in self.requests)


@dataclass(frozen=True, slots=True)
class SteadyPace:
    """The steady load with every value settled. The first prompt arrives after `first_s` seconds."""

    streams: int
    answer_tokens: int
    prompt_tokens: int
    every_s: float
    num_prompts: int
    first_s: float


def steady_load(pace: SteadyPace, seed: int, *, vocab_size: int | None, max_model_len: int) -> Load:
    """`streams` answers from second 0 on, and a long prompt every `every_s` seconds.

    Raises UsageError when a request doesn't fit the model's context.
    """
    for name, tokens in (
        ("A long prompt", pace.prompt_tokens + PROMPT_ANSWER_TOKENS),
        ("A running answer", STREAM_PROMPT_TOKENS + pace.answer_tokens),
    ):
        if tokens > max_model_len:
            raise UsageError(
                f"{name} of this load needs {tokens:,} tokens and the model's context is {max_model_len:,}: "
                "choose shorter --prompts, a shorter --every or fewer --num-prompts."
            )
    answers = answers_alone(pace.streams, pace.answer_tokens, seed, vocab_size=vocab_size)
    prompts = _fixed(pace.prompt_tokens, PROMPT_ANSWER_TOKENS, pace.num_prompts, seed + 1, vocab_size, 0)
    times = [pace.first_s + index * pace.every_s for index in range(pace.num_prompts)]
    return Load(
        requests=(*answers.requests, *timed(prompts.requests, times)),
        judged=frozenset(request.request_id for request in prompts.requests),
        facts={
            "kind": "steady",
            "streams": pace.streams,
            "answer_tokens": pace.answer_tokens,
            "prompt_tokens": pace.prompt_tokens,
            "num_prompts": pace.num_prompts,
            "every_s": round(pace.every_s, 3),
        },
    )


def answers_alone(streams: int, tokens: int, seed: int, *, vocab_size: int | None) -> Load:
    """`streams` answers of `tokens` tokens, all from second 0 on, and nothing beside them; none is judged."""
    draw = _fixed(STREAM_PROMPT_TOKENS, tokens, streams, seed, vocab_size, _FIRST_STREAM_ID)
    return Load(timed(draw.requests, [0.0] * streams), frozenset())


def workload_load(
    workload: Workload, rate_per_s: float, count: int, seed: int, *, vocab_size: int | None, max_model_len: int
) -> Load:
    """`count` requests of a workload at Poisson times. All of them are judged."""
    draw = workload.draw(seed, count, vocab_size=vocab_size, max_model_len=max_model_len)
    return Load(
        requests=timed(draw.requests, poisson_exactly(rate_per_s, seed, count)),
        judged=frozenset(request.request_id for request in draw.requests),
        facts={"kind": "workload", "rate_per_s": rate_per_s, "num_requests": count, **workload.as_dict()},
        notices=draw.notices,
    )


def _fixed(prompt: int, output: int, count: int, seed: int, vocab_size: int | None, first_id: int) -> Draw:
    workload = Workload(f"fixed:{prompt}:{output}", Fixed(tokens=prompt), Fixed(tokens=output))
    return workload.draw(seed, count, vocab_size=vocab_size, max_model_len=prompt + output, first_id=first_id)
