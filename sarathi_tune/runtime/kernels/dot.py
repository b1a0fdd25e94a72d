"""Attention by AVX-512's bfloat16 dot product, beside the tiles: the layouts of keys and values, a running softmax of
several rows at once, and single queries against keys as they lie in the cache.

The docstring of a function here says what the intrinsic does; its own arguments are numba's types, and what it returns
generates the code. Arrays are flat; offsets count elements.
"""

# llvmlite has no types, numba few.
# mypy: allow-untyped-calls, disable-error-code="import-untyped"

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from sarathi_tune.runtime.kernels.bfloat16 import (
    I16,
    PAIRS,
    add_products,
    load_row,
    number,
    pair_pointer,
    put,
    put_rounded,
    repeated,
    scaled_power_of_two,
)
from sarathi_tune.runtime.kernels.intrinsics import (
    _BIT_REVERSED,
    _F32,
    _FULL_DEGREE,
    _I32,
    _I64,
    _LOG2_E,
    _VECTOR,
    LANES,
    _broadcast,
    _data,
    _filled,
    _fma,
    _head_blocks,
    _load,
    _nth_vector,
    _power_of_two,
    _prefetch,
    _reduce,
    _shuffle,
    _store,
    _TransposedSum,
)

#: How far ahead keys and values are asked for; best of 1 to 16 KiB on Zen 5.
_AHEAD_BYTES = 2048

#: The first and the second four numbers of each eight of two rows, alternately: what one instruction each can do.
_LOW_WORDS, _HIGH_WORDS = (
    [8 * eight + i + row * 2 * LANES for eight in range(4) for i in range(first, first + 4) for row in (0, 1)]
    for first in (0, 4)
)


def _softmax_tile(
    _: Any,
    scores: Any,
    heads: Any,
    stride: Any,
    num_whole: Any,
    num_vectors: Any,
    stops: Any,
    scale: Any,
    tops: Any,
    totals: Any,
    at: Any,
    shrinks: Any,
) -> Any:
    """One more block of keys in the running softmax of some rows: weights of it, and how much what was summed up before
    them shrinks.

    scores: float32, row r from r * `stride` (a constant) on; its weights are written as pairs of bfloat16 from the same
    place on. There are as many rows as the tuple `heads` is long, 16 at most. Of `num_vectors` vectors of 16 keys, row
    r doesn't see those from stops[r] (int64) on, all of them behind the first `num_whole` vectors. tops, totals:
    float32, row r at `at` + r, the largest score times `scale` and the sum of all weights, both up to date afterwards.
    shrinks: float32, 16 of them.
    """
    del num_whole, num_vectors, scale, at
    step = stride.literal_value
    rows = range(len(heads))
    is_row = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [lane < len(heads) for lane in range(LANES)])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = _data(context, builder, signature, arguments, 0)
        whole, vectors, scale = arguments[3], arguments[4], arguments[6]
        places = [builder.gep(data, [number(r * step)]) for r in rows]
        highest = [cgutils.alloca_once_value(builder, _filled(_VECTOR, -3e38)) for _ in rows]

        def compare(index: Any, stops: list[Any] | None) -> None:
            for r in rows:
                at = _nth_vector(builder, places[r], index)
                vector = _load(builder, at, 0)
                if stops is not None:
                    vector = builder.select(_lanes_before(builder, index, stops[r]), vector, _filled(_VECTOR, -1e30))
                    _store(builder, vector, at, 0)
                top = builder.load(highest[r])
                builder.store(builder.select(builder.fcmp_ordered(">", vector, top), vector, top), highest[r])

        with cgutils.for_range(builder, whole) as loop:
            compare(loop.index, None)
        stop_at = _data(context, builder, signature, arguments, 5)
        stops = [builder.trunc(builder.load(builder.gep(stop_at, [number(r)])), _I32) for r in rows]
        with cgutils.for_range(builder, builder.sub(vectors, whole)) as loop:
            compare(builder.add(loop.index, whole), stops)

        top_at, total_at = (
            builder.gep(_data(context, builder, signature, arguments, index), [arguments[9]]) for index in (7, 8)
        )
        shrink_at = _data(context, builder, signature, arguments, 10)
        before = _load(builder, top_at, 0)
        here = _lanes(builder, [_reduce(builder, builder.load(highest[r]), "max") for r in rows], before)
        here = builder.select(is_row, builder.fmul(here, _broadcast(builder, scale)), before)
        top = builder.select(builder.fcmp_ordered(">", here, before), here, before)
        log2e = _filled(_VECTOR, _LOG2_E)
        shrink = _power_of_two(builder, builder.fmul(builder.fsub(before, top), log2e), _FULL_DEGREE)
        _store(builder, top, top_at, 0)
        _store(builder, shrink, shrink_at, 0)

        offsets = builder.fneg(builder.fmul(top, log2e))
        offset = [_shuffle(builder, offsets, offsets, [r] * LANES) for r in rows]
        factor = _broadcast(builder, builder.fmul(scale, ir.Constant(_F32, float(np.float32(_LOG2_E)))))
        sums = [cgutils.alloca_once_value(builder, _filled(_VECTOR, 0.0)) for _ in rows]
        with cgutils.for_range(builder, vectors) as loop:
            loaded = [_load(builder, _nth_vector(builder, places[r], loop.index), 0) for r in rows]
            weights = [scaled_power_of_two(builder, _fma(builder, loaded[r], factor, offset[r])) for r in rows]
            for r in rows:
                builder.store(builder.fadd(builder.load(sums[r]), weights[r]), sums[r])
                pairs = builder.bitcast(places[r], ir.PointerType(I16))
                put_rounded(builder, weights[r], _nth_vector(builder, pairs, loop.index))
        total = _load(builder, total_at, 0)
        added = _lanes(builder, [_reduce(builder, builder.load(sums[r]), "add") for r in rows], total)
        _store(builder, builder.select(is_row, _fma(builder, total, shrink, added), total), total_at, 0)
        return context.get_dummy_value()

    integer = types.int64
    signature = types.void(
        scores, heads, stride, integer, integer, stops, types.float32, tops, totals, integer, shrinks
    )
    return signature, generate


