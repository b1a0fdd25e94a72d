"""Which budgets are run for a recommendation, on cases worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.by_budget import BudgetRun
from sarathi_tune.report.result import Advice, CurvePoint, LimitingStep
from sarathi_tune.tune.launching.tries import first_try, next_try

SLO = Slo(itl_ms=120.0)
DECODE = LimitingStep(32, 800, 0, 0, 40.0, 110.0)
SMALLEST = LimitingStep(32, 800, 16, 752, 45.0, 125.0)
ADVICE = Advice("infeasible", "", 32, smallest_tokens=48, decode_step=DECODE, limiting=SMALLEST)


def seen(
    budget: int | None, itl_ms: float, stalled_ms: float | None, verdict: str = "missed", ttft_ms: float = 900.0
) -> BudgetRun:
    report = SimpleNamespace(
        itl=SimpleNamespace(tail_ms=itl_ms),
        itl_stalled=SimpleNamespace(tail_ms=stalled_ms),
        ttft=SimpleNamespace(tail_ms=ttft_ms),
    )
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
    ("runs", "budget"),
    [
        # 128 tokens typically take 100 ms and took 150; 108 ms is then a typical step of 72: 12 / 40 of the way to 128
        ([seen(128, 150.0, 140.0)], 83),
        ([seen(128, 150.0, None)], 83),
        ([seen(128, 140.0, 150.0)], 83),
        # a typical step of 10 ms is less than the decodes alone take
        ([seen(128, 1080.0, 1080.0)], 48),
        ([seen(48, 150.0, 170.0)], None),
        ([seen(128, 119.0, 118.0)], None),
        ([seen(128, 150.0, 150.0, "inconclusive")], None),
        ([seen(None, 150.0, 170.0)], None),
        # 48 tokens typically take 50 ms and took 60: 108 is then one of 90, 64 + 64 * 30 / 40
        ([seen(48, 60.0, 60.0, "met")], 112),
        # between the two: 108 is 48 / 70 of the way from 60 to 130
        ([seen(48, 60.0, 60.0, "met"), seen(112, 130.0, 130.0)], 91),
        ([seen(128, 150.0, 150.0), seen(64, 60.0, 60.0, "met")], 98),
        # as a vLLM had it: 68 + 142 * 40.6 / 92.6, where the typical steps called for 79
        ([seen(68, 67.4, 67.6, "met"), seen(210, 160.0, 164.0)], 127),
        # a start is worth 15 % more tokens, 74 and not 73
        ([seen(80, 130.0, 130.0), seen(64, 60.0, 60.0, "met")], 74),
        ([seen(77, 130.0, 130.0), seen(64, 60.0, 60.0, "met")], None),
        # half-way to one that missed something else
        ([seen(48, 60.0, 60.0, "met"), seen(112, 90.0, 90.0), seen(60, 60.0, 60.0, "met")], 86),
        # too close to the objective, and the smaller of the two the worse
        ([seen(48, 110.0, 110.0, "met"), seen(112, 130.0, 130.0)], None),
        ([seen(48, 130.0, 130.0), seen(64, 60.0, 60.0, "met")], None),
        ([seen(112, 108.0, 108.0, "met")], None),
        # beyond the curve
        ([seen(128, 20.0, 20.0, "met")], 256),
    ],
)
def test_the_next_try(runs: list[BudgetRun], budget: int | None) -> None:
    curve = tuple(
        CurvePoint(tokens, step_ms, 3 * step_ms) for tokens, step_ms in ((64, 60.0), (128, 100.0), (256, 180.0))
    )
    assert next_try(replace(ADVICE, curve=curve), SLO, runs) == budget


@pytest.mark.parametrize(
    ("runs", "budget"),
    [
        # the gaps leave room: 108 is a typical step of 90 where 50 took 60, and the first tokens come sooner there
        ([seen(48, 60.0, 60.0, ttft_ms=3000.0)], 112),
        # the gaps are at the objective already
        ([seen(112, 108.0, 108.0, ttft_ms=3000.0)], None),
        # both are missed: the gaps decide, although a smaller budget makes the first tokens later still
        ([seen(128, 150.0, 140.0, ttft_ms=3000.0)], 83),
        # 48 was too late and 112 too slow: 91 is between them
        ([seen(48, 60.0, 60.0, ttft_ms=3000.0), seen(112, 130.0, 130.0, ttft_ms=800.0)], 91),
        # what else was missed isn't mended by a budget
        ([seen(48, 60.0, 60.0, ttft_ms=800.0)], None),
    ],
)
@pytest.mark.parametrize("advised", [None, 48])
def test_a_budget_that_misses_its_ttft_alone_is_too_small(
    runs: list[BudgetRun], budget: int | None, advised: int | None
) -> None:
    curve = (CurvePoint(64, 60.0, 180.0), CurvePoint(128, 100.0, 300.0), CurvePoint(256, 180.0, 540.0))
    advice = replace(ADVICE, curve=curve, budget_tokens=advised)
    assert next_try(advice, Slo(itl_ms=120.0, ttft_ms=1000.0), runs) == budget


def test_an_advised_budget_that_meets_the_objective_is_good_enough() -> None:
    curve = (CurvePoint(64, 60.0, 70.0), CurvePoint(256, 180.0, 200.0))
    advice = replace(ADVICE, verdict="recommended", budget_tokens=64, curve=curve)
    assert next_try(advice, SLO, [seen(64, 60.0, 60.0, "met")]) is None


def test_no_try_follows_a_server_that_failed() -> None:
    assert next_try(ADVICE, SLO, [BudgetRun(272, (), "log", failure="it died")]) is None
