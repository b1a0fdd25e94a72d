"""The step model on published tables and on synthetic profiles whose truth is known."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_tune.engine.plan import StepShape
from sarathi_tune.errors import DocumentError
from sarathi_tune.measure.profile import Profile, Sample
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.stepmodel.fit import StepModel, fit_step_model
from tests.profiles import cpu_like, gpu_like, hand_written, measured, published

NAMES = ("linear-5090", "infeasible-4090", "tiles-4090", "warmup-artefact", "h100-llama3-8b", "graphs-not-budget")


def relative_errors(model: StepModel, profile: Profile) -> dict[str, float]:
    return {
        str(sample.shape): model.predict_ms(sample.shape.step_shape) / sample.median_ms - 1.0
        for sample in profile.samples
    }


def codes(model: StepModel) -> list[str]:
    return [notice.code for notice in model.notices]


def test_four_points_predict_the_next_doubling() -> None:
    model = fit_step_model(published("linear-5090"))
    assert model.predict_ms(Shape(chunk=8192).step_shape) == pytest.approx(431, rel=0.02)


def test_published_4090_table_is_reproduced() -> None:
    profile = published("infeasible-4090")
    errors = relative_errors(fit_step_model(profile), profile)
    assert sorted(map(abs, errors.values()))[len(errors) // 2] < 0.02
    assert max(map(abs, errors.values())) < 0.10


def test_attention_of_the_4090_table_is_its_slope() -> None:
    # (53.9 - 20.1) / (16 * 15360) and (311 - 40.5) / (128 * 15360) ms per key.
    model = fit_step_model(published("infeasible-4090"))
    assert model.coefficient("context") == pytest.approx(1.375e-4, rel=0.02)


def test_a_warm_up_artefact_is_named_and_does_not_bend_the_fit() -> None:
    profile = published("warmup-artefact")
    model = fit_step_model(profile)
    assert model.rejected == ("256@0",)
    notice = next(notice for notice in model.notices if notice.code == "profile-row-rejected")
    assert "256@0" in notice.cause
    assert "on-monotone" in notice.cause
    # 256 between its neighbours (48.1 at 128, 105.6 at 512), as a line between them has it: 67.3.
    assert model.predict_ms(Shape(chunk=256).step_shape) == pytest.approx(67.3, rel=0.1)
    clean = Profile(samples=tuple(sample for sample in profile.samples if sample.shape.chunk != 256))
    assert relative_errors(model, clean) == pytest.approx(relative_errors(fit_step_model(clean), clean))


@pytest.mark.parametrize("wrong", [64, 256, 1024])
@pytest.mark.parametrize("factor", [2.5, 30.0])
def test_an_artefact_anywhere_is_found(wrong: int, factor: float) -> None:
    # 7,234 ms instead of about 220: seen in the field.
    rows = [((0, 0, n, 0), (12 + 0.1 * n) * (factor if n == wrong else 1.0)) for n in (64, 128, 256, 512, 1024, 1536)]
    model = fit_step_model(hand_written(rows))
    assert model.rejected == (f"{wrong}@0",)
    assert model.predict_ms(Shape(chunk=wrong).step_shape) == pytest.approx(12 + 0.1 * wrong, rel=0.02)


@pytest.mark.parametrize(("noise", "is_rejected"), [(0.01, True), (0.15, False)])
def test_rows_seen_once_may_differ_as_far_as_the_others_scatter(noise: float, is_rejected: bool) -> None:
    """A live server shows its hybrid steps once or twice each, and its decode steps often: what they scatter by goes
    for the hybrid ones too, which are no artefacts, and no stairs, when they lie 45 % apart."""
    rng = random.Random(3)
    decode = [Shape(31, context) for context in range(512, 1025, 64)]
    hybrid = [Shape(31, context, chunk) for context in (768, 832, 896) for chunk in (64, 80, 128, 160, 256)]
    slow, late = Shape(31, 768, 160), Shape(31, 832, 80)
    samples = [Sample(shape, tuple(cpu_like(shape) * rng.gauss(1.0, noise) for _ in range(40))) for shape in decode]
    samples += [Sample(shape, (cpu_like(shape) * (1.45 if shape in (slow, late) else 1.0),)) for shape in hybrid]
    model = fit_step_model(Profile(samples=tuple(samples)))
    assert set(model.rejected) == ({str(slow), str(late)} if is_rejected else set())
    assert model.stairs == ()
    told = [notice.cause for notice in model.notices if notice.code == "profile-row-rejected"]
    assert len(told) == is_rejected, "one notice for both"
    if is_rejected:
        assert "2 steps took longer than larger ones" in told[0]
        assert str(slow) in told[0]
        assert str(late) in told[0]


def test_rejection_can_not_eat_a_noisy_profile() -> None:
    rng = random.Random(4)
    rows = [((0, 0, n, 0), rng.uniform(10, 100)) for n in range(64, 64 * 25, 64)]
    model = fit_step_model(hand_written(rows))
    assert len(model.rejected) <= 3
    assert codes(model).count("profile-row-rejected") == 1
    (notice,) = [notice for notice in model.notices if notice.code == "profile-not-monotone"]
    assert "more" in notice.cause, "the worst three are named, and the rest counted"


def test_decodes_ride_nearly_free_and_adding_overstates() -> None:
    # Sarathi-Serve's own numbers: 217.65 against 217.24 + 68.1: 31 % too much.
    model = fit_step_model(published("sarathi-hybrid"))
    assert model.error.additive_bias == pytest.approx(0.311, abs=0.002)
    assert model.error.additive_n == 1


def test_stairs_are_found_where_they_were_measured() -> None:
    model = fit_step_model(published("tiles-4090"))
    assert model.stairs == (256, 512, 1024)
    just_above = model.predict_ms(Shape(chunk=257).step_shape)
    assert just_above / model.predict_ms(Shape(chunk=256).step_shape) > 1.3


def test_no_stairs_without_neighbours() -> None:
    for name in ("linear-5090", "infeasible-4090", "h100-llama3-8b"):
        assert fit_step_model(published(name)).stairs == ()


def test_a_fixed_hybrid_cost_is_paid_by_the_narrowest_chunk() -> None:
    model = fit_step_model(published("graphs-not-budget"))
    assert model.predict_ms(Shape(32, 8192, 1, 0).step_shape) > 180
    assert model.predict_ms(Shape(32, 8192).step_shape) < 16


@pytest.mark.parametrize("truth", [cpu_like, gpu_like])
@pytest.mark.parametrize("seed", [1, 2])
def test_truth_is_recovered_from_noise(truth: object, seed: int) -> None:
    assert callable(truth)
    profile = measured(truth, noise=0.03, repeats=15, seed=seed, held_out=0.25)
    model = fit_step_model(profile)
    assert model.error.method == "held-out"
    assert model.error.median < 0.03
    assert model.error.p95 < 0.08
    for shape in (Shape(8, 1024), Shape(chunk=700, prefix=1000), Shape(8, 1024, 504, 1000), Shape(24, 2048, 1000)):
        assert model.predict_ms(shape.step_shape) == pytest.approx(truth(shape), rel=0.05)


def test_p99_of_the_fit_is_the_p99_of_the_noise() -> None:
    model = fit_step_model(measured(cpu_like, noise=0.04, repeats=40, seed=5))
    shape = Shape(8, 1024, 504, 0).step_shape
    # The 99th percentile of a normal distribution lies 2.326 sigma above its centre.
    assert model.quantile_ms(shape, 0.99) / model.predict_ms(shape) == pytest.approx(1 + 2.326 * 0.04, rel=0.02)
    rng = random.Random(6)
    draws = sorted(model.predict_ms(shape) * model.draw_ratio(True, rng) for _ in range(4000))
    assert draws[3960] == pytest.approx(model.quantile_ms(shape, 0.99), rel=0.02)
    assert draws[2000] == pytest.approx(model.predict_ms(shape), rel=0.01)


def test_a_row_that_the_model_misses_widens_no_spread() -> None:
    rows = [Sample(Shape(chunk=n), ((10 + 0.1 * n) * (1.08 if n == 256 else 1.0),) * 20) for n in (64, 128, 256, 512)]
    model = fit_step_model(Profile(samples=tuple(rows)))
    assert model.spread.ratio(True, 0.99) == 1.0


def test_one_time_per_row_has_no_spread_and_says_so() -> None:
    model = fit_step_model(published("h100-llama3-8b"))
    shape = Shape(32, 1024, 480, 0).step_shape
    assert model.quantile_ms(shape, 0.99) == model.predict_ms(shape)
    assert "profile-no-repeats" in codes(model)


def test_hold_out_is_k_fold_without_marked_shapes() -> None:
    model = fit_step_model(published("infeasible-4090"))
    assert (model.error.method, model.error.n, model.error.hybrid_n) == ("k-fold", 21, 4)
    assert model.error.median < 0.05


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.tuples(st.integers(0, 200), st.integers(1, 40_000), st.integers(0, 20_000), st.integers(0, 40_000)),
    st.tuples(st.integers(0, 100), st.integers(0, 9_000), st.integers(0, 5_000), st.integers(0, 9_000)),
)
def test_a_larger_step_is_never_faster(
    name: str, small: tuple[int, int, int, int], more: tuple[int, int, int, int]
) -> None:
    model = fit_step_model(published(name))
    shape = Shape(*small)
    larger = Shape(*(have + add for have, add in zip(small, more, strict=True)))
    if shape.num_tokens:
        assert model.predict_ms(shape.step_shape) <= model.predict_ms(larger.step_shape) * (1 + 1e-12)


def test_table_and_terms_agree() -> None:
    profile = measured(gpu_like, noise=0.02, repeats=5, seed=8)
    model = fit_step_model(profile)
    from sarathi_tune.stepmodel.features import Load

    for sample in profile.samples:
        load = Load.of(sample.shape.step_shape)
        by_terms = sum(v * term.value(load) for term, v in zip(model.terms, model.coefficients, strict=True))
        assert model.predict_ms(sample.shape.step_shape) == pytest.approx(by_terms)


def test_mixed_contexts_and_several_chunks() -> None:
    model = fit_step_model(measured(cpu_like, noise=0.0, repeats=3, seed=9))
    mixed = StepShape(decode_contexts=(100, 900, 2000), chunks=((0, 100), (500, 156)))
    by_hand = 9.0 + 0.11 * (259 - 24) + 3 * 0.05 + 6e-5 * 3000 + 3e-6 * (100 * 50 + 156 * 578)
    assert model.predict_ms(mixed) == pytest.approx(by_hand, rel=0.03)


def in_eights(shape: Shape) -> float:
    """Above 32 tokens rows come in eights, as in oneDNN: 0.25 ms for each, on top of 5 ms."""
    rows = shape.num_tokens if shape.num_tokens <= 32 else -(-shape.num_tokens // 8) * 8
    return 5.0 + 0.25 * rows + 1e-4 * shape.context * shape.decodes


def test_rows_that_are_filled_up_are_paid_for() -> None:
    rounded = [Shape(chunk=chunk) for chunk in (8, 16, 32, 40, 48, 64, 96, 128, 192, 256)]
    hybrid = [Shape(8, context, chunk) for context in (100, 900) for chunk in (8, 24, 56, 120)]
    samples = tuple(Sample(shape, (in_eights(shape),) * 3) for shape in (*rounded, *hybrid))
    profile = Profile(samples=samples, engine={"exact_rows": 32, "row_multiple": 8})
    model = fit_step_model(profile)
    for shape in (Shape(chunk=31), Shape(chunk=33), Shape(8, 400, 89), Shape(8, 400, 96)):
        assert model.predict_ms(shape.step_shape) == pytest.approx(in_eights(shape), rel=0.01)
    again = StepModel.from_dict(json.loads(json.dumps(model.as_dict(), allow_nan=False)))
    assert again.predict_ms(Shape(chunk=33).step_shape) == pytest.approx(15.0, rel=0.01)


def test_without_a_word_on_rows_tokens_are_rows() -> None:
    model = fit_step_model(measured(cpu_like, noise=0.0, repeats=3, seed=9))
    assert model.predict_ms(Shape(chunk=257).step_shape) < model.predict_ms(Shape(chunk=264).step_shape)


def test_round_trip_through_json() -> None:
    for name in (*NAMES, "sarathi-hybrid"):
        model = fit_step_model(published(name))
        again = StepModel.from_dict(json.loads(json.dumps(model.as_dict(), allow_nan=False)))
        assert again.as_dict() == model.as_dict()
        shape = Shape(8, 1000, 300, 200).step_shape
        assert again.quantile_ms(shape, 0.99) == model.quantile_ms(shape, 0.99)


def test_bad_documents_are_refused() -> None:
    with pytest.raises(DocumentError, match="not a fitted step model"):
        StepModel.from_dict({"terms": []})
    with pytest.raises(DocumentError, match="no timed step"):
        fit_step_model(Profile(samples=(Sample(Shape(chunk=64), (), "out of memory"),)))


def test_missing_rows_are_left_out() -> None:
    rows = published("linear-5090").samples
    with_gap = Profile(samples=(*rows, Sample(Shape(chunk=8192), (), "out of memory")))
    assert fit_step_model(with_gap).coefficients == fit_step_model(Profile(samples=rows)).coefficients


def test_one_row_is_a_constant() -> None:
    model = fit_step_model(hand_written([((4, 100, 0, 0), 12.0)]))
    assert model.predict_ms(Shape(4, 100).step_shape) == pytest.approx(12.0)
    assert math.isnan(model.error.median)
