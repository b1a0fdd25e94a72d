"""Which budgets are run for a recommendation: the advised one, and smaller ones while the load breaks the objective."""

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.by_budget import BudgetRun
from sarathi_tune.report.result import Advice

#: Each costs a start of the server and a run.
MOST_TRIES = 3
#: A smaller budget aims this far below the objective: what has just missed it was aimed at the objective itself.
_AIM = 0.9


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


def next_try(advice: Advice, slo: Slo, run: BudgetRun) -> int | None:
    """The smaller budget that a run's gaps call for; None when they meet the objective, or none is small enough.

    A step's time over that of its decodes alone is about proportional to its chunk.
    """
    decode, smallest, tokens = advice.decode_step, advice.smallest_tokens, run.budget_tokens
    point = run.verification.point if run.verification else None
    if run.verdict != "missed" or point is None or decode is None or smallest is None or tokens is None:
        return None
    seen_ms = max(point.report.itl.tail_ms or 0.0, point.report.itl_stalled.tail_ms or 0.0)
    if seen_ms <= slo.itl_ms or tokens <= smallest:
        return None
    share = max(0.0, _AIM * slo.itl_ms - decode.step_ms) / (seen_ms - decode.step_ms)
    return max(smallest, decode.decodes + int(share * (tokens - decode.decodes)))
