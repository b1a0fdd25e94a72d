"""A workload: how long prompts and outputs are, and the requests drawn from it.

The same seed gives the same requests, at any rate and for any budget, so that two runs differ in one thing only.
Statistics (means, quantiles) come from one fixed, evenly spread set of pairs of levels, so that they include every
clamp and cost no randomness.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any

from sarathi_tune.errors import UsageError
from sarathi_tune.notices import Notice, prompts_clamped
from sarathi_tune.workload.lengths import Empirical, Fixed, Lengths
from sarathi_tune.workload.sharing import Message, Sharing, conversation_prompts
from sarathi_tune.workload.trace import Trace

_GRID = 4096
#: Points by which the distribution of a trace or a mixture is described.
_QUANTILES = 512
#: No two prompts of a draw share their first page; 16 is the smallest page the engine is used with.
_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request to be sent: the prompt's token ids and exactly how many tokens it must answer with.

    A prompt drawn without a vocabulary is a `range`: it has a length, and nothing may compute it.
    """

    request_id: int
    prompt: Sequence[int]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Prompt length in tokens."""
        return len(self.prompt)


@dataclass(frozen=True, slots=True)
class Draw:
    """Requests of one seed. `num_clamped` of them were shortened because the model's context is too small for the
    distribution's tail; `notices` says so."""

    requests: tuple[RequestSpec, ...]
    num_clamped: int = 0
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Length distributions in tokens. `total_cap` limits prompt plus output of every request: the prompt is shortened
    first, and the output only where it alone would break the cap.

    `prompt` is what a request adds; where prompts share a prefix or a conversation (`sharing`), that stands before it.
    With `parts`, each request comes from one of them, as often as its share says; with a `trace`, requests are the
    recorded ones. `prompt` and `output` are then the distributions that come of it.
    """

    name: str
    prompt: Lengths
    output: Lengths
    total_cap: int | None = None
    description: str = ""
    provenance: str = ""
    sharing: Sharing = field(default_factory=Sharing)
    parts: tuple[tuple[float, "Workload"], ...] = ()
    trace: Trace | None = None

    @property
    def shares_prompts(self) -> bool:
        """Whether a prefix cache finds something of one prompt in another."""
        return not self.sharing.is_none or (self.trace is not None and self.trace.shares_prompts)

    def fit_to_context(self, max_model_len: int) -> "Workload":
        """This workload under the model's context length.

        Raises UsageError when the median prompt doesn't fit beside the shortest output: more than half of the prompts
        would be cut, and what is left isn't this workload. Requests of a trace are never cut; those that don't fit are
        left out.
        """
        if self.trace is not None:
            trace = self.trace.fit(self.name, max_model_len)
            return self if trace is self.trace else of_trace(trace, self.name, self.description, self.provenance)
        median = self._history_tokens((self.sharing.turns - 1) / 2) + self.prompt.quantile(0.5)
        shortest = self.output.shortest
        if self.total_cap is not None:
            median = min(median, max(1, self.total_cap - shortest))
        if median + shortest > max_model_len:
            raise UsageError(
                f"Workload {self.name!r} doesn't fit the model's context of {max_model_len} tokens: half of its "
                f"prompts have {median} tokens or more, beside at least {shortest} of output; choose a workload with "
                f"shorter prompts (for example fixed:{max(1, max_model_len // 2)}:{max(1, max_model_len // 8)}) or a "
                "model with a longer context."
            )
        cap = max_model_len if self.total_cap is None else min(self.total_cap, max_model_len)
        return replace(self, total_cap=cap)

    def lengths_at(self, prompt_level: float, output_level: float, turn: int = 0) -> tuple[int, int]:
        """(prompt, output) tokens of the request at these quantile levels, the total cap applied. Behind `turn` earlier
        turns it repeats as much as they have on average. A trace has whole requests, in the order of their prompts."""
        if self.trace is not None:
            return self.trace.at(prompt_level)
        if self.parts:
            prompt_level, part = _part(self.parts, prompt_level)
            prompt, output = part.lengths_at(prompt_level, output_level)
        else:
            prompt, output = self.prompt.quantile(prompt_level), self.output.quantile(output_level)
            prompt += self._history_tokens(turn)
        if self.total_cap is not None and prompt + output > self.total_cap:
            output = min(output, self.total_cap - 1)
            prompt = min(prompt, self.total_cap - output)
        return prompt, output

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt length, caps included."""
        return sum(prompt for prompt, _ in _pairs(self)) / _GRID

    @property
    def mean_output_tokens(self) -> float:
        """Mean output length, caps included."""
        return sum(output for _, output in _pairs(self)) / _GRID

    @property
    def mean_decode_context_tokens(self) -> float:
        """Mean number of keys that a decode sees, over all decodes: long answers count for every token they have."""
        decodes = sum(output - 1 for _, output in _pairs(self))
        keys = sum((output - 1) * (prompt + output / 2) for prompt, output in _pairs(self))
        return keys / decodes if decodes else self.mean_prompt_tokens

    def quantile_prompt(self, level: float) -> int:
        """The prompt length that a share `level` of the requests stays below, caps included."""
        return _rank([prompt for prompt, _ in _pairs(self)], level)

    def quantile_output(self, level: float) -> int:
        """The output length that a share `level` of the requests stays below, caps included."""
        return _rank([output for _, output in _pairs(self)], level)

    def quantile_total(self, level: float) -> int:
        """The length of prompt plus output that a share `level` of the requests stays below."""
        return _rank([prompt + output for prompt, output in _pairs(self)], level)

    def draw(self, seed: int, n: int, *, vocab_size: int | None, max_model_len: int, first_id: int = 0) -> Draw:
        """`n` requests. Their prompts are random token ids below `vocab_size`, no two with the same first page, and
        different for every seed; `vocab_size` None leaves them as ranges, for an executor that never reads a token.

        Raises UsageError when the workload doesn't fit into `max_model_len`.
        """
        fitted = self.fit_to_context(max_model_len)
        if fitted.trace is not None:
            return fitted.draw_rows(
                Random(f"{seed}/rows").randrange(len(fitted.trace.rows)), seed, n, vocab_size, first_id
            )
        if not self.sharing.is_none:
            return self._draw_shared(fitted, seed, n, vocab_size, first_id)
        levels = Random(f"{seed}/lengths")
        lengths: list[tuple[int, int]] = []
        num_clamped = 0
        for _ in range(n):
            level = _open(levels.random()), _open(levels.random())
            lengths.append(fitted.lengths_at(*level))
            num_clamped += lengths[-1] != self.lengths_at(*level)
        prompts = _ranges(lengths) if vocab_size is None else _unique_prompts(seed, lengths, vocab_size)
        notices = (prompts_clamped(self.name, num_clamped, n, max_model_len),) if num_clamped else ()
        requests = tuple(
            RequestSpec(first_id + index, prompt, output)
            for index, (prompt, (_, output)) in enumerate(zip(prompts, lengths, strict=True))
        )
        return Draw(requests, num_clamped, notices)

    def draw_rows(self, first: int, seed: int, n: int, vocab_size: int | None, first_id: int = 0) -> Draw:
        """`n` requests of the trace from its number `first` on, as they were recorded; the seed is that of the tokens.
        The workload has been fitted to the model's context."""
        trace = self.trace
        assert trace is not None, "only a trace has rows"
        requests = tuple(
            RequestSpec(first_id + index, prompt, trace.row(first + index).output_tokens)
            for index, prompt in enumerate(trace.prompts(seed, first, n, vocab_size))
        )
        return Draw(requests, notices=trace.notices)

    def _history_tokens(self, turns: float) -> int:
        """Tokens before what a request adds: the prefix, and so many earlier turns of average length."""
        if self.sharing.is_none:
            return 0
        return self.sharing.prefix_tokens + round(turns * (_mean(self.prompt) + _mean(self.output)))

    def _draw_shared(self, fitted: "Workload", seed: int, n: int, vocab_size: int | None, first_id: int) -> Draw:
        """Requests whose prompts have tokens in common, of `fitted` lengths."""
        levels = Random(f"{seed}/lengths")
        messages = [
            Message(self.prompt.quantile(_open(levels.random())), self.output.quantile(_open(levels.random())))
            for _ in range(n)
        ]
        cap, own_cap = fitted.total_cap, self.total_cap
        assert cap is not None, "a fitted workload has a cap"
        messages = [Message(message.own, min(message.answer, cap - 1)) for message in messages]
        prompts, num_cut = conversation_prompts(seed, self.sharing, messages, vocab_size, cap)
        # a cut by the workload's own cap is part of the workload
        num_clamped = num_cut if own_cap is None or own_cap > cap else 0
        notices = (prompts_clamped(self.name, num_clamped, n, cap),) if num_clamped else ()
        requests = tuple(
            RequestSpec(first_id + index, prompt, message.answer)
            for index, (prompt, message) in enumerate(zip(prompts, messages, strict=True))
        )
        return Draw(requests, num_clamped, notices)

    def as_dict(self) -> dict[str, Any]:
        """The workload as it stands in a result document."""
        levels = (0.5, 0.9, 0.99)
        return {
            "name": self.name,
            "description": self.description,
            "provenance": self.provenance,
            "total_cap_tokens": self.total_cap,
            "shared_prefix_tokens": self.sharing.prefix_tokens,
            "num_prefixes": self.sharing.num_prefixes if self.sharing.prefix_tokens else 0,
            "turns": self.sharing.turns,
            "mean_prompt_tokens": round(self.mean_prompt_tokens, 1),
            "mean_output_tokens": round(self.mean_output_tokens, 1),
            "prompt_tokens": {f"p{level * 100:g}": self.quantile_prompt(level) for level in levels},
            "output_tokens": {f"p{level * 100:g}": self.quantile_output(level) for level in levels},
            **({"mix": {part.name: share for share, part in self.parts}} if self.parts else {}),
            **({"trace": self.trace.as_dict()} if self.trace is not None else {}),
        }


