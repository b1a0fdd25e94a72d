"""Greedy and seeded sampling: the distribution, and what a token depends on."""

import math
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from sarathi_tune.engine.plan import Slice
from sarathi_tune.engine.request import Request, Sampling
from sarathi_tune.runtime.sampling import sample_tokens

LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0])


def slice_at(position: int, temperature: float = 1.0, seed: int = 0, request_id: int = 0) -> Slice:
    request = Request(request_id, range(position), 1, sampling=Sampling(temperature, seed))
    return Slice(request, position - 1, 1, is_decode=True, samples=True)


def drawn(logits: torch.Tensor, count: int, temperature: float, seed: int = 11) -> Counter[int]:
    """How often each token came out of `count` positions of one request."""
    counts: Counter[int] = Counter()
    for start in range(1, count + 1, 1000):
        slices = [slice_at(position, temperature, seed) for position in range(start, min(start + 1000, count + 1))]
        counts.update(sample_tokens(logits.expand(len(slices), -1), slices))
    return counts


def test_greedy_takes_the_largest() -> None:
    assert sample_tokens(LOGITS[None], [slice_at(3, temperature=0.0)]) == [2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 11, 2**63])
def test_frequencies_follow_the_softmax(temperature: float, seed: int) -> None:
    count = 4000
    seen = drawn(LOGITS, count, temperature, seed)
    expected = ((LOGITS / temperature).double().softmax(0) * count).tolist()
    assert chisquare([seen[token] for token in range(4)], expected).pvalue > 1e-4


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_frequencies_follow_the_softmax_over_several_blocks(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)).to(dtype)
    count = 20_000
    seen = drawn(logits, count, 0.7)
    expected = (logits.double() / 0.7).softmax(0) * count
    assert set(seen) <= set(range(vocab_size))
    # rare tokens together, as the test asks for five of each
    common = [token for token in range(vocab_size) if expected[token] >= 5]
    observed, wanted = [seen[token] for token in common], [float(expected[token]) for token in common]
    if len(common) < vocab_size:
        observed.append(count - sum(observed))
        wanted.append(count - sum(wanted))
    assert chisquare(observed, wanted).pvalue > 1e-4


def test_consecutive_positions_and_seeds_are_independent() -> None:
    flat = torch.zeros(2)
    by_position = [sample_tokens(flat[None], [slice_at(position, seed=4)])[0] for position in range(1, 2001)]
    by_seed = [sample_tokens(flat[None], [slice_at(5, seed=seed)])[0] for seed in range(2000)]
    for tokens in (by_position, by_seed):
        pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
        assert chisquare([pairs[pair] for pair in ((0, 0), (0, 1), (1, 0), (1, 1))]).pvalue > 1e-4


def test_tokens_that_cannot_be_are_never_drawn() -> None:
    logits = torch.full((600,), -torch.inf)
    logits[[3, 599]] = torch.tensor([0.0, 1.0])
    seen = drawn(logits, 2000, 1.0)
    assert set(seen) == {3, 599}
    share = 1 / (1 + math.e)
    assert abs(seen[3] / 2000 - share) < 4 * math.sqrt(share * (1 - share) / 2000)


def test_the_coldest_temperature_is_greedy() -> None:
    for temperature in (1e-9, 5e-324):
        assert set(drawn(LOGITS, 100, temperature)) == {2}


def test_a_token_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    alone = sample_tokens(logits[2:3], [slice_at(9, seed=4)])
    slices = [slice_at(i + 1, seed=i, request_id=i) for i in range(5)]
    slices[2] = slice_at(9, seed=4, request_id=77)
    assert sample_tokens(logits, slices)[2] == alone[0]
    flat = torch.zeros(1, 300)
    assert len({sample_tokens(flat, [slice_at(9, seed=seed)])[0] for seed in range(50)}) > 30
    assert len({sample_tokens(flat, [slice_at(position, seed=4)])[0] for position in range(1, 51)}) > 30


def test_greedy_and_warm_rows_share_a_batch() -> None:
    logits = torch.randn(32, 5000, generator=torch.Generator().manual_seed(1)).bfloat16()
    slices = [slice_at(row + 1, temperature=0.8 * (row % 3 == 0), seed=row) for row in range(32)]
    together = sample_tokens(logits, slices)
    assert together == [sample_tokens(logits[row : row + 1], [slices[row]])[0] for row in range(32)]
    assert together == sample_tokens(logits, slices), "the same again"
    greedy = logits.argmax(dim=-1).tolist()
    assert [together[row] for row in range(32) if row % 3] == [greedy[row] for row in range(32) if row % 3]
    assert any(together[row] != greedy[row] for row in range(0, 32, 3))
