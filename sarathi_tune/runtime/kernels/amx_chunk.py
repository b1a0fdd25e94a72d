"""Attention of a prefill chunk by AMX, in one pass as FlashAttention does it.

The same as `kernels.chunk`, over what its `pack` lays out, in tiles of 16 rows: a vector of 16 keys' pairs is a row of
one of AMX's tiles.

Elements are `uint16`, the bits of a bfloat16. The functions without underscore take the number of threads first.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np

from sarathi_tune.runtime.kernels.amx import TILE_INPUTS, TILE_ROWS, add_value_rows, configure, release, score_rows
from sarathi_tune.runtime.kernels.availability import KERNEL_LANES as LANES
from sarathi_tune.runtime.kernels.buffers import LINE_BYTES, empty_bytes
from sarathi_tune.runtime.kernels.dot import finish_row, softmax_tile
from sarathi_tune.runtime.kernels.options import OPTIONS
from sarathi_tune.runtime.kernels.parallel import parallel_for

#: Rows (queries times heads of a group) that share what is read of keys and values.
BLOCK_ROWS = 8 * TILE_ROWS
#: Keys whose scores are held at once.
BLOCK_KEYS = 512
#: Values that are added up at a time.
TILE_KEYS = TILE_INPUTS

_TILE = (0,) * TILE_ROWS
_f32 = np.float32
_LOWEST = np.float32(-1e30)


@numba.njit(**OPTIONS)
def _attend_shares(
    begin, end, num_shares, parts, query, first_row, num_rows, key_pairs, value_pairs, num_visible, window, scale, out
):
    num_heads = query.shape[0]
    num_units = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS * num_heads
    head_dim = len(parts) * LANES
    rows = empty_bytes(2 * BLOCK_ROWS * head_dim).view(np.uint16)
    rows[:] = 0
    sums = empty_bytes(4 * BLOCK_ROWS * head_dim).view(np.float32)
    scores = empty_bytes(4 * TILE_ROWS * BLOCK_KEYS).view(np.float32)
    # Behind the last row there is room for a vector's other lanes.
    tops, totals = np.zeros(BLOCK_ROWS + LANES, np.float32), np.zeros(BLOCK_ROWS + LANES, np.float32)
    shrinks, stops = np.empty(LANES, np.float32), np.empty(TILE_ROWS, np.int64)
    config = np.zeros(LINE_BYTES, np.uint8)
    configure(config, 2 * TILE_ROWS)
    scratch = (rows, sums, scores, tops, totals, shrinks, stops)
    for share in range(begin, end):
        for turn in range((num_units + num_shares - 1) // num_shares):
            # The last blocks see most keys. Dealt out to and fro from the largest on, shares come out even.
            unit = turn * num_shares + (share if turn % 2 == 0 else num_shares - 1 - share)
            if unit < num_units:
                block, head = (num_units - 1 - unit) // num_heads, unit % num_heads
                _attend_block(
                    parts,
                    query,
                    first_row,
                    head,
                    block * BLOCK_ROWS,
                    min(BLOCK_ROWS, num_rows - block * BLOCK_ROWS),
                    key_pairs,
                    value_pairs,
                    num_visible,
                    window,
                    scale,
                    out,
                    scratch,
                )
    release()


@numba.njit(**OPTIONS)
def _attend_block(
    parts,
    query,
    first_row,
    head,
    block_row,
    num_rows,
    key_pairs,
    value_pairs,
    num_visible,
    window,
    scale,
    out,
    scratch,
):
    rows, sums, scores, tops, totals, shrinks, stops = scratch
    head_dim = len(parts) * LANES
    group, room = query.shape[2], key_pairs.shape[1]
    flat_query, flat_out = query.reshape(-1), out.reshape(-1)
    flat_keys, flat_values = key_pairs.reshape(-1), value_pairs.reshape(-1)
    at = ((head * query.shape[1] + first_row) * group + block_row) * head_dim
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    source = flat_query
    if num_rows % TILE_ROWS:
        # A tile reads all its rows, and behind the last one others' may lie, or nothing.
        for i in range(num_rows * head_dim):
            rows[i] = flat_query[at + i]
        source, at = rows, 0
    for i in range(num_tiles * TILE_ROWS * head_dim):
        sums[i] = 0
    for row in range(num_tiles * TILE_ROWS):
        tops[row] = _LOWEST
        totals[row] = 0
    # Row r sees the keys before `num_visible + r // group`, and of them the last `window`.
    first_key = max(0, num_visible + block_row // group - window) // TILE_KEYS * TILE_KEYS
    for start in range(first_key, num_visible + (block_row + num_rows - 1) // group, BLOCK_KEYS):
        pairs_at = (head * room + start) * head_dim
        for tile in range(num_tiles):
            tile_row = tile * TILE_ROWS
            last_row = min(tile_row + TILE_ROWS, num_rows) - 1
            num_keys = min(BLOCK_KEYS, num_visible + (block_row + last_row) // group - start)
            if num_keys <= 0:
                continue
            steps = (num_keys + TILE_KEYS - 1) // TILE_KEYS
            num_vectors = 2 * steps
            for vector in range(0, num_vectors, 2):
                keys_at = pairs_at + vector * LANES * head_dim
                rows_at = at + tile_row * head_dim
                score_rows(source, rows_at, flat_keys, keys_at, 2, scores, vector * LANES, parts, BLOCK_KEYS)
            for i in range(TILE_ROWS):
                stops[i] = num_visible + (block_row + tile_row + i) // group - start
                for key in range(min(stops[i] - window, num_vectors * LANES)):
                    scores[i * BLOCK_KEYS + key] = _LOWEST
            num_whole = min(max(0, stops[0]) // LANES, num_vectors)
            softmax_tile(
                scores, _TILE, BLOCK_KEYS, num_whole, num_vectors, stops, scale, tops, totals, tile_row, shrinks
            )
            for r in range(TILE_ROWS):
                for d in range(head_dim):
                    sums[(tile_row + r) * head_dim + d] *= shrinks[r]
            add_value_rows(scores, flat_values, pairs_at, steps, sums, tile_row * head_dim, parts, BLOCK_KEYS)
    for row in range(num_rows):
        token, j = first_row + (block_row + row) // group, (block_row + row) % group
        out_at = ((token * query.shape[0] + head) * group + j) * head_dim
        finish_row(sums, row * head_dim, _f32(1) / totals[row], flat_out, out_at, parts)


@numba.njit(**OPTIONS)
def attend_chunk_by_amx(
    threads, parts, query, first_row, count, key_pairs, value_pairs, num_visible, window, scale, out
):
    """Attention of `count` queries of one request, from token `first_row` of the step on.

    query: [num_kv_heads, tokens, group, head_dim] elements. key_pairs, value_pairs: as `pack` writes them. Query i sees
    the last `window` of the first `num_visible + i` packed keys. out: [tokens, num_kv_heads, group, head_dim].
    """
    arguments = (
        threads,
        parts,
        query,
        first_row,
        count * query.shape[2],
        key_pairs,
        value_pairs,
        num_visible,
        window,
        scale,
        out,
    )
    parallel_for(_attend_shares, threads, threads, arguments)
