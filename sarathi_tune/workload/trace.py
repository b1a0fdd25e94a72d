"""A recorded trace as a workload: its requests in the order and with the lengths in which they came.

Traces hold lengths and, where prompts share beginnings, ids of equal blocks; never texts. So prompts are random tokens
here as well, and equal block ids give equal tokens: a prefix cache finds what it would have found then.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sarathi_tune.errors import UsageError
from sarathi_tune.notices import Notice, trace_rows_skipped

#: Token ids of prompts that nothing computes.
_UNREAD_VOCABULARY = 32_768
#: Kinds of random text, so that a request's own tokens never equal a block's.
_BLOCK, _OWN = 3, 4


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request. `at_s` counts from the first one, None where the trace has no times. `blocks` are ids of
    the prompt's blocks, in order: requests that have one in common have its tokens in common."""

    at_s: float | None
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The requests of a trace, in order of their times; at least one. `notices` say what was left out on the way."""

    format: str
    file_name: str
    rows: tuple[TraceRow, ...]
    block_tokens: int = 512
    notices: tuple[Notice, ...] = ()

    @property
    def has_times(self) -> bool:
        """Whether the requests can be replayed at the times they came."""
        return self.rows[0].at_s is not None

    @property
    def shares_prompts(self) -> bool:
        """Whether prompts have blocks in common."""
        return any(row.blocks for row in self.rows)

    @property
    def lap_s(self) -> float:
        """From the first request to where the trace can begin again: its length and one mean gap. 0 without times."""
        if not self.has_times:
            return 0.0
        span_s = (self.rows[-1].at_s or 0.0) - (self.rows[0].at_s or 0.0)
        return span_s * len(self.rows) / (len(self.rows) - 1) if len(self.rows) > 1 else span_s

    def fit(self, name: str, max_tokens: int) -> "Trace":
        """The trace without the requests that are longer than `max_tokens`. A shortened request would be another one.

        Raises UsageError when more than half of them would go.
        """
        rows = tuple(row for row in self.rows if row.prompt_tokens + row.output_tokens <= max_tokens)
        skipped = len(self.rows) - len(rows)
        if not skipped:
            return self
        if skipped > len(self.rows) / 2:
            raise UsageError(
                f"Workload {name!r} doesn't fit the model's context of {max_tokens} tokens: {skipped:,} of its "
                f"{len(self.rows):,} requests are longer, prompt and answer together; choose another trace or a model "
                "with a longer context."
            )
        return replace(
            self, rows=rows, notices=(*self.notices, trace_rows_skipped(skipped, len(self.rows), max_tokens))
        )

    def at(self, level: float) -> tuple[int, int]:
        """(prompt, output) tokens of the request whose prompt is longer than a share `level` of the others'."""
        rows = _by_prompt(self)
        row = rows[min(len(rows) - 1, int(level * len(rows)))]
        return row.prompt_tokens, row.output_tokens

    def as_dict(self) -> dict[str, Any]:
        """The trace as it stands in a result document."""
        return {
            "format": self.format,
            "file": self.file_name,
            "requests": len(self.rows),
            "rate_per_s": len(self.rows) / self.lap_s if self.lap_s else None,
            "block_tokens": self.block_tokens if self.shares_prompts else None,
        }

    def row(self, index: int) -> TraceRow:
        """Request number `index`; behind the last one the trace begins again."""
        return self.rows[index % len(self.rows)]

    def until(self, end_s: float) -> int:
        """How many requests come within the first `end_s` seconds."""
        assert self.has_times, "a trace without times isn't replayed"
        first_s = self.rows[0].at_s or 0.0
        return bisect_left(self.rows, end_s, key=lambda row: (row.at_s or 0.0) - first_s)

    def times(self, count: int) -> tuple[float, ...]:
        """When the first `count` requests come, in seconds from the first of them."""
        assert self.has_times, "a trace without times isn't replayed"
        first_s, size = self.rows[0].at_s or 0.0, len(self.rows)
        return tuple(
            (self.rows[index % size].at_s or 0.0) - first_s + index // size * self.lap_s for index in range(count)
        )

    def times_at(self, rate_per_s: float, count: int) -> tuple[float, ...]:
        """The same pattern stretched so that `count` requests come in count / rate seconds."""
        recorded_s = self.times(count + 1)
        if not recorded_s[-1]:
            raise UsageError(f"The first {count:,} requests of {self.file_name} came all at once: they have no rate.")
        stretch = count / rate_per_s / recorded_s[-1]
        return tuple(time_s * stretch for time_s in recorded_s[:-1])

    def prompts(self, seed: int, first: int, count: int, vocab_size: int | None) -> list[Sequence[int]]:
        """Token ids of `count` prompts from number `first` on. Another lap, and another seed, has other blocks."""
        texts = _Texts(seed, vocab_size or _UNREAD_VOCABULARY)
        return [self._prompt(texts, index) for index in range(first, first + count)]

    def _prompt(self, texts: "_Texts", index: int) -> Sequence[int]:
        row, lap = self.row(index), index // len(self.rows)
        prompt = array("i")
        for block in row.blocks[: -(-row.prompt_tokens // self.block_tokens)]:
            prompt += texts.block(lap, block, self.block_tokens)
        del prompt[row.prompt_tokens :]
        if len(prompt) < row.prompt_tokens:
            prompt += texts.draw((_OWN, index), row.prompt_tokens - len(prompt))
        return prompt


@lru_cache(maxsize=8)
def _by_prompt(trace: Trace) -> tuple[TraceRow, ...]:
    return tuple(sorted(trace.rows, key=lambda row: (row.prompt_tokens, row.output_tokens)))


class _Texts:
    """Random token ids; a block's are drawn once."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed & 0xFFFFFFFF
        self._vocab_size = vocab_size
        self._blocks: dict[tuple[int, int], array[int]] = {}

    def block(self, lap: int, block: int, count: int) -> "array[int]":
        if (lap, block) not in self._blocks:
            self._blocks[lap, block] = self.draw((_BLOCK, lap, block & 0xFFFFFFFF, block >> 32 & 0xFFFFFFFF), count)
        return self._blocks[lap, block]

    def draw(self, key: tuple[int, ...], count: int) -> "array[int]":
        import numpy as np  # here, because `derive` starts without it

        ids = np.random.default_rng([self._seed, *key]).integers(0, self._vocab_size, count, dtype=np.int32)
        return array("i", ids.tobytes())
