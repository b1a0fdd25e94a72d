"""Which budgets are run for a recommendation: the advised one, then what its gaps under load call for."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.by_budget import BudgetRun
from sarathi_tune.report.result import Advice

#: Each costs a start of the server and a run.
MOST_TRIES = 3
#: Another budget aims this far below the objective: the one before it was aimed at the objective itself, and missed.
_AIM = 0.9
#: A larger budget isn't worth a try unless it is larger by this share.
_WORTH = 0.15


def first_try(advice: Advice, slo: Slo) -> int | None:
    """The budget that is run first: the advised one, or the fit's own where that is too uncertain to be advised.

    Where the tail of the measured steps leaves room for neither, the smallest one if its typical step meets the
    objective: the tail may have been the machine's. None when not even that does.
    """
    if advice.budget_tokens is not None:
        return advice.budget_tokens
    if advice.fitted_tokens is not None:
        return advice.fitted_tokens
    limiting = advice.limiting
    may_meet = advice.verdict in ("infeasible", "inconclusive") and limiting is not None
    return advice.smallest_tokens if may_meet and limiting and limiting.step_ms <= slo.itl_ms else None


def next_try(advice: Advice, slo: Slo, tried: Sequence[BudgetRun]) -> int | None:
    """The budget that the gaps of those before call for; None when the last is good enough, or none is left.

    Between one whose gaps met the objective and one whose gaps missed it, the gaps of the two say where it lies. With
    no more than one of the kinds, how far the last one's gaps at the objective's percentile lay over its typical step
    is taken to be the same for other budgets. A budget that was advised and meets the objective is good enough; one
    that was only tried may be too small, and so is one that missed nothing but the time to the first token.
    """
    last, smallest = tried[-1], advice.smallest_tokens
    tokens, seen_ms = last.budget_tokens, _seen_ms(last)
    steps = _typical_steps(advice)
    if tokens is None or smallest is None or not seen_ms or len(steps) < 2:
        return None
    if last.verdict not in ("met", "missed") or (last.verdict == "met" and advice.budget_tokens is not None):
        return None
    if last.verdict == "missed" and seen_ms <= slo.itl_ms and not _misses_ttft_alone(last, slo):
        return None
    judged = [(run, run.verdict == "met" or _misses_ttft_alone(run, slo)) for run in tried]
    within = max((run for run, is_within in judged if is_within), key=_tokens, default=None)
    missed = (run for run, is_within in judged if run.verdict == "missed" and not is_within)
    beyond = min(missed, key=_tokens, default=None)
    aim_ms = _AIM * slo.itl_ms
    if within is not None and beyond is not None:
        budget = _between_two(within, beyond, aim_ms)
    else:
        budget = _crossing(steps, aim_ms * _between(steps, tokens) / seen_ms)
        if within is None:
            budget = max(smallest, min(budget, tokens - 1))
            return budget if budget < tokens else None
    return budget if budget >= (1.0 + _WORTH) * _tokens(within) else None


def _misses_ttft_alone(run: BudgetRun, slo: Slo) -> bool:
    """Whether the gaps met the objective and the first tokens came too late."""
    point = run.verification.point if run.verification else None
    if point is None or slo.ttft_ms is None or run.verdict != "missed" or (_seen_ms(run) or 0.0) > slo.itl_ms:
        return False
    return (point.report.ttft.tail_ms or 0.0) > slo.ttft_ms


def _tokens(run: BudgetRun) -> int:
    return run.budget_tokens or 0


def _between_two(within: BudgetRun, beyond: BudgetRun, aim_ms: float) -> int:
    """Where the line through the gaps of both is at `aim_ms`; half-way where they don't rise from one to the other."""
    low, high = _tokens(within), _tokens(beyond)
    low_ms, high_ms = _seen_ms(within) or 0.0, _seen_ms(beyond) or 0.0
    if not low_ms < aim_ms < high_ms:
        return low if aim_ms <= low_ms else (low + high) // 2
    return int(low + (high - low) * (aim_ms - low_ms) / (high_ms - low_ms))


def _seen_ms(run: BudgetRun) -> float | None:
    """The worse of a run's two views of its gaps, at the objective's percentile."""
    point = run.verification.point if run.verification else None
    if point is None:
        return None
    return max(point.report.itl.tail_ms or 0.0, point.report.itl_stalled.tail_ms or 0.0)


def _typical_steps(advice: Advice) -> list[tuple[int, float]]:
    """(budget, typical time of its largest step in ms), ascending in both, from the decodes alone on."""
    steps = [(advice.decode_step.decodes, advice.decode_step.step_ms)] if advice.decode_step else []
    for point in advice.curve:
        if not steps or (point.budget_tokens > steps[-1][0] and point.step_ms > steps[-1][1]):
            steps.append((point.budget_tokens, point.step_ms))
    return steps


def _between(steps: Sequence[tuple[int, float]], tokens: int) -> float:
    """The typical step of a budget, by lines between the known ones and on from the last two."""
    at = min(max(1, bisect_right(steps, (tokens, float("inf")))), len(steps) - 1)
    (low, low_ms), (high, high_ms) = steps[at - 1], steps[at]
    return low_ms + (tokens - low) * (high_ms - low_ms) / (high - low)


def _crossing(steps: Sequence[tuple[int, float]], step_ms: float) -> int:
    """The budget whose typical step takes so long, by the same lines; no larger than the largest known one."""
    for (low, low_ms), (high, high_ms) in pairwise(steps):
        if step_ms < high_ms:
            return max(0, int(low + (step_ms - low_ms) * (high - low) / (high_ms - low_ms)))
    return steps[-1][0]
