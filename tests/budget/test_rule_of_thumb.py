"""The three steps on published numbers."""

import math

import pytest

from sarathi_tune.budget.rule_of_thumb import rule_of_thumb
from sarathi_tune.stepmodel.fit import fit_step_model
from tests.profiles import hand_written, published


def test_h100_llama3_8b_by_hand() -> None:
    profile = published("h100-llama3-8b")
    rule = rule_of_thumb(profile, fit_step_model(profile), 32, 1024)
    assert rule.prefill_ms_per_token == pytest.approx(0.0212, abs=5e-5)  # 43.51 ms / 2048
    assert rule.budget_tokens == pytest.approx(8.34 / 0.0212, abs=1)
    assert math.isnan(rule.additive_bias)
    assert rule.as_dict()["additive_bias"] is None


def test_the_sum_is_held_against_a_measured_hybrid_step() -> None:
    profile = published("sarathi-hybrid")
    rule = rule_of_thumb(profile, fit_step_model(profile), 4, 1024)
    assert rule.budget_tokens == round(68.1 / (217.24 / 1024))
    assert "overstates the measured hybrid steps by 31%" in rule.steps[2]


def test_a_batch_that_was_not_measured_is_fitted_and_said_to_be() -> None:
    profile = published("infeasible-4090")
    rule = rule_of_thumb(profile, fit_step_model(profile), 48, 1024)
    assert 23.9 < rule.decode_step_ms < 29.3  # between 32 and 64 decodes
    assert rule.decode_source.startswith("fitted")


def test_without_a_pure_prefill_row() -> None:
    rows = [
        ((8, 1024, 0, 0), 12.0),
        ((8, 1024, 504, 0), 62.4),
        ((8, 1024, 1016, 0), 113.6),
        ((8, 1024, 2040, 0), 216.0),
    ]
    profile = hand_written(rows)
    rule = rule_of_thumb(profile, fit_step_model(profile), 8, 1024)
    assert rule.prefill_ms_per_token == pytest.approx(0.1, rel=0.1)
    assert rule.prefill_source.startswith("fitted")
