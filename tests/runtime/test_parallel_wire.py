"""The batch layout on the wire: what a follower makes of it computes the same as what rank 0 has."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.engine.plan import Slice, StepPlan, Swap
from sarathi_tune.engine.request import Request, Sampling
from sarathi_tune.errors import UsageError
from sarathi_tune.runtime.batch import RaggedBatch, build_batch
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.parallel.wire import (
    MESSAGE_WORDS,
    Command,
    PlanDigest,
    decode_document,
    decode_plan,
    encode_document,
    encode_plan,
    make_messages,
    read_message,
)

PAGE_TOKENS = 4
CPU = torch.device("cpu")
CACHE = KVCache(ModelConfig("tiny", "llama", 64, 32, 48, 1, 2, 1, 16, 128), 40, PAGE_TOKENS, CPU, torch.float32)


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    prompt = draw(st.lists(st.integers(0, 150_000), min_size=1, max_size=30))
    output = draw(st.lists(st.integers(0, 150_000), max_size=6))
    start = draw(st.integers(0, len(prompt) + len(output) - 1))
    count = draw(st.integers(1, len(prompt) + len(output) - start))
    num_pages = -(-(len(prompt) + len(output)) // PAGE_TOKENS)
    request = Request(
        draw(st.integers(0, 2**62)),
        prompt,
        max_output_tokens=9,
        sampling=Sampling(draw(st.floats(0, 2)), draw(st.integers(-(2**70), 2**70))),
        output=output,
        pages=draw(st.lists(st.integers(0, 39), min_size=num_pages, max_size=num_pages + 2)),
    )
    return Slice(request, start, count, is_decode=draw(st.booleans()), samples=draw(st.booleans()))


SWAPS = st.builds(
    Swap,
    st.sampled_from(["out", "in", "drop"]),
    st.integers(0, 2**62),
    st.lists(st.integers(0, 39), max_size=5).map(tuple),
)
PLANS = st.builds(
    StepPlan, st.lists(slices(), min_size=1, max_size=6).map(tuple), st.lists(SWAPS, max_size=3).map(tuple)
)


@settings(max_examples=60, deadline=None)
@given(PLANS)
def test_a_follower_builds_the_batch_that_rank_0_builds(plan: StepPlan) -> None:
    received = decode_plan(encode_plan(plan, PAGE_TOKENS))
    assert received.swaps == plan.swaps
    ours, theirs = build_batch(plan, CACHE, CPU), build_batch(received, CACHE, CPU)
    for field in fields(RaggedBatch):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
    for piece, copy in zip(plan, received, strict=True):
        assert (piece.is_decode, piece.samples) == (copy.is_decode, copy.samples)
        assert piece.request.request_id == copy.request.request_id
        assert piece.request.sampling.temperature == copy.request.sampling.temperature
        assert (piece.request.sampling.seed - copy.request.sampling.seed) % 2**64 == 0  # all that a draw depends on


@settings(max_examples=30, deadline=None)
@given(PLANS)
def test_both_sides_digest_the_same(plan: StepPlan) -> None:
    words = encode_plan(plan, PAGE_TOKENS)
    digest = PlanDigest().add(words)
    assert digest == PlanDigest().add(encode_plan(decode_plan(words), PAGE_TOKENS))
    assert 0 <= digest < 2**63


def _plan(**changes: object) -> StepPlan:
    values: dict[str, object] = {"prompt": [5, 6, 7], "pages": [3], "start": 0, "count": 3, "samples": True} | changes
    request = Request(1, values["prompt"], 4, pages=values["pages"])  # type: ignore[arg-type]
    return StepPlan((Slice(request, values["start"], values["count"], False, values["samples"]),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"prompt": [5, 6, 8]}, {"pages": [4]}, {"start": 1, "count": 2}, {"count": 2}, {"samples": False}]
)
def test_the_digest_sees_every_difference(change: dict[str, object]) -> None:
    ours, theirs = (encode_plan(plan, PAGE_TOKENS) for plan in (_plan(), _plan(**change)))
    assert PlanDigest().add(ours) != PlanDigest().add(theirs)


def test_the_digest_remembers_earlier_steps() -> None:
    missed, complete = PlanDigest(), PlanDigest()
    complete.add(encode_plan(_plan(), PAGE_TOKENS))
    latest = encode_plan(_plan(count=2), PAGE_TOKENS)
    assert missed.add(latest) != complete.add(latest)


def test_only_the_steps_own_tokens_travel() -> None:
    """A decode behind 4,000 tokens of context costs its pages and a few words, not 4,000 token ids."""
    request = Request(1, [7] * 4000, 4, pages=list(range(1000)), output=[9])
    words = encode_plan(StepPlan((Slice(request, 4000, 1, True, True),)), 16)
    assert words.dtype == np.int64
    assert len(words) <= 20 + -(-4001 // 16)
    assert decode_plan(words).slices[0].request.token_ids(4000, 4001) == [9]


@pytest.mark.parametrize("num_words", [0, 1, MESSAGE_WORDS - 4, MESSAGE_WORDS - 3, 5000])
def test_messages_carry_the_payload(num_words: int) -> None:
    payload = np.arange(num_words, dtype=np.int64) - 7
    first, second = make_messages(Command.STEP, payload, 2**62 + 1)
    command, digest, begin, num_missing = read_message(first)
    assert (command, digest) == (Command.STEP, 2**62 + 1)
    assert len(first) == MESSAGE_WORDS
    assert num_missing == len(second)
    assert (num_missing > 0) == (num_words > MESSAGE_WORDS - 4)
    assert np.array_equal(np.concatenate((begin, second)), payload)


def test_documents() -> None:
    document = {"name": "größe", "options": [1, None, "x"]}
    assert decode_document(encode_document(document)) == document


def test_another_version_is_refused() -> None:
    first, _ = make_messages(Command.STOP, encode_document({}))
    first[0] += 1
    with pytest.raises(UsageError, match="install the same version of sarathi-tune"):
        read_message(first)
