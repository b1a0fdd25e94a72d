"""Predictions over a step model that is fitted to made-up but exact step times, so that answers can be worked out."""

from dataclasses import replace

import pytest

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.surface import (
    Scenario,
    draw_requests,
    predict_capacity,
    predict_cell,
    predict_requests,
    predict_surface,
    run_virtual,
    saturation_rate,
)
from sarathi_tune.stepmodel.fit import StepModel
from sarathi_tune.workload.load import load_workload
from tests.goodput.scenes import exact_model, scene


@pytest.fixture(scope="module")
def model() -> StepModel:
    return exact_model()


@pytest.fixture
def scenario(model: StepModel) -> Scenario:
    return scene(model)


def test_a_lone_request_takes_the_time_it_must(scenario: Scenario) -> None:
    # at 1 request per 100 s nothing overlaps: 6 chunks of 64 take 6 * 84 ms, each of the 32 decodes 21 ms
    cell = predict_cell(scenario, 64, 0.01)
    assert cell.report.ttft.p50_ms == pytest.approx(6 * 84, rel=0.02)
    assert cell.report.itl.p50_ms == pytest.approx(21, rel=0.02)
    assert cell.is_met
    assert cell.mean_decodes == pytest.approx(32 / 38, rel=0.02)


def test_a_stall_is_as_long_as_the_budgets_step(scenario: Scenario) -> None:
    surface = predict_surface(scenario, (64, 256), (0.5, 1.0))
    for budget in (64, 256):
        cell = surface.cell(budget, 1.0)
        # a full step of `budget` tokens
        assert cell.report.itl_stalled.p99_ms == pytest.approx(20 + budget, rel=0.02)
        assert cell.report.itl_stalled.n > 100
    assert surface.cell(64, 1.0).is_met
    assert surface.cell(256, 1.0).misses[0].startswith("p99 ITL 27")


def test_the_criterion_decides_whether_rare_stalls_count(scenario: Scenario) -> None:
    # one stalled step in a hundred requests' worth of gaps is below 1 %
    rare = replace(scenario, criterion="pooled")
    assert predict_cell(rare, 2048, 0.02).is_met
    assert not predict_cell(scenario, 2048, 0.5).is_met
    overloaded = predict_cell(rare, 2048, 1.5)
    assert not overloaded.is_met


def test_a_ttft_objective_counts(scenario: Scenario) -> None:
    tight = replace(scenario, slo=Slo(100.0, ttft_ms=400.0))
    assert predict_cell(scenario, 64, 0.05).is_met
    missed = predict_cell(tight, 64, 0.05)
    assert any("TTFT" in miss for miss in missed.misses)
    assert missed.report.goodput_per_s == 0.0


def test_the_offered_rate_is_exact_and_goodput_below_capacity_is_all_of_it(scenario: Scenario) -> None:
    cell = predict_cell(scenario, 64, 0.3)
    assert cell.report.offered_per_s == pytest.approx(0.3)
    assert cell.report.goodput_per_s == pytest.approx(0.3)
    assert cell.report.counts.intended == 80


def test_a_cell_has_the_very_rate_that_was_asked_for(scenario: Scenario) -> None:
    """80 / (80 / 0.7) isn't 0.7 to the last digit, and prices are looked up by rate."""
    rates = tuple(0.07 * step for step in range(3, 30))
    assert [cell.rate_per_s for cell in predict_surface(scenario, (128,), rates).cells] == list(rates)


def test_overload_is_seen_and_cut_short(scenario: Scenario) -> None:
    cell = predict_cell(scenario, 64, 20.0)
    assert cell.is_diverged
    assert "the queue only grows" in cell.misses
    assert cell.report.counts.intended == 80


def test_a_prediction_is_repeatable_and_a_seed_changes_it(scenario: Scenario) -> None:
    assert predict_cell(scenario, 64, 1.0) == predict_cell(scenario, 64, 1.0)
    assert predict_cell(scenario, 64, 1.0) != predict_cell(replace(scenario, seed=1), 64, 1.0)


def test_the_saturation_rate_by_hand(scenario: Scenario) -> None:
    # budget 64 in the proportion 384 prompt tokens to 32 decodes: 59.08 and 4.92 in a step of 84 ms
    assert saturation_rate(scenario, 64) == pytest.approx(59.08 / 384 / 0.084, rel=0.02)
    # two sequences only: 2 decodes and 24 prompt tokens in a step of 46 ms
    two = replace(scenario, config=replace(scenario.config, max_num_seqs=2))
    assert saturation_rate(two, 2048) == pytest.approx(24 / 384 / 0.046, rel=0.03)


def test_the_capacity_lies_below_saturation_and_splits_met_from_missed(scenario: Scenario) -> None:
    found = predict_capacity(scenario, 64)
    assert found.rate_per_s is not None
    assert found.upper_per_s is not None
    # a finite run may end before its queue shows that it only grows, hence the margin above saturation
    assert 0.6 * saturation_rate(scenario, 64) < found.rate_per_s < 1.2 * saturation_rate(scenario, 64)
    assert found.upper_per_s <= found.rate_per_s * 1.05
    assert predict_cell(scenario, 64, 0.8 * found.rate_per_s).is_met
    assert not predict_cell(scenario, 64, 1.3 * found.rate_per_s).is_met


def test_a_budget_that_breaks_the_slo_has_no_capacity(scenario: Scenario) -> None:
    assert predict_capacity(scenario, 512).rate_per_s is None


def test_a_measured_run_can_be_predicted_request_by_request(scenario: Scenario) -> None:
    # the same requests in the same window, prompts with ids this time
    draw = scenario.workload.draw(scenario.seed, 80, vocab_size=500, max_model_len=2048)
    timed = draw_requests(scenario, 1.0)
    real = [replace(item, spec=spec) for item, spec in zip(timed, draw.requests, strict=True)]
    assert predict_requests(scenario, 64, real, 80.0) == predict_cell(scenario, 64, 1.0)


def test_pages_that_run_out_are_preemptions_in_the_prediction(scenario: Scenario) -> None:
    # 40 pages of 16 tokens hold one request of 417 tokens and part of another one
    small = replace(scenario, config=replace(scenario.config, num_pages=40), num_requests=20)
    result = run_virtual(small, 64, draw_requests(small, 2.0), 10.0)
    assert max(step.num_running for step in result.steps) <= 2


def test_a_surface_of_the_default_cpu_workload(model: StepModel) -> None:
    config = EngineConfig(token_budget=1, max_num_seqs=16, num_pages=4096, max_model_len=2048)
    scenario = Scenario(model, config, load_workload("chat-small"), Slo(100.0))
    surface = predict_surface(scenario, (64, 80, 96, 512, 2048), (0.2, 0.4, 0.6, 0.8, 1.0))
    assert len(surface.cells) == 25
    assert surface.budgets_tokens == (64, 80, 96, 512, 2048)
    # larger budgets trade gaps for a quicker first token
    first, last = surface.cell(64, 0.8).report, surface.cell(2048, 0.8).report
    assert first.itl.p99_ms is not None
    assert last.itl.p99_ms is not None
    assert first.ttft.p50_ms is not None
    assert last.ttft.p50_ms is not None
    assert first.itl.p99_ms < last.itl.p99_ms / 3
    assert first.ttft.p50_ms > last.ttft.p50_ms
