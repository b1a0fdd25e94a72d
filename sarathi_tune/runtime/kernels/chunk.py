"""Attention of a prefill chunk by AVX-512's bfloat16 dot product or by AMX, in one pass as FlashAttention does it.

Keys and values are first laid out for the dot product, once for all queries; a vector of 16 keys' pairs is a row of
one of AMX's tiles, too. Then each thread takes blocks of query rows; the scores of a tile's rows, six by the dot
product and 16 by AMX, against `BLOCK_KEYS` keys stay in the first-level cache until they are used up as weights, and
keys behind a row's last visible one are never computed (https://arxiv.org/abs/2307.08691, section 3).

Elements are `uint16`, the bits of a bfloat16. The functions without underscore take the number of threads first.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np

from sarathi_tune.runtime.kernels.amx import TILE_ROWS as AMX_ROWS
from sarathi_tune.runtime.kernels.amx import add_value_rows, configure, release, score_rows
from sarathi_tune.runtime.kernels.availability import AMX_INPUTS
from sarathi_tune.runtime.kernels.availability import KERNEL_LANES as LANES
from sarathi_tune.runtime.kernels.buffers import LINE_BYTES, empty_bytes
from sarathi_tune.runtime.kernels.dot import finish_row, pack_keys, pack_values, softmax_tile
from sarathi_tune.runtime.kernels.options import OPTIONS
from sarathi_tune.runtime.kernels.parallel import parallel_for
from sarathi_tune.runtime.kernels.tiles import TILE_ROWS, TILE_VECTORS, score_tile, value_tile

#: Tiles of rows by either, as `attend_chunk` takes them: tuples, whose lengths are compiled in.
DOT_TILE, AMX_TILE = (0,) * TILE_ROWS, (0,) * AMX_ROWS
#: Rows (queries times heads of a group) that share what is read of keys and values, a multiple of a tile's.
_DOT_BLOCK_ROWS, _AMX_BLOCK_ROWS = 16 * TILE_ROWS, 8 * AMX_ROWS
#: Keys whose scores are held at once. Fewer fit the first-level cache better and cost more rescaling; best of 128, 256
#: and 512 on Zen 5.
BLOCK_KEYS = 512

_f32 = np.float32
_LOWEST = np.float32(-1e30)


def packed_keys(num_keys: int) -> int:
    """Room, in keys, for the packed form of `num_keys` keys: whole tiles of AMX, two vectors each."""
    return -(-num_keys // (2 * LANES)) * 2 * LANES


@numba.njit(**OPTIONS)
def _pack_groups(begin, end, parts, keys, values, table, page_tokens, first, stop, key_pairs, value_pairs):
    head_dim = len(parts) * LANES
    num_slots = keys.shape[1]
    num_groups = key_pairs.shape[1] // LANES
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    out_keys, out_values = key_pairs.reshape(-1), value_pairs.reshape(-1)
    tail = np.zeros(2 * LANES * head_dim, np.uint16)
    for item in range(begin, end):
        head, group = item // num_groups, item % num_groups
        key = first + group * LANES
        page = min(key, stop - 1) // page_tokens
        slot = np.int64(table[page]) * page_tokens + key % page_tokens
        at = (head * num_slots + slot) * head_dim
        out_at = (head * key_pairs.shape[1] + group * LANES) * head_dim
        if key + LANES <= stop:
            pack_keys(flat_keys, at, out_keys, out_at, parts)
            pack_values(flat_values, at, out_values, out_at, parts)
        else:
            # What lies behind the last key isn't this request's, and zero times NaN would be NaN.
            tail[:] = 0
            for i in range((stop - key) * head_dim):
                tail[i] = flat_keys[at + i]
                tail[LANES * head_dim + i] = flat_values[at + i]
            pack_keys(tail, 0, out_keys, out_at, parts)
            pack_values(tail, LANES * head_dim, out_values, out_at, parts)


@numba.njit(**OPTIONS)
def pack(threads, parts, keys, values, table, page_tokens, first, stop, key_pairs, value_pairs):
    """Lay out the keys and values `first` (a multiple of 16) to `stop` - 1 of one request for `attend_chunk`.

    parts: a tuple of head_dim / 16 things; its length is compiled in. keys, values: [num_kv_heads, slots, head_dim].
    table: [pages], the request's. key_pairs, value_pairs: [num_kv_heads, packed_keys(stop - first), head_dim] elements;
    zeros behind the last key.
    """
    arguments = (parts, keys, values, table, page_tokens, first, stop, key_pairs, value_pairs)
    num_groups = key_pairs.shape[1] // LANES
    parallel_for(_pack_groups, num_groups * keys.shape[0], threads, arguments)


# Calls of their own made AMX's tiles 8 to 30 % slower.
@numba.njit(**OPTIONS, inline="always")
def _score_keys(tile, query, at, keys, keys_at, num_vectors, scores, parts):
    """Dot products of a tile's queries with 16 * `num_vectors` keys; by AMX the vectors are even in number."""
    head_dim = len(parts) * LANES
    if len(tile) == AMX_ROWS:  # known when this is compiled
        for vector in range(0, num_vectors, 2):
            vector_at, score_at = keys_at + vector * LANES * head_dim, vector * LANES
            score_rows(query, at, keys, vector_at, 2, scores, score_at, parts, BLOCK_KEYS)
    else:
        for vector in range(0, num_vectors, TILE_VECTORS):
            vector_at, vectors = keys_at + vector * LANES * head_dim, min(TILE_VECTORS, num_vectors - vector)
            score_tile(query, at, keys, vector_at, vectors, scores, parts, BLOCK_KEYS, vector * LANES)