def _finish_row(_: Any, sums: Any, at: Any, factor: Any, out: Any, out_at: Any, parts: Any) -> Any:
    """out = sums * factor, rounded to bfloat16, for head_dim numbers from `at` and `out_at` on. head_dim is 16 times
    the length of the tuple `parts`."""
    del at, factor, out_at
    num_parts = len(parts)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = builder.gep(_data(context, builder, signature, arguments, 0), [arguments[1]])
        target = builder.gep(_data(context, builder, signature, arguments, 3), [arguments[4]])
        factors = _broadcast(builder, arguments[2])
        for part in range(num_parts):
            result = builder.fmul(_load(builder, source, part * LANES), factors)
            put_rounded(builder, result, builder.gep(target, [number(part * LANES)]))
        return context.get_dummy_value()

    return types.void(sums, types.int64, types.float32, out, types.int64, parts), generate


def _query_scores(
    _: Any, query: Any, at: Any, keys: Any, key_at: Any, out: Any, out_at: Any, parts: Any, heads: Any, stride: Any
) -> Any:
    """Dot products of a few queries with 16 consecutive keys, each key read once for all of them.

    query: uint16, query j at `at` + j * head_dim. keys: uint16, the first at `key_at`, head_dim numbers each. out:
    float32, the scores of query j from `out_at` + j * `stride` on. head_dim is 16 times the length of the tuple `parts`
    and a multiple of 32, the number of queries is the length of the tuple `heads`; they and `stride` are constants.
    """
    del at, key_at, out_at
    num_pieces, num_heads, step = len(parts) // 2, len(heads), stride.literal_value
    width, piece = len(parts) * LANES, 2 * LANES

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first_query = builder.gep(_data(context, builder, signature, arguments, 0), [arguments[1]])
        first_key = builder.gep(_data(context, builder, signature, arguments, 2), [arguments[3]])
        first_out = builder.gep(_data(context, builder, signature, arguments, 4), [arguments[5]])
        for chosen in _head_blocks(num_heads, num_pieces):
            queries = [
                [load_row(builder, first_query, j * width + p * piece) for p in range(num_pieces)] for j in chosen
            ]
            sums = [_TransposedSum(builder) for _ in chosen]
            # One behind the other, as memory is read fastest; the sums come out in another order for it.
            for key in range(LANES):
                if chosen.start == 0:
                    _prefetch(builder, first_key, key * width, width, _AHEAD_BYTES)
                row = [load_row(builder, first_key, key * width + p * piece) for p in range(num_pieces)]
                for query, total in zip(queries, sums, strict=True):
                    products = _filled(_VECTOR, 0.0)
                    for first, second in zip(query, row, strict=True):
                        products = add_products(builder, products, first, second)
                    total.add(products)
            for j, total in zip(chosen, sums, strict=True):
                scores = total.result()
                _store(builder, _shuffle(builder, scores, scores, list(_BIT_REVERSED)), first_out, j * step)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(query, integer, keys, integer, out, integer, parts, heads, stride), generate


