"""Whether the machine is as fast as it was: which steps show it, and what a prediction makes of it."""

from collections.abc import Sequence

import pytest

from sarathi_tune.engine.plan import StepShape
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.profile import Profile, Sample
from sarathi_tune.measure.shapes import Shape, parse_shape
from sarathi_tune.stepmodel.fit import fit_step_model
from sarathi_tune.tune.drift import Anchors, Drift, drifted, mean_drift, measure_drift
from tests.profiles import cpu_like, measured


def profile_of(*rows: tuple[str, Sequence[float]]) -> Profile:
    return Profile(samples=tuple(Sample(parse_shape(shape), tuple(times)) for shape, times in rows))


ROWS = (
    ("4x1024", (5.0, 5.0, 5.0)),
    ("8x512", (6.0, 7.0, 6.5)),
    ("8x1024", (8.0, 8.0, 9.0)),
    ("512@0", (60.0, 60.0, 60.0)),
    ("8x1024+120@0", (20.0, 20.0, 20.0)),
    ("8x1024+248@0", (30.0, 31.0, 32.0)),
    ("8x1024+504@0", (50.0, 50.0, 50.0)),
    ("8x1024+244@0", (29.0, 29.0)),
)


@pytest.mark.parametrize(
    ("budget", "hybrid"), [(256, "8x1024+248@0"), (1, "8x1024+120@0"), (9999, "8x1024+504@0"), (400, "8x1024+504@0")]
)
def test_the_anchors_are_the_decode_batch_and_the_step_nearest_to_the_budget(budget: int, hybrid: str) -> None:
    anchors = Anchors.of(profile_of(*ROWS), budget)
    assert anchors is not None
    assert str(anchors.decode.shape) == "8x1024"
    assert str(anchors.hybrid.shape) == hybrid


def test_a_row_with_few_times_is_no_anchor() -> None:
    anchors = Anchors.of(profile_of(*ROWS), 252)
    assert anchors is not None
    assert str(anchors.hybrid.shape) == "8x1024+248@0"


@pytest.mark.parametrize("kind", ["decode", "hybrid"])
def test_a_profile_without_such_rows_has_no_anchors(kind: str) -> None:
    rows = [row for row in ROWS if parse_shape(row[0]).kind != kind]
    assert Anchors.of(profile_of(*rows), 256) is None


class Scripted(Bench):
    """Steps of a machine that became slower: decodes by a tenth, hybrid steps by half; the first of each is cold."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def time_shape(self, shape: Shape) -> float:
        self.order.append(str(shape))
        cold = 100.0 if self.order.count(str(shape)) == 1 else 1.0
        return cold * (8.8 if shape.kind == "decode" else 46.5)


def test_drift_is_the_median_now_over_the_median_then_without_the_cold_step() -> None:
    bench = Scripted()
    anchors = Anchors.of(profile_of(*ROWS), 256)
    assert anchors is not None
    drift = measure_drift(bench, anchors)
    assert drift.decode == pytest.approx(1.1)
    assert drift.chunk == pytest.approx(1.5)
    assert bench.order[:4] == ["8x1024", "8x1024+248@0"] * 2, "in turn"


def test_the_mean_of_before_and_after() -> None:
    assert mean_drift([Drift(1.0, 1.2), Drift(1.2, 1.0)]) == Drift(pytest.approx(1.1), pytest.approx(1.1))


def test_a_drifted_model_scales_medians_and_tails_of_each_kind() -> None:
    model = fit_step_model(measured(cpu_like, 0.05, 7, 0))
    now = drifted(model, Drift(decode=1.25, chunk=0.5))
    decode = StepShape((1024,) * 8)
    hybrid = StepShape((1024,) * 8, ((0, 248),))
    for q in (0.5, 0.99):
        assert now.quantile_ms(decode, q) == pytest.approx(1.25 * model.quantile_ms(decode, q))
        assert now.quantile_ms(hybrid, q) == pytest.approx(0.5 * model.quantile_ms(hybrid, q))
    assert (now.spread.n_decode, now.spread.n_chunk) == (model.spread.n_decode, model.spread.n_chunk)
