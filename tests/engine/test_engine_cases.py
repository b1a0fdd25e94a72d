"""Faults that engines like this one had (public threads), as far as the scheduler and the page pool can have them.

What needs a device's arithmetic stands in tests/runtime/.
"""

import pytest

from sarathi_tune.engine.request import RequestState
from sarathi_tune.errors import RequestRefusedError
from tests.engine.doubles import expected_output, make_engine, make_request, run_until_idle


def test_a_preempted_request_comes_back_with_the_same_output() -> None:
    # 6 pages of 4 tokens; two requests that both want 5 pages in the end
    engine, _, _ = make_engine(budget=8, num_pages=6, page_tokens=4)
    requests = [make_request(request_id, 4, 14) for request_id in (1, 2)]
    for request in requests:
        engine.add(request)
    run_until_idle(engine)
    assert engine.num_preemptions > 0
    for request in requests:
        assert request.output == expected_output(list(request.prompt), 14)


def test_a_preempted_request_with_output_is_a_prefill_again() -> None:
    engine, executor, _ = make_engine(budget=64, num_pages=6, page_tokens=4)
    for request_id in (1, 2):
        engine.add(make_request(request_id, 4, 14))
    results = run_until_idle(engine)
    preempted_at = next(result.index for result in results if result.num_preempted)
    back = next(piece for plan in executor.plans[preempted_at:] for piece in plan if piece[0] == 2 and piece[1] == 0)
    # everything it had, prompt and output, is computed again in one chunk and not taken for a decode
    assert back[2] > 4
    assert back[3] is False


def test_every_slice_has_a_page_of_its_own_to_write_to() -> None:
    # the pool is used to its last page; the ledger fails on any slot that two requests write
    engine, _, _ = make_engine(budget=8, num_pages=8, page_tokens=4, max_num_seqs=2)
    requests = [make_request(request_id, 12, 5) for request_id in (1, 2)]
    for request in requests:
        engine.add(request)
    results = run_until_idle(engine)
    assert any(result.num_running == 2 for result in results)
    assert [request.output for request in requests] == [expected_output(list(r.prompt), 5) for r in requests]


def test_two_prompts_of_70_percent_of_the_pool_both_finish() -> None:
    engine, _, _ = make_engine(budget=8, num_pages=20, page_tokens=4)
    requests = [make_request(request_id, 56, 4) for request_id in (1, 2)]
    for request in requests:
        engine.add(request)
    run_until_idle(engine)
    assert engine.num_preemptions == 0
    assert all(request.state is RequestState.FINISHED for request in requests)


@pytest.mark.parametrize(
    ("prompt", "output", "says"),
    [(0, 3, "empty"), (5, 0, "no output"), (90, 20, "context is 100"), (60, 10, "whole pool holds 64")],
)
def test_what_can_never_fit_is_refused_and_the_next_one_runs(prompt: int, output: int, says: str) -> None:
    engine, _, _ = make_engine(num_pages=16, page_tokens=4, max_model_len=100)
    with pytest.raises(RequestRefusedError, match=says):
        engine.add(make_request(1, prompt, output))
    request = make_request(2, 10, 2)
    engine.add(request)
    run_until_idle(engine)
    assert request.state is RequestState.FINISHED


def test_fewer_tokens_than_requests_nobody_running_starves_and_no_chunk_is_negative() -> None:
    engine, executor, _ = make_engine(budget=2, max_num_seqs=8, num_pages=512)
    requests = [make_request(request_id, 3, 50) for request_id in range(5)]
    for request in requests:
        engine.add(request)
    run_until_idle(engine)
    assert all(piece[2] > 0 for plan in executor.plans for piece in plan)
    for request_id in range(5):  # from its first to its last step a decode is in every step
        steps = [i for i, plan in enumerate(executor.plans) if any(p[0] == request_id and p[3] for p in plan)]
        assert steps == list(range(steps[0], steps[0] + 49))
    assert all(request.state is RequestState.FINISHED for request in requests)


def test_three_chunks_give_exactly_one_token() -> None:
    engine, _, _ = make_engine(budget=4)
    engine.add(make_request(1, 12, 1))
    results = run_until_idle(engine)
    assert [len(result.emissions) for result in results] == [0, 0, 1]


def test_pages_are_counted_as_pages_when_the_pool_is_nearly_full() -> None:
    # 5 pages of 16 tokens: a prompt of 64 tokens takes 4, so a second prompt of 17 tokens (2 pages) must wait
    engine, executor, _ = make_engine(budget=128, num_pages=5, page_tokens=16)
    engine.add(make_request(1, 64, 2))
    engine.add(make_request(2, 17, 1))
    run_until_idle(engine)
    assert executor.plans[0] == [(1, 0, 64, False)]
    assert engine.num_preemptions == 0


def test_abort_between_chunks_frees_everything_and_a_resend_is_right() -> None:
    engine, _, _ = make_engine(budget=4)
    engine.add(make_request(1, 12, 3))
    engine.step()
    engine.abort(1)
    engine.check_idle()
    engine.abort(1)  # gone already: no error
    again = make_request(1, 12, 3)
    engine.add(again)
    run_until_idle(engine)
    assert again.output == expected_output(list(again.prompt), 3)


def test_abort_of_a_waiting_request() -> None:
    engine, _, _ = make_engine(max_num_seqs=1)
    for request_id in (1, 2):
        engine.add(make_request(request_id, 4, 3))
    engine.step()
    engine.abort(2)
    run_until_idle(engine)


def test_a_stream_of_long_prompts_never_delays_a_decode_by_more_than_one_step() -> None:
    engine, executor, _ = make_engine(budget=16, max_num_seqs=8, num_pages=512)
    for request_id in range(4):
        engine.add(make_request(request_id, 4, 60))
    while not executor.plans or sum(piece[3] for piece in executor.plans[-1]) < 4:
        engine.step()
    begin = len(executor.plans)
    for request_id in range(10, 20):
        engine.add(make_request(request_id, 100, 1))
    run_until_idle(engine)
    steps_with_prefill = 0
    for plan in executor.plans[begin : begin + 40]:
        decoding = {piece[0] for piece in plan if piece[3]}
        assert decoding >= {0, 1, 2, 3}
        steps_with_prefill += any(not piece[3] for piece in plan)
        assert sum(piece[2] for piece in plan) <= 16
    assert steps_with_prefill == 40


def test_decodes_are_not_preempted_by_an_arriving_prefill() -> None:
    # the pool has room for the long prompt only if the decode did not grow: it must wait instead
    engine, _, _ = make_engine(budget=5, num_pages=12, page_tokens=4, max_num_seqs=4)
    decode = make_request(1, 4, 24)
    engine.add(decode)
    for _ in range(3):
        engine.step()
    engine.add(make_request(2, 36, 1))
    run_until_idle(engine)
    assert decode.num_preemptions == 0
    assert engine.num_preemptions == 0


def test_an_executor_that_fails_loses_nothing() -> None:
    engine, executor, _ = make_engine(budget=8)
    request = make_request(1, 12, 2)
    engine.add(request)
    engine.step()

    def explode(_: object) -> float:
        raise MemoryError("device is full")

    executor.cost_s, working = explode, executor.cost_s
    with pytest.raises(MemoryError):
        engine.step()
    assert request.num_computed == 8
    executor.cost_s = working
    run_until_idle(engine)
    assert request.output == expected_output(list(request.prompt), 2)