@numba.njit(**OPTIONS, inline="always")
def _add_values(tile, weights, values, values_at, num_vectors, shrinks, sums, sum_at, parts):
    """Each row's sum shrinks, and grows by 16 * `num_vectors` weighted values."""
    head_dim = len(parts) * LANES
    if len(tile) == AMX_ROWS:
        for r in range(len(tile)):
            for d in range(head_dim):
                sums[sum_at + r * head_dim + d] *= shrinks[r]
        add_value_rows(weights, values, values_at, num_vectors // 2, sums, sum_at, parts, BLOCK_KEYS)
    else:
        pairs = num_vectors * (LANES // 2)
        value_tile(weights, values, values_at, pairs, shrinks, sums, sum_at, parts, BLOCK_KEYS)


@numba.njit(**OPTIONS)
def _attend_shares(begin, end, num_shares, tile, parts, num_rows, chunk):
    query = chunk[0]
    num_heads = query.shape[0]
    block_rows = _AMX_BLOCK_ROWS if len(tile) == AMX_ROWS else _DOT_BLOCK_ROWS
    num_units = (num_rows + block_rows - 1) // block_rows * num_heads
    head_dim = len(parts) * LANES
    rows = empty_bytes(2 * block_rows * head_dim).view(np.uint16)
    rows[:] = 0
    sums = empty_bytes(4 * block_rows * head_dim).view(np.float32)
    scores = empty_bytes(4 * len(tile) * BLOCK_KEYS).view(np.float32)
    # Behind the last row there is room for a vector's other lanes.
    tops, totals = np.zeros(block_rows + LANES, np.float32), np.zeros(block_rows + LANES, np.float32)
    shrinks, stops = np.empty(LANES, np.float32), np.empty(len(tile), np.int64)
    if len(tile) == AMX_ROWS:
        configure(np.zeros(LINE_BYTES, np.uint8), 2 * AMX_ROWS)
    scratch = (rows, sums, scores, tops, totals, shrinks, stops)
    for share in range(begin, end):
        for turn in range((num_units + num_shares - 1) // num_shares):
            # The last blocks see most keys. Dealt out to and fro from the largest on, shares come out even.
            unit = turn * num_shares + (share if turn % 2 == 0 else num_shares - 1 - share)
            if unit < num_units:
                block, head = (num_units - 1 - unit) // num_heads, unit % num_heads
                block_row = block * block_rows
                _attend_block(tile, parts, head, block_row, min(block_rows, num_rows - block_row), chunk, scratch)
    if len(tile) == AMX_ROWS:
        release()


@numba.njit(**OPTIONS)
def _attend_block(tile, parts, head, block_row, num_rows, chunk, scratch):
    query, first_row, key_pairs, value_pairs, num_visible, window, scale, out = chunk
    rows, sums, scores, tops, totals, shrinks, stops = scratch
    head_dim, tile_rows = len(parts) * LANES, len(tile)
    unit = AMX_INPUTS if tile_rows == AMX_ROWS else LANES  # keys that are computed together
    group, room = query.shape[2], key_pairs.shape[1]
    flat_query, flat_out = query.reshape(-1), out.reshape(-1)
    flat_keys, flat_values = key_pairs.reshape(-1), value_pairs.reshape(-1)
    at = ((head * query.shape[1] + first_row) * group + block_row) * head_dim
    num_tiles = (num_rows + tile_rows - 1) // tile_rows
    source = flat_query
    if num_rows % tile_rows:
        # A tile reads all its rows, and behind the last one others' may lie, or nothing.
        for i in range(num_rows * head_dim):
            rows[i] = flat_query[at + i]
        source, at = rows, 0
    for i in range(num_tiles * tile_rows * head_dim):
        sums[i] = 0
    for row in range(num_tiles * tile_rows):
        tops[row] = _LOWEST
        totals[row] = 0
    # Row r sees the keys before `num_visible + r // group`, and of them the last `window`.
    first_key = max(0, num_visible + block_row // group - window) // unit * unit
    for start in range(first_key, num_visible + (block_row + num_rows - 1) // group, BLOCK_KEYS):
        pairs_at = (head * room + start) * head_dim
        for index in range(num_tiles):
            tile_row = index * tile_rows
            last_row = min(tile_row + tile_rows, num_rows) - 1
            num_keys = min(BLOCK_KEYS, num_visible + (block_row + last_row) // group - start)
            if num_keys <= 0:
                continue
            num_vectors = (num_keys + unit - 1) // unit * (unit // LANES)
            tile_at = tile_row * head_dim
            _score_keys(tile, source, at + tile_at, flat_keys, pairs_at, num_vectors, scores, parts)
            for i in range(tile_rows):
                stops[i] = num_visible + (block_row + tile_row + i) // group - start
                for key in range(min(stops[i] - window, num_vectors * LANES)):
                    scores[i * BLOCK_KEYS + key] = _LOWEST
            num_whole = min(max(0, stops[0]) // LANES, num_vectors)
            softmax_tile(
                scores, tile, BLOCK_KEYS, num_whole, num_vectors, stops, scale, tops, totals, tile_row, shrinks
            )
            _add_values(tile, scores, flat_values, pairs_at, num_vectors, shrinks, sums, tile_at, parts)
    for row in range(num_rows):
        token, j = first_row + (block_row + row) // group, (block_row + row) % group
        out_at = ((token * query.shape[0] + head) * group + j) * head_dim
        finish_row(sums, row * head_dim, _f32(1) / totals[row], flat_out, out_at, parts)


@numba.njit(**OPTIONS)
def attend_chunk(
    threads, tile, parts, query, first_row, count, key_pairs, value_pairs, num_visible, window, scale, out
):
    """Attention of `count` queries of one request, from token `first_row` of the step on.

    tile: DOT_TILE or AMX_TILE, which takes a head_dim that is a multiple of 32. query: [num_kv_heads, tokens, group,
    head_dim] elements. key_pairs, value_pairs: as `pack` writes them. Query i sees the last `window` of the first
    `num_visible + i` packed keys. out: [tokens, num_kv_heads, group, head_dim].
    """
    chunk = (query, first_row, key_pairs, value_pairs, num_visible, window, scale, out)
    parallel_for(_attend_shares, threads, threads, (threads, tile, parts, count * query.shape[2], chunk))
