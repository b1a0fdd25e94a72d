"""Budgets side by side: what is said of the runs."""

import io

from rich.console import Console

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.by_budget import BudgetComparison, BudgetRun, Recommendation
from sarathi_tune.goodput.verified import Verification
from sarathi_tune.notices import Notice, close_call, few_repeats, profile_without_repeats
from sarathi_tune.report.by_budget import print_budgets

SLO = Slo(itl_ms=120.0)


def run(budget: int | None, *notices: Notice) -> BudgetRun:
    verification = Verification("http://here/v1", SLO, "met", "all well", notices=notices)
    return BudgetRun(budget, ("vllm",), "log", 1.0, verification)


def test_a_warning_says_which_budget_it_is_about() -> None:
    about = Recommendation(58, "recommended", "because", None, notices=(few_repeats(20).as_dict(),))
    runs = (run(None, close_call(0.3)), run(58), run(127, close_call(0.66), profile_without_repeats()))
    text = io.StringIO()
    print_budgets(BudgetComparison("vllm", "m", SLO, runs, about), Console(file=text, width=500))
    warnings = " ".join(text.getvalue().partition("Warnings")[2].split())
    close = "A repetition of this run would meet the objective with a probability of about 66%."
    assert f"With 127, and likewise with default: {close}" in warnings
    assert "30%" not in warnings, "the last of several like it is told"
    assert "With 127: The profile has no repeated times" in warnings
    assert warnings.startswith("The spread of step times rests on 20 repeats"), "the recommendation's are of no run"
