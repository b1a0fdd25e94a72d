"""The prefix cache: what it finds, what it must never find, and what happens to its pages."""

import pytest

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.engine.loop import Engine
from sarathi_tune.engine.queue import RequestQueue
from sarathi_tune.engine.request import Request
from tests.engine.doubles import (
    LedgerExecutor,
    ManualClock,
    expected_output,
    make_engine,
    make_request,
    run_until_idle,
)


def ask(engine: Engine, request_id: int, prompt: list[int], output: int = 3) -> Request:
    request = Request(request_id, prompt, output)
    engine.add(request)
    run_until_idle(engine)
    assert request.output == expected_output(prompt, output)
    return request


def test_4000_tokens_with_3500_cached_take_one_step_of_500() -> None:
    engine, executor, _ = make_engine(budget=512, num_pages=600, page_tokens=20, prefix_cache=True)
    shared = list(range(3500))
    ask(engine, 1, shared + [40_001] * 20)
    executor.plans.clear()
    request = ask(engine, 2, shared + [40_002] * 500, output=1)
    assert executor.plans == [[(2, 3500, 500, False)]]
    assert request.num_cached == 3500


@pytest.mark.parametrize("extra", [0, 1])
def test_a_fully_cached_prompt_still_computes_its_last_token(extra: int) -> None:
    # a prompt of exactly k pages, sent twice
    engine, executor, _ = make_engine(budget=64, page_tokens=4, prefix_cache=True)
    prompt = list(range(12 + extra))
    ask(engine, 1, prompt)
    executor.plans.clear()
    ask(engine, 2, prompt)
    assert executor.plans[0] == [(2, 8 + 4 * extra, 4 - 3 * extra, False)]


def test_stale_pages_are_not_found_after_their_room_was_used() -> None:
    engine, _, _ = make_engine(budget=64, num_pages=8, page_tokens=4, prefix_cache=True)
    first, second = list(range(100, 120)), list(range(200, 228))
    ask(engine, 1, first)
    assert ask(engine, 2, first).num_cached == 16
    ask(engine, 3, second)  # 8 pages: takes every page of the first prompt
    assert ask(engine, 4, first).num_cached == 0


def test_a_request_arriving_mid_prefill_finds_only_computed_pages() -> None:
    engine, executor, _ = make_engine(budget=8, page_tokens=4, max_num_seqs=4, prefix_cache=True)
    prompt = list(range(40))
    one, two = Request(1, prompt, 2), Request(2, prompt, 2)
    engine.add(one)
    engine.step()
    engine.step()
    assert one.num_computed == 16
    engine.add(two)
    run_until_idle(engine)
    first_slice = next(piece for plan in executor.plans for piece in plan if piece[0] == 2)
    assert first_slice[1] <= 36
    assert one.output == two.output == expected_output(prompt, 2)


def test_abort_between_chunks_leaves_only_computed_pages_behind() -> None:
    engine, _, _ = make_engine(budget=6, page_tokens=4, prefix_cache=True)
    prompt = list(range(20))
    engine.add(Request(1, prompt, 2))
    engine.step()  # 6 tokens: one full page
    engine.abort(1)
    engine.check_idle()
    assert ask(engine, 2, prompt).num_cached == 4


def test_equal_hashes_never_hand_out_another_prompts_pages() -> None:
    clock = ManualClock()
    executor = LedgerExecutor(4, clock)
    engine = Engine(EngineConfig(64, 4, 64, 4, 1000, prefix_cache=True), executor, clock)
    engine._queue = RequestQueue(engine.config, token_hash=lambda _parent, _tokens: 7)
    engine._scheduler = type(engine._scheduler)(engine._queue)
    ask(engine, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert ask(engine, 2, [9, 9, 9, 9, 5, 6, 7, 8, 9]).num_cached == 0  # same second page, other first page
    assert ask(engine, 3, [1, 2, 3, 4, 6, 6, 6, 6, 9]).num_cached == 4
    assert ask(engine, 4, [1, 2, 3, 4, 5, 6, 7, 8, 9]).num_cached == 8


def test_two_requests_at_once_share_and_publish_behind_each_other() -> None:
    engine, _, _ = make_engine(budget=64, page_tokens=4, prefix_cache=True)
    one, two = make_request(1, 20, 9, shared_tokens=16), make_request(2, 20, 9, shared_tokens=16)
    engine.add(one)
    engine.add(two)  # both compute the shared part in the same step
    run_until_idle(engine)
    follow_up = list(two.prompt) + two.output + [5, 6, 7]
    assert ask(engine, 3, follow_up).num_cached == 28


def test_a_preempted_request_resumes_from_its_own_cached_pages() -> None:
    engine, executor, _ = make_engine(budget=64, num_pages=9, page_tokens=4, prefix_cache=True)
    requests = [make_request(request_id, 8, 16) for request_id in (1, 2)]
    for request in requests:
        engine.add(request)
    run_until_idle(engine)
    victim = requests[1]
    assert victim.num_preemptions > 0
    assert victim.num_cached > 0
    assert all(request.output == expected_output(list(request.prompt), 16) for request in requests)
    del executor


def test_forget_cache_makes_the_next_prompt_cold() -> None:
    engine, _, _ = make_engine(page_tokens=4, prefix_cache=True)
    prompt = list(range(20))
    ask(engine, 1, prompt)
    engine.forget_cache()
    assert ask(engine, 2, prompt).num_cached == 0


def test_swapped_requests_come_back_without_computing_anything_again() -> None:
    engine, executor, _ = make_engine(budget=64, num_pages=8, page_tokens=4, preemption="swap")
    requests = [make_request(request_id, 8, 16) for request_id in (1, 2)]
    for request in requests:
        engine.add(request)
    run_until_idle(engine)
    assert engine.num_preemptions > 0
    computed = sum(count for plan in executor.plans for _, _, count, _ in plan)
    assert computed == sum(len(request.prompt) + 15 for request in requests)
    assert all(request.output == expected_output(list(request.prompt), 16) for request in requests)
    assert not executor.host
