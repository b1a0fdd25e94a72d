"""Which budgets are run for a recommendation, on cases worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.by_budget import BudgetRun
from sarathi_tune.report.result import Advice, LimitingStep
from sarathi_tune.tune.launching.tries import first_try, next_try

SLO = Slo(itl_ms=120.0)
DECODE = LimitingStep(32, 800, 0, 0, 40.0, 110.0)
SMALLEST = LimitingStep(32, 800, 16, 752, 45.0, 125.0)
ADVICE = Advice("infeasible", "", 32, smallest_tokens=48, decode_step=DECODE, limiting=SMALLEST)


def seen(budget: int | None, itl_ms: float, stalled_ms: float | None, verdict: str = "missed") -> BudgetRun:
    report = SimpleNamespace(itl=SimpleNamespace(tail_ms=itl_ms), itl_stalled=SimpleNamespace(tail_ms=stalled_ms))
    run = SimpleNamespace(
        budget_tokens=budget, verdict=verdict, verification=SimpleNamespace(point=SimpleNamespace(report=report))
    )
    return cast(BudgetRun, run)


@pytest.mark.parametrize(
    ("advice", "budget"),
    [
        (replace(ADVICE, verdict="recommended", budget_tokens=111), 111),
        (replace(ADVICE, verdict="not-binding", budget_tokens=4096), 4096),
        (replace(ADVICE, verdict="inconclusive", fitted_tokens=68), 68),
        # the tail leaves no room, the typical step does
        (ADVICE, 48),
        (replace(ADVICE, verdict="inconclusive"), 48),
        # not even the typical step
        (replace(ADVICE, limiting=replace(SMALLEST, step_ms=121.0)), None),
        (replace(ADVICE, verdict="not-the-budget"), None),
        (replace(ADVICE, limiting=None), None),
    ],
)
def test_the_first_try(advice: Advice, budget: int | None) -> None:
    assert first_try(advice, SLO) == budget


@pytest.mark.parametrize(
    ("run", "budget"),
    [
        # 0.9 * 120 - 40 = 68 ms for a chunk of which 240 took 170 - 40 = 130: 32 + 125
        (seen(272, 150.0, 170.0), 157),
        (seen(272, 170.0, None), 157),
        # (108 - 40) / (1,040 - 40) of 68 is 4, and 48 the smallest
        (seen(100, 1040.0, 1040.0), 48),
        (seen(48, 150.0, 170.0), None),
        (seen(272, 119.0, 118.0), None),
        (seen(272, 119.0, 118.0, "met"), None),
        (seen(272, 150.0, 170.0, "inconclusive"), None),
        (seen(None, 150.0, 170.0), None),
    ],
)
def test_the_next_try(run: BudgetRun, budget: int | None) -> None:
    assert next_try(ADVICE, SLO, run) == budget


def test_no_try_follows_a_server_that_failed() -> None:
    assert next_try(ADVICE, SLO, BudgetRun(272, (), "log", failure="it died")) is None
