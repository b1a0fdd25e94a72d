"""Micro-batches, and what is said about a pipeline's times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.request import Request
from sarathi_tune.runtime.parallel.pipeline import PipelineTimes, split_plan

PIECES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40), st.booleans()), min_size=1, max_size=8)


def _plan(pieces: list[tuple[int, int, bool]]) -> StepPlan:
    requests = [Request(number, [0] * (start + count), 1) for number, (start, count, _) in enumerate(pieces)]
    return StepPlan(
        tuple(
            Slice(request, start, count, is_decode=count == 1, samples=samples)
            for request, (start, count, samples) in zip(requests, pieces, strict=True)
        )
    )


@given(PIECES, st.integers(1, 8))
def test_micro_batches_are_equal_and_hold_every_token_once(pieces: list[tuple[int, int, bool]], parts: int) -> None:
    plan = _plan(pieces)
    batches = split_plan(plan, parts)
    sizes = [batch.num_tokens for batch in batches]
    assert len(batches) == min(parts, plan.num_tokens)
    assert max(sizes) - min(sizes) <= 1

    def tokens(plan: StepPlan) -> list[tuple[int, int]]:
        return [(piece.request.request_id, place) for piece in plan for place in range(piece.start, piece.stop)]

    assert [token for batch in batches for token in tokens(batch)] == tokens(plan)
    ends = [(piece.request.request_id, piece.stop) for batch in batches for piece in batch if piece.samples]
    assert ends == [(piece.request.request_id, piece.stop) for piece in plan if piece.samples]


def test_a_chunk_is_cut_behind_the_decodes() -> None:
    """4 decodes and a chunk of 12 behind 20 tokens, for two stages: 8 tokens each."""
    plan = _plan([(9, 1, True), (9, 1, True), (9, 1, True), (9, 1, True), (20, 12, True)])
    first, second = split_plan(plan, 2)
    assert [(piece.start, piece.count, piece.samples) for piece in first] == [(9, 1, True)] * 4 + [(20, 4, False)]
    assert [(piece.start, piece.count, piece.samples) for piece in second] == [(24, 8, True)]


def test_period_rotation_and_bubble() -> None:
    """Two equal stages of 10 ms per micro-batch, two micro-batches: 3 periods, a third of each stage's time idle. Then
    a step of one micro-batch: 2 periods, half of it idle."""
    times = PipelineTimes()
    times.add(30.0, 2, [20.0, 20.0])
    assert times.as_dict() == {
        "steps": 1,
        "micro_batches": 2.0,
        "stage_period_ms": 10.0,
        "rotation_ms": 30.0,
        "bubble": pytest.approx(1 / 3),
    }
    times.add(20.0, 1, [10.0, 10.0])
    assert times.as_dict()["rotation_ms"] == 25.0
    assert times.as_dict()["bubble"] == pytest.approx(1 - 30 / 50)


def test_the_period_is_the_slowest_stages() -> None:
    times = PipelineTimes()
    times.add(50.0, 2, [12.0, 36.0])
    assert times.as_dict()["stage_period_ms"] == 18.0
    assert PipelineTimes().as_dict() == {"steps": 0}
