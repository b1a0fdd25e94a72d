"""Attention of single queries by AVX-512's bfloat16 dot product: half the instructions of `kernels.attention`, which
widens every key and value to float32, so that reading the cache is what takes the time.

Elements are `uint16`, the bits of a bfloat16. The functions without underscore take the number of threads first.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np

from sarathi_tune.runtime.kernels.availability import KERNEL_LANES as LANES
from sarathi_tune.runtime.kernels.dot import add_values, in_order, query_scores, softmax_tile
from sarathi_tune.runtime.kernels.options import OPTIONS
from sarathi_tune.runtime.kernels.parallel import parallel_for

#: Keys whose scores are held at once: keys and values are read in long runs, as memory is read fastest.
BLOCK_KEYS = 512

_f32 = np.float32
_LOWEST = np.float32(-1e30)


@numba.njit(**OPTIONS)
def _decode_items(
    begin, end, parts, heads, query, rows, keys, values, table, page_tokens, segments, scale, sums, tops, totals
):
    head_dim, group = len(parts) * LANES, len(heads)
    num_heads, num_slots, num_tokens = keys.shape[0], keys.shape[1], query.shape[1]
    flat_query, flat_keys, flat_values = query.reshape(-1), keys.reshape(-1), values.reshape(-1)
    flat_sums = sums.reshape(-1)
    total = np.empty(group * head_dim, np.float32)
    block = np.empty(group * BLOCK_KEYS, np.float32)
    top, weight_sum, shrinks = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    stops = np.empty(LANES, np.int64)
    last = np.zeros(2 * head_dim, np.uint16)
    for item in range(begin, end):
        segment, head = item // num_heads, item % num_heads
        sequence, first, stop = segments[segment, 0], segments[segment, 1], segments[segment, 2]
        query_at = (head * num_tokens + rows[sequence]) * group * head_dim
        top[:] = _LOWEST
        weight_sum[:] = 0
        total[:] = 0
        for start in range(first // LANES * LANES, stop, BLOCK_KEYS):
            num_keys = min(BLOCK_KEYS, stop - start)
            num_vectors = (num_keys + LANES - 1) // LANES
            for key in range(start, start + num_keys, LANES):
                slot = np.int64(table[sequence, key // page_tokens]) * page_tokens + key % page_tokens
                at = (head * num_slots + slot) * head_dim
                query_scores(flat_query, query_at, flat_keys, at, block, key - start, parts, heads, BLOCK_KEYS)
            for j in range(group):
                stops[j] = num_keys
                for t in range(first - start):
                    block[j * BLOCK_KEYS + t] = _LOWEST
            num_whole = num_keys // LANES
            softmax_tile(block, heads, BLOCK_KEYS, num_whole, num_vectors, stops, scale, top, weight_sum, 0, shrinks)
            for j in range(group):
                for d in range(head_dim):
                    total[j * head_dim + d] *= shrinks[j]
            for key in range(start, start + num_keys, LANES):
                slot = np.int64(table[sequence, key // page_tokens]) * page_tokens + key % page_tokens
                at, count = (head * num_slots + slot) * head_dim, min(LANES, start + num_keys - key)
                pair = (key - start) // 2
                add_values(block, pair, flat_values, at, count // 2, total, parts, heads, BLOCK_KEYS)
                if count % 2:
                    # What lies behind the last value isn't this request's, and zero times NaN would be NaN.
                    for d in range(head_dim):
                        last[d] = flat_values[at + (count - 1) * head_dim + d]
                    add_values(block, pair + count // 2, last, 0, 1, total, parts, heads, BLOCK_KEYS)
        for j in range(group):
            tops[item, j], totals[item, j] = top[j], weight_sum[j]
            in_order(total, j * head_dim, flat_sums, (item * group + j) * head_dim, parts)


@numba.njit(**OPTIONS)
def decode_segments_by_dot(
    threads, parts, heads, query, rows, keys, values, table, page_tokens, segments, scale, sums, tops, totals
):
    """What `kernels.attention.decode_segments` computes, with weights rounded to bfloat16; takes the same arguments.
    head_dim is a multiple of 32."""
    arguments = (parts, heads, query, rows, keys, values, table, page_tokens, segments, scale, sums, tops, totals)
    parallel_for(_decode_items, segments.shape[0] * keys.shape[0], threads, arguments)
