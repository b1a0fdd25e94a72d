"""The fitted model as an executor."""

import time

import pytest

from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.request import Request
from sarathi_tune.stepmodel.fit import fit_step_model
from sarathi_tune.stepmodel.virtual import VirtualClock, VirtualExecutor
from tests.profiles import cpu_like, measured, published


def plan(num_decodes: int, chunk: int) -> StepPlan:
    requests = [Request(index, [1] * 600, 50, output=[2]) for index in range(num_decodes)]
    slices = [Slice(request, 600, 1, is_decode=True, samples=True) for request in requests]
    slices.append(Slice(Request(99, [1] * 4000, 50), 512, chunk, is_decode=False, samples=False))
    return StepPlan(tuple(slices))


def test_clock_moves_only_forwards() -> None:
    clock = VirtualClock(5.0)
    clock.sleep_until_s(3.0)
    assert clock.now_s() == 5.0
    clock.sleep_until_s(7.5)
    clock.advance_s(0.25)
    assert clock.now_s() == 7.75


def test_a_step_takes_its_modelled_time() -> None:
    model = fit_step_model(published("infeasible-4090"))  # one time per row: no spread
    clock = VirtualClock()
    tokens = VirtualExecutor(model, clock, overhead_ms=2.0).execute(plan(16, 496))
    expected = model.predict_ms(plan(16, 496).shape) + 2.0
    assert clock.now_s() * 1e3 == pytest.approx(expected)
    assert len(tokens) == 16  # a chunk that isn't the last samples nothing


def test_the_same_seed_repeats() -> None:
    model = fit_step_model(measured(cpu_like, noise=0.05, repeats=10, seed=1))

    def run(seed: int) -> tuple[float, list[int]]:
        clock = VirtualClock()
        executor = VirtualExecutor(model, clock, seed)
        tokens = [token for _ in range(20) for token in executor.execute(plan(4, 60))]
        return clock.now_s(), tokens

    assert run(1) == run(1)
    assert run(1)[0] != run(2)[0]
    assert run(1)[1] == run(2)[1]


def test_a_step_costs_microseconds() -> None:
    model = fit_step_model(measured(cpu_like, noise=0.05, repeats=10, seed=1))
    executor, step = VirtualExecutor(model, VirtualClock()), plan(16, 496)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(400):
            executor.execute(step)
        best = min(best, (time.perf_counter() - start) / 400)
    assert best < 100e-6  # about 10 on an idle core; the limit is generous for a busy one
