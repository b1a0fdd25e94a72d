"""Attention kernels: decodes over the paged cache, and the softmax of a chunk's scores.

A decode is bound by reading keys and values. Each is read once for all query heads of its group and converted to
float32 in registers; long requests are cut into segments so that all threads have the same work (FlashDecoding's split,
https://pytorch.org/blog/flash-decoding).

Elements are `uint16` (bfloat16's bits) or `float32`. The functions without underscore take the number of threads first.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np

from sarathi_tune.runtime.kernels.availability import KERNEL_LANES as LANES
from sarathi_tune.runtime.kernels.intrinsics import accumulate, exp, narrow, row_top, row_weights, scores, widen
from sarathi_tune.runtime.kernels.options import OPTIONS
from sarathi_tune.runtime.kernels.parallel import parallel_for

#: Keys whose scores are held at once.
BLOCK_KEYS = 128

_f32 = np.float32
_LOWEST = np.float32(-1e30)


@numba.njit(**OPTIONS)
def _decode_items(
    begin, end, parts, heads, query, rows, keys, values, table, page_tokens, segments, scale, sums, tops, totals
):
    head_dim, group = len(parts) * LANES, len(heads)
    num_heads, num_slots = keys.shape[0], keys.shape[1]
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    q = np.empty(group * head_dim, np.float32)
    total = np.empty(group * head_dim, np.float32)
    block = np.empty(group * BLOCK_KEYS, np.float32)
    for item in range(begin, end):
        segment, head = item // num_heads, item % num_heads
        sequence, first, stop = segments[segment, 0], segments[segment, 1], segments[segment, 2]
        for j in range(group):
            for d in range(head_dim):
                q[j * head_dim + d] = widen(query[head, rows[sequence], j, d]) * scale
            tops[item, j] = _LOWEST
            totals[item, j] = _f32(0)
        total[:] = 0
        for start in range(first // LANES * LANES, stop, BLOCK_KEYS):
            num_keys = min(BLOCK_KEYS, stop - start)
            num_vectors = (num_keys + LANES - 1) // LANES
            for key in range(start, start + num_keys, LANES):
                slot = np.int64(table[sequence, key // page_tokens]) * page_tokens + key % page_tokens
                scores(q, flat_keys, (head * num_slots + slot) * head_dim, block, key - start, parts, heads, BLOCK_KEYS)
            for j in range(group):
                at = j * BLOCK_KEYS
                for t in range(first - start):
                    block[at + t] = _LOWEST
                for t in range(num_keys, num_vectors * LANES):
                    block[at + t] = _LOWEST
                top = max(tops[item, j], row_top(block, at, num_vectors))
                shrink = exp(tops[item, j] - top)
                tops[item, j] = top
                totals[item, j] = totals[item, j] * shrink + row_weights(block, at, num_vectors, _f32(1), top)
                for d in range(head_dim):
                    total[j * head_dim + d] *= shrink
            for key in range(start, start + num_keys, LANES):
                slot = np.int64(table[sequence, key // page_tokens]) * page_tokens + key % page_tokens
                skip = max(0, first - key)
                count = min(LANES, stop - key) - skip
                at = (head * num_slots + slot + skip) * head_dim
                accumulate(block, key - start + skip, flat_values, at, count, total, parts, heads, BLOCK_KEYS)
        for j in range(group):
            for d in range(head_dim):
                sums[item, j, d] = total[j * head_dim + d]


@numba.njit(**OPTIONS)
def decode_segments(
    threads, parts, heads, query, rows, keys, values, table, page_tokens, segments, scale, sums, tops, totals
):
    """Attention of single queries over segments of their keys, to be merged by `merge_segments`.

    parts, heads: tuples of head_dim / 16 and of `group` things; their lengths are compiled in. query: [num_kv_heads,
    tokens, group, head_dim]. rows: [sequences], the query row of each. keys, values: [num_kv_heads, slots, head_dim].
    table: [sequences, pages]. segments: [n, 3] of (sequence, first key, behind the last key). For segment i and key
    head h, at i * num_kv_heads + h: sums [group, head_dim] float32 of exp(score - top) * value, tops, totals [group].
    """
    arguments = (parts, heads, query, rows, keys, values, table, page_tokens, segments, scale, sums, tops, totals)
    parallel_for(_decode_items, segments.shape[0] * keys.shape[0], threads, arguments)


@numba.njit(**OPTIONS)
def _merge_items(begin, end, rows, starts, sums, tops, totals, out):
    num_heads, group, head_dim = out.shape[1], out.shape[2], out.shape[3]
    like = out.dtype.type(0)
    merged = np.empty(head_dim, np.float32)
    for item in range(begin, end):
        sequence, head = item // num_heads, item % num_heads
        first, stop = starts[sequence], starts[sequence + 1]
        for j in range(group):
            top = _LOWEST
            for segment in range(first, stop):
                top = max(top, tops[segment * num_heads + head, j])
            merged[:] = 0
            total = _f32(0)
            for segment in range(first, stop):
                at = segment * num_heads + head
                share = exp(tops[at, j] - top)
                total += totals[at, j] * share
                for d in range(head_dim):
                    merged[d] += sums[at, j, d] * share
            inverse = _f32(1) / total
            for d in range(head_dim):
                out[rows[sequence], head, j, d] = narrow(merged[d] * inverse, like)


@numba.njit(**OPTIONS)
def merge_segments(threads, rows, starts, sums, tops, totals, out):
    """The segments of each sequence as one output. starts: [sequences + 1], the first segment of each.

    out: [tokens, num_kv_heads, group, head_dim] elements.
    """
    parallel_for(_merge_items, rows.shape[0] * out.shape[1], threads, (rows, starts, sums, tops, totals, out))


@numba.njit(**OPTIONS)
def _chunk_weights_rows(begin, end, weights, inverses, group, num_visible, window, scale):
    num_rows, num_keys = weights.shape[1], weights.shape[2]
    flat = weights.reshape(-1)
    like = weights.dtype.type(0)
    lowest = narrow(_LOWEST, like)
    for item in range(begin, end):
        start = item * num_keys
        stop = min(num_keys, num_visible + (item % num_rows) // group)
        hidden = max(0, stop - window)
        first = hidden // LANES * LANES
        num_vectors = (stop - first) // LANES
        whole = first + num_vectors * LANES
        if whole < stop and whole + LANES <= num_keys:
            num_vectors += 1
            whole += LANES
            for t in range(stop, whole):
                flat[start + t] = lowest
        for t in range(first):
            flat[start + t] = like
        for t in range(first, hidden):
            flat[start + t] = lowest
        top = row_top(flat, start + first, num_vectors)
        for t in range(whole, stop):
            top = max(top, widen(flat[start + t]))
        top *= scale
        total = row_weights(flat, start + first, num_vectors, scale, top)
        for t in range(whole, stop):
            weight = exp(widen(flat[start + t]) * scale - top)
            total += weight
            flat[start + t] = narrow(weight, like)
        for t in range(max(whole, stop), num_keys):
            flat[start + t] = like
        inverses[item // num_rows, item % num_rows] = _f32(1) / total


@numba.njit(**OPTIONS)
def chunk_weights(threads, weights, inverses, group, num_visible, window, scale):
    """A masked softmax without its division, in place.

    weights: [num_kv_heads, rows, keys] elements, scores that become exp((score - row's top) * scale); row r belongs to
    query r // group. Query i sees the last `window` of its first `num_visible + i` keys; the other weights become zero.
    inverses: [num_kv_heads, rows] float32, what a row's weighted sum of values is to be multiplied with.
    """
    arguments = (weights, inverses, group, num_visible, window, scale)
    parallel_for(_chunk_weights_rows, weights.shape[0] * weights.shape[1], threads, arguments)


@numba.njit(**OPTIONS)
def _chunk_output_queries(begin, end, sums, inverses, out, first_row):
    num_heads, group, head_dim = out.shape[1], out.shape[2], out.shape[3]
    like = out.dtype.type(0)
    for i in range(begin, end):
        for head in range(num_heads):
            for j in range(group):
                inverse = inverses[head, i * group + j]
                for d in range(head_dim):
                    out[first_row + i, head, j, d] = narrow(widen(sums[head, i * group + j, d]) * inverse, like)


@numba.njit(**OPTIONS)
def chunk_output(threads, sums, inverses, out, first_row):
    """Divide, and turn heads and tokens round.

    sums: [num_kv_heads, rows, head_dim] elements. out: [tokens, num_kv_heads, group, head_dim]; from `first_row` on.
    """
    parallel_for(_chunk_output_queries, sums.shape[1] // out.shape[2], threads, (sums, inverses, out, first_row))
