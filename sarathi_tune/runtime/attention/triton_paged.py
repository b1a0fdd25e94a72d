"""Attention in a Triton kernel of our own: the ragged batch over the pages themselves, whatever their size.

Needs nothing but torch and triton. The decodes that lead a batch are one launch, split along their keys when they are
too few to fill the device; the other slices are a second one. Nothing waits for the device, and a launch's grid depends
on the number of rows and sequences and on `max_key_length` only, so that decode steps can be captured in CUDA graphs.
"""

import math
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from sarathi_tune.runtime.attention.base import AttentionShape
from sarathi_tune.runtime.batch import RaggedBatch
from sarathi_tune.runtime.kvcache import LayerCache

#: `combine` adds up to so many parts of one row.
MAX_SPLITS = 32
#: Keys that make a part worth its own program.
MIN_KEYS_PER_SPLIT = 256
#: Programs per multiprocessor that keep enough reads in flight.
PROGRAMS_PER_PROCESSOR = 2
#: Bytes of keys that a program loads at once. Keys and values, twice buffered, and 128 query rows stay within the
#: 99 KiB of shared memory of the smallest GPUs that are supported (compute capability 8.6 and 8.9).
BLOCK_BYTES = 16 << 10
#: tl.dot wants 16 rows at least.
MIN_ROWS = 16
MIN_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel can't run on this device, or None. On a CPU it runs in Triton's interpreter only."""
    if dtype not in DTYPES:
        return "it computes in bfloat16, float16 or float32 only"
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install 'sarathi-tune[gpu]')"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device and this is {device.type}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "it needs an Ampere or newer GPU (compute capability 8.0)"
    return None


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at once: `rows` of the score matrix (query rows times heads of a group), `keys` of its
    columns; and what it is given for that."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 2


def decode_tile(group: int, block_dim: int, itemsize: int) -> Tile:
    """One query row, the heads of its group."""
    return Tile(max(MIN_ROWS, power_of_two(group)), _keys_per_block(block_dim, itemsize), num_warps=4)


def chunk_tile(group: int, block_dim: int, itemsize: int) -> Tile:
    """As many rows as keep queries and accumulator on chip: 128 for 16-bit heads of up to 128, fewer for others."""
    rows = max(MIN_ROWS, min(128, (64 << 10) // (block_dim * itemsize**2)), power_of_two(group))
    return Tile(rows, _keys_per_block(block_dim, itemsize), num_warps=8 if rows >= 128 else 4)


def _keys_per_block(block_dim: int, itemsize: int) -> int:
    """float32 gets half the bytes: its products are split into three, and the parts take registers."""
    return max(16, min(64, 2 * BLOCK_BYTES // (block_dim * itemsize**2)))


def num_splits(num_sequences: int, num_kv_heads: int, max_key_length: int, num_processors: int) -> int:
    """Into how many parts the keys of each decode are split: enough to fill the device, none of them tiny."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors // (num_sequences * num_kv_heads))
    return max(1, min(wanted, -(-max_key_length // MIN_KEYS_PER_SPLIT), MAX_SPLITS))


def num_leading_decodes(batch: RaggedBatch) -> int:
    """How many slices at the batch's head are one row."""
    count = 0
    for sequence in batch.sequences:
        if sequence.count != 1:
            break
        count += 1
    return count


def power_of_two(number: int) -> int:
    """The smallest power of two that isn't smaller."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Work:
    """What all launches of one call share. query, output: [tokens, num_heads, head_dim]."""

    query: torch.Tensor
    cache: LayerCache
    batch: RaggedBatch
    output: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """What one launch computes: `num_sequences` of the batch from `first_sequence` on, in tiles of `query_rows` rows;
    or, with `one_row`, decodes whose keys are split into `splits` parts."""

    tile: Tile
    grid: tuple[int, int, int]
    first_sequence: int
    num_sequences: int
    query_rows: int
    one_row: bool

    @property
    def splits(self) -> int:
        """Parts of each sequence's keys."""
        return self.grid[2]


class TritonAttention:
    """The paged kernel behind the Attention protocol.

    `num_processors`: multiprocessors to fill; read from the device when not given.
    """

    #: A captured launch computes other lengths rightly: `runtime.graphs` asks.
    graph_safe = True

    def __init__(self, shape: AttentionShape, page_tokens: int, num_processors: int | None = None) -> None:
        from sarathi_tune.runtime.attention import triton_kernel

        self._kernels = triton_kernel
        self._shape = shape
        self._page_tokens = page_tokens
        self._num_processors = num_processors
        self._block_dim = max(MIN_ROWS, power_of_two(shape.head_dim))

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: RaggedBatch) -> torch.Tensor:
        """See Attention."""
        query = query.flatten(1, 2)
        assert cache.keys.stride() == cache.values.stride(), "keys and values are laid out alike"
        assert query.stride(-1) == cache.keys.stride(-1) == 1, "a head's elements are neighbours"
        work = _Work(query, cache, batch, torch.empty(query.shape, dtype=query.dtype, device=query.device))
        num_decodes = num_leading_decodes(batch)
        if num_decodes:
            self._decodes(work, num_decodes)
        if num_decodes < len(batch.sequences):
            self._chunks(work, num_decodes)
        return work.output.flatten(1)

    def _decodes(self, work: _Work, num_decodes: int) -> None:
        shape, batch, device = self._shape, work.batch, work.query.device
        keys_seen = min(batch.max_key_length, shape.window or batch.max_key_length)
        splits = num_splits(num_decodes, shape.num_kv_heads, keys_seen, self._processors(device))
        tile = decode_tile(shape.group, self._block_dim, work.query.element_size())
        part = _Part(tile, (num_decodes, shape.num_kv_heads, splits), 0, num_decodes, query_rows=1, one_row=True)
        if splits == 1:
            self._attend(work, part, work.output, work.output)
            return
        partials = (num_decodes, shape.num_heads, splits)
        sums = torch.empty((*partials, shape.head_dim), dtype=torch.float32, device=device)
        weights = torch.empty((2, *partials), dtype=torch.float32, device=device)
        self._attend(work, part, sums, weights)
        self._combine(work, part, sums, weights)

    def _chunks(self, work: _Work, first: int) -> None:
        shape, num_sequences = self._shape, len(work.batch.sequences) - first
        tile = chunk_tile(shape.group, self._block_dim, work.query.element_size())
        query_rows = tile.rows // shape.group
        # One tile more per sequence than full ones: `_find_sequence` says why that is enough.
        num_tiles = (work.batch.num_tokens - first) // query_rows + num_sequences
        part = _Part(tile, (num_tiles, shape.num_kv_heads, 1), first, num_sequences, query_rows, one_row=False)
        self._attend(work, part, work.output, work.output)

    def _attend(self, work: _Work, part: _Part, sums: torch.Tensor, weights: torch.Tensor) -> None:
        shape, batch = self._shape, work.batch
        self._kernels.attend[part.grid](
            work.query,
            work.cache.keys,
            work.cache.values,
            work.output,
            sums,
            weights,
            batch.query_starts,
            batch.key_starts,
            batch.page_table,
            shape.scale * math.log2(math.e),
            part.first_sequence,
            part.num_sequences,
            batch.page_table.stride(0),
            part.splits,
            *work.query.stride()[:2],
            *work.cache.keys.stride()[:2],
            *work.output.stride()[:2],
            GROUP=shape.group,
            HEAD_DIM=shape.head_dim,
            WINDOW=shape.window or 0,
            PAGE_TOKENS=self._page_tokens,
            BLOCK_M=part.tile.rows,
            BLOCK_Q=part.query_rows,
            BLOCK_N=part.tile.keys,
            BLOCK_D=self._block_dim,
            ONE_ROW=part.one_row,
            IS_SPLIT=part.splits > 1,
            WIDEN=work.query.device.type == "cpu",
            num_warps=part.tile.num_warps,
            num_stages=part.tile.num_stages,
        )

    def _combine(self, work: _Work, part: _Part, sums: torch.Tensor, weights: torch.Tensor) -> None:
        shape = self._shape
        self._kernels.combine[part.num_sequences, shape.num_heads](
            sums,
            weights,
            work.output,
            work.batch.query_starts,
            part.first_sequence,
            part.num_sequences,
            part.splits,
            *work.output.stride()[:2],
            HEAD_DIM=shape.head_dim,
            BLOCK_D=self._block_dim,
            MAX_SPLITS=MAX_SPLITS,
        )

    def _processors(self, device: torch.device) -> int:
        return self._num_processors if self._num_processors is not None else _device_processors(device)


@cache
def _device_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter there is one of everything."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
