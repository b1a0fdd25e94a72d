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

from dataclasses import dataclass
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from sarathi_tune.runtime.kernels.availability import KERNEL_LANES
from sarathi_tune.runtime.kernels.intrinsics import (
    _BFLOAT16_DEGREE,
    _F32,
    _I32,
    _I64,
    _LOG2_E,
    _VECTOR,
    _broadcast,
    _data,
    _filled,
    _fma,
    _load,
    _nth_vector,
    _power_of_two,
    _reduce,
    _shuffle,
)

llvmlite.binding.initialize_native_asmparser()  # for `_Tile`

LANES = KERNEL_LANES
#: Rows and vectors of columns of a tile.
TILE_ROWS, TILE_VECTORS = 6, 4

_I16 = ir.IntType(16)


class _BFloat16Type(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite doesn't know."""

    def __str__(self) -> str:
        return "bfloat"


_BFLOAT16 = _BFloat16Type()
_BFLOAT16_LANES = ir.VectorType(_BFLOAT16, LANES)


def _score_tile(
    _: Any, query: Any, at: Any, keys: Any, key_at: Any, out: Any, parts: Any, stride: Any, out_at: Any
) -> Any:
    """Dot products of TILE_ROWS queries with 16 * TILE_VECTORS keys.

    query: uint16, row r at `at` + r * head_dim. keys: as `pack_keys` writes them, from `key_at` on. out: float32, row r
    from `out_at` + r * `stride` on. head_dim is 16 times the length of the tuple `parts`; `stride` is a constant.
    """
    del at, key_at, out_at
    pairs, step = len(parts) * LANES // 2, stride.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows = _pair_pointer(builder, _data(context, builder, signature, arguments, 0), arguments[1])
        columns = _pair_pointer(builder, _data(context, builder, signature, arguments, 2), arguments[3])
        out = builder.gep(_data(context, builder, signature, arguments, 4), [arguments[7]])
        tile = _Tile(TILE_ROWS, TILE_VECTORS, LANES, step)
        tile.multiply(builder, rows, _number(pairs), columns, _number(pairs * LANES), _number(pairs), out)
        return context.get_dummy_value()

    signature = types.void(query, types.int64, keys, types.int64, out, parts, stride, types.int64)
    return signature, generate


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

    weights: as `row_pairs` writes them, row r at float32 r * `stride`. values: as `pack_values` writes them, from
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


def _row_pairs(_: Any, row: Any, at: Any, num_vectors: Any, scale: Any, top: Any) -> Any:
    """exp(x * scale - top) of `16 * num_vectors` float32 x from `at` on; returns their sum.

    The weights are written as bfloat16 from the same place on: the first half of the row becomes pairs.
    """
    del at, num_vectors, scale, top

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.gep(_data(context, builder, signature, arguments, 0), [arguments[1]])
        pairs = builder.bitcast(first, ir.PointerType(_I16))
        log2e = _filled(_F32, _LOG2_E)
        scales = _broadcast(builder, builder.fmul(arguments[3], log2e))
        offset = _broadcast(builder, builder.fneg(builder.fmul(arguments[4], log2e)))
        sums = cgutils.alloca_once_value(builder, _filled(_VECTOR, 0.0))
        with cgutils.for_range(builder, arguments[2]) as loop:
            exponents = _fma(builder, _load(builder, _nth_vector(builder, first, loop.index), 0), scales, offset)
            weights = _power_of_two(builder, exponents, _BFLOAT16_DEGREE)
            builder.store(builder.fadd(builder.load(sums), weights), sums)
            rounded = _intrinsic(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _BFLOAT16_LANES, weights)
            at_pairs = _nth_vector(builder, pairs, loop.index)
            builder.store(rounded, builder.bitcast(at_pairs, ir.PointerType(_BFLOAT16_LANES)), align=2)
        return _reduce(builder, builder.load(sums), "add")

    return types.float32(row, types.int64, types.int64, types.float32, types.float32), generate


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
    _: Any, x: Any, at: Any, row_pairs: Any, num_rows: Any, weights: Any, weight_at: Any, num_vectors: Any, out: Any
) -> Any:
    """Dot products of `num_rows` (1 to TILE_ROWS) rows with 16 * `num_vectors` (1 to TILE_VECTORS) columns.

    x: uint16, row r at `at` + r * 2 * `row_pairs`. weights: as `kernels.linear` lays them out, from `weight_at` on.
    out: float32, [TILE_ROWS, 16 * TILE_VECTORS].
    """
    del at, row_pairs, num_rows, weight_at, num_vectors

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows = _pair_pointer(builder, _data(context, builder, signature, arguments, 0), arguments[1])
        columns = _pair_pointer(builder, _data(context, builder, signature, arguments, 4), arguments[5])
        out = _data(context, builder, signature, arguments, 7)
        pairs = arguments[2]
        column_step = builder.mul(pairs, ir.Constant(_I64, LANES))
        sizes = [(rows, vectors) for rows in range(1, TILE_ROWS + 1) for vectors in range(1, TILE_VECTORS + 1)]
        size = builder.add(
            builder.mul(builder.sub(arguments[3], ir.Constant(_I64, 1)), ir.Constant(_I64, TILE_VECTORS)),
            builder.sub(arguments[6], ir.Constant(_I64, 1)),
        )
        done = builder.append_basic_block("done")
        blocks = [builder.append_basic_block(f"tile_{rows}x{vectors}") for rows, vectors in sizes]
        choice = builder.switch(size, done)
        for index, block in enumerate(blocks):
            choice.add_case(ir.Constant(_I64, index), block)
        for (count, vectors), block in zip(sizes, blocks, strict=True):
            builder.position_at_end(block)
            tile = _Tile(count, vectors, LANES, TILE_VECTORS * LANES)
            tile.multiply(builder, rows, pairs, columns, column_step, pairs, out)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    signature = types.void(x, types.int64, types.int64, types.int64, weights, types.int64, types.int64, out)
    return signature, generate


