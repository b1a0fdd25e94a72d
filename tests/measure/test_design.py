"""Which shapes are chosen: for the question, within the time, with held-out ones inside."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_tune.errors import UsageError
from sarathi_tune.measure.design import Design, DesignSpace, design_for_shapes, plan_design, probe_cost
from sarathi_tune.measure.rounds import round_order
from sarathi_tune.measure.shapes import Shape
from tests.measure.doubles import laptop_ms, server_ms

LAPTOP = DesignSpace(decodes=8, context=1024, prefix=1024, slo_ms=100.0, num_pages=4096)
SERVER = DesignSpace(decodes=128, context=2048, prefix=4096, slo_ms=20.0, num_pages=200_000)
SPACES = st.builds(
    DesignSpace,
    decodes=st.integers(1, 300),
    context=st.integers(1, 8192),
    prefix=st.integers(0, 8192),
    slo_ms=st.one_of(st.none(), st.floats(1.0, 5000.0)),
    num_pages=st.integers(1, 200_000),
    page_tokens=st.sampled_from([16, 32]),
    max_model_len=st.integers(64, 32768),
    seconds=st.floats(1.0, 100.0),
)


def test_the_probe_finds_what_a_step_costs() -> None:
    calls: list[Shape] = []

    def time_shape(shape: Shape) -> float:
        is_first = shape not in calls
        calls.append(shape)
        return laptop_ms(shape) * (30 if is_first else 1)

    cost = probe_cost(LAPTOP, time_shape)
    # 15 ms for a token, 0.3 ms per token from 256 tokens on, to within some tens of per cent; the cold first steps
    # don't show.
    assert cost.estimate_ms(Shape(1, 16)) == pytest.approx(15.0, rel=0.01)
    assert cost.estimate_ms(Shape(chunk=1024)) == pytest.approx(laptop_ms(Shape(chunk=1024)), rel=0.15)
    assert cost.estimate_ms(Shape(8, 1024)) == pytest.approx(laptop_ms(Shape(8, 1024)), rel=0.3)
    # 5 shapes, twice each: a probe, not a measurement.
    assert len(calls) == 2 * len(set(calls)) == 10


def test_a_slow_device_is_not_probed_with_large_chunks() -> None:
    calls: list[Shape] = []

    def time_shape(shape: Shape) -> float:
        calls.append(shape)
        return 20 * laptop_ms(shape)

    probe_cost(LAPTOP, time_shape)
    assert max(shape.num_tokens for shape in calls) == 256


def test_a_chunk_that_does_not_fit_ends_the_probe_and_not_the_run() -> None:
    def time_shape(shape: Shape) -> float:
        if shape.chunk > 512:
            raise RuntimeError("CUDA out of memory.")
        return server_ms(shape)

    assert probe_cost(SERVER, time_shape).knots[-1][0] == 256


def plan(space: DesignSpace, cost_ms: object = laptop_ms) -> Design:
    assert callable(cost_ms)
    return plan_design(space, probe_cost(space, cost_ms))


def shapes_of(design: Design) -> set[Shape]:
    return {point.shape for point in design.points}


@pytest.mark.parametrize(("space", "cost_ms"), [(LAPTOP, laptop_ms), (SERVER, server_ms)])
def test_every_kind_of_step_is_there(space: DesignSpace, cost_ms: object) -> None:
    design = plan(space, cost_ms)
    shapes = shapes_of(design)
    B, S, P = space.decodes, space.context, space.prefix
    assert {"decode", "prefill", "hybrid"} == {shape.kind for shape in shapes}
    assert Shape(B, S) in shapes
    assert Shape(1, S) in shapes
    # The default budget as control: 2048 tokens of step, the decodes among them.
    assert Shape(B, S, 2048 - B, P) in shapes
    assert len({shape.chunk for shape in shapes if shape.kind == "hybrid" and shape.decodes == B}) >= 5
    assert {shape.prefix for shape in shapes if shape.kind == "prefill"} >= {0, P}
    assert len({(shape.decodes, shape.context) for shape in shapes if shape.kind == "decode"}) >= 4


@pytest.mark.parametrize(("space", "cost_ms"), [(LAPTOP, laptop_ms), (SERVER, server_ms)])
def test_the_region_around_the_slo_is_dense(space: DesignSpace, cost_ms: object) -> None:
    assert callable(cost_ms)
    assert space.slo_ms is not None
    worst = [
        cost_ms(shape)
        for shape in shapes_of(plan(space, cost_ms))
        if (shape.decodes, shape.context, shape.prefix) == (space.decodes, space.context, space.prefix)
    ]
    # Steps on both sides of the SLO, and most of them within 0.3 to 3 times of it: outside lie one size on each side
    # (several where the curve is flat) and the control.
    assert min(worst) < space.slo_ms < max(worst)
    assert sum(0.3 * space.slo_ms <= time <= 3 * space.slo_ms for time in worst) >= 0.6 * len(worst)


def test_neighbours_of_a_tile_edge() -> None:
    # All tokens of the step meet the tile (256 tokens are 248 + 8 decodes): edge - 1, edge, edge + 1.
    totals = {shape.num_tokens for shape in shapes_of(plan(LAPTOP)) if shape.kind == "hybrid"}
    edges = [total for total in totals if {total - 1, total, total + 1} <= totals]
    assert edges
    assert all(edge % LAPTOP.tile_tokens == 0 for edge in edges)


def test_an_a_a_pair_of_a_decode_and_of_a_hybrid_step() -> None:
    pairs = [point.shape.kind for point in plan(LAPTOP).points if point.label == "b"]
    assert sorted(pairs) == ["decode", "hybrid"]


@pytest.mark.parametrize("seconds", [10.0, 20.0, 45.0, 90.0])
def test_the_time_allowed_is_filled_and_kept(seconds: float) -> None:
    design = plan(replace(LAPTOP, seconds=seconds))
    warm_up_s = sum(laptop_ms(point.shape) for point in design.points) / 1e3
    round_s = sum(laptop_ms(point.shape) / point.every for point in design.points) / 1e3
    # What is run in any case is within the time (the estimates are rough), and there is no time for idling.
    assert warm_up_s + design.min_rounds * round_s < 1.2 * seconds
    assert warm_up_s + design.max_rounds * round_s > 0.9 * seconds
    assert design.seconds == seconds


def test_more_time_gives_more_shapes() -> None:
    sizes = [len(plan(replace(LAPTOP, seconds=seconds)).points) for seconds in (10.0, 30.0, 90.0)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 1.5 * sizes[0]


def test_one_shape_does_not_eat_the_time() -> None:
    # 50 times slower: the 2048-token control alone would take half a minute per step.
    slow = plan(LAPTOP, lambda shape: 50 * laptop_ms(shape))
    assert max(shape.num_tokens for shape in shapes_of(slow)) < 512
    assert Shape(8, 1024) in shapes_of(slow)
    assert slow.min_rounds >= 3


def test_the_control_is_timed_less_often() -> None:
    (control,) = [point for point in plan(LAPTOP).points if point.shape == Shape(8, 1024, 2040, 1024)]
    assert control.every >= 3


@pytest.mark.parametrize("seconds", [3.0, 8.0, 45.0])
def test_every_shape_is_timed_twice_at_least(seconds: float) -> None:
    design = plan(replace(LAPTOP, seconds=seconds))
    for point in design.points:
        rounds = [index for index in range(1, design.min_rounds + 1) if point in round_order(design, index)]
        assert len(rounds) >= 2


def test_held_out_shapes_lie_inside_hybrid_ones_included() -> None:
    for space, cost_ms in ((LAPTOP, laptop_ms), (SERVER, server_ms)):
        design = plan(space, cost_ms)
        held_out = [point.shape for point in design.points if point.held_out]
        fitted = [point.shape for point in design.points if not point.held_out]
        assert {"decode", "prefill", "hybrid"} == {shape.kind for shape in held_out}
        assert sum(shape.kind == "hybrid" for shape in held_out) >= 3
        assert not set(held_out) & set(fitted)
        for shape in held_out:
            assert min(fit.num_tokens for fit in fitted) < shape.num_tokens < max(fit.num_tokens for fit in fitted)
            if shape.decodes:
                assert 1 < shape.decodes < space.decodes
                assert space.context // 4 < shape.context < space.context
            if shape.chunk:
                assert 0 < shape.prefix < space.prefix


@settings(max_examples=60, deadline=None)
@given(space=SPACES, is_server=st.booleans())
def test_any_question_gives_shapes_that_fit(space: DesignSpace, is_server: bool) -> None:
    design = plan(space, server_ms if is_server else laptop_ms)
    keys = [(point.shape, point.label) for point in design.points]
    assert len(keys) == len(set(keys))
    for shape in shapes_of(design):
        assert shape.num_tokens >= 1
        assert shape.num_pages(space.page_tokens) <= space.num_pages
        assert max(shape.context, shape.prefix + shape.chunk) <= space.max_model_len
    if space.num_pages >= space.decodes:
        assert any(point.shape.decodes == space.decodes for point in design.points)
    assert 3 <= design.min_rounds <= design.max_rounds
    assert all(1 <= point.every <= 4 for point in design.points)


def test_a_small_cache_cuts_the_prefix_first_and_then_the_context() -> None:
    space = DesignSpace(decodes=4, context=64, prefix=1000, slo_ms=None, num_pages=20, page_tokens=16)
    # 4 decodes of 64 take 16 of 20 pages: 64 tokens are left for a chunk of 16 and its prefix.
    assert space.fit(Shape(4, 64, 16, 1000)) == Shape(4, 64, 16, 48)
    # A chunk of 7 pages leaves 13: 3 pages each.
    assert space.fit(Shape(4, 64, 112, 1000)) == Shape(4, 48, 112, 0)
    assert space.fit(Shape(4, 64, 320, 0)) is None
    assert space.fit(Shape(21, 64)) is None


def test_the_models_context_cuts_the_prefix() -> None:
    space = DesignSpace(decodes=1, context=1, prefix=0, slo_ms=None, num_pages=10_000, max_model_len=2048)
    assert space.fit(Shape(chunk=512, prefix=8192)) == Shape(chunk=512, prefix=1536)


@pytest.mark.parametrize("changes", [{"decodes": 0}, {"prefix": -1}, {"seconds": 0.0}, {"seconds": float("nan")}])
def test_impossible_questions(changes: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        replace(LAPTOP, **changes)  # type: ignore[arg-type]


def test_listed_shapes_are_timed_exactly() -> None:
    shapes = (Shape(8, 1024), Shape(chunk=512), Shape(8, 512, 504))
    design = design_for_shapes(shapes, 9)
    assert tuple(point.shape for point in design.points) == shapes
    assert (design.min_rounds, design.max_rounds, design.seconds) == (9, 9, None)


def test_a_design_survives_the_journal() -> None:
    design = plan(LAPTOP)
    assert Design.from_dict(design.as_dict()) == design
