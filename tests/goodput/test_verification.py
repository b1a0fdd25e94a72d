"""How a verifying run is laid out."""

import pytest

from sarathi_tune.goodput.verification import plan_verification
from sarathi_tune.workload.load import load_workload


def test_a_comfortable_rate_takes_the_time_asked() -> None:
    plan = plan_verification(4.0, load_workload("fixed:100:33"), seconds=20)
    assert plan.rate_per_s == pytest.approx(4.0)
    assert plan.window_s == pytest.approx(20)
    assert plan.num_requests == 80
    assert plan.expected_gaps == pytest.approx(80 * 32)
    assert plan.notices == ()


def test_a_low_rate_makes_the_run_longer() -> None:
    plan = plan_verification(0.4, load_workload("fixed:100:33"), seconds=20, max_seconds=60, min_requests=12)
    assert plan.window_s == pytest.approx(30)
    assert plan.num_requests == 12


def test_a_very_low_rate_is_said() -> None:
    plan = plan_verification(0.01, load_workload("fixed:100:33"), seconds=20, max_seconds=60)
    assert plan.num_requests == 1
    assert [notice.code for notice in plan.notices] == ["short-verification"]


def test_the_requests_offer_exactly_the_rate() -> None:
    plan = plan_verification(0.77, load_workload("chat-small"), seconds=20)
    requests, draw = plan.requests(load_workload("chat-small"), 1, vocab_size=100, max_model_len=2048)
    assert len(requests) == plan.num_requests == len(draw.requests)
    assert plan.num_requests / plan.window_s == pytest.approx(plan.rate_per_s)
    assert all(item.at_s is not None and 0 <= item.at_s < plan.window_s for item in requests)