score_tile: Any = intrinsic(prefer_literal=True)(_score_tile)
product_tile: Any = intrinsic(_product_tile)
value_tile: Any = intrinsic(prefer_literal=True)(_value_tile)
row_pairs: Any = intrinsic(_row_pairs)
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
        three = _number(3)
        operands = [
            rows,
            builder.gep(rows, [builder.mul(row_step, three)]),
            columns,
            builder.gep(columns, [builder.mul(column_step, three)]),
            num_pairs,
            builder.mul(row_step, _number(4)),
            builder.mul(column_step, _number(4)),
            out,
            out if shrink is None else shrink,
        ]
        changed = [operand.type for operand in operands[:5]]
        function_type = ir.FunctionType(ir.LiteralStructType(changed), [operand.type for operand in operands])
        builder.asm(function_type, self._code(shrink is not None), _CONSTRAINTS, operands, side_effect=True)

    def _code(self, shrinks: bool) -> str:
        """Sums in zmm0 to zmm23, vectors of columns in zmm24 to zmm27, pairs of rows in zmm28 to zmm31."""
        cells = [(r, c, r * self.num_vectors + c) for r in range(self.num_rows) for c in range(self.num_vectors)]
        places = [f"{4 * (r * self.out_step + c * LANES)}($12)" for r, c, _ in cells]
        lines = []
        for (r, c, sums), place in zip(cells, places, strict=True):
            if shrinks and c == 0:
                lines.append(f"vbroadcastss {4 * r}($13), %zmm28")
            lines.append(
                f"vmulps {place}, %zmm28, %zmm{sums}" if shrinks else f"vpxord %zmm{sums}, %zmm{sums}, %zmm{sums}"
            )
        lines.append(".Ltile${:uid}:")
        column_at = ("($2)", "($2,$11)", "($2,$11,2)", "($3)")
        row_at = ("($0)", "($0,$10)", "($0,$10,2)", "($1)", "($1,$10)", "($1,$10,2)")
        lines += [f"vmovups {column_at[c]}, %zmm{24 + c}" for c in range(self.num_vectors)]
        for r, c, sums in cells:
            if c == 0:
                lines.append(f"vpbroadcastd {row_at[r]}, %zmm{28 + r % 4}")
            lines.append(f"vdpbf16ps %zmm{24 + c}, %zmm{28 + r % 4}, %zmm{sums}")
        steps = ((0, 4), (1, 4), (2, 4 * self.pair_step), (3, 4 * self.pair_step))
        lines += [f"addq $${size}, ${operand}" for operand, size in steps]
        lines += ["decq $4", "jnz .Ltile${:uid}"]
        lines += [f"vmovups %zmm{sums}, {place}" for (_, _, sums), place in zip(cells, places, strict=True)]
        return "\n".join(lines)


#: Operands 0 to 4 are counted up and down and are outputs too, so that inputs begin with the fifth: 5 to 9 are the same
#: five, 10 and 11 the steps in bytes, 12 and 13 `out` and `shrink`.
_CONSTRAINTS = ",".join(
    ["=&r"] * 5
    + [str(operand) for operand in range(5)]
    + ["r"] * 4
    + [f"~{{zmm{register}}}" for register in range(32)]
    + ["~{memory}", "~{flags}"]
)


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


def _intrinsic(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), operands)
