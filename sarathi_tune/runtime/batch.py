"""From a step plan to a ragged batch: all slices' tokens one behind the other, found again by cumulative offsets.

Nothing is padded to the longest request. `query_starts` is what varlen kernels call `cu_seqlens_q`.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch

from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.runtime.kvcache import KVCache


@dataclass(frozen=True, slots=True)
class Sequence:
    """One slice as attention sees it: query rows `row` to `row + count - 1` behind `prefix` tokens in the cache.

    `runs`: (first slot, tokens) of each contiguous run of pages, in the order of the request's tokens, `key_length`
    tokens in all.
    """

    row: int
    count: int
    prefix: int
    runs: tuple[tuple[int, int], ...]

    @property
    def key_length(self) -> int:
        """Keys the last query of the slice sees."""
        return self.prefix + self.count


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The tokens of one step, on the device. T tokens of N slices.

    token_ids, positions, slots: [T] int64. query_starts, key_starts: [N + 1] int32 offsets. page_table: [N, most pages]
    int32, rows filled up with the dummy page. sample_rows: [slices that sample] int64. Rows behind the last slice are
    padding (see `pad_rows`) and belong to no sequence.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    page_table: torch.Tensor
    sample_rows: torch.Tensor
    sequences: tuple[Sequence, ...]
    max_count: int
    max_key_length: int

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return int(self.token_ids.shape[0])


def build_batch(plan: StepPlan, cache: KVCache, device: torch.device) -> RaggedBatch:
    """The ragged batch of a plan whose requests own the pages that their slices need."""
    pages = [_pages_of(piece, cache.page_tokens) for piece in plan]
    starts = _offsets([piece.count for piece in plan])
    positions = np.concatenate([np.arange(piece.start, piece.stop, dtype=np.int64) for piece in plan])
    sequences = tuple(
        Sequence(int(row), piece.count, piece.start, _runs(owned, piece.stop, cache.page_tokens))
        for piece, owned, row in zip(plan, pages, starts, strict=False)
    )
    samples = [int(starts[i + 1]) - 1 for i, piece in enumerate(plan) if piece.samples]
    return RaggedBatch(
        token_ids=_to(device, np.array(_token_ids(plan), dtype=np.int64)),
        positions=_to(device, positions),
        slots=_to(device, _slots(plan, pages, cache.page_tokens)),
        query_starts=_to(device, starts),
        key_starts=_to(device, _offsets([piece.stop for piece in plan])),
        page_table=_to(device, _page_table(pages, cache.dummy_page)),
        sample_rows=_to(device, np.array(samples, dtype=np.int64)),
        sequences=sequences,
        max_count=max(piece.count for piece in plan),
        max_key_length=max(piece.stop for piece in plan),
    )


def sampled_rows(batch: RaggedBatch) -> RaggedBatch:
    """Of a batch on the host only the rows that are sampled from, each a slice of one token behind all others."""
    wanted = {row: at for at, row in enumerate(batch.sample_rows.tolist())}
    chosen = [i for i, sequence in enumerate(batch.sequences) if sequence.row + sequence.count - 1 in wanted]
    sequences = tuple(
        Sequence(row, 1, batch.sequences[i].key_length - 1, batch.sequences[i].runs) for row, i in enumerate(chosen)
    )
    lengths = [sequence.key_length for sequence in sequences]
    return RaggedBatch(
        token_ids=batch.token_ids[batch.sample_rows],
        positions=batch.positions[batch.sample_rows],
        slots=batch.slots[batch.sample_rows],
        query_starts=torch.arange(len(chosen) + 1, dtype=torch.int32),
        key_starts=torch.from_numpy(_offsets(lengths)),
        page_table=batch.page_table[chosen],
        sample_rows=torch.arange(len(chosen)),
        sequences=sequences,
        max_count=1,
        max_key_length=max(lengths, default=0),
    )


def pad_rows(batch: RaggedBatch, num_rows: int, cache: KVCache) -> RaggedBatch:
    """The batch with `num_rows` rows, at least as many as it has: the new ones compute something that nobody reads, and
    write it into the dummy page."""
    missing = num_rows - batch.num_tokens
    assert missing >= 0, "rows can only be added"
    if missing == 0:
        return batch
    nothing = batch.token_ids.new_zeros(missing)
    return replace(
        batch,
        token_ids=torch.cat((batch.token_ids, nothing)),
        positions=torch.cat((batch.positions, nothing)),
        slots=torch.cat((batch.slots, nothing + cache.dummy_slot)),
    )


def _pages_of(piece: Slice, page_tokens: int) -> np.ndarray:
    needed = -(-piece.stop // page_tokens)
    owned = piece.request.pages
    assert len(owned) >= needed, f"the slice ends at token {piece.stop} and its request owns {len(owned)} pages"
    return np.array(owned[:needed], dtype=np.int32)


def _offsets(lengths: list[int]) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _token_ids(plan: StepPlan) -> list[int]:
    ids: list[int] = []
    for piece in plan:
        ids += piece.request.token_ids(piece.start, piece.stop)
    return ids


def _slots(plan: StepPlan, pages: list[np.ndarray], page_tokens: int) -> np.ndarray:
    slots = []
    for piece, owned in zip(plan, pages, strict=True):
        position = np.arange(piece.start, piece.stop, dtype=np.int64)
        slots.append(owned[position // page_tokens].astype(np.int64) * page_tokens + position % page_tokens)
    return np.concatenate(slots)


def _runs(pages: np.ndarray, key_length: int, page_tokens: int) -> tuple[tuple[int, int], ...]:
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    edges = [0, *breaks.tolist(), len(pages)]
    return tuple(
        (int(pages[first]) * page_tokens, min(last * page_tokens, key_length) - first * page_tokens)
        for first, last in itertools.pairwise(edges)
    )


def _page_table(pages: list[np.ndarray], dummy_page: int) -> np.ndarray:
    table = np.full((len(pages), max(map(len, pages))), dummy_page, dtype=np.int32)
    for row, owned in zip(table, pages, strict=True):
        row[: len(owned)] = owned
    return table


def _to(device: torch.device, array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