def _add_values(
    _: Any,
    weights: Any,
    at: Any,
    values: Any,
    value_at: Any,
    num_pairs: Any,
    out: Any,
    parts: Any,
    heads: Any,
    stride: Any,
) -> Any:
    """out[j] += the sum over 2 * `num_pairs` consecutive values of weight * value, each value read once for all rows.

    weights: as `softmax_tile` writes them, those of row j from float32 j * `stride` on, the first pair at float32 `at`.
    values: uint16, the first at `value_at`, head_dim numbers each. out: float32, row j at j * head_dim, its numbers in
    the order that `in_order` ends. head_dim is 16 times the length of the tuple `parts` and a multiple of 32, the
    number of rows is the length of the tuple `heads`; they and `stride` are constants.
    """
    del at, value_at, num_pairs
    num_pieces, num_heads, step = len(parts) // 2, len(heads), stride.literal_value
    width, piece = len(parts) * LANES, 2 * LANES

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pairs = builder.gep(
            pair_pointer(builder, _data(context, builder, signature, arguments, 0), number(0)), [arguments[1]]
        )
        first_value = builder.gep(_data(context, builder, signature, arguments, 2), [arguments[3]])
        out_data = _data(context, builder, signature, arguments, 5)
        for chosen in _head_blocks(num_heads, 2 * num_pieces):
            offsets = [[j * width + part * LANES for part in range(2 * num_pieces)] for j in chosen]
            sums = [
                [cgutils.alloca_once_value(builder, _load(builder, out_data, offset)) for offset in row]
                for row in offsets
            ]
            with cgutils.for_range(builder, arguments[4]) as loop:
                value = builder.gep(first_value, [builder.mul(loop.index, number(2 * width))])
                if chosen.start == 0:
                    _prefetch(builder, value, 0, 2 * width, _AHEAD_BYTES)
                mixed = []
                for p in range(num_pieces):
                    two = [load_row(builder, value, p * piece + row * width) for row in (0, 1)]
                    mixed += [_shuffle(builder, two[0], two[1], order) for order in (_LOW_WORDS, _HIGH_WORDS)]
                for j, row in zip(chosen, sums, strict=True):
                    weight = builder.load(builder.gep(pairs, [builder.add(loop.index, number(j * step))]))
                    both = builder.bitcast(repeated(builder, weight), PAIRS)
                    for total, values in zip(row, mixed, strict=True):
                        builder.store(add_products(builder, builder.load(total), both, values), total)
            for row, totals in zip(offsets, sums, strict=True):
                for offset, total in zip(row, totals, strict=True):
                    _store(builder, builder.load(total), out_data, offset)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(weights, integer, values, integer, integer, out, parts, heads, stride), generate


def _in_order(_: Any, sums: Any, at: Any, out: Any, out_at: Any, parts: Any) -> Any:
    """Copy head_dim float32 that `add_values` has summed up, each to its place."""
    del at, out_at
    num_pieces = len(parts) // 2

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = builder.gep(_data(context, builder, signature, arguments, 0), [arguments[1]])
        target = builder.gep(_data(context, builder, signature, arguments, 2), [arguments[3]])
        for p in range(num_pieces):
            low, high = (_load(builder, source, (2 * p + i) * LANES) for i in (0, 1))
            for half in (0, 1):
                order = [
                    4 * lane + i + source * LANES
                    for lane in (2 * half, 2 * half + 1)
                    for source in (0, 1)
                    for i in range(4)
                ]
                _store(builder, _shuffle(builder, low, high, order), target, (2 * p + half) * LANES)
        return context.get_dummy_value()

    return types.void(sums, types.int64, out, types.int64, parts), generate


