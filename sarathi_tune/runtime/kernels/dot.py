"""Matrix tiles by AVX-512's bfloat16 dot product, and the layouts that it wants.

`vdpbf16ps` multiplies 16 pairs of numbers with 16 other pairs and adds each pair's two products to one of 16 float32
sums. So one operand is laid out in vectors of 16 pairs (one per column), and the pair of a row is broadcast. Six rows
by four vectors of columns keep 24 sums in registers: every operand that is loaded is used several times. That loop is
written in assembler: LLVM's scheduler would load all rows' pairs first, has too few registers then, and keeps sums in
memory, at half the speed.

The docstring of a function here says what the intrinsic does; its own arguments are numba's types, and what it returns
generates the code. Arrays are flat; offsets count elements.
"""

# llvmlite has no types, numba few.
# mypy: allow-untyped-calls, disable-error-code="import-untyped"

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from sarathi_tune.runtime.kernels.availability import KERNEL_LANES
from sarathi_tune.runtime.kernels.intrinsics import (
    _BFLOAT16_DEGREE,
    _BIT_REVERSED,
    _F32,
    _FULL_DEGREE,
    _I32,
    _I64,
    _LOG2_E,
    _TAYLOR,
    _VECTOR,
    _broadcast,
    _call,
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

llvmlite.binding.initialize_native_asmparser()  # for `_Tile`

LANES = KERNEL_LANES
#: Rows and vectors of columns of a tile.
TILE_ROWS, TILE_VECTORS = 6, 4

#: How far ahead keys and values are asked for; best of 1 to 16 KiB on Zen 5.
_AHEAD_BYTES = 2048

_I16 = ir.IntType(16)


class _BFloat16Type(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite doesn't know."""

    def __str__(self) -> str:
        return "bfloat"


_BFLOAT16 = _BFloat16Type()
_BFLOAT16_LANES = ir.VectorType(_BFLOAT16, LANES)
_WORDS = ir.VectorType(_BFLOAT16, 2 * LANES)
#: The first and the second four numbers of each eight of two rows, alternately: what one instruction each can do.
_LOW_WORDS, _HIGH_WORDS = (
    [8 * eight + i + row * 2 * LANES for eight in range(4) for i in range(first, first + 4) for row in (0, 1)]
    for first in (0, 4)
)


def _score_tile(
    _: Any,
    query: Any,
    at: Any,
    keys: Any,
    key_at: Any,
    num_vectors: Any,
    out: Any,
    parts: Any,
    stride: Any,
    out_at: Any,
) -> Any:
    """Dot products of TILE_ROWS queries with 16 * `num_vectors` (1 to TILE_VECTORS) keys.

    query: uint16, row r at `at` + r * head_dim. keys: as `pack_keys` writes them, from `key_at` on. out: float32, row r
    from `out_at` + r * `stride` on. head_dim is 16 times the length of the tuple `parts`; `stride` is a constant.
    """
    del at, key_at, num_vectors, out_at
    pairs, step = len(parts) * LANES // 2, stride.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows = _pair_pointer(builder, _data(context, builder, signature, arguments, 0), arguments[1])
        columns = _pair_pointer(builder, _data(context, builder, signature, arguments, 2), arguments[3])
        out = builder.gep(_data(context, builder, signature, arguments, 5), [arguments[8]])

        def multiply(vectors: int) -> None:
            tile = _Tile(TILE_ROWS, vectors, LANES, step)
            tile.multiply(builder, rows, _number(pairs), columns, _number(pairs * LANES), _number(pairs), out)

        _choose(builder, arguments[4], range(1, TILE_VECTORS + 1), multiply)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(query, integer, keys, integer, integer, out, parts, stride, integer), generate


def _value_tile(
    _: Any,
    weights: Any,
    values: Any,
    value_at: Any,
    pairs: Any,
    shrink: Any,
    out: Any,
    out_at: Any,
    parts: Any,
    stride: Any,
) -> Any:
    """out[r] = out[r] * shrink[r] + the sum over 2 * `pairs` values of weight * value, for TILE_ROWS rows r.

    weights: as `softmax_tile` writes them, row r at float32 r * `stride`. values: as `pack_values` writes them, from
    `value_at` on. shrink: float32. out: float32, row r at `out_at` + r * head_dim. head_dim is 16 times the length of
    the tuple `parts`; `stride` is a constant.
    """
    del value_at, pairs, out_at
    num_parts, step = len(parts), stride.literal_value
    width = num_parts * LANES

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows = _pair_pointer(builder, _data(context, builder, signature, arguments, 0), _number(0))
        columns = _pair_pointer(builder, _data(context, builder, signature, arguments, 1), arguments[2])
        shrinks = _data(context, builder, signature, arguments, 4)
        out = builder.gep(_data(context, builder, signature, arguments, 5), [arguments[6]])
        for first in range(0, num_parts, TILE_VECTORS):
            tile = _Tile(TILE_ROWS, min(TILE_VECTORS, num_parts - first), width, width)
            here = [builder.gep(pointer, [_number(first * LANES)]) for pointer in (columns, out)]
            tile.multiply(builder, rows, _number(step), here[0], _number(LANES), arguments[3], here[1], shrinks)
        return context.get_dummy_value()

    signature = types.void(weights, values, types.int64, types.int64, shrink, out, types.int64, parts, stride)
    return signature, generate


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
        places = [builder.gep(data, [_number(r * step)]) for r in rows]
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
        stops = [builder.trunc(builder.load(builder.gep(stop_at, [_number(r)])), _I32) for r in rows]
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
            weights = [_scaled_power_of_two(builder, _fma(builder, loaded[r], factor, offset[r])) for r in rows]
            for r in rows:
                builder.store(builder.fadd(builder.load(sums[r]), weights[r]), sums[r])
                pairs = builder.bitcast(places[r], ir.PointerType(_I16))
                _put_rounded(builder, weights[r], _nth_vector(builder, pairs, loop.index))
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
            _put_rounded(builder, result, builder.gep(target, [_number(part * LANES)]))
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
                [_load_row(builder, first_query, j * width + p * piece) for p in range(num_pieces)] for j in chosen
            ]
            sums = [_TransposedSum(builder) for _ in chosen]
            # One behind the other, as memory is read fastest; the sums come out in another order for it.
            for key in range(LANES):
                if chosen.start == 0:
                    _prefetch(builder, first_key, key * width, width, _AHEAD_BYTES)
                row = [_load_row(builder, first_key, key * width + p * piece) for p in range(num_pieces)]
                for query, total in zip(queries, sums, strict=True):
                    products = _filled(_VECTOR, 0.0)
                    for first, second in zip(query, row, strict=True):
                        products = _add_products(builder, products, first, second)
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
            _pair_pointer(builder, _data(context, builder, signature, arguments, 0), _number(0)), [arguments[1]]
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
                value = builder.gep(first_value, [builder.mul(loop.index, _number(2 * width))])
                if chosen.start == 0:
                    _prefetch(builder, value, 0, 2 * width, _AHEAD_BYTES)
                mixed = []
                for p in range(num_pieces):
                    two = [_load_row(builder, value, p * piece + row * width) for row in (0, 1)]
                    mixed += [_shuffle(builder, two[0], two[1], order) for order in (_LOW_WORDS, _HIGH_WORDS)]
                for j, row in zip(chosen, sums, strict=True):
                    weight = builder.load(builder.gep(pairs, [builder.add(loop.index, _number(j * step))]))
                    both = builder.bitcast(_repeated(builder, weight), _WORDS)
                    for total, values in zip(row, mixed, strict=True):
                        builder.store(_add_products(builder, builder.load(total), both, values), total)
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
        source = _pair_pointer(builder, _data(context, builder, signature, arguments, 0), arguments[1])
        target = _pair_pointer(builder, _data(context, builder, signature, arguments, 2), arguments[3])
        for first in range(0, num_pairs, LANES):
            count = min(LANES, num_pairs - first)
            rows = [_load_pairs(builder, source, key * num_pairs + first, count) for key in range(LANES)]
            for i, vector in enumerate(_transposed(builder, rows)[:count]):
                _put(builder, vector, target, (first + i) * LANES)
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
        vector_type = ir.PointerType(ir.VectorType(_I16, LANES))
        for first in range(0, LANES * width, 2 * width):
            for d in range(0, width, LANES):
                pair = [
                    builder.load(
                        builder.bitcast(builder.gep(source, [ir.Constant(_I64, offset)]), vector_type), align=2
                    )
                    for offset in (first + d, first + width + d)
                ]
                _put(builder, _shuffle(builder, pair[0], pair[1], alternately), target, first + 2 * d)
        return context.get_dummy_value()

    return types.void(values, types.int64, out, types.int64, parts), generate


def _product_tile(
    _: Any,
    x: Any,
    at: Any,
    row_pairs: Any,
    num_rows: Any,
    weights: Any,
    weight_at: Any,
    num_vectors: Any,
    start: Any,
    out: Any,
    out_at: Any,
    out_columns: Any,
) -> Any:
    """Dot products of `num_rows` (1 to TILE_ROWS) rows with 16 * `num_vectors` (1 to TILE_VECTORS) columns.

    x: uint16, row r at `at` + r * 2 * `row_pairs`. weights: as `kernels.linear` lays them out, from `weight_at` on.
    start: float32, [TILE_ROWS, 16 * TILE_VECTORS], added to the products; or an array of uint16 for nothing. out:
    uint16, row r from `out_at` + r * `out_columns` on, rounded to bfloat16.
    """
    del at, row_pairs, num_rows, weight_at, num_vectors, out_at, out_columns
    has_start = start.dtype == types.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows = _pair_pointer(builder, _data(context, builder, signature, arguments, 0), arguments[1])
        columns = _pair_pointer(builder, _data(context, builder, signature, arguments, 4), arguments[5])
        start_at = _data(context, builder, signature, arguments, 7)
        out_at = builder.gep(_data(context, builder, signature, arguments, 8), [arguments[9]])
        pairs = arguments[2]
        column_step = builder.mul(pairs, ir.Constant(_I64, LANES))
        start = start_at if has_start else None

        def multiply(size: int) -> None:
            tile = _Tile(size // TILE_VECTORS, size % TILE_VECTORS + 1, LANES, TILE_VECTORS * LANES)
            columns_at, out = (columns, column_step), (out_at, arguments[10])
            tile.multiply_and_round(builder, (rows, pairs), columns_at, pairs, start, out)

        size = builder.add(builder.mul(arguments[3], _number(TILE_VECTORS)), builder.sub(arguments[6], _number(1)))
        _choose(builder, size, range(TILE_VECTORS, (TILE_ROWS + 1) * TILE_VECTORS), multiply)
        return context.get_dummy_value()

    integer = types.int64
    signature = types.void(x, integer, integer, integer, weights, integer, integer, start, out, integer, integer)
    return signature, generate


def _silu_mul_vectors(_: Any, gate_up: Any, at: Any, num_vectors: Any, out: Any, out_at: Any) -> Any:
    """silu(gate) * up of `num_vectors` vectors: from `at` on, 16 numbers of gate lie before 16 of up. out: from
    `out_at` on. All are uint16."""
    del at, num_vectors, out_at

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = builder.gep(_data(context, builder, signature, arguments, 0), [arguments[1]])
        target = builder.gep(_data(context, builder, signature, arguments, 3), [arguments[4]])
        one, minus = _filled(_VECTOR, 1.0), _filled(_VECTOR, -_LOG2_E)
        lowest, highest = _filled(_VECTOR, -1e3), _filled(_VECTOR, 1e3)  # beyond them the gate is shut or open
        with cgutils.for_range(builder, arguments[2]) as loop:
            pair = _nth_vector(builder, _nth_vector(builder, source, loop.index), loop.index)
            gate, up = _load(builder, pair, 0), _load(builder, pair, LANES)
            exponent = builder.fmul(gate, minus)
            exponent = builder.select(builder.fcmp_ordered(">", exponent, highest), highest, exponent)
            exponent = builder.select(builder.fcmp_ordered("<", exponent, lowest), lowest, exponent)
            below = builder.fadd(one, _scaled_power_of_two(builder, exponent))
            result = builder.fmul(builder.fdiv(gate, below), up)
            _put_rounded(builder, result, _nth_vector(builder, target, loop.index))
        return context.get_dummy_value()

    return types.void(gate_up, types.int64, types.int64, out, types.int64), generate


score_tile: Any = intrinsic(prefer_literal=True)(_score_tile)
product_tile: Any = intrinsic(_product_tile)
silu_mul_vectors: Any = intrinsic(_silu_mul_vectors)
value_tile: Any = intrinsic(prefer_literal=True)(_value_tile)
softmax_tile: Any = intrinsic(prefer_literal=True)(_softmax_tile)
finish_row: Any = intrinsic(_finish_row)
query_scores: Any = intrinsic(prefer_literal=True)(_query_scores)
add_values: Any = intrinsic(prefer_literal=True)(_add_values)
in_order: Any = intrinsic(_in_order)
pack_keys: Any = intrinsic(_pack_keys)
pack_values: Any = intrinsic(_pack_values)


@dataclass(frozen=True, slots=True)
class _Tile:
    """`num_rows` rows by `num_vectors` vectors of columns.

    `pair_step`: from one pair of a column to the next, in pairs. `out_step`: from one row of the sums to the next.
    """

    num_rows: int
    num_vectors: int
    pair_step: int
    out_step: int

    def multiply(
        self,
        builder: Any,
        rows: Any,
        row_step: Any,
        columns: Any,
        column_step: Any,
        num_pairs: Any,
        out: Any,
        shrink: Any = None,
    ) -> None:
        """out[r][c] = the products of `num_pairs` (one or more) pairs of row r with those of column vector c, added up.

        With `shrink`, a float32 per row, the sum is added to shrink[r] * out[r][c]. Steps count pairs.
        """
        code = self._shrunk() if shrink is not None else self._zeros()
        code += self._products()
        code += [f"vmovups %zmm{sums}, {4 * (r * self.out_step + c * LANES)}($12)" for r, c, sums in self._cells()]
        more = [out, out if shrink is None else shrink]
        self._emit(builder, code, (rows, row_step), (columns, column_step), num_pairs, more)

    def multiply_and_round(
        self,
        builder: Any,
        rows: tuple[Any, Any],
        columns: tuple[Any, Any],
        num_pairs: Any,
        start: Any,
        out: tuple[Any, Any],
    ) -> None:
        """out[r][c] = start[r][c] + the products, rounded to bfloat16.

        rows, columns, out: a pointer and the step to the next row, or vector of columns, in elements of the pointer.
        start: float32, rows `out_step` from each other, or None for zeros.
        """
        code = self._zeros() if start is None else self._started()
        code += self._products()
        code += self._rounded()
        out_bytes = builder.mul(out[1], _number(2))
        self._emit(builder, code, rows, columns, num_pairs, [out[0], out_bytes, out[0] if start is None else start])

    def _emit(
        self, builder: Any, code: list[str], rows: tuple[Any, Any], columns: tuple[Any, Any], num_pairs: Any, more: Any
    ) -> None:
        three = _number(3)
        operands = [
            rows[0],
            builder.gep(rows[0], [builder.mul(rows[1], three)]),
            columns[0],
            builder.gep(columns[0], [builder.mul(columns[1], three)]),
            num_pairs,
            builder.mul(rows[1], _number(4)),
            builder.mul(columns[1], _number(4)),
            *more,
        ]
        changed = [operand.type for operand in operands[:5]]
        function_type = ir.FunctionType(ir.LiteralStructType(changed), [operand.type for operand in operands])
        builder.asm(function_type, "\n".join(code), _constraints(len(operands) - 5), operands, side_effect=True)

    def _cells(self) -> list[tuple[int, int, int]]:
        """Row, vector of columns, and number of the register of each vector of sums."""
        return [(r, c, r * self.num_vectors + c) for r in range(self.num_rows) for c in range(self.num_vectors)]

    def _zeros(self) -> list[str]:
        return [f"vpxord %zmm{sums}, %zmm{sums}, %zmm{sums}" for _, _, sums in self._cells()]

    def _started(self) -> list[str]:
        """Sums begin with the float32 at operand 14."""
        return [f"vmovups {4 * (r * self.out_step + c * LANES)}($14), %zmm{sums}" for r, c, sums in self._cells()]

    def _shrunk(self) -> list[str]:
        """Sums begin with those at operand 12, times the row's number at operand 13."""
        code = []
        for r, c, sums in self._cells():
            if c == 0:
                code.append(f"vbroadcastss {4 * r}($13), %zmm28")
            code.append(f"vmulps {4 * (r * self.out_step + c * LANES)}($12), %zmm28, %zmm{sums}")
        return code

    def _products(self) -> list[str]:
        """Sums in zmm0 to zmm23, vectors of columns in zmm24 to zmm27, pairs of rows in zmm28 to zmm31."""
        code = [".Ltile${:uid}:"]
        column_at = ("($2)", "($2,$11)", "($2,$11,2)", "($3)")
        code += [f"vmovups {column_at[c]}, %zmm{24 + c}" for c in range(self.num_vectors)]
        for r, c, sums in self._cells():
            if c == 0:
                code.append(f"vpbroadcastd {_ROW_AT[r]}, %zmm{28 + r % 4}")
            code.append(f"vdpbf16ps %zmm{24 + c}, %zmm{28 + r % 4}, %zmm{sums}")
        steps = ((0, 4), (1, 4), (2, 4 * self.pair_step), (3, 4 * self.pair_step))
        code += [f"addq $${size}, ${operand}" for operand, size in steps]
        return [*code, "decq $4", "jnz .Ltile${:uid}"]

    def _rounded(self) -> list[str]:
        """Sums to bfloat16 at operand 12, rows operand 13 from each other. Uses operands 0 and 1 for addresses."""
        code = ["movq $12, $0", "leaq ($12,$13,2), $1", "addq $13, $1"]
        for r, c, sums in self._cells():
            at = f"{2 * c * LANES}{_ROW_AT[r].replace('$10', '$13')}"
            if c % 2 == 0 and c + 1 < self.num_vectors:
                code.append(f"vcvtne2ps2bf16 %zmm{sums}, %zmm{sums + 1}, %zmm24")
                code.append(f"vmovups %zmm24, {at}")
            elif c % 2 == 0:
                code.append(f"vcvtneps2bf16 %zmm{sums}, %ymm24")
                code.append(f"vmovups %ymm24, {at}")
        return code


#: Rows 0 to 5 from operands 0 (the first) and 1 (the fourth) on, a step of operand 10 from each other.
_ROW_AT = ("($0)", "($0,$10)", "($0,$10,2)", "($1)", "($1,$10)", "($1,$10,2)")


def _constraints(num_inputs: int) -> str:
    """Operands 0 to 4 are counted up and down and are outputs too, so that inputs begin with the fifth: 5 to 9 are the
    same five, 10 and 11 the steps in bytes, and the rest begins with 12."""
    return ",".join(
        ["=&r"] * 5
        + [str(operand) for operand in range(5)]
        + ["r"] * num_inputs
        + [f"~{{zmm{register}}}" for register in range(32)]
        + ["~{memory}", "~{flags}"]
    )


def _choose(builder: Any, value: Any, cases: Iterable[int], generate: Callable[[int], None]) -> None:
    """What `generate` makes for the case that equals `value`, and nothing for another value."""
    done = builder.append_basic_block("done")
    choice = builder.switch(value, done)
    for case in cases:
        block = builder.append_basic_block(f"case_{case}")
        choice.add_case(ir.Constant(value.type, case), block)
        builder.position_at_end(block)
        generate(case)
        builder.branch(done)
    builder.position_at_end(done)


def _lanes(builder: Any, scalars: list[Any], rest: Any) -> Any:
    """A vector of these numbers, and of `rest` behind them."""
    for lane, scalar in enumerate(scalars):
        rest = builder.insert_element(rest, scalar, ir.Constant(_I32, lane))
    return rest


def _lanes_before(builder: Any, vector_index: Any, stop: Any) -> Any:
    """Which lanes of the vector with this number are before the element `stop`."""
    first = builder.mul(builder.trunc(vector_index, _I32), ir.Constant(_I32, LANES))
    left = _repeated(builder, builder.sub(stop, first))
    return builder.icmp_signed("<", ir.Constant(left.type, list(range(LANES))), left)


def _scaled_power_of_two(builder: Any, exponent: Any) -> Any:
    """2 to a vector's finite exponents, to a hundredth of bfloat16's precision; 0 or infinity far from zero."""
    whole = _call(builder, "llvm.rint", exponent)
    rest = builder.fsub(exponent, whole)
    series = _filled(_VECTOR, _TAYLOR[_BFLOAT16_DEGREE])
    for coefficient in reversed(_TAYLOR[:_BFLOAT16_DEGREE]):
        series = _fma(builder, series, rest, _filled(_VECTOR, coefficient))
    every, as_usual = ir.Constant(_I16, -1), ir.Constant(_I32, 4)
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    return _intrinsic(builder, name, _VECTOR, series, whole, series, every, as_usual)


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


def _pair_pointer(builder: Any, pointer: Any, offset: Any) -> Any:
    """The element at `offset`, taken as pairs of bfloat16."""
    return builder.bitcast(builder.gep(pointer, [offset]), ir.PointerType(_I32))


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _load_pairs(builder: Any, pointer: Any, offset: int, count: int) -> Any:
    """`count` pairs from `offset` on, in a vector of 16."""
    at = builder.gep(pointer, [ir.Constant(_I64, offset)])
    loaded = builder.load(builder.bitcast(at, ir.PointerType(ir.VectorType(_I32, count))), align=2)
    return loaded if count == LANES else _shuffle(builder, loaded, loaded, [lane % count for lane in range(LANES)])


def _put(builder: Any, vector: Any, pointer: Any, offset: int) -> None:
    """Store a vector as it is, from the element at `offset` on."""
    at = builder.gep(pointer, [ir.Constant(_I64, offset)])
    builder.store(vector, builder.bitcast(at, ir.PointerType(vector.type)), align=2)


def _put_rounded(builder: Any, vector: Any, pointer: Any) -> None:
    """16 float32 as bfloat16."""
    rounded = _intrinsic(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _BFLOAT16_LANES, vector)
    builder.store(rounded, builder.bitcast(pointer, ir.PointerType(_BFLOAT16_LANES)), align=2)


def _load_row(builder: Any, pointer: Any, offset: int) -> Any:
    """32 bfloat16 from the element at `offset` on."""
    at = builder.gep(pointer, [_number(offset)])
    return builder.load(builder.bitcast(at, ir.PointerType(_WORDS)), align=2)


def _repeated(builder: Any, number: Any) -> Any:
    """A vector of 16 times the same integer."""
    kind = ir.VectorType(number.type, LANES)
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_I32, 0))
    return _shuffle(builder, vector, vector, [0] * LANES)


def _add_products(builder: Any, sums: Any, first: Any, second: Any) -> Any:
    """Sums of 16 lanes, each plus the products of two neighbours."""
    return _intrinsic(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VECTOR, sums, first, second)


def _intrinsic(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), operands)
