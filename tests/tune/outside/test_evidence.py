"""What the server says about itself, from texts as vLLM 0.32.0 writes them."""

import pytest

from sarathi_tune.goodput.server_account import Mean
from sarathi_tune.tune.outside.evidence import (
    Exposition,
    Sent,
    account,
    evidence,
    others_share,
    own_gap_ms,
    read_exposition,
)
from sarathi_tune.tune.outside.running import RunningBudget

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m, \\"n\\""} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_preemptions_total{engine="0",model_name="m"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 500.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 0.0
vllm:iteration_tokens_total_bucket{engine="0",le="256.0",model_name="m"} 90.0
vllm:iteration_tokens_total_bucket{engine="0",le="512.0",model_name="m"} 98.0
vllm:iteration_tokens_total_bucket{engine="0",le="1024.0",model_name="m"} 100.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 100.0
vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="1456"} 1.0
python_gc_objects_collected_total{generation="0"} 12.0
broken line
vllm:no_number{engine="0"} many
"""
BUDGET = RunningBudget(512, (508, 514), is_bound=False, error=0.01, num_full=9, num_injections=9, miscounted=0.0)


def with_values(**values: float) -> Exposition:
    return Exposition({f"vllm:{name}": value for name, value in values.items()})


def with_steps(up_to_512: float, up_to_1024: float, everything: float) -> Exposition:
    return Exposition(step_buckets={512.0: up_to_512, 1024.0: up_to_1024, float("inf"): everything})


def codes(before: Exposition, after: Exposition, sent: Sent, running: RunningBudget | None = BUDGET) -> list[str]:
    return [notice.code for notice in evidence(before, after, sent, running)]


def test_a_text_is_read() -> None:
    found = read_exposition(TEXT)
    assert found.value("vllm:num_requests_running") == 2
    assert found.value("vllm:prompt_tokens_total") == 1500, "engines are summed"
    assert found.value("vllm:no_number") is None
    assert found.step_buckets == {256.0: 90.0, 512.0: 98.0, 1024.0: 100.0, float("inf"): 100.0}
    assert found.kv_tokens == 128 * 1456
    assert not found.speculates


def test_drafts_are_seen() -> None:
    assert read_exposition('vllm:spec_decode_num_drafts_total{engine="0"} 0.0').speculates


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert codes(Exposition(), Exposition(), Sent(5000)) == []
    assert others_share(Exposition(), Exposition(), Sent(5000)) is None
    assert read_exposition("<html></html>") == Exposition()


def test_prompts_of_others_are_told() -> None:
    before, after = with_values(prompt_tokens_total=100), with_values(prompt_tokens_total=1100)
    assert others_share(before, after, Sent(1000)) == 0
    assert others_share(before, after, Sent(750)) == pytest.approx(0.25)
    assert codes(before, after, Sent(1000)) == []
    assert codes(before, after, Sent(750)) == ["server-has-others"]


def test_requests_under_way_before_it_began_are_told() -> None:
    (notice,) = evidence(with_values(num_requests_running=3), Exposition(), Sent(0), None)
    assert notice.code == "server-has-others"
    assert "3 requests were under way" in notice.cause


def test_preemptions_and_cache_hits_are_told() -> None:
    before = with_values(num_preemptions_total=4, prefix_cache_hits_total=10)
    after = with_values(num_preemptions_total=6, prefix_cache_hits_total=74)
    found = evidence(before, after, Sent(0), None)
    assert [notice.code for notice in found] == ["server-preempted", "prefix-cache-hits"]
    assert "2 times" in found[0].cause
    assert "64 prompt tokens" in found[1].cause


@pytest.mark.parametrize("name", ["inter_token_latency_seconds", "time_per_output_token_seconds"])
def test_the_mean_gap_is_that_of_the_servers_histogram(name: str) -> None:
    before = with_values(**{f"{name}_sum": 1.0, f"{name}_count": 10})
    after = with_values(**{f"{name}_sum": 3.0, f"{name}_count": 60})
    assert own_gap_ms(before, after) == pytest.approx(2000 / 50)
    assert own_gap_ms(before, before) is None
    assert evidence(before, after, Sent(0), None, 41.9) == ()
    (notice,) = evidence(before, after, Sent(0), None, 42.1)
    assert notice.code == "gaps-differ"
    assert "40.0 ms between tokens in the mean, and from outside it was 42.1 ms" in notice.cause


def test_gaps_that_are_not_ours_alone_are_no_evidence() -> None:
    before = with_values(prompt_tokens_total=0)
    after = with_values(
        prompt_tokens_total=1000, inter_token_latency_seconds_sum=2.0, inter_token_latency_seconds_count=50
    )
    assert [notice.code for notice in evidence(before, after, Sent(500), None, 80.0)] == ["server-has-others"]


def test_a_whole_prompt_booked_on_its_last_step_is_no_contradiction() -> None:
    """vLLM counts 1,000 tokens in the step that ends a prompt of 1,000, although it computed 504 of them there."""
    before, after = with_steps(10, 10, 10), with_steps(30, 31, 31)
    assert codes(before, after, Sent(1500, prompts=(1000, 500))) == []


def test_steps_above_the_budget_that_no_prompt_explains_are_told() -> None:
    before, after = with_steps(10, 10, 10), with_steps(30, 33, 34)
    (notice,) = evidence(before, after, Sent(1500, prompts=(1000, 500)), BUDGET)
    assert notice.code == "evidence-disagrees"
    # four steps above 512, 514 of which can't be told from the budget: those above 1,024 count
    assert "1 steps of more than 1,024" in notice.cause


def test_a_lower_bound_can_not_be_contradicted() -> None:
    bound = RunningBudget(400, (400, None), is_bound=True, error=0.01, num_full=0, num_injections=9, miscounted=0.0)
    assert codes(with_steps(0, 0, 0), with_steps(0, 0, 9), Sent(0), bound) == []


def counted(ttft: tuple[float, float], gaps: tuple[float, float], queue: tuple[float, float], preempted: int) -> str:
    """The lines of vLLM 0.32.0 about two engines, of which the second counted nothing."""
    text = ""
    for name, (count, total_s) in (
        ("time_to_first_token", ttft),
        ("inter_token_latency", gaps),
        ("request_queue_time", queue),
    ):
        for engine, share in (("0", 1), ("1", 0)):
            labels = f'{{engine="{engine}",model_name="m"}}'
            text += f"vllm:{name}_seconds_count{labels} {share * count}\n"
            text += f"vllm:{name}_seconds_sum{labels} {share * total_s}\n"
    return text + f'vllm:num_preemptions_total{{engine="0",model_name="m"}} {float(preempted)}\n'


def test_what_a_server_counted_over_a_run() -> None:
    before = read_exposition(counted((10, 3.0), (300, 9.0), (9, 0.9), 2))
    after = read_exposition(counted((30, 8.0), (900, 39.0), (29, 1.0), 5))
    found = account(before, after, ())
    assert found is not None
    assert found.ttft.own == Mean(20, pytest.approx(250.0))
    assert found.gap.own == Mean(600, pytest.approx(50.0))
    assert found.queue == Mean(20, pytest.approx(5.0))
    assert found.preemptions == 3


def test_a_server_that_counts_no_answers_gives_no_account() -> None:
    assert account(Exposition(), Exposition(), ()) is None
    idle = read_exposition(counted((10, 3.0), (300, 9.0), (9, 0.9), 2))
    assert account(idle, idle, ()) is None