def _pack_keys(_: Any, keys: Any, at: Any, out: Any, out_at: Any, parts: Any) -> Any:
    """Turn 16 keys, one behind the other from `at` on, into a vector of 16 pairs for each two of their head_dim
    numbers. head_dim is 16 times the length of the tuple `parts`."""
    del at, out_at
    num_pairs = len(parts) * LANES // 2

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = pair_pointer(builder, _data(context, builder, signature, arguments, 0), arguments[1])
        target = pair_pointer(builder, _data(context, builder, signature, arguments, 2), arguments[3])
        for first in range(0, num_pairs, LANES):
            count = min(LANES, num_pairs - first)
            rows = [_load_pairs(builder, source, key * num_pairs + first, count) for key in range(LANES)]
            for i, vector in enumerate(_transposed(builder, rows)[:count]):
                put(builder, vector, target, (first + i) * LANES)
        return context.get_dummy_value()

    return types.void(keys, types.int64, out, types.int64, parts), generate


def _pack_values(_: Any, values: Any, at: Any, out: Any, out_at: Any, parts: Any) -> Any:
    """Turn 16 values, one behind the other from `at` on, into head_dim pairs for each two of them: (first, second)
    number 0, (first, second) number 1 ... head_dim is 16 times the length of the tuple `parts`."""
    del at, out_at
    width = len(parts) * LANES
    alternately = [lane + source * LANES for lane in range(LANES) for source in (0, 1)]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = builder.gep(_data(context, builder, signature, arguments, 0), [arguments[1]])
        target = builder.gep(_data(context, builder, signature, arguments, 2), [arguments[3]])
        vector_type = ir.PointerType(ir.VectorType(I16, LANES))
        for first in range(0, LANES * width, 2 * width):
            for d in range(0, width, LANES):
                pair = [
                    builder.load(
                        builder.bitcast(builder.gep(source, [ir.Constant(_I64, offset)]), vector_type), align=2
                    )
                    for offset in (first + d, first + width + d)
                ]
                put(builder, _shuffle(builder, pair[0], pair[1], alternately), target, first + 2 * d)
        return context.get_dummy_value()

    return types.void(values, types.int64, out, types.int64, parts), generate


softmax_tile: Any = intrinsic(prefer_literal=True)(_softmax_tile)
finish_row: Any = intrinsic(_finish_row)
query_scores: Any = intrinsic(prefer_literal=True)(_query_scores)
add_values: Any = intrinsic(prefer_literal=True)(_add_values)
in_order: Any = intrinsic(_in_order)
pack_keys: Any = intrinsic(_pack_keys)
pack_values: Any = intrinsic(_pack_values)


def _lanes(builder: Any, scalars: list[Any], rest: Any) -> Any:
    """A vector of these numbers, and of `rest` behind them."""
    for lane, scalar in enumerate(scalars):
        rest = builder.insert_element(rest, scalar, ir.Constant(_I32, lane))
    return rest


def _lanes_before(builder: Any, vector_index: Any, stop: Any) -> Any:
    """Which lanes of the vector with this number are before the element `stop`."""
    first = builder.mul(builder.trunc(vector_index, _I32), ir.Constant(_I32, LANES))
    left = repeated(builder, builder.sub(stop, first))
    return builder.icmp_signed("<", ir.Constant(left.type, list(range(LANES))), left)


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 lanes turned round: exchange halves, quarters, eighths and neighbours."""
    distance = LANES // 2
    while distance:
        low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        turned = list(rows)
        for i in range(LANES):
            if not i & distance:
                turned[i] = _shuffle(builder, rows[i], rows[i + distance], low)
                turned[i + distance] = _shuffle(builder, rows[i], rows[i + distance], high)
        rows = turned
        distance //= 2
    return rows


def _load_pairs(builder: Any, pointer: Any, offset: int, count: int) -> Any:
    """`count` pairs from `offset` on, in a vector of 16."""
    at = builder.gep(pointer, [ir.Constant(_I64, offset)])
    loaded = builder.load(builder.bitcast(at, ir.PointerType(ir.VectorType(_I32, count))), align=2)
    return loaded if count == LANES else _shuffle(builder, loaded, loaded, [lane % count for lane in range(LANES)])
