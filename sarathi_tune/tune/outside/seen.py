"""What was seen from outside: stamps of tokens at the socket. Plain values, all the rest is worked out from them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SteadyStream:
    """An answer that decoded while prompts came and went. `token_s` has the stamp of every event with tokens,
    `event_tokens` how many each carried (None: the server doesn't count along)."""

    prompt_tokens: int
    token_s: tuple[float, ...]
    event_tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that asked for one token: sent, answered, and how much of it a cache knew."""

    tokens: int
    sent_s: float
    first_s: float
    cached_tokens: int | None = None

    @property
    def computed_tokens(self) -> int:
        """Tokens that the server had to compute."""
        return max(1, self.tokens - (self.cached_tokens or 0))


@dataclass(frozen=True, slots=True)
class Scene:
    """`streams` that decode together, and the injections beside them in order of time: the prompts of one injection
    were sent in the same moment. No injection is sent before the last one has been answered. `own_gap_ms`: the mean gap
    between tokens by the server's clock, of those that ended after `own_since_s`; None where it doesn't say."""

    name: str
    streams: tuple[SteadyStream, ...]
    injections: tuple[tuple[Prompt, ...], ...] = ()
    own_gap_ms: float | None = None
    own_since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Alone:
    """A prompt on an idle server: its time to the first token."""

    tokens: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that was measured, in the order in which it was."""

    alone: tuple[Alone, ...]
    scenes: tuple[Scene, ...]
