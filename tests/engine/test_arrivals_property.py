"""Random arrivals against the ledger: the laws that every schedule keeps."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_tune.config.engine import PreemptionMode, SchedulerName
from sarathi_tune.engine.request import RequestState
from sarathi_tune.engine.schedulers import SCHEDULERS
from tests.engine.doubles import expected_output, make_engine, make_request

arrival = st.tuples(
    st.integers(0, 30),  # step at which it arrives
    st.integers(1, 60),  # prompt tokens
    st.integers(1, 12),  # output tokens
    st.one_of(st.none(), st.integers(0, 10)),  # aborted so many steps after its arrival
    st.sampled_from([0, 0, 9, 32]),  # prompt tokens shared with others
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(arrival, min_size=1, max_size=12),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    page_tokens=st.sampled_from([1, 4, 16]),
    spare_tokens=st.integers(0, 120),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    prefix_cache=st.booleans(),
    preemption=st.sampled_from(["recompute", "swap"]),
)
def test_every_schedule_keeps_the_laws(
    arrivals: list[tuple[int, int, int, int | None, int]],
    budget: int,
    max_num_seqs: int,
    page_tokens: int,
    spare_tokens: int,
    scheduler: SchedulerName,
    prefix_cache: bool,
    preemption: PreemptionMode,
) -> None:
    num_pages = (72 + spare_tokens) // page_tokens + 1
    engine, executor, _ = make_engine(
        budget,
        max_num_seqs,
        num_pages,
        page_tokens,
        scheduler=scheduler,
        prefix_cache=prefix_cache,
        preemption=preemption,
    )
    requests = [
        make_request(index, prompt, output, shared) for index, (_, prompt, output, _, shared) in enumerate(arrivals)
    ]
    aborts = {index: at + later for index, (at, _, _, later, _) in enumerate(arrivals) if later is not None}
    step = 0
    while step <= 40 or engine.has_work:
        for index, (at, *_) in enumerate(arrivals):
            if at == step:
                engine.add(requests[index])
            if aborts.get(index) == step and at <= step:
                engine.abort(index)
        decoding = {r.request_id for r in requests if r.state is RequestState.RUNNING and r.is_decoding}
        result = engine.step()
        engine.check_integrity()  # no page owned twice, none lost
        if result is not None:
            plan = executor.plans[-1]
            tokens = sum(piece[2] for piece in plan)
            assert result.num_running <= max_num_seqs
            served = {piece[0] for piece in plan if piece[3]}
            if scheduler == "sarathi":
                assert tokens <= budget
            elif scheduler == "sarathi-single":
                assert tokens <= budget + len(served)
                assert len(plan) <= len(served) + 1
            if scheduler != "prefill-first" and not result.num_preempted:
                assert served == decoding  # no running decode is skipped
            if scheduler == "decode-first":
                assert not served or len(served) == len(plan)
            if scheduler in ("prefill-first", "decode-first", "orca"):
                assert all(stop == total for stop, total in executor.reached)  # prompts are never cut
            # decodes stand first
            flags = [piece[3] for piece in plan]
            assert flags == sorted(flags, reverse=True)
        step += 1
        assert step < 5_000, "no progress"
    engine.check_idle()
    for request in requests:
        assert request.is_finished
        expected = expected_output(list(request.prompt), request.max_output_tokens)
        if request.state is RequestState.FINISHED:
            assert request.output == expected
        else:
            assert request.output == expected[: len(request.output)]
