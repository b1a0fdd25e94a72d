"""Fast attention on a CPU: compiled kernels for decodes, and for chunks where the CPU multiplies bfloat16.

Decodes are bound by reading the cache: all decodes of a step are one kernel call, each key is read once for its whole
group of query heads, and long requests are cut into segments so that threads get equal work. Where the CPU has
AVX-512's bfloat16 dot product, `kernels.decode` computes bfloat16, `kernels.attention` everything else.

A chunk is one pass in tiles by AMX where Linux permits that or by AVX-512's bfloat16 dot product where the CPU has no
AMX (see `kernels.chunk`). Elsewhere, and in float32, it is cut into blocks of queries: the queries of a group are
folded into the rows of one matmul against the keys that the block's last query sees; the mask is applied inside the
softmax, from positions, so it is right behind a prefix (PyTorch #108503). Scores are rounded to the model's dtype
between the two matmuls, as in transformers' eager attention.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from sarathi_tune.runtime.attention.base import AttentionShape, cached
from sarathi_tune.runtime.batch import RaggedBatch, Sequence
from sarathi_tune.runtime.kernels.arrays import as_array, threads_for
from sarathi_tune.runtime.kernels.attention import chunk_output, chunk_weights, decode_segments, merge_segments
from sarathi_tune.runtime.kernels.availability import (
    AMX_INPUTS,
    KERNEL_LANES,
    amx_obstacle,
    has_bfloat16_dot,
    has_dot_tiles,
)
from sarathi_tune.runtime.kernels.decode import decode_segments_by_dot
from sarathi_tune.runtime.kvcache import LayerCache

#: Keys per segment of a decode: a quarter of a millisecond's work at most, so that threads end together.
SEGMENT_KEYS = 512
#: Queries per block of a chunk.
BLOCK_QUERIES = 128


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The slices of a batch with one query, as the kernel takes them; see `decode_segments`."""

    rows: np.ndarray
    table: np.ndarray
    segments: np.ndarray
    starts: np.ndarray


