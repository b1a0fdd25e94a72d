"""Requests drawn from a workload: repeatable, unlike each other, and never longer than they may be."""

from statistics import fmean, median

import pytest

from sarathi_tune.errors import UsageError
from sarathi_tune.workload.lengths import Fixed, Lognormal
from sarathi_tune.workload.load import load_workload
from sarathi_tune.workload.spec import Workload


def test_draws_have_the_workloads_statistics() -> None:
    workload = load_workload("chat-small")
    requests = workload.draw(3, 5000, vocab_size=None, max_model_len=8192).requests
    assert median(r.prompt_tokens for r in requests) == pytest.approx(400, rel=0.05)
    assert median(r.output_tokens for r in requests) == pytest.approx(48, rel=0.05)
    assert fmean(r.prompt_tokens for r in requests) == pytest.approx(workload.mean_prompt_tokens, rel=0.05)
    assert fmean(r.output_tokens for r in requests) == pytest.approx(workload.mean_output_tokens, rel=0.05)
    totals = sorted(r.prompt_tokens + r.output_tokens for r in requests)
    assert totals[4500] == pytest.approx(workload.quantile_total(0.9), rel=0.05)


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    workload = load_workload("chat-small")
    first, again, other = (workload.draw(seed, 20, vocab_size=1000, max_model_len=2048) for seed in (1, 1, 2))
    assert first == again
    pages = {tuple(r.prompt[:16]) for r in first.requests} | {tuple(r.prompt[:16]) for r in other.requests}
    assert len(pages) == 40


def test_no_two_prompts_share_a_first_page_even_with_two_tokens_to_choose_from() -> None:
    # 2,000 of 65,536 possible pages: without care, thirty would collide
    requests = load_workload("fixed:16:1").draw(0, 2000, vocab_size=2, max_model_len=64).requests
    assert len({tuple(r.prompt) for r in requests}) == 2000
    assert {token for r in requests for token in r.prompt} == {0, 1}


def test_unread_prompts_share_no_token() -> None:
    requests = load_workload("chat-small").draw(0, 10, vocab_size=None, max_model_len=2048).requests
    tokens = [token for r in requests for token in r.prompt]
    assert len(set(tokens)) == len(tokens)


def test_lengths_are_the_same_with_and_without_token_ids() -> None:
    workload = load_workload("chat-small")
    read = workload.draw(5, 30, vocab_size=100, max_model_len=2048).requests
    unread = workload.draw(5, 30, vocab_size=None, max_model_len=2048).requests
    assert [(r.prompt_tokens, r.output_tokens) for r in read] == [(r.prompt_tokens, r.output_tokens) for r in unread]


def test_ids_start_where_they_are_told_to() -> None:
    requests = load_workload("fixed:8:1").draw(0, 3, vocab_size=9, max_model_len=64, first_id=10).requests
    assert [r.request_id for r in requests] == [10, 11, 12]


def test_a_tail_beyond_the_context_is_clamped_counted_and_said() -> None:
    draw = load_workload("chat").draw(0, 1000, vocab_size=None, max_model_len=4096)
    longest = max(r.prompt_tokens + r.output_tokens for r in draw.requests)
    assert longest == 4096
    uncapped = load_workload("chat").draw(0, 1000, vocab_size=None, max_model_len=1 << 20)
    too_long = sum(r.prompt_tokens + r.output_tokens > 4096 for r in uncapped.requests)
    assert draw.num_clamped == too_long > 100
    assert uncapped.num_clamped == 0
    assert uncapped.notices == ()
    assert [notice.code for notice in draw.notices] == ["prompts-clamped"]
    assert f"{too_long} of 1000" in draw.notices[0].cause


@pytest.mark.parametrize(("name", "context"), [("fixed:2048:64", 2048), ("arxiv", 2048), ("chat", 1024)])
def test_a_workload_that_does_not_fit_the_context_is_refused(name: str, context: int) -> None:
    with pytest.raises(UsageError, match=f"doesn't fit the model's context of {context} tokens"):
        load_workload(name).draw(0, 1, vocab_size=100, max_model_len=context)


def test_the_total_cap_shortens_the_prompt_before_the_output() -> None:
    workload = Workload("w", Fixed(tokens=90), Fixed(tokens=30), total_cap=100)
    assert workload.lengths_at(0.5, 0.5) == (70, 30)
    assert Workload("w", Fixed(tokens=90), Fixed(tokens=300), total_cap=100).lengths_at(0.5, 0.5) == (1, 99)


def test_the_context_of_a_decode_counts_long_answers_for_every_token() -> None:
    assert load_workload("fixed:100:11").mean_decode_context_tokens == pytest.approx(105.5)  # 101 .. 110
    # a request with an answer of one token has no decode at all
    assert load_workload("fixed:100:1").mean_decode_context_tokens == 100
    output = Lognormal.from_median_p90(50, 200, 2, None)
    skewed = Workload("w", Fixed(tokens=100), output)
    lengths = [output.quantile((i + 0.5) / 2000) for i in range(2000)]
    contexts = [100 + k for length in lengths for k in range(1, length)]
    assert skewed.mean_decode_context_tokens == pytest.approx(fmean(contexts), rel=0.01)
