"""The terms that a step's time is a sum of, and which of them a profile can tell apart.

    step_ms = host + linear(tokens) + a * sum(decode context) + c * decodes
              + b * sum(max(chunk, query_block) * (prefix + chunk / 2)) + fixed cost of a chunk + fixed cost of a mix

Every coefficient is non-negative, so a step never gets cheaper by growing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from sarathi_tune.engine.plan import StepShape

TermName = Literal[
    "host", "tokens", "hinge", "stair", "ramp", "context", "decodes", "attention", "chunk_fixed", "mix_fixed"
]

#: Token counts closer than this ratio are one knot: the curve can't be told apart from noise between them.
KNOT_RATIO = 1.25
#: Two token counts closer than this are neighbours of a tile edge, measured to find a stair.
NEIGHBOUR_RATIO = 1.125
#: More hinges than this describe noise.
MAX_KNOTS = 10


@dataclass(frozen=True, slots=True)
class Term:
    """One column of the design. `at` and `to` are token counts:

    hinge   max(0, tokens - at)              the slope grows from `at` on (weights stream until there, arithmetic after)
    stair   1 if tokens > at                 one more GEMM tile, or no CUDA graph of that size
    ramp    (tokens - at) / (to - at), 0..1  a rise between two knots that does not go on
    *_fixed 1 from the first chunk token on (at = 0), or rising until the chunk has `at` tokens
    attention: a chunk narrower than `at` (the attention kernel's query block) costs as much as one of `at` tokens
    """

    name: TermName
    at: int = 0
    to: int = 0

    def value(self, load: Load) -> float:
        """The term's factor for one step, in its own unit (tokens, keys, steps)."""
        match self.name:
            case "host":
                return 1.0
            case "tokens":
                return float(load.tokens)
            case "hinge":
                return float(max(0, load.tokens - self.at))
            case "stair":
                return 1.0 if load.tokens > self.at else 0.0
            case "ramp":
                return min(1.0, max(0.0, (load.tokens - self.at) / (self.to - self.at)))
            case "context":
                return float(load.context_sum)
            case "decodes":
                return float(load.decodes)
            case "attention":
                return sum(max(count, self.at) * (prefix + 0.5 * count) for prefix, count in load.chunks)
            case "chunk_fixed":
                return _onset(load.chunk_tokens, self.at)
            case "mix_fixed":
                return _onset(load.chunk_tokens, self.at) if load.decodes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The term as it stands in a document."""
        return {"name": self.name, "at": self.at, "to": self.to}


def _onset(chunk_tokens: int, width: int) -> float:
    """0 without a chunk, then 1 at once (width 0) or rising linearly until the chunk is `width` tokens wide."""
    if not chunk_tokens:
        return 0.0
    return 1.0 if not width else min(1.0, chunk_tokens / width)


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows an engine computes a step with: above `exact` tokens the next multiple of `multiple`. A GEMM whose
    rows come in blocks takes as long for 257 tokens as for 264, and a curve through 264 would make 257 too cheap."""

    exact: int = 0
    multiple: int = 1

    def of(self, tokens: int) -> int:
        """The rows of a step of so many tokens."""
        return tokens if tokens <= self.exact else -(-tokens // self.multiple) * self.multiple


EXACT = Rows()


@dataclass(frozen=True, slots=True)
class Load:
    """What the terms read from a step. `tokens` counts the rows that are filled up, too."""

    tokens: int
    decodes: int
    context_sum: int
    chunk_tokens: int
    chunks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shape: StepShape, rows: Rows = EXACT) -> Load:
        """The load of a step's shape."""
        chunk_tokens = sum(count for _, count in shape.chunks)
        return cls(
            tokens=rows.of(len(shape.decode_contexts) + chunk_tokens),
            decodes=len(shape.decode_contexts),
            context_sum=sum(shape.decode_contexts),
            chunk_tokens=chunk_tokens,
            chunks=shape.chunks,
        )


@dataclass(frozen=True, slots=True)
class Observation:
    """One timed shape as the fit sees it: its load, its centre in milliseconds, the times behind it and the standard
    error of the centre relative to it (0 when unknown). `pooled_error` is that error too, where there are too few times
    for one from how the profile's other rows scatter: what a comparison of two rows has to allow for."""

    load: Load
    centre_ms: float
    label: str = ""
    times_ms: tuple[float, ...] = field(default=(), repr=False)
    relative_error: float = 0.0
    pooled_error: float = 0.0

    @property
    def has_spread(self) -> bool:
        """Whether there are enough times to say how they scatter."""
        return len(self.times_ms) > 2

    def ratios(self) -> list[float]:
        """Each time over the centre, the deviations widened by sqrt(n / (n - 1)), what a median of n times hides of
        their spread; empty without a spread."""
        if not self.has_spread:
            return []
        n = len(self.times_ms)
        widen = math.sqrt(n / (n - 1))
        return [1.0 + (time / self.centre_ms - 1.0) * widen for time in self.times_ms]


def merged_knots(token_counts: Iterable[int], ratio: float = KNOT_RATIO) -> list[int]:
    """Ascending token counts with at least `ratio` between neighbours; the larger ones of a cluster go."""
    kept: list[int] = []
    for count in sorted(set(token_counts)):
        if not kept or count >= kept[-1] * ratio:
            kept.append(count)
    return kept


def find_stairs(rows: Sequence[Observation], noise: float = 0.0) -> list[int]:
    """Token counts behind which a step was *measured* to jump: the last count on the lower tread, ascending.

    Two rows are compared when they differ in tokens only (same context and prefix, and either the same decodes or no
    chunk) and lie within `NEIGHBOUR_RATIO`. A jump is a rise that proportional growth can't explain, above the noise.
    """
    stairs: set[int] = set()
    ordered = sorted(rows, key=lambda row: row.load.tokens)
    for index, low in enumerate(ordered):
        for high in ordered[index + 1 :]:
            growth = high.load.tokens / low.load.tokens - 1.0
            if growth <= 0.0 or growth + 1.0 > NEIGHBOUR_RATIO or not _differ_in_tokens_only(low.load, high.load):
                continue
            spread = 3.0 * math.hypot(low.pooled_error, high.pooled_error)
            if high.centre_ms / low.centre_ms - 1.0 > 0.05 + 1.5 * growth + max(spread, noise):
                stairs.add(low.load.tokens)
            break
    return sorted(stairs)


def _differ_in_tokens_only(low: Load, high: Load) -> bool:
    if bool(low.chunks) != bool(high.chunks):
        return False
    if not low.chunks:
        return low.context_sum * high.decodes == high.context_sum * low.decodes
    same_decodes = low.decodes == high.decodes and low.context_sum == high.context_sum
    return same_decodes and [prefix for prefix, _ in low.chunks] == [prefix for prefix, _ in high.chunks]


def candidate_terms(
    rows: Sequence[Observation],
    *,
    stairs: Sequence[int],
    graph_limit: int | None = None,
    query_block: int = 0,
    chunk_onset: int = 0,
    mix_onset: int = 0,
) -> list[Term]:
    """The terms that these rows could tell apart, most basic first.

    Hinges need two measured token counts above them, so that the last slope never hangs on one row. Ramps (a rise that
    ends) are offered only to rich profiles. Where a stair was measured, every token count may be a hinge.
    """
    counts = sorted({row.load.tokens for row in rows})
    knots = counts if stairs else merged_knots(counts)
    hinges = _thinned(knots[1:-2], MAX_KNOTS)
    terms = [Term("host"), Term("tokens")]
    terms += [Term("hinge", at) for at in hinges]
    terms += [Term("stair", at) for at in stairs]
    if graph_limit and counts and counts[0] <= graph_limit < counts[-1] and graph_limit not in stairs:
        terms.append(Term("stair", graph_limit))
    if len(rows) >= 20:
        corners = [0, *_thinned(merged_knots(counts), MAX_KNOTS)]
        terms += [Term("ramp", low, high) for low, high in pairwise(corners) if low]
    terms += [Term("context"), Term("decodes"), Term("attention", query_block)]
    terms += [Term("chunk_fixed", chunk_onset), Term("mix_fixed", mix_onset)]
    return terms


def _thinned(values: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the values, evenly spread over their ranks, the ends kept."""
    if len(values) <= limit:
        return list(values)
    step = (len(values) - 1) / (limit - 1)
    return sorted({values[round(index * step)] for index in range(limit)})