def of_trace(trace: Trace, name: str, description: str = "", provenance: str = "") -> Workload:
    """A trace as a workload."""
    prompts, outputs = (
        Empirical(points=_points(sorted(lengths)))
        for lengths in zip(*((row.prompt_tokens, row.output_tokens) for row in trace.rows), strict=True)
    )
    return Workload(name, prompts, outputs, None, description, provenance, trace=trace)


def mixed(
    name: str, parts: tuple[tuple[float, Workload], ...], description: str = "", provenance: str = ""
) -> Workload:
    """Several workloads at once, each with its share of the requests."""
    whole = sum(share for share, _ in parts)
    parts = tuple((share / whole, part) for share, part in parts)
    blank = Workload(name, Fixed(tokens=1), Fixed(tokens=1), parts=parts)
    prompts, outputs = (Empirical(points=_points(sorted(lengths))) for lengths in zip(*_pairs(blank), strict=True))
    return Workload(name, prompts, outputs, None, description, provenance, parts=parts)


def _part(parts: tuple[tuple[float, Workload], ...], level: float) -> tuple[float, Workload]:
    """The part that a level falls to, and the level within that part."""
    low = 0.0
    for share, part in parts[:-1]:
        if level < low + share:
            return _open((level - low) / share), part
        low += share
    share, part = parts[-1]
    return min(1.0 - 2.0**-53, _open((level - low) / share)), part


