"""Budgets as steps: what the step at a budget costs, and the searches over budgets, batches and chunks.

Everything here leans on one property of the step model: a step never gets cheaper by growing. So each search is a
bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sarathi_tune.stepmodel.model import StepModel

#: Without a known context limit, budgets up to this many times the largest measured step are considered.
BEYOND_MEASURED = 16


def largest_where(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest n in [low, high] for which `holds`, given that it holds up to some n and not beyond; else None."""
    if high < low or not holds(low):
        return None
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Steps:
    """Hybrid steps of `decodes` decodes at `context` keys beside one chunk, under one model.

    The chunk lies behind `prefix` tokens, or behind fewer where a chunk of its width could not: prefix + chunk is at
    most `max_model_len`. `widest_chunk` is a whole prompt of that length.
    """

    model: StepModel
    decodes: int
    context: int
    prefix: int
    percentile: float
    max_model_len: int | None = None
    #: Times of decode-only steps that were measured, by (decodes, context); they stand before the model's.
    measured_decodes: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @property
    def widest_chunk(self) -> int:
        """The widest chunk a step can hold."""
        if self.max_model_len is not None:
            return self.max_model_len
        return BEYOND_MEASURED * max(self.model.measured_tokens, default=1)

    def prefix_of(self, chunk: int) -> int:
        """The prefix that a chunk of this width can have."""
        return self.prefix if self.max_model_len is None else min(self.prefix, max(0, self.max_model_len - chunk))

    def centre_ms(self, chunk: int) -> float:
        """Typical time of the step with this chunk; 0 is the decode-only step, as measured where it was."""
        if chunk <= 0 and (measured := self.measured_decodes.get((self.decodes, self.context))) is not None:
            return measured
        chunks = ((self.prefix_of(chunk), chunk),) if chunk > 0 else ()
        return self.model.centre_ms(self.decodes, self.decodes * self.context, chunks)

    def p99_ms(self, chunk: int) -> float:
        """The step's time at the percentile."""
        return self.centre_ms(chunk) * self.model.spread.ratio(chunk > 0, self.percentile)

    def worst_ms(self, chunk: int) -> float:
        """The slower of the hybrid and the decode-only step at the percentile: both occur, both must hold."""
        return max(self.p99_ms(chunk), self.p99_ms(0))

    def widest_within(self, limit_ms: float) -> int | None:
        """The widest chunk whose step, and the decode-only step, stay within the limit; None if not even one token."""
        return largest_where(lambda chunk: self.worst_ms(chunk) <= limit_ms, 1, self.widest_chunk)

    def useful_chunk(self, least: int, share: float) -> int:
        """The narrowest chunk worth a step: at least `least` tokens, and prompts computed at `share` of the best rate
        (tokens per ms) of any measured width beside these decodes."""
        widest = max(1, min(self.widest_chunk, max(self.model.measured_tokens, default=1)))
        least = min(least, self.widest_chunk)
        widths = _geometric(least, max(least, widest))
        rates = [width / max(self.centre_ms(width), 1e-9) for width in widths]
        wanted = share * max(rates)
        first = next(index for index, rate in enumerate(rates) if rate >= wanted)
        if first == 0:
            return widths[0]
        below = largest_where(
            lambda width: width / max(self.centre_ms(width), 1e-9) < wanted, widths[first - 1], widths[first]
        )
        return (below or widths[first - 1]) + 1

    def widest_serial_chunk(self, limit_ms: float, least: int) -> int | None:
        """The widest chunk that may run *between* two decode steps: decode step plus chunk within the limit."""
        ratio = self.model.spread.ratio(True, self.percentile)
        left_ms = limit_ms - self.p99_ms(0)

        def fits(chunk: int) -> bool:
            return self.model.centre_ms(0, 0, ((self.prefix_of(chunk), chunk),)) * ratio <= left_ms

        return largest_where(fits, min(least, self.widest_chunk), self.widest_chunk)


def _geometric(low: int, high: int) -> list[int]:
    """Token counts from low to high, each about a fifth above the last, both ends included."""
    widths = [low]
    while widths[-1] < high:
        widths.append(min(high, max(widths[-1] + 1, int(widths[-1] * 1.2))))
    return widths
