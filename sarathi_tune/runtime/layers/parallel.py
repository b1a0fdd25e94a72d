"""Linear layers whose weights are split over the ranks of a pipeline stage."""

from dataclasses import dataclass
from typing import Protocol

import torch

from sarathi_tune.runtime.layers.linear import Linear


class TensorGroup(Protocol):
    """The ranks that share a stage's layers. Every rank makes the same calls in the same order."""

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part`, on every rank; may overwrite `part`."""
        ...

    def collect_columns(self, part: torch.Tensor) -> torch.Tensor | None:
        """All ranks' `part` [rows, columns] side by side on the first rank, None on the others."""
        ...


@dataclass(frozen=True, slots=True)
class RowParallel:
    """A layer that holds some columns of the weight and gets as many of its inputs: one all-reduce over the tokens.

    `adds_residual`: whether this rank is the one whose partial sum carries the residual (and, in `part`, the bias).
    """

    part: Linear
    adds_residual: bool
    group: TensorGroup

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, own inputs] -> [tokens, out], the same on every rank."""
        return self.group.add_up(self.part(x, residual if self.adds_residual else None))


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """The LM head that holds `num_rows` rows of the vocabulary; the first rank gets the logits of all of them.

    Parts are `part_rows` wide except the last ones, which are filled up, because a gather wants equal parts.
    """

    part: Linear
    num_rows: int
    part_rows: int
    vocab_size: int
    group: TensorGroup

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, hidden] -> logits [tokens, vocab] on the first rank; [tokens, 0] on the others."""
        assert residual is None, "nothing is added to logits"
        logits = x.new_zeros(x.shape[0], self.part_rows)
        if self.num_rows:
            logits[:, : self.num_rows] = self.part(x)
        if not len(x):
            return x.new_empty(0, self.vocab_size)
        collected = self.group.collect_columns(logits)
        return x.new_empty(len(x), 0) if collected is None else collected[:, : self.vocab_size]
