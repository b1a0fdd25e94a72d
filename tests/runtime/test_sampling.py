"""Greedy and seeded sampling: the distribution, and what a token depends on."""

import math

import torch

from sarathi_tune.engine.plan import Slice
from sarathi_tune.engine.request import Request, Sampling
from sarathi_tune.runtime.sampling import sample_tokens

LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0])


def slice_at(position: int, temperature: float = 1.0, seed: int = 0, request_id: int = 0) -> Slice:
    request = Request(request_id, [1] * position, 1, sampling=Sampling(temperature, seed))
    return Slice(request, position - 1, 1, is_decode=True, samples=True)


def test_greedy_takes_the_largest() -> None:
    assert sample_tokens(LOGITS[None], [slice_at(3, temperature=0.0)]) == [2]


def test_frequencies_follow_the_softmax() -> None:
    count = 4000
    for temperature in (0.5, 2.0):
        slices = [slice_at(position, temperature, seed=11) for position in range(1, count + 1)]
        drawn = sample_tokens(LOGITS.expand(count, -1), slices)
        for token, probability in enumerate((LOGITS / temperature).softmax(0).tolist()):
            # Four standard deviations of a binomial share.
            margin = 4 * math.sqrt(probability * (1 - probability) / count)
            assert abs(drawn.count(token) / count - probability) < margin


def test_a_token_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    alone = sample_tokens(logits[2:3], [slice_at(9, seed=4)])
    slices = [slice_at(i + 1, seed=i, request_id=i) for i in range(5)]
    slices[2] = slice_at(9, seed=4, request_id=77)
    assert sample_tokens(logits, slices)[2] == alone[0]
    flat = torch.zeros(1, 300)
    assert len({sample_tokens(flat, [slice_at(9, seed=seed)])[0] for seed in range(50)}) > 30
    assert len({sample_tokens(flat, [slice_at(position, seed=4)])[0] for position in range(1, 51)}) > 30
