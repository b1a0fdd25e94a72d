"""What one step computes: a slice of tokens per request, decodes first, and the shape that its cost depends on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sarathi_tune.engine.request import Request


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` tokens of one request, starting behind the `start` tokens that are already in the KV cache.

    `samples` is true when the slice ends at the request's last token, so that a next token is sampled; the slice of a
    chunk that isn't the last one samples nothing.
    """

    request: Request
    start: int
    count: int
    is_decode: bool
    samples: bool

    @property
    def stop(self) -> int:
        """Tokens in the KV cache once the step is done: the key length of this slice's attention."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that a step's cost depends on. `decode_contexts`: keys per decode, the new token included;
    `chunks`: (prefix tokens already in the cache, chunk tokens) per prefill chunk."""

    decode_contexts: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def num_decodes(self) -> int:
        """Running decodes, one token each."""
        return len(self.decode_contexts)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens computed in the step."""
        return sum(count for _, count in self.chunks)

    @property
    def num_tokens(self) -> int:
        """All tokens of the step: what vLLM's budget limits."""
        return self.num_decodes + self.num_prefill_tokens


@dataclass(frozen=True, slots=True)
class Swap:
    """A transfer of a request's K and V between the cache and host memory, done before the step is computed.

    `out` copies `pages` to the host, `in` fills `pages` (in the request's order) from what was copied out, `drop`
    forgets the copy of a request that ended meanwhile.
    """

    direction: Literal["out", "in", "drop"]
    request_id: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The slices of one step, and the swaps to be done before, in order. An executor never gets an empty plan."""

    slices: tuple[Slice, ...]
    swaps: tuple[Swap, ...] = ()

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)

    @property
    def num_tokens(self) -> int:
        """All tokens of the step."""
        return sum(piece.count for piece in self.slices)

    @property
    def shape(self) -> StepShape:
        """The step's shape, for the step model and the log."""
        return StepShape(
            decode_contexts=tuple(piece.stop for piece in self.slices if piece.is_decode),
            chunks=tuple((piece.start, piece.count) for piece in self.slices if not piece.is_decode),
        )