class CpuAttention:
    """Implements `attention.base.Attention` over a cache of layout "heads".

    `tiles`: whether bfloat16 is computed by `kernels.chunk` and `kernels.decode`; `amx`: whether chunks of it are by
    AMX's tiles. None asks the CPU.
    """

    def __init__(
        self, shape: AttentionShape, page_tokens: int, tiles: bool | None = None, amx: bool | None = None
    ) -> None:
        self._shape = shape
        if amx is None:
            amx = tiles is None and amx_obstacle() is None
        self._amx = amx and shape.head_dim % AMX_INPUTS == 0
        self._tiles = self._amx or (has_dot_tiles() if tiles is None else tiles)
        self._page_tokens = page_tokens
        self._dot = (has_bfloat16_dot() if tiles is None else tiles) and shape.head_dim % (2 * KERNEL_LANES) == 0
        self._parts = (0,) * (shape.head_dim // KERNEL_LANES)
        self._heads = (0,) * shape.group
        self._prepared: tuple[RaggedBatch, _Decodes | None] | None = None
        self._scratch = torch.empty(0)
        self._packed = torch.empty(0, dtype=torch.bfloat16)

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: RaggedBatch) -> torch.Tensor:
        """See Attention."""
        by_head = query.permute(1, 0, 2, 3).contiguous()
        output = torch.empty(query.shape, dtype=query.dtype)
        last = batch.sequences[-1]
        if last.row + last.count < len(output):
            output[last.row + last.count :] = 0
        decodes = self._decodes(batch)
        if decodes is not None:
            self._decode(by_head, cache, decodes, output)
        tiles = self._tiles and query.dtype is torch.bfloat16
        for index, sequence in enumerate(batch.sequences):
            if sequence.count > 1 and tiles:
                self._tiled_chunk(by_head, cache, sequence, batch.page_table[index], output)
            elif sequence.count > 1:
                self._chunk(by_head, cache, sequence, output)
        return output.view(query.shape[0], -1)

    def _decodes(self, batch: RaggedBatch) -> _Decodes | None:
        """Made once per batch, used by every layer."""
        if self._prepared is None or self._prepared[0] is not batch:
            self._prepared = batch, self._prepare(batch)
        return self._prepared[1]

    def _prepare(self, batch: RaggedBatch) -> _Decodes | None:
        chosen = [i for i, sequence in enumerate(batch.sequences) if sequence.count == 1]
        if not chosen:
            return None
        segments: list[tuple[int, int, int]] = []
        starts = [0]
        for index, sequence in enumerate(batch.sequences[i] for i in chosen):
            first, stop = self._shape.first_key(sequence.prefix), sequence.key_length
            segments += [(index, key, min(key + SEGMENT_KEYS, stop)) for key in range(first, stop, SEGMENT_KEYS)]
            starts.append(len(segments))
        return _Decodes(
            rows=np.array([batch.sequences[i].row for i in chosen], dtype=np.int64),
            table=batch.page_table.numpy()[chosen],
            segments=np.array(segments, dtype=np.int64),
            starts=np.array(starts, dtype=np.int64),
        )

    def _decode(self, query: torch.Tensor, cache: LayerCache, decodes: _Decodes, output: torch.Tensor) -> None:
        shape = self._shape
        items = len(decodes.segments) * shape.num_kv_heads
        sums = np.empty((items, shape.group, shape.head_dim), dtype=np.float32)
        tops = np.empty((items, shape.group), dtype=np.float32)
        totals = np.empty((items, shape.group), dtype=np.float32)
        threads = torch.get_num_threads()
        compute = decode_segments_by_dot if self._dot and cache.keys.dtype is torch.bfloat16 else decode_segments
        compute(
            threads,
            self._parts,
            self._heads,
            as_array(query),
            decodes.rows,
            cache.key_array,
            cache.value_array,
            decodes.table,
            self._page_tokens,
            decodes.segments,
            np.float32(shape.scale),
            sums,
            tops,
            totals,
        )
        merge_segments(threads_for(sums.size), decodes.rows, decodes.starts, sums, tops, totals, as_array(output))

    def _tiled_chunk(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        sequence: Sequence,
        pages: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        from sarathi_tune.runtime.kernels.chunk import AMX_TILE, DOT_TILE, attend_chunk, pack, packed_keys

        shape, threads = self._shape, torch.get_num_threads()
        first, stop = shape.first_key(sequence.prefix) // KERNEL_LANES * KERNEL_LANES, sequence.key_length
        size = (2, shape.num_kv_heads, packed_keys(stop - first), shape.head_dim)
        if self._packed.numel() < math.prod(size):
            self._packed = torch.empty(math.prod(size) * 3 // 2, dtype=torch.bfloat16)
        key_pairs, value_pairs = as_array(self._packed[: math.prod(size)].view(size))
        keys, values, table = cache.key_array, cache.value_array, pages.numpy()
        pack(threads, self._parts, keys, values, table, self._page_tokens, first, stop, key_pairs, value_pairs)
        attend_chunk(
            threads,
            AMX_TILE if self._amx else DOT_TILE,
            self._parts,
            as_array(query),
            sequence.row,
            sequence.count,
            key_pairs,
            value_pairs,
            sequence.prefix + 1 - first,
            shape.window or stop,
            np.float32(shape.scale),
            as_array(output),
        )

    def _chunk(self, query: torch.Tensor, cache: LayerCache, sequence: Sequence, output: torch.Tensor) -> None:
        first_seen = self._shape.first_key(sequence.prefix)
        keys = cached(cache.keys, sequence, first_seen).permute(1, 2, 0)
        values = cached(cache.values, sequence, first_seen).permute(1, 0, 2)
        for start in range(0, sequence.count, BLOCK_QUERIES):
            stop = min(start + BLOCK_QUERIES, sequence.count)
            position = sequence.prefix + start
            skipped = self._shape.first_key(position) - first_seen
            num_keys = sequence.prefix + stop - first_seen
            block = query[:, sequence.row + start : sequence.row + stop].flatten(1, 2)
            self._block(
                block,
                keys[..., skipped:num_keys],
                values[:, skipped:num_keys],
                position + 1 - first_seen - skipped,
                output,
                sequence.row + start,
            )

    def _block(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        num_visible: int,
        output: torch.Tensor,
        first_row: int,
    ) -> None:
        """query: [num_kv_heads, rows, head_dim]; keys: [num_kv_heads, head_dim, keys]; values: [.., keys, head_dim].

        The first query sees `num_visible` keys.
        """
        shape = self._shape
        weights = self._scores_buffer(query.shape[0], query.shape[1], keys.shape[2], query.dtype)
        torch.bmm(query, keys, out=weights)
        inverses = np.empty(query.shape[:2], dtype=np.float32)
        window = shape.window or num_visible + query.shape[1]
        threads, scale = torch.get_num_threads(), np.float32(shape.scale)
        chunk_weights(threads, as_array(weights), inverses, shape.group, num_visible, window, scale)
        chunk_output(threads, as_array(torch.bmm(weights, values)), inverses, as_array(output), first_row)

    def _scores_buffer(self, heads: int, rows: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
        """Grows to the largest block seen and stays, so that no step waits for the allocator."""
        size = heads * rows * keys
        if self._scratch.numel() < size or self._scratch.dtype is not dtype:
            self._scratch = torch.empty(size + size // 2, dtype=dtype)
        return self._scratch[:size].view(heads, rows, keys)
