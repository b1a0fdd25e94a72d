"""The token budget that a server runs with, from how it cut prompts.

With budget C beside d decodes a prompt of L tokens takes ceil(L / (C - d)) steps, full ones and a rest, and the last of
them brings its first token. So each candidate C says which step held which tokens; one smooth price of tokens must then
explain the times of all steps of all prompts. The candidate that explains them best is the budget, and those that
explain them nearly as well are its interval. A budget that no prompt filled is only bounded from below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sarathi_tune.stats import median
from sarathi_tune.stepmodel.nonnegative import nonnegative_solution
from sarathi_tune.tune.outside.steps import Injection

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Chunks = tuple[tuple[int, int], ...]

#: Where the price of a token may rise: weights stream until there, arithmetic decides after.
_HINGES = (32, 128, 512, 2048, 8192)
#: A step's time is believed to within this share of it, and never better than this many milliseconds (the client's own
#: part of a gap): what lies far outside counts like any outlier.
_RELATIVE, _LEAST_MS = 0.04, 0.3
#: The price of tokens isn't smooth to the last per cent (tiles, pages), so that an interval is never closer than this.
_SMOOTH = 0.01
#: A step of this many decode steps' time has prompt tokens in it.
_STALLED = 1.5
#: A step this many times further off than it is believed to be holds something else.
_STRANGE = 6.0
#: What a step costs a candidate that needs one more or fewer than there were, in squared errors of that size.
_MISCOUNT = 25.0
#: Candidates lie this far apart at first; between the best ones every token count is tried, or this many.
_COARSE, _FINE = 1.03, 60
_ROUNDS = 3
#: The chi-square of one degree of freedom that 95 % stay below.
_CHI2 = 3.84
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class RunningBudget:
    """The budget that the server seems to run with, in tokens, decodes included. With `is_bound` no step was full and
    the budget is at least that; the interval's upper end is then None. `error` is the median relative misfit of the
    steps with prompt tokens, `num_full` how many steps were full, `miscounted` the share of injections that took more
    or fewer steps than this budget would make of them."""

    budget: int
    interval: tuple[int, int | None]
    is_bound: bool
    error: float
    num_full: int
    num_injections: int
    miscounted: float


def infer_budget(injections: Sequence[Injection]) -> RunningBudget | None:
    """The budget that explains the injections best; None when there is none to explain."""
    injections = [item for item in injections if item.steps]
    if not injections:
        return None
    least = 1 + max(item.decodes for item in injections)
    # one step takes it all: any larger budget does the same
    most = max(item.num_tokens + item.decodes for item in injections)
    costs: dict[int, float] = {}

    def cost(budget: int) -> float:
        if budget not in costs:
            costs[budget] = _Rows(injections, budget).cost()
        return costs[budget]

    coarse = sorted({*_geometric(least, most), *(edge for edge in _edges(injections) if least <= edge <= most)})
    best = min(coarse, key=cost)
    # several valleys can be about as deep: the rest of a prompt fits into more than one
    for valley in sorted(coarse, key=cost)[:4]:
        low, high = max(least, int(valley / _COARSE)), min(most, math.ceil(valley * _COARSE))
        for budget in range(low, high + 1, max(1, (high - low) // _FINE)):
            best = min(best, budget, key=cost)
    rows = _Rows(injections, best)
    # the noise is at least what is believed of a step, and more where even the best candidate leaves more
    limit = costs[best] + _CHI2 * max(1.0, costs[best] / max(1, len(rows.rows) - len(_HINGES)))
    believed = sorted(budget for budget, value in costs.items() if value <= limit)
    is_bound = cost(most) <= limit
    low, high = min(believed), max(believed)
    if is_bound:
        best = low = _joined_from(sorted(costs), set(believed), most)
    else:
        low, high = max(least, math.floor(low * (1.0 - _SMOOTH))), math.ceil(high * (1.0 + _SMOOTH))
        best = roundest(value for value in range(low, high + 1) if _cut_alike(injections, value, best))
    rows = _Rows(injections, best)
    return RunningBudget(
        budget=best,
        interval=(low, None if is_bound else high),
        is_bound=is_bound,
        error=rows.error(),
        num_full=rows.num_full,
        num_injections=len(injections),
        miscounted=rows.num_miscounted() / len(injections),
    )


def roundest(values: Iterable[int]) -> int:
    """Among budgets that explain the same equally well, the one that a person would set: the fewest digits that count,
    in twos or in tens (2048, 600, 96), and of those the one nearest to the middle."""
    candidates = sorted(values)
    middle = (candidates[0] + candidates[-1]) / 2
    return min(candidates, key=lambda value: (_digits_that_count(value), abs(value - middle)))


def _digits_that_count(value: int) -> int:
    """What is left of a number without the twos, or without the tens, whichever is less."""
    odd = value // (value & -value)
    while value % 10 == 0:
        value //= 10
    return min(odd, value)


def _cut_alike(injections: Sequence[Injection], budget: int, other: int) -> bool:
    """Whether two budgets make as many steps of every injection. A budget that doesn't isn't equally good, even where
    their chunks are as long to a per cent: how many steps there were is counted, not timed."""
    return all(_num_steps(item, budget) == _num_steps(item, other) for item in injections)


def _num_steps(item: Injection, budget: int) -> int:
    return -(-item.num_tokens // (budget - item.decodes))


def chunks_of(prompts: Iterable[int], width: int) -> list[Chunks]:
    """How prompts that came together are cut into steps of `width` prompt tokens: per step the (prefix, count) of each
    prompt in it, first come first served."""
    steps: list[list[tuple[int, int]]] = []
    room = 0
    for tokens in prompts:
        done = 0
        while done < tokens:
            if room == 0:
                steps.append([])
                room = width
            count = min(room, tokens - done)
            steps[-1].append((done, count))
            done, room = done + count, room - count
    return [tuple(step) for step in steps]


@dataclass(frozen=True, slots=True)
class _Row:
    """A step under a candidate: its time, that of a decode step of just then, and what it held if that is right."""

    injection: int
    duration_ms: float
    plain_ms: float
    chunks: Chunks

    @property
    def sigma_ms(self) -> float:
        """How closely the step is believed."""
        return max(_LEAST_MS, _RELATIVE * max(self.duration_ms, self.plain_ms))


class _Rows:
    """The steps of all injections under one candidate."""

    def __init__(self, injections: Sequence[Injection], budget: int) -> None:
        self.rows: list[_Row] = []
        self.num_full = 0
        self.missing: dict[int, int] = {}
        for index, item in enumerate(injections):
            width = budget - item.decodes
            cut = chunks_of(item.prompts, width)
            self.num_full += sum(sum(count for _, count in chunks) == width for chunks in cut)
            self.missing[index] = max(0, len(cut) - len(item.steps))
            held: list[Chunks] = [()] * (len(item.steps) - len(cut)) + cut
            for step, chunks in zip(item.steps, held[len(held) - len(item.steps) :], strict=True):
                self.rows.append(_Row(index, step.duration_ms, item.plain_ms, chunks))
        self.residuals = self._scaled_residuals()

    def cost(self) -> float:
        """Squared misfit in units of what is believed, far outliers damped."""
        misfit = sum(4.0 * math.log1p(residual * residual / 4.0) for residual in self.residuals)
        return misfit + _MISCOUNT * sum(self.missing.values())

    def error(self) -> float:
        """Median relative misfit of the steps that have prompt tokens in them, or look like it."""
        return median(
            [
                abs(residual) * row.sigma_ms / row.duration_ms
                for residual, row in zip(self.residuals, self.rows, strict=True)
                if row.chunks or row.duration_ms > _STALLED * row.plain_ms
            ]
        )

    def num_miscounted(self) -> int:
        """Injections of which steps are missing, or at least two don't look like what they should hold: a step of its
        own accord does that once."""
        strange = dict(self.missing)
        for residual, row in zip(self.residuals, self.rows, strict=True):
            strange[row.injection] += abs(residual) > _STRANGE
        return sum(count >= 2 for count in strange.values())

    def _scaled_residuals(self) -> list[float]:
        """Fit one price of tokens to all steps; outliers lose their weight round by round."""
        import numpy as np

        extra = np.array([row.duration_ms - row.plain_ms for row in self.rows])
        sigma = np.array([row.sigma_ms for row in self.rows])
        scaled, target = np.array([_terms(row.chunks) for row in self.rows]) / sigma[:, None], extra / sigma
        scaled = scaled / (np.sqrt((scaled**2).sum(axis=0)) + 1e-12)
        weight = np.ones(len(extra))
        residual = target
        for _ in range(_ROUNDS):
            gram = (scaled * weight[:, None]).T @ scaled + 1e-9 * np.eye(scaled.shape[1])
            solution, _ = nonnegative_solution(gram, (scaled * weight[:, None]).T @ target)
            residual = target - scaled @ solution
            weight = 1.0 / (1.0 + residual**2 / 4.0)
        return [float(value) for value in residual]


def _terms(chunks: Chunks) -> list[float]:
    """What a step with these chunks may cost: a fixed part, tokens, dearer tokens, and the keys that they see."""
    tokens = sum(count for _, count in chunks)
    keys = sum(count * (prefix + count / 2) for prefix, count in chunks)
    return [1.0 if tokens else 0.0, float(tokens), *(float(max(0, tokens - hinge)) for hinge in _HINGES), keys]


def _geometric(low: int, high: int) -> Iterator[int]:
    value = low
    while value < high:
        yield value
        value = max(value + 1, int(value * _COARSE))
    yield high


def _edges(injections: Iterable[Injection]) -> Iterator[int]:
    """The smallest budgets that compute each prompt in as many steps as it stalled: prompts of about a step's length,
    or a multiple, lie on both sides of the budget within a few tokens, where a coarse candidate cuts most of them
    otherwise than they were."""
    for item in injections:
        stalled = sum(step.duration_ms > _STALLED * item.plain_ms for step in item.steps)
        yield -(-item.num_tokens // max(1, stalled)) + item.decodes


def _joined_from(tried: Sequence[int], believed: set[int], most: int) -> int:
    """The smallest candidate from which on all that were tried up to `most` are believed."""
    lowest = most
    for budget in reversed(tried):
        if budget not in believed:
            break
        lowest = budget
    return lowest
