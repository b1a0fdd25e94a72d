"""Rows that are added to a batch, and the rows that its last layer keeps."""

import pytest
import torch

from sarathi_tune.config.presets import PRESETS
from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.runtime.batch import build_batch, pad_rows, sampled_rows
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.model import Model
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
from tests.runtime.ragged import CPU

#: A chunk in the middle of its prompt, two decodes with 20 and 37 keys, the last chunk of another prompt.
MIDDLE, SHORT, LONG, END = (
    request_of([5] * 60, range(4)),
    request_of([6] * 20, [9, 4]),
    request_of([7] * 37, [5, 6, 8]),
    request_of([8] * 45, [12, 11, 10]),
)
PLAN = StepPlan((chunk(MIDDLE, 9, 40), decode(SHORT), decode(LONG), chunk(END, 40, 5)))


@pytest.fixture
def cache() -> KVCache:
    return KVCache(PRESETS["smollm2-135m"], 16, PAGE_TOKENS, CPU, torch.bfloat16)


def test_added_rows_write_into_the_dummy_page_and_belong_to_nobody(cache: KVCache) -> None:
    batch = build_batch(PLAN, cache, CPU)
    padded = pad_rows(batch, 50, cache)
    assert batch.num_tokens == 47
    assert padded.num_tokens == 50
    for name in ("token_ids", "positions", "slots"):
        assert getattr(padded, name)[:47].equal(getattr(batch, name))
    assert padded.slots[47:].tolist() == [16 * PAGE_TOKENS] * 3
    assert (padded.sequences, padded.sample_rows.tolist()) == (batch.sequences, [40, 41, 46])
    assert pad_rows(batch, 47, cache) is batch


def test_sampled_rows_are_single_queries_behind_all_their_other_keys(cache: KVCache) -> None:
    batch = build_batch(PLAN, cache, CPU)
    kept = sampled_rows(batch)
    assert [(s.row, s.count, s.prefix, s.key_length) for s in kept.sequences] == [
        (0, 1, 19, 20),
        (1, 1, 36, 37),
        (2, 1, 44, 45),
    ]
    assert [s.runs for s in kept.sequences] == [s.runs for s in batch.sequences[1:]]
    assert kept.positions.tolist() == [19, 36, 44]
    assert kept.slots.tolist() == [4 * 16 + 3, 8 * 16 + 4, 10 * 16 + 12]
    assert kept.page_table.equal(batch.page_table[1:])
    assert kept.query_starts.tolist() == [0, 1, 2, 3]
    assert kept.key_starts.tolist() == [0, 20, 57, 102]
    assert kept.sample_rows.tolist() == [0, 1, 2]
    assert (kept.num_tokens, kept.max_count, kept.max_key_length) == (3, 1, 45)


def test_nothing_is_left_of_a_batch_that_isnt_sampled_from(cache: KVCache) -> None:
    kept = sampled_rows(build_batch(StepPlan((chunk(MIDDLE, 9, 40),)), cache, CPU))
    assert (kept.num_tokens, kept.sequences) == (0, ())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_a_last_layer_with_all_rows(
    family: str, reference: ReferenceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build_runner(reference(family))
    first = request_of(prompt_of(60, seed=1), range(4))
    second = request_of(prompt_of(20, seed=2), [9, 4])
    third = request_of(prompt_of(45, seed=3), [12, 11, 10])

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        poison(runner)
        prefill(runner, first, 9)
        prefill(runner, second, 19)
        prefill(runner, third, 40)
        mixed = step_logits(runner, chunk(first, 9, 40), decode(second), chunk(third, 40, 5))
        return mixed, step_logits(runner, chunk(first, 49, 11))

    cut = run()
    monkeypatch.setattr(Model, "_kept_rows", lambda _model, _batch: None)
    for actual, expected in zip(cut, run(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


def test_a_step_with_added_rows_gives_the_same_logits(
    reference: ReferenceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build_runner(reference("llama"))
    request = request_of(prompt_of(45), range(3))
    plan = StepPlan((Slice(request, 0, 45, is_decode=False, samples=True),))
    expected = runner.logits(plan)
    poison(runner)
    monkeypatch.setattr("sarathi_tune.runtime.layers.linear.LinearChoice.padded_rows", lambda _choice, count: count + 3)
    torch.testing.assert_close(runner.logits(plan), expected, rtol=0, atol=2e-5)
    written = torch.stack([layer.keys.isfinite().all(dim=-1).all(dim=-1) for layer in runner.cache.layers]).all(dim=0)
    assert written.nonzero().flatten().tolist() == [*range(45), runner.cache.dummy_slot]
