"""Faults that engines like this one had (public threads), as far as they need a device's arithmetic."""

import pytest
import torch

from sarathi_tune.engine.plan import StepPlan, Swap
from sarathi_tune.engine.request import Request, Sampling
from tests.hf_models import hf_greedy, hf_logits
from tests.runtime.conftest import (
    PAGE_TOKENS,
    ReferenceMaker,
    build_runner,
    chunk,
    decode,
    poison,
    prefill,
    prompt_of,
    request_of,
    step_logits,
)

BACK_ENDS = ["auto", "sdpa", "reference"]


@pytest.mark.parametrize("attention", BACK_ENDS)
def test_a_chunk_reads_no_slot_that_is_not_written(attention: str, reference: ReferenceMaker) -> None:
    """nano-vllm #212: the key length was the full prompt's. Unwritten slots hold NaN here."""
    runner = build_runner(reference("llama"), attention=attention)
    request = request_of(prompt_of(70), [9, 3, 4, 5, 1])
    for start in range(0, 70, 10):
        visible = request_of(request.prompt[: start + 10], request.pages)
        assert step_logits(runner, chunk(visible, start, 10)).isfinite().all()


@pytest.mark.parametrize("attention", BACK_ENDS)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen3"])
def test_mixed_batch_uses_right_slices(family: str, attention: str, reference: ReferenceMaker) -> None:
    """vLLM #27034: one decode and two chunks behind prefixes give what each gives alone, in any order."""
    model = reference(family)
    runner = build_runner(model, attention=attention)
    lengths = {"decode": 45, "first": 66, "second": 39}
    prompts = {name: prompt_of(length, seed=length) for name, length in lengths.items()}
    pages = {"decode": [20, 21, 7], "first": [0, 1, 2, 3, 4], "second": [63, 40, 41]}
    requests = {name: request_of(prompts[name], pages[name]) for name in lengths}
    prefixes = {"decode": 44, "first": 30, "second": 17}
    expected = {name: hf_logits(model.hf_model, prompts[name])[-1] for name in lengths}
    for order in (("decode", "first", "second"), ("second", "decode", "first"), ("first", "second", "decode")):
        for name in lengths:
            prefill(runner, requests[name], prefixes[name])
        slices = [chunk(requests[name], prefixes[name], lengths[name] - prefixes[name]) for name in order]
        logits = step_logits(runner, *slices)
        for name, actual in zip(order, logits, strict=True):
            torch.testing.assert_close(actual, expected[name], rtol=0, atol=1e-4)


def test_padding_never_touches_a_page_in_use(reference: ReferenceMaker) -> None:
    """vLLM #43810: slot -1 is the last slot of the last page. The pool's last page is in use and full."""
    model = reference("llama")
    runner = build_runner(model, num_pages=8)
    last = request_of(prompt_of(PAGE_TOKENS + 1, seed=1), [7, 0])
    prefill(runner, last, PAGE_TOKENS)
    before = [layer.keys[: 8 * PAGE_TOKENS].clone() for layer in runner.cache.layers]
    other = request_of(prompt_of(5, seed=2), [3])
    expected = hf_logits(model.hf_model, list(other.prompt))[-1]
    torch.testing.assert_close(step_logits(runner, chunk(other, 0, 5))[0], expected, rtol=0, atol=1e-4)
    for layer, keys in zip(runner.cache.layers, before, strict=True):
        torch.testing.assert_close(
            layer.keys[7 * PAGE_TOKENS : 8 * PAGE_TOKENS], keys[7 * PAGE_TOKENS :], rtol=0, atol=0
        )
    expected = hf_logits(model.hf_model, list(last.prompt))[-1]
    torch.testing.assert_close(step_logits(runner, decode(last))[0], expected, rtol=0, atol=1e-4)


def test_page_tables_are_filled_up_with_the_dummy_page(reference: ReferenceMaker) -> None:
    from sarathi_tune.runtime.batch import build_batch

    runner = build_runner(reference("llama"), num_pages=8)
    long, short = request_of(prompt_of(40), [7, 5, 6]), request_of(prompt_of(3), [0])
    batch = build_batch(StepPlan((chunk(long, 0, 40), chunk(short, 0, 3))), runner.cache, torch.device("cpu"))
    assert batch.page_table.tolist() == [[7, 5, 6], [0, 8, 8]]
    assert int(batch.slots.min()) >= 0
    assert runner.cache.layers[0].keys.shape[0] == 9 * PAGE_TOKENS


def test_a_prompt_in_three_chunks_gives_one_token_after_the_third(reference: ReferenceMaker) -> None:
    """vLLM #57562: a partial chunk's sampled token was kept."""
    model = reference("llama")
    runner = build_runner(model)
    request = request_of(prompt_of(50), [4, 5, 6, 7])
    tokens = [
        runner.execute(StepPlan((chunk(request, start, count),))) for start, count in ((0, 20), (20, 20), (40, 10))
    ]
    assert tokens == [[], [], hf_greedy(model.hf_model, list(request.prompt), 1)]


@pytest.mark.parametrize("attention", BACK_ENDS)
@pytest.mark.parametrize(("prefix", "count"), [(1, 2), (15, 17), (16, 16), (40, 3), (3, 60), (100, 29)])
def test_a_chunk_behind_a_prefix_is_masked_at_the_bottom_right(
    prefix: int, count: int, attention: str, reference: ReferenceMaker
) -> None:
    """PyTorch #108503: SDPA's causal mask is aligned at the top left when there are fewer queries than keys."""
    model = reference("llama")
    runner = build_runner(model, attention=attention)
    request = request_of(prompt_of(prefix + count, seed=prefix), range(10, 20))
    prefill(runner, request, prefix)
    expected = hf_logits(model.hf_model, list(request.prompt))[-1]
    torch.testing.assert_close(step_logits(runner, chunk(request, prefix, count))[0], expected, rtol=0, atol=1e-4)


def test_sampling_depends_on_seed_and_position_and_not_on_the_batch(reference: ReferenceMaker) -> None:
    runner = build_runner(reference("llama"))

    def sampled(seed: int, neighbours: int) -> list[int]:
        hot = Request(0, prompt_of(12), 4, sampling=Sampling(temperature=1.5, seed=seed), pages=[0, 1])
        others = [request_of(prompt_of(9, seed=i), [i + 2], request_id=i) for i in range(1, neighbours + 1)]
        plan = StepPlan((*(chunk(other, 0, 9) for other in others), chunk(hot, 0, 12)))
        return runner.execute(plan)[-1:]

    for seed in range(5):
        assert sampled(seed, 0) == sampled(seed, 3)
    assert len({sampled(seed, 0)[0] for seed in range(40)}) > 5


def test_a_request_swapped_out_and_in_goes_on_as_if_nothing_had_happened(reference: ReferenceMaker) -> None:
    model = reference("qwen3")
    runner = build_runner(model)
    request = request_of(prompt_of(40), [4, 9, 5])
    prefill(runner, request, 39)
    runner.execute(StepPlan((chunk(request_of([5], [0]), 0, 1),), (Swap("out", request.request_id, (4, 9, 5)),)))
    poison(runner)
    request.pages = [30, 2, 11]
    plan = StepPlan((decode(request),), (Swap("in", request.request_id, (30, 2, 11)),))
    expected = hf_logits(model.hf_model, list(request.prompt))[-1]
    torch.testing.assert_close(runner.logits(plan)[0], expected, rtol=0, atol=1e-4)
