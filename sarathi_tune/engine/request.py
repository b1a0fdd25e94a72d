"""A request and how far it has come.

There is no prefill phase and no decode phase: `num_computed` catches up with the tokens a request has. A request whose
only uncomputed token is the one it sampled last is *decoding*; every other running request is *prefilling* (a preempted
one that has output and must be recomputed included).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class RequestState(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; `seed` makes sampling repeatable per request."""

    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One request in the engine. Mutable; only the engine and its scheduler change it.

    `request_id` is unique within an engine. `arrival_s` is the intended arrival on the engine's clock.
    `pages[i]` holds the K and V of tokens `i * page_tokens` to `(i + 1) * page_tokens - 1`.
    """

    request_id: int
    prompt: Sequence[int]
    max_output_tokens: int
    arrival_s: float = 0.0
    sampling: Sampling = Sampling()
    stop_token_ids: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length in tokens."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens the request has: prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def max_tokens(self) -> int:
        """Tokens whose K and V the request can ever need: the last sampled token is never computed."""
        return len(self.prompt) + self.max_output_tokens - 1

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the next step computes just the token sampled last."""
        return bool(self.output) and self.num_uncomputed == 1

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.state in (RequestState.FINISHED, RequestState.ABORTED)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens `start` to `stop - 1` of prompt and output together."""
        boundary = len(self.prompt)
        ids = list(self.prompt[start : min(stop, boundary)])
        if stop > boundary:
            ids.extend(self.output[max(0, start - boundary) : stop - boundary])
        return ids
