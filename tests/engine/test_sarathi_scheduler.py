"""The stall-free scheduler: order, budget, decodes first, and the schedule of hand-worked examples."""

from sarathi_tune.engine.request import RequestState
from tests.engine.doubles import expected_output, make_engine, make_request, run_until_idle


def test_a_prompt_is_cut_into_chunks_of_the_budget_and_emits_once() -> None:
    engine, executor, _ = make_engine(budget=8)
    request = make_request(1, prompt_tokens=20, output_tokens=1)
    engine.add(request)
    results = run_until_idle(engine)
    assert executor.plans == [[(1, 0, 8, False)], [(1, 8, 8, False)], [(1, 16, 4, False)]]
    assert [len(result.emissions) for result in results] == [0, 0, 1]
    assert request.output == expected_output(list(request.prompt), 1)


def test_decodes_come_first_then_prefills_in_progress_then_new_requests() -> None:
    engine, executor, _ = make_engine(budget=8)
    for request_id, prompt, output in ((1, 3, 9), (2, 12, 2), (3, 2, 2)):
        engine.add(make_request(request_id, prompt, output))
    run_until_idle(engine)
    # step 1: request 1's whole prompt (3), request 2 gets the 5 tokens left
    assert executor.plans[0] == [(1, 0, 3, False), (2, 0, 5, False)]
    # step 2: one decode, the prefill in progress takes 7
    assert executor.plans[1] == [(1, 3, 1, True), (2, 5, 7, False)]
    # step 3: two decodes, the new request fits beside them
    assert executor.plans[2] == [(1, 4, 1, True), (2, 12, 1, True), (3, 0, 2, False)]


def test_two_prompts_share_a_step_within_the_budget() -> None:
    engine, executor, _ = make_engine(budget=16)
    for request_id in (1, 2, 3):
        engine.add(make_request(request_id, 6, 1))
    run_until_idle(engine)
    assert executor.plans == [[(1, 0, 6, False), (2, 0, 6, False), (3, 0, 4, False)], [(3, 4, 2, False)]]


def test_no_more_than_max_num_seqs_run() -> None:
    engine, executor, _ = make_engine(budget=100, max_num_seqs=2)
    for request_id in range(5):
        engine.add(make_request(request_id, 2, 4))
    results = run_until_idle(engine)
    assert max(len(plan) for plan in executor.plans) == 2
    assert max(result.num_running for result in results) == 2


def test_step_result_tells_shape_time_and_queue() -> None:
    engine, _, clock = make_engine(budget=8, max_num_seqs=2)
    for request_id in (1, 2, 3):
        engine.add(make_request(request_id, 4, 2))
    clock.time_s = 5.0
    first = engine.step()
    assert first is not None
    assert first.shape.chunks == ((0, 4), (0, 4))
    assert (first.start_s, first.end_s, first.duration_ms) == (5.0, 6.0, 1000.0)
    assert (first.num_running, first.num_waiting) == (2, 1)
    second = engine.step()
    assert second is not None
    assert second.shape.decode_contexts == (5, 5)
    assert [emission.is_last for emission in second.emissions] == [True, True]


def test_stop_token_ends_a_request_early() -> None:
    engine, _, _ = make_engine()
    request = make_request(1, 5, 10)
    request.stop_token_ids = frozenset({expected_output(list(request.prompt), 3)[2]})
    engine.add(request)
    run_until_idle(engine)
    assert len(request.output) == 3
    assert request.state is RequestState.FINISHED


def test_nothing_to_do_is_none() -> None:
    engine, _, _ = make_engine()
    assert engine.step() is None
