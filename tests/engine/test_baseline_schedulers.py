"""The schedulers that the papers compare with, on schedules worked out by hand."""

from itertools import pairwise

import pytest

from sarathi_tune.config.engine import SchedulerName
from tests.engine.doubles import make_engine, make_request, run_until_idle


def plans_of(scheduler: SchedulerName, budget: int = 4) -> list[list[tuple[int, int, int, bool]]]:
    """A short request that decodes, and a prompt of 10 tokens that arrives behind its first token."""
    engine, executor, _ = make_engine(budget=budget, scheduler=scheduler)
    engine.add(make_request(1, 3, 5))
    engine.step()
    engine.add(make_request(2, 10, 2))
    run_until_idle(engine)
    return executor.plans


def test_sarathi_shares_one_budget() -> None:
    assert plans_of("sarathi") == [
        [(1, 0, 3, False)],
        [(1, 3, 1, True), (2, 0, 3, False)],
        [(1, 4, 1, True), (2, 3, 3, False)],
        [(1, 5, 1, True), (2, 6, 3, False)],
        [(1, 6, 1, True), (2, 9, 1, False)],
        [(2, 10, 1, True)],
    ]


def test_sarathi_single_has_a_fixed_chunk_beside_the_decodes() -> None:
    assert plans_of("sarathi-single") == [
        [(1, 0, 3, False)],
        [(1, 3, 1, True), (2, 0, 4, False)],
        [(1, 4, 1, True), (2, 4, 4, False)],
        [(1, 5, 1, True), (2, 8, 2, False)],
        [(1, 6, 1, True), (2, 10, 1, True)],
    ]


def test_prefill_first_pauses_the_decode_for_a_whole_prompt() -> None:
    assert plans_of("prefill-first")[:3] == [
        [(1, 0, 3, False)],
        [(2, 0, 10, False)],
        [(1, 3, 1, True), (2, 10, 1, True)],
    ]


def test_decode_first_lets_the_new_request_wait_for_the_whole_batch() -> None:
    assert plans_of("decode-first") == [
        [(1, 0, 3, False)],
        [(1, 3, 1, True)],
        [(1, 4, 1, True)],
        [(1, 5, 1, True)],
        [(1, 6, 1, True)],
        [(2, 0, 10, False)],
        [(2, 10, 1, True)],
    ]


def test_orca_mixes_a_whole_prompt_into_the_decodes() -> None:
    assert plans_of("orca")[:3] == [
        [(1, 0, 3, False)],
        [(1, 3, 1, True), (2, 0, 10, False)],
        [(1, 4, 1, True), (2, 10, 1, True)],
    ]


@pytest.mark.parametrize(
    ("scheduler", "shortest", "longest"),
    [
        ("sarathi", 16, 16),  # one budgeted step
        ("sarathi-single", 20, 22),  # a chunk of 16 and the 4 to 6 decodes
        ("orca", 104, 106),  # a whole prompt and the 4 to 6 decodes
        ("prefill-first", 304, 307),  # three whole prompts, then a step of the 4 to 7 decodes
        ("decode-first", 4, 4),  # nothing but decodes
    ],
)
def test_the_largest_token_gap_is_what_each_policy_is_known_for(
    scheduler: SchedulerName, shortest: int, longest: int
) -> None:
    """Four decodes, three prompts of 100 tokens arrive at once, a step costs one second per token."""
    engine, executor, clock = make_engine(budget=16, max_num_seqs=8, num_pages=512, scheduler=scheduler)
    executor.cost_s = lambda plan: float(plan.num_tokens)
    for request_id in range(4):
        engine.add(make_request(request_id, 4, 60))
    stamps: list[float] = []
    for step in range(300):
        if step == 5:
            for request_id in (10, 11, 12):
                engine.add(make_request(request_id, 100, 2))
        result = engine.step()
        if result is None:
            break
        if any(emission.request.request_id == 0 for emission in result.emissions):
            stamps.append(clock.time_s)
    gaps = [later - earlier for earlier, later in pairwise(stamps)]
    assert shortest <= max(gaps) <= longest
