"""At which rate the advice is verified: one at which the very requests of the run don't queue up."""

from dataclasses import replace

import pytest

from sarathi_tune.goodput.surface import Scenario, predict_requests
from sarathi_tune.goodput.verification import VERIFY_SHARE, plan_verification
from sarathi_tune.tune import predicting
from sarathi_tune.tune.predicting import working_rate
from tests.goodput.scenes import exact_model, scene

BUDGET, WINDOW_S = 256, 30.0


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    """Prompts of 400 tokens in the middle and 2,000 at p99: what a short window holds varies."""
    return scene(exact_model(), "chat-small")


def waiting_ms(played: Scenario, rate_per_s: float) -> float:
    plan = plan_verification(rate_per_s, played.workload, seconds=WINDOW_S, max_seconds=2 * WINDOW_S)
    requests, _ = plan.requests(
        played.workload, played.seed, vocab_size=None, max_model_len=played.config.max_model_len
    )
    delay_ms = predict_requests(played, BUDGET, requests, plan.window_s).report.scheduling_delay.p50_ms
    assert delay_ms is not None
    return delay_ms


@pytest.mark.parametrize("seed", range(6))
def test_the_requests_of_the_run_do_not_queue_up(scenario: Scenario, seed: int) -> None:
    played = replace(scenario, seed=seed)
    saturation = predicting.saturation_rate(played, BUDGET)
    # Far too high a capacity: at 0.8 of it the queue grows, whatever the seed draws.
    rate = working_rate(played, 1.5 * saturation, BUDGET, WINDOW_S)
    assert rate < VERIFY_SHARE * 1.5 * saturation
    assert waiting_ms(played, rate) <= 2000.0
    # Not lower than need be: a fifth more does queue up.
    assert waiting_ms(played, 1.2 * rate) > 2000.0
    # And a rate that is quiet already stays as it is.
    assert working_rate(played, 0.3 * saturation, BUDGET, WINDOW_S) == pytest.approx(VERIFY_SHARE * 0.3 * saturation)
