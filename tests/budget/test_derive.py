"""Advice on published measurements, and what must hold for any profile."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_tune.budget.derive import BudgetQuestion, Derivation, derive
from sarathi_tune.budget.question import settled_headroom
from sarathi_tune.errors import UsageError
from sarathi_tune.measure.profile import Profile, Sample
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.stepmodel.fit import fit_step_model
from tests.profiles import cpu_like, gpu_like, hand_written, measured, published

CPU = measured(cpu_like, noise=0.03, repeats=12, seed=11)
CPU_MODEL = fit_step_model(CPU)


def answer(profile: Profile | str, slo_itl_ms: float, decodes: int, context: int, **more: object) -> Derivation:
    known = published(profile) if isinstance(profile, str) else profile
    question = BudgetQuestion(slo_itl_ms, decodes, context, **more)  # type: ignore[arg-type]
    return derive(known, fit_step_model(known), question)


def cpu(slo_itl_ms: float, decodes: int = 8, context: int = 1024, **more: object) -> Derivation:
    more = {"resamples": 0} | more
    return derive(CPU, CPU_MODEL, BudgetQuestion(slo_itl_ms, decodes, context, **more))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- published cases


@pytest.mark.parametrize(("slo_ms", "expected"), [(50, 611), (75, 1100), (100, 1589)])
@pytest.mark.parametrize("decodes", [1, 16])
def test_linear_5090(slo_ms: float, expected: int, decodes: int) -> None:
    found = answer("linear-5090", slo_ms, decodes, 25_000)
    assert found.verdict == "recommended"
    assert found.budget == pytest.approx(expected, rel=0.02)
    assert found.interval is not None
    assert found.interval[0] < expected < found.interval[1]


@pytest.mark.parametrize("decodes", [1, 8, 16, 64])
def test_linear_5090_at_20_ms_is_infeasible(decodes: int) -> None:
    found = answer("linear-5090", 20, decodes, 25_000)
    assert (found.verdict, found.budget) == ("infeasible", None)
    assert found.smallest_slo_ms is not None
    assert 20 < found.smallest_slo_ms < 30


def test_infeasible_4090_says_what_would_do() -> None:
    found = answer("infeasible-4090", 20, 16, 1024)
    assert (found.verdict, found.budget, found.chunk_tokens) == ("infeasible", None, None)
    assert "20.1 ms" in found.why  # the measured decode step
    assert found.largest_batch is not None
    assert 1 <= found.largest_batch < 16
    assert found.smallest_slo_ms is not None
    # Decode alone takes 20.1 ms; a prefill step of 128 tokens takes 21.1 by itself.
    assert 20.1 < found.smallest_slo_ms < 26
    assert f"--max-num-seqs {found.largest_batch}" in found.why


def test_what_would_do_does() -> None:
    refused = answer("infeasible-4090", 20, 16, 1024)
    assert refused.largest_batch is not None
    assert refused.smallest_slo_ms is not None
    profile = published("infeasible-4090")
    model = fit_step_model(profile)
    fewer = BudgetQuestion(20, refused.largest_batch, 1024, resamples=0)
    assert derive(profile, model, fewer).verdict == "recommended"
    one_more = BudgetQuestion(20, refused.largest_batch + 1, 1024, resamples=0)
    assert derive(profile, model, one_more).verdict == "infeasible"
    slower = BudgetQuestion(refused.smallest_slo_ms, 16, 1024, resamples=0)
    assert derive(profile, model, slower).verdict == "recommended"
    a_little_less = BudgetQuestion(refused.smallest_slo_ms - 0.1, 16, 1024, resamples=0)
    assert derive(profile, model, a_little_less).verdict == "infeasible"


@pytest.mark.parametrize("slo_ms", [0.4, 0.5, 0.57, 0.575, 0.58, 0.59, 0.6, 0.61, 0.65, 0.7, 0.74, 0.8, 0.95, 1.1, 1.5])
@pytest.mark.parametrize("decodes", [1, 16])
def test_tiles_4090_meet_total_tokens(slo_ms: float, decodes: int) -> None:
    found = answer("tiles-4090", slo_ms, decodes, 1024)
    assert found.verdict == "recommended"
    assert found.budget in (256, 384, 512, 768, 1024)
    assert found.chunk_tokens == found.budget - decodes


def test_a_512_token_step_with_16_decodes_is_a_chunk_of_496() -> None:
    found = answer("tiles-4090", 0.8, 16, 1024)
    assert (found.budget, found.chunk_tokens, found.limiting.chunk) == (512, 496, 496)


def test_hybrid_tiles_are_met_by_decodes_and_chunk_together() -> None:
    # The same stair at 256 tokens, seen in steps with 16 decodes: chunks of 240 and 256.
    chunks = {0: 11.5, 240: 12.0, 256: 16.0, 368: 16.1, 496: 20.0, 512: 24.0}
    rows = [((16, 1024, chunk, 0), ms) for chunk, ms in chunks.items()]
    found = answer(hand_written(rows), 15.0, 16, 1024)
    assert (found.budget, found.chunk_tokens) == (256, 240)


def test_nothing_is_aligned_without_a_measured_stair() -> None:
    found = answer("h100-llama3-8b", 20, 32, 1024)
    assert found.budget == found.unaligned_budget
    assert found.alignment.startswith("not aligned")


def test_warm_up_artefact_does_not_bend_the_advice() -> None:
    with_artefact = answer("warmup-artefact", 200, 16, 1024)
    profile = published("warmup-artefact")
    clean = Profile(samples=tuple(sample for sample in profile.samples if sample.shape.chunk != 256))
    assert with_artefact.budget == answer(clean, 200, 16, 1024).budget
    assert with_artefact.budget is not None
    assert 700 < with_artefact.budget < 1200  # 105.6 ms at 512, 214.3 at 1024, 366 at 2048
    assert any(n.code == "profile-row-rejected" and "256@0" in n.cause for n in with_artefact.notices)


@pytest.mark.parametrize("slo_ms", [16, 20, 50, 100, 185])
def test_graphs_not_budget(slo_ms: float) -> None:
    found = answer("graphs-not-budget", slo_ms, 32, 8192)
    assert (found.verdict, found.budget) == ("not-the-budget", None)
    assert "CUDA graph" in found.why


def test_graphs_case_is_infeasible_below_the_decode_step() -> None:
    assert answer("graphs-not-budget", 13, 32, 8192).verdict == "infeasible"


def test_h100_llama3_8b() -> None:
    found = answer("h100-llama3-8b", 20, 32, 1024)
    assert found.verdict == "recommended"
    assert found.budget is not None
    assert 700 <= found.budget <= 950
    assert found.rule_of_thumb.budget_tokens == pytest.approx(393, abs=1)
    assert found.rule_of_thumb.decode_step_ms == 8.34
    default = next(n for n in found.neighbours if n.budget == 2048)
    assert not default.meets_slo
    assert default.p99_step_ms == pytest.approx(43.5 + 1.3, abs=2.0)


def test_h100_answer_is_not_the_sum_of_two_numbers() -> None:
    # 8.34 ms + chunk = 20 ms leaves 11.66 ms, just under 512 tokens: what adding would say.
    found = answer("h100-llama3-8b", 20, 32, 1024)
    assert found.budget is not None
    assert found.budget > 1.3 * (512 + 32)


# ------------------------------------------------------------------------------------------------------- verdicts


def test_not_binding_names_the_limit() -> None:
    found = cpu(60_000)
    assert found.verdict == "not-binding"
    assert found.budget == 8 + 8192
    assert "max_model_len" in found.why
    assert cpu(60_000, max_model_len=4096).budget == 8 + 4096


def test_unknown_context_limit_is_said() -> None:
    found = answer("linear-5090", 1e6, 4, 1000)
    assert found.verdict == "not-binding"
    assert "16 times the largest measured step" in found.why


def test_too_few_rows() -> None:
    for rows in (
        [((8, 1024, 0, 0), 12.0)],
        [((8, 1024, 0, 0), 12.0), ((16, 1024, 0, 0), 13.0), ((32, 1024, 0, 0), 14.0)],
        [((8, 1024, 0, 0), 12.0), ((0, 0, 512, 0), 40.0)],
    ):
        found = answer(hand_written(rows), 50, 8, 1024)
        assert (found.verdict, found.budget, found.fitted_budget) == ("inconclusive", None, None)
        assert "rows" in found.why


def test_noise_is_inconclusive() -> None:
    noisy = Profile(samples=CPU.samples, noise=0.3)
    found = answer(noisy, 100, 8, 1024)
    assert "30%" in found.why
    assert (found.verdict, found.budget) == ("inconclusive", None)
    certain = answer(CPU, 100, 8, 1024)
    assert certain.verdict == "recommended"
    assert (found.fitted_budget, certain.fitted_budget) == (certain.budget, None)
    assert answer(noisy, 5, 8, 1024).fitted_budget is None, "the fit has none either"


def test_steps_that_take_twice_their_median_at_times_are_inconclusive() -> None:
    # every tenth step takes 2.5 times as long, which is more than any idle device does
    restless = Profile(
        samples=tuple(Sample(s.shape, (*[s.median_ms] * 27, *[2.5 * s.median_ms] * 3)) for s in CPU.samples)
    )
    found = answer(restless, 250, 8, 1024)
    assert (found.verdict, found.budget) == ("inconclusive", None)
    assert "2.5 times their median" in found.why
    # steps of up to 250 / 2.5 ms
    calm = Profile(samples=tuple(Sample(s.shape, (s.median_ms,) * 30) for s in CPU.samples))
    assert found.fitted_budget == pytest.approx(answer(calm, 100, 8, 1024, resamples=0).budget, rel=0.05)


def test_a_model_that_misses_is_inconclusive() -> None:
    rng = random.Random(3)
    factors = [rng.choice((0.4, 1.6)) for _ in CPU.samples]
    samples = tuple(
        Sample(sample.shape, tuple(time * factor for time in sample.times_ms))
        for sample, factor in zip(CPU.samples, factors, strict=True)
    )
    assert answer(Profile(samples=samples), 100, 8, 1024).verdict == "inconclusive"


def test_an_overhead_larger_than_the_slo() -> None:
    found = cpu(20, overhead_ms=25)
    assert found.verdict == "infeasible"
    assert "overhead" in found.why


def test_overhead_is_taken_off_the_slo() -> None:
    assert cpu(80, overhead_ms=10).budget == cpu(70).budget
    slo = cpu(80, overhead_ms=10).smallest_slo_ms
    assert slo is not None
    assert slo == pytest.approx((cpu(80).smallest_slo_ms or 0) + 10, abs=0.01)


def test_headroom_leaves_room_for_slower_steps() -> None:
    # a step that takes 5 % longer meets 84 ms where it met 80 before
    assert cpu(84, headroom=0.05).budget == cpu(80).budget
    assert cpu(94, overhead_ms=10, headroom=0.05).budget == cpu(80).budget
    slo = cpu(80, overhead_ms=10, headroom=0.05).smallest_slo_ms
    assert slo == pytest.approx(1.05 * (cpu(80).smallest_slo_ms or 0) + 10, abs=0.01)
    assert "(5 % headroom)" in cpu(84, headroom=0.05).why


def test_headroom_changes_no_neighbours_verdict() -> None:
    found = cpu(84, headroom=0.05)
    above = next(neighbour for neighbour in found.neighbours if neighbour.label == "next above")
    assert 80 < above.p99_step_ms <= 84
    assert above.meets_slo


def test_settled_headroom_is_that_of_a_measured_profile() -> None:
    assert settled_headroom(Profile(samples=())) == 0.0
    assert settled_headroom(Profile(samples=(), noise=0.01)) == 0.05
    assert settled_headroom(Profile(samples=(), noise=0.08)) == 0.08
    assert settled_headroom(Profile(samples=(), noise=0.08), 0.0) == 0.0, "what was asked for counts"


def test_floor_of_max_num_seqs() -> None:
    at_8 = cpu(40).budget
    assert at_8 is not None
    assert cpu(40, max_num_seqs=at_8).budget == at_8
    refused = cpu(40, max_num_seqs=at_8 + 1)
    assert (refused.verdict, refused.budget) == ("infeasible", None)
    assert refused.largest_max_num_seqs == at_8
    assert f"--max-num-seqs {at_8}" in refused.why


def test_floor_of_speculation() -> None:
    budget = cpu(40, max_num_seqs=8).budget
    assert budget is not None
    refused = cpu(40, max_num_seqs=64, speculative_tokens=15)
    assert refused.floor == 16 * 64
    assert refused.verdict == "infeasible"
    assert refused.largest_max_num_seqs == budget // 16


def test_never_a_budget_without_a_useful_chunk() -> None:
    for slo_ms in [12 + 0.25 * step for step in range(60)]:
        found = cpu(slo_ms)
        if found.budget is not None:
            assert found.budget >= 8 + 16
            assert found.chunk_tokens is not None
            assert found.chunk_tokens >= found.min_chunk_tokens


# --------------------------------------------------------------------------------------------- properties, any profile


def test_budget_is_the_largest_that_holds() -> None:
    found = cpu(70)
    assert found.budget is not None
    chunk = found.budget - 8
    assert CPU_MODEL.quantile_ms(Shape(8, 1024, chunk).step_shape, 0.99) <= 70
    assert CPU_MODEL.quantile_ms(Shape(8, 1024, chunk + 1).step_shape, 0.99) > 70


@settings(max_examples=60, deadline=None)
@given(st.floats(15, 400), st.floats(1, 200), st.integers(1, 24), st.integers(64, 4000), st.integers(0, 4000))
def test_budget_grows_with_the_slo(slo: float, more: float, decodes: int, context: int, prefix: int) -> None:
    tight = cpu(slo, decodes, context, prefix=prefix)
    loose = cpu(slo + more, decodes, context, prefix=prefix)
    if tight.budget is not None:
        assert loose.budget is not None
        assert tight.budget <= loose.budget
        if tight.verdict == "recommended":
            assert tight.limiting.p99_ms <= slo


@settings(max_examples=40, deadline=None)
@given(st.floats(30, 300), st.integers(1, 20), st.integers(100, 2000), st.integers(0, 3000))
def test_a_heavier_load_never_gets_a_larger_chunk(slo: float, decodes: int, context: int, prefix: int) -> None:
    light = cpu(slo, decodes, context, prefix=prefix).chunk_tokens or 0
    assert (cpu(slo, decodes + 4, context, prefix=prefix).chunk_tokens or 0) <= light
    assert (cpu(slo, decodes, context * 2, prefix=prefix).chunk_tokens or 0) <= light
    assert (cpu(slo, decodes, context, prefix=prefix + 1000).chunk_tokens or 0) <= light


@pytest.mark.parametrize("truth", [cpu_like, gpu_like])
@pytest.mark.parametrize("seed", [21, 22, 23])
def test_the_true_budget_is_found_and_lies_in_the_interval(truth: object, seed: int) -> None:
    assert callable(truth)
    profile = measured(truth, noise=0.02, repeats=20, seed=seed)
    slo_ms, decodes, context = 2.0 * truth(Shape(8, 1024)), 8, 1024
    p99 = 1 + 2.326 * 0.02
    true = max(n for n in range(9, 8192) if truth(Shape(decodes, context, n - decodes)) * p99 <= slo_ms)
    found = derive(profile, fit_step_model(profile), BudgetQuestion(slo_ms, decodes, context))
    assert found.verdict == "recommended"
    assert found.budget == pytest.approx(true, rel=0.08)
    assert found.interval is not None
    assert found.interval[0] <= true <= found.interval[1]
    assert found.interval[1] < 1.5 * found.interval[0]


def test_prefix_shrinks_where_the_context_ends() -> None:
    # A chunk of a prompt that long can't lie behind the whole prefix: prefix + chunk <= max_model_len.
    found = cpu(60_000, prefix=8000)
    assert found.verdict == "not-binding"
    assert found.limiting.prefix == 0


def test_neighbours_have_their_price() -> None:
    found = cpu(70, reference_prompt_tokens=2000)
    assert found.budget is not None
    by_label = {neighbour.label: neighbour for neighbour in found.neighbours}
    assert {"half", "recommended", "next below", "next above", "double", "engine default"} <= set(by_label)
    assert by_label["recommended"].meets_slo
    assert not by_label["double"].meets_slo
    budgets = [neighbour.budget for neighbour in found.neighbours]
    assert budgets == sorted(set(budgets))
    half = by_label["half"]
    assert half.chunk_tokens == half.budget - 8
    assert half.prompt_steps == -(-2000 // half.chunk_tokens)
    # By hand: full chunks, then what is left, each behind what came before.
    starts = range(0, 2000, half.chunk_tokens)
    by_hand = sum(cpu_like(Shape(8, 1024, min(half.chunk_tokens, 2000 - start), start)) for start in starts)
    assert half.ttft_ms == pytest.approx(by_hand, rel=0.05)


def test_the_serial_chunk_is_smaller() -> None:
    # An engine that puts a chunk between two decode steps has decode step + chunk in one gap.
    found = cpu(70)
    assert found.serial_chunk is not None
    assert found.chunk_tokens is not None
    gap = cpu_like(Shape(8, 1024)) + cpu_like(Shape(chunk=found.serial_chunk))
    assert gap * (1 + 2.326 * 0.03) == pytest.approx(70, rel=0.05)
    assert found.serial_chunk < found.chunk_tokens


def test_notices_about_what_was_not_measured() -> None:
    def codes(found: Derivation) -> set[str]:
        return {notice.code for notice in found.notices}

    assert "decode-cost-unknown" in codes(answer("linear-5090", 50, 4, 1000))
    assert "hybrid-not-measured" in codes(answer("h100-llama3-8b", 20, 32, 1024))
    assert "load-extrapolated" in codes(cpu(400, decodes=100))
    assert "load-extrapolated" in codes(cpu(70, context=8000))
    assert "budget-extrapolated" in codes(answer("linear-5090", 1000, 4, 1000, max_model_len=100_000))
    assert "seqs-beyond-decodes" in codes(cpu(70, max_num_seqs=32))
    assert not codes(cpu(70))


def test_as_dict_is_json() -> None:
    for found in (cpu(70), cpu(12), answer("h100-llama3-8b", 20, 32, 1024)):
        document = json.loads(json.dumps(found.as_dict(), allow_nan=False))
        assert document["verdict"] == found.verdict
        assert len(document["rule_of_thumb"]["steps"]) == 3


def test_the_same_question_has_the_same_answer() -> None:
    assert cpu(70, resamples=50) == cpu(70, resamples=50)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slo_itl_ms": 0.0},
        {"slo_itl_ms": float("nan")},
        {"decodes": 0},
        {"context": 0},
        {"prefix": -1},
        {"percentile": 1.0},
        {"max_num_seqs": 0},
        {"overhead_ms": -1.0},
        {"headroom": -0.01},
        {"headroom": 1.5},
    ],
)
def test_senseless_questions_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        BudgetQuestion(**({"slo_itl_ms": 20.0, "decodes": 8, "context": 1024} | wrong))  # type: ignore[arg-type]