def _points(lengths: list[int]) -> tuple[tuple[float, float], ...]:
    """The quantile function of sorted lengths, by at most a few hundred of them."""
    last = len(lengths) - 1
    if not last:
        return ((0.0, lengths[0]), (1.0, lengths[0]))
    count = min(last, _QUANTILES)
    return tuple((index / count, lengths[round(index / count * last)]) for index in range(count + 1))


@lru_cache(maxsize=32)
def _pairs(workload: Workload) -> tuple[tuple[int, int], ...]:
    """(prompt, output) at the points of a Hammersley set: even in both levels, and the levels independent."""
    bits = _GRID.bit_length() - 1
    turns = workload.sharing.turns
    return tuple(
        workload.lengths_at((index + 0.5) / _GRID, (int(f"{index:0{bits}b}"[::-1], 2) + 0.5) / _GRID, index % turns)
        for index in range(_GRID)
    )


@lru_cache(maxsize=32)
def _mean(lengths: Lengths) -> float:
    return sum(lengths.quantile((index + 0.5) / _GRID) for index in range(_GRID)) / _GRID


def _rank(values: list[int], level: float) -> int:
    values.sort()
    return values[min(len(values) - 1, int(level * len(values)))]


def _open(level: float) -> float:
    """Keep 0 out: the normal quantile of 0 is minus infinity."""
    return level or 2.0**-53


def _ranges(lengths: list[tuple[int, int]]) -> list[Sequence[int]]:
    """Ranges that share no token, so that even a prefix cache would find nothing."""
    prompts: list[Sequence[int]] = []
    start = 0
    for prompt_tokens, _ in lengths:
        prompts.append(range(start, start + prompt_tokens))
        start += prompt_tokens
    return prompts


def _unique_prompts(seed: int, lengths: list[tuple[int, int]], vocab_size: int) -> list[Sequence[int]]:
    import numpy as np  # here, because `derive` starts without it

    assert vocab_size >= 2, "prompts of a one-token vocabulary can't differ"
    rng = np.random.default_rng([seed & 0xFFFFFFFF, 0x5A2A7A1])
    seen: set[bytes] = set()
    prompts: list[Sequence[int]] = []
    for prompt_tokens, _ in lengths:
        page = b""
        while not page or page in seen:
            ids = rng.integers(0, vocab_size, prompt_tokens, dtype=np.int32)
            page = ids[:_PAGE_TOKENS].tobytes()
            if prompt_tokens < _PAGE_TOKENS:  # never fills a page, so nothing of it can be found in a cache
                break
        seen.add(page)
        prompts.append(array("i", ids.tobytes()))
    return prompts
