"""From logits to token ids: greedy, or with temperature by one uniform number per token.

A sampled token depends on its request's seed, its position and its logits, and on nothing else in the batch: the number
is a hash of (seed, position). The token is where that number falls in the running sum of probabilities. The sum is
searched in two steps, blocks first, because a running sum over a whole vocabulary takes longer than the softmax.
"""

from collections.abc import Sequence

import torch

from sarathi_tune.engine.plan import Slice

_MASK = (1 << 64) - 1
#: Probabilities that are summed up at once.
_BLOCK = 256
#: A lower temperature is greedy but for exact ties, and its reciprocal might not be a float32.
_COLDEST = 1e-6


def sample_tokens(logits: torch.Tensor, slices: Sequence[Slice]) -> list[int]:
    """One token id per row. `logits`: [len(slices), vocab] of any float type; `slices[i]` samples from row i."""
    warm = [row for row, piece in enumerate(slices) if piece.request.sampling.temperature > 0]
    if len(warm) == len(slices):
        return _draw(logits, slices)
    # Not argmax: on a CPU it takes six times as long over bfloat16. Both return the first of equal ones.
    tokens: list[int] = logits.max(dim=-1).indices.tolist()
    if warm:
        for row, token in zip(warm, _draw(logits[warm], [slices[row] for row in warm]), strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: torch.Tensor, slices: Sequence[Slice]) -> list[int]:
    """A token per row from the softmax at its request's temperature."""
    if not slices:
        return []
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // _BLOCK)
    heat = [[1.0 / max(_COLDEST, piece.request.sampling.temperature)] for piece in slices]
    scaled = logits.new_full((num_rows, num_blocks * _BLOCK), -torch.inf, dtype=torch.float32)
    torch.mul(logits, torch.tensor(heat, device=logits.device), out=scaled[:, :vocab_size])
    blocks = scaled.softmax(dim=-1).view(num_rows, num_blocks, _BLOCK)

    uniform = [[_uniform(piece.request.sampling.seed, piece.stop)] for piece in slices]
    level = torch.tensor(uniform, dtype=torch.float64, device=logits.device)
    block, level = _find(blocks.sum(dim=-1), level)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    within, _ = _find(chosen, level)
    # Only logits that aren't numbers lead behind the vocabulary.
    tokens: list[int] = (block * _BLOCK + within)[:, 0].clamp(max=vocab_size - 1).tolist()
    return tokens


def _find(weights: torch.Tensor, level: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(which of `weights` [rows, n] the running sum passes `level` of its total in, how far into it), [rows, 1] both.

    `level` is in [0, 1), and a weight of zero is never found.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    wanted = level * sums[:, -1:]
    found = torch.searchsorted(sums, wanted, right=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(1, found)
    passed = (wanted - (sums.gather(1, found) - weight)) / weight
    return found, passed.clamp(0.0, 1.0 - 2.0**-53)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) by splitmix64 of seed and position: neighbouring ones give unrelated numbers."""
    state = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((state ^ (state >> 31)) >> 11) * 2.0**-53
