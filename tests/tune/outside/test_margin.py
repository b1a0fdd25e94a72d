"""The steps of a steady load beside the worst step."""

import pytest

from sarathi_tune.budget.question import BudgetQuestion
from sarathi_tune.stepmodel.fit import fit_step_model
from sarathi_tune.tune.outside.margin import margin, steady_decodes
from sarathi_tune.workload.load import load_workload
from tests.profiles import cpu_like, measured

PROMPTS, ANSWERS = load_workload("fixed:768:64"), load_workload("fixed:64:768")


def test_decodes_of_a_steady_load_by_hand() -> None:
    """120 tokens a step: 9 decodes leave 111 for prompts, 0.1445 prompts a step, which decode for 63 steps: 9.1."""
    assert steady_decodes(PROMPTS, 120, 32) == 9
    assert steady_decodes(PROMPTS, 2048, 32) == 32


def test_a_load_of_prompts_leaves_a_margin() -> None:
    model = fit_step_model(measured(cpu_like, noise=0.01, repeats=5, seed=1))
    question = BudgetQuestion(30.0, decodes=32, context=800, prefix=700)
    found = margin(model, question, PROMPTS, 128)
    assert found is not None
    assert found.decodes == 10
    # 9 + 0.11 * (128 - 24) + 10 * (0.05 + 0.048) + 3e-6 * 118 * (700 + 59), and p99 of 1 % noise
    assert found.step_ms == pytest.approx(21.7, rel=0.06)
    assert found.largest_budget > 128


def test_a_load_of_answers_leaves_none() -> None:
    model = fit_step_model(measured(cpu_like, noise=0.01, repeats=5, seed=1))
    assert margin(model, BudgetQuestion(30.0, decodes=32, context=800), ANSWERS, 128) is None
