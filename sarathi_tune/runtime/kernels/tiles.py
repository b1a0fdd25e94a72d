"""Matrix tiles by AVX-512's bfloat16 dot product.

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
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from sarathi_tune.runtime.kernels.bfloat16 import number, pair_pointer, put_rounded, silu_mul
from sarathi_tune.runtime.kernels.intrinsics import (
    _SECOND_LEVEL,
    LANES,
    _data,
    _load,
    _nth_vector,
    _prefetch_line,
)

llvmlite.binding.initialize_native_asmparser()  # for `_Tile`

#: Rows and vectors of columns of a tile.
TILE_ROWS, TILE_VECTORS = 6, 4
#: Numbers in a cache line.
LINE_ELEMENTS = 32


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
        rows = pair_pointer(builder, _data(context, builder, signature, arguments, 0), arguments[1])
        columns = pair_pointer(builder, _data(context, builder, signature, arguments, 2), arguments[3])
        out = builder.gep(_data(context, builder, signature, arguments, 5), [arguments[8]])

        def multiply(vectors: int) -> None:
            tile = _Tile(TILE_ROWS, vectors, LANES, step)
            tile.multiply(builder, rows, number(pairs), columns, number(pairs * LANES), number(pairs), out)

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
        rows = pair_pointer(builder, _data(context, builder, signature, arguments, 0), number(0))
        columns = pair_pointer(builder, _data(context, builder, signature, arguments, 1), arguments[2])
        shrinks = _data(context, builder, signature, arguments, 4)
        out = builder.gep(_data(context, builder, signature, arguments, 5), [arguments[6]])
        for first in range(0, num_parts, TILE_VECTORS):
            tile = _Tile(TILE_ROWS, min(TILE_VECTORS, num_parts - first), width, width)
            here = [builder.gep(pointer, [number(first * LANES)]) for pointer in (columns, out)]
            tile.multiply(builder, rows, number(step), here[0], number(LANES), arguments[3], here[1], shrinks)
        return context.get_dummy_value()

    signature = types.void(weights, values, types.int64, types.int64, shrink, out, types.int64, parts, stride)
    return signature, generate


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
        rows = pair_pointer(builder, _data(context, builder, signature, arguments, 0), arguments[1])
        columns = pair_pointer(builder, _data(context, builder, signature, arguments, 4), arguments[5])
        start_at = _data(context, builder, signature, arguments, 7)
        out_at = builder.gep(_data(context, builder, signature, arguments, 8), [arguments[9]])
        pairs = arguments[2]
        column_step = builder.mul(pairs, number(LANES))
        start = start_at if has_start else None

        def multiply(size: int) -> None:
            tile = _Tile(size // TILE_VECTORS, size % TILE_VECTORS + 1, LANES, TILE_VECTORS * LANES)
            columns_at, out = (columns, column_step), (out_at, arguments[10])
            tile.multiply_and_round(builder, (rows, pairs), columns_at, pairs, start, out)

        size = builder.add(builder.mul(arguments[3], number(TILE_VECTORS)), builder.sub(arguments[6], number(1)))
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
        with cgutils.for_range(builder, arguments[2]) as loop:
            pair = _nth_vector(builder, _nth_vector(builder, source, loop.index), loop.index)
            gate, up = _load(builder, pair, 0), _load(builder, pair, LANES)
            put_rounded(builder, silu_mul(builder, gate, up), _nth_vector(builder, target, loop.index))
        return context.get_dummy_value()

    return types.void(gate_up, types.int64, types.int64, out, types.int64), generate


def _fetch_lines(_: Any, array: Any, at: Any, num_lines: Any) -> Any:
    """Ask for cache lines of an array of uint16 from `at` on, to the second-level cache. What lies behind the array's
    end does no harm: a prefetch never faults."""
    del at, num_lines

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.gep(_data(context, builder, signature, arguments, 0), [arguments[1]])
        with cgutils.for_range(builder, arguments[2]) as loop:
            line = builder.gep(first, [builder.mul(loop.index, number(LINE_ELEMENTS))])
            _prefetch_line(builder, line, _SECOND_LEVEL)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


score_tile: Any = intrinsic(prefer_literal=True)(_score_tile)
value_tile: Any = intrinsic(prefer_literal=True)(_value_tile)
product_tile: Any = intrinsic(_product_tile)
silu_mul_vectors: Any = intrinsic(_silu_mul_vectors)
fetch_lines: Any = intrinsic(_fetch_lines)


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
        out_bytes = builder.mul(out[1], number(2))
        self._emit(builder, code, rows, columns, num_pairs, [out[0], out_bytes, out[0] if start is None else start])

    def _emit(
        self, builder: Any, code: list[str], rows: tuple[Any, Any], columns: tuple[Any, Any], num_pairs: Any, more: Any
    ) -> None:
        three = number(3)
        operands = [
            rows[0],
            builder.gep(rows[0], [builder.mul(rows[1], three)]),
            columns[0],
            builder.gep(columns[0], [builder.mul(columns[1], three)]),
            num_pairs,
            builder.mul(rows[1], number(4)),
            builder.mul(columns[1], number(4)),
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
