"""Matrix tiles by AMX.

A tile register holds 16 rows of 64 bytes. `tdpbf16ps` multiplies a tile of 16 rows' 32 inputs with one of 32 inputs'
16 columns (pairs of inputs lie side by side) and adds the products to a tile of 16 by 16 float32 sums. Two tiles of
rows by two of columns use every tile that is loaded twice. A row's sums are added up in the order of its inputs,
whatever the number of rows beside it.

The docstring of a function here says what the intrinsic does; its own arguments are numba's types, and what it returns
generates the code. Arrays are flat; offsets count elements.
"""

# llvmlite has no types, numba few.
# mypy: allow-untyped-calls, disable-error-code="import-untyped"

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from sarathi_tune.runtime.kernels.availability import AMX_INPUTS
from sarathi_tune.runtime.kernels.bfloat16 import number, put, rounded, silu_mul
from sarathi_tune.runtime.kernels.buffers import LINE_BYTES
from sarathi_tune.runtime.kernels.intrinsics import LANES, _data, _load, _nth_vector
from sarathi_tune.runtime.kernels.tiles import _choose

llvmlite.binding.initialize_native_asmparser()  # for `_emit`

#: Rows of a tile, and numbers of bfloat16 in each.
TILE_ROWS, TILE_INPUTS = 16, AMX_INPUTS
#: Rows and vectors of columns of a block; its sums are float32, one row of columns behind the other.
BLOCK_ROWS, BLOCK_VECTORS = 2 * TILE_ROWS, 2
BLOCK_COLUMNS = BLOCK_VECTORS * LANES
#: How many cache lines a block asks for with each 32 inputs: a power of two, up to all of two tiles.
MOST_LINES = 2 * TILE_ROWS

_TILE_BYTES = 1024
_LINES = tuple(1 << power for power in range(MOST_LINES.bit_length()))


def _configure(_: Any, config: Any, num_rows: Any) -> Any:
    """Set the thread's tile registers up for blocks of `num_rows` (1 to BLOCK_ROWS) rows. config: 64 bytes, all zero
    before their first use."""
    del num_rows

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = _data(context, builder, signature, arguments, 0)
        byte = data.type.pointee
        whole = number(TILE_ROWS)
        rows = arguments[1]
        is_more = builder.icmp_signed(">", rows, whole)
        first = builder.select(is_more, whole, rows)
        second = builder.select(is_more, builder.sub(rows, whole), whole)

        def store(at: int, value: Any) -> None:
            builder.store(value, builder.gep(data, [number(at)]))

        store(0, ir.Constant(byte, 1))  # the only palette there is
        for tile in range(8):
            store(16 + 2 * tile, ir.Constant(byte, LINE_BYTES))
            tile_rows = {**dict.fromkeys(_FIRST_ROWS, first), **dict.fromkeys(_SECOND_ROWS, second)}.get(tile, whole)
            store(48 + tile, builder.trunc(tile_rows, byte))
        function_type = ir.FunctionType(ir.VoidType(), [data.type])
        builder.asm(function_type, "ldtilecfg ($0)", "r,~{memory}", [data], side_effect=True)
        return context.get_dummy_value()

    return types.void(config, types.int64), generate


def _release(_: Any) -> Any:
    """Leave the thread's tile registers as if they had never been used."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "tilerelease", "~{memory}", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), generate


def _multiply_block(
    _: Any,
    x: Any,
    at: Any,
    inputs: Any,
    num_rows: Any,
    weights: Any,
    weight_at: Any,
    num_vectors: Any,
    ahead_at: Any,
    lines: Any,
    sums: Any,
) -> Any:
    """Dot products of `num_rows` rows, as many as `configure` was told, with 16 * `num_vectors` (1 or 2) columns.

    x: uint16, row r at `at` + r * `inputs`. weights: uint16, as `kernels.linear` lays them out, from `weight_at` on.
    `lines` (one of 1, 2, 4 ... MOST_LINES) cache lines of them from `ahead_at` on are asked for with each 32 inputs.
    sums: float32, [BLOCK_ROWS, BLOCK_COLUMNS].
    """
    del at, inputs, num_rows, weight_at, num_vectors, ahead_at, lines

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, at, inputs, num_rows, weights, weight_at, num_vectors, ahead_at, lines, sums = arguments
        x, weights, sums = (_data(context, builder, signature, arguments, index) for index in (0, 4, 9))
        rows, columns, ahead = (
            builder.gep(array, [offset]) for array, offset in ((x, at), (weights, weight_at), (weights, ahead_at))
        )
        operands = [
            rows,
            builder.gep(rows, [builder.mul(inputs, number(TILE_ROWS))]),
            columns,
            builder.gep(columns, [builder.mul(inputs, number(LANES))]),
            ahead,
            builder.udiv(inputs, number(TILE_INPUTS)),
            builder.mul(inputs, number(2)),
            number(LINE_BYTES),
            sums,
            number(4 * BLOCK_COLUMNS),
        ]
        two_tiles = builder.zext(builder.icmp_signed(">", num_rows, number(TILE_ROWS)), num_rows.type)
        shape = builder.add(builder.mul(two_tiles, number(2)), builder.sub(num_vectors, number(1)))
        case = builder.add(builder.mul(shape, number(2 * MOST_LINES)), lines)
        shapes = {
            size * 2 * MOST_LINES + count: (size // 2 + 1, size % 2 + 1, count) for size in range(4) for count in _LINES
        }
        _choose(builder, case, shapes, lambda case: _multiply(builder, operands, *shapes[case]))
        return context.get_dummy_value()

    integer = types.int64
    signature = types.void(x, integer, integer, integer, weights, integer, integer, integer, integer, sums)
    return signature, generate


def _round_block(
    _: Any,
    sums: Any,
    num_rows: Any,
    num_vectors: Any,
    bias: Any,
    added: Any,
    added_at: Any,
    out: Any,
    out_at: Any,
    columns: Any,
) -> Any:
    """out = sums + bias + added, rounded to bfloat16, for the rows of a block.

    bias: float32, BLOCK_COLUMNS of them. added: uint16, row r from `added_at` + r * `columns` on; or an array of
    float32 for nothing. out: uint16, row r from `out_at` + r * `columns` on.
    """
    del num_rows, num_vectors, added_at, out_at, columns
    has_added = added.dtype != types.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, bias, added, out = (_data(context, builder, signature, arguments, index) for index in (0, 3, 4, 6))

        def finish(vectors: int) -> None:
            biases = [_load(builder, bias, vector * LANES) for vector in range(vectors)]
            with cgutils.for_range(builder, arguments[1]) as loop:
                row = builder.gep(sums, [builder.mul(loop.index, number(BLOCK_COLUMNS))])
                step = builder.mul(loop.index, arguments[8])
                target = builder.gep(out, [builder.add(arguments[7], step)])
                source = builder.gep(added, [builder.add(arguments[5], step)]) if has_added else None
                for vector in range(vectors):
                    value = builder.fadd(_load(builder, row, vector * LANES), biases[vector])
                    if source is not None:
                        value = builder.fadd(value, _load(builder, source, vector * LANES))
                    put(builder, rounded(builder, value), target, vector * LANES)

        _choose(builder, arguments[2], range(1, BLOCK_VECTORS + 1), finish)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(sums, integer, integer, bias, added, integer, out, integer, integer), generate


def _gate_block(_: Any, sums: Any, num_rows: Any, bias: Any, out: Any, out_at: Any, columns: Any) -> Any:
    """out = silu(gate) * up for the rows of a block, whose first vector is gate and whose second is up, each with its
    bias. bias: as `round_block` takes it. out: uint16, row r from `out_at` + r * `columns` on."""
    del num_rows, out_at, columns

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, bias, out = (_data(context, builder, signature, arguments, index) for index in (0, 2, 3))
        biases = [_load(builder, bias, vector * LANES) for vector in range(BLOCK_VECTORS)]
        with cgutils.for_range(builder, arguments[1]) as loop:
            row = _nth_vector(builder, _nth_vector(builder, sums, loop.index), loop.index)
            gate, up = (
                builder.fadd(_load(builder, row, vector * LANES), biases[vector]) for vector in range(BLOCK_VECTORS)
            )
            target = builder.gep(out, [builder.add(arguments[4], builder.mul(loop.index, arguments[5]))])
            put(builder, rounded(builder, silu_mul(builder, gate, up)), target, 0)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(sums, integer, bias, out, integer, integer), generate


def _score_rows(
    _: Any,
    query: Any,
    at: Any,
    keys: Any,
    key_at: Any,
    num_vectors: Any,
    scores: Any,
    score_at: Any,
    parts: Any,
    stride: Any,
) -> Any:
    """Dot products of TILE_ROWS queries with 16 * `num_vectors` (1 or 2) keys.

    query: uint16, row r at `at` + r * head_dim. keys: as `pack_keys` writes them, from `key_at` on. scores: float32,
    row r from `score_at` + r * `stride` on. head_dim is 16 times the length of the tuple `parts` and a multiple of 32;
    `stride` is a constant.
    """
    del at, key_at, num_vectors, score_at
    steps, width, step = len(parts) // 2, len(parts) * LANES, stride.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, columns, out = (
            builder.gep(_data(context, builder, signature, arguments, index), [arguments[index + 1]])
            for index in (0, 2, 5)
        )
        operands = [rows, columns, out, number(2 * width), number(LINE_BYTES), number(4 * step)]

        def multiply(vectors: int) -> None:
            code = [f"tilezero %tmm{vector}" for vector in range(vectors)]
            for k in range(steps):
                code.append(f"tileloadd {LINE_BYTES * k}($0,$3,1), %tmm4")
                for vector in range(vectors):
                    code.append(f"tileloadd {_TILE_BYTES * (vector * steps + k)}($1,$4,1), %tmm{6 + vector}")
                    code.append(f"tdpbf16ps %tmm{6 + vector}, %tmm4, %tmm{vector}")
            code += [f"tilestored %tmm{vector}, {LINE_BYTES * vector}($2,$5,1)" for vector in range(vectors)]
            _emit(builder, code, operands)

        _choose(builder, arguments[4], (1, 2), multiply)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(query, integer, keys, integer, integer, scores, integer, parts, stride), generate


def _add_value_rows(
    _: Any, weights: Any, values: Any, value_at: Any, steps: Any, sums: Any, sum_at: Any, parts: Any, stride: Any
) -> Any:
    """sums[r] += the sum over 32 * `steps` (one or more) values of weight * value, for TILE_ROWS rows r.

    weights: as `softmax_tile` writes them, row r at float32 r * `stride`. values: as `pack_values` writes them, from
    `value_at` on. sums: float32, row r at `sum_at` + r * head_dim. head_dim is 16 times the length of the tuple
    `parts`; `stride` is a constant.
    """
    del value_at, steps, sum_at
    num_parts, step = len(parts), stride.literal_value
    width = num_parts * LANES

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows = _data(context, builder, signature, arguments, 0)
        columns = builder.gep(_data(context, builder, signature, arguments, 1), [arguments[2]])
        sums = builder.gep(_data(context, builder, signature, arguments, 4), [arguments[5]])
        for first in range(0, num_parts, _SUM_TILES):
            tiles = range(min(_SUM_TILES, num_parts - first))
            at = [LINE_BYTES * (first + tile) for tile in tiles]
            code = [f"tileloadd {at[tile]}($6,$7,1), %tmm{tile}" for tile in tiles]
            code += [".Lvalues${:uid}:", "tileloadd ($0,$8,1), %tmm4"]
            for tile in tiles:
                code.append(f"tileloadd {at[tile]}($1,$7,1), %tmm{6 + tile % 2}")
                code.append(f"tdpbf16ps %tmm{6 + tile % 2}, %tmm4, %tmm{tile}")
            code += [f"addq $${LINE_BYTES}, $0", f"addq $${4 * TILE_ROWS * width}, $1"]
            code += ["decq $2", "jnz .Lvalues${:uid}"]
            code += [f"tilestored %tmm{tile}, {at[tile]}($6,$7,1)" for tile in tiles]
            _emit(builder, code, [rows, columns, arguments[3], sums, number(4 * width), number(4 * step)], changed=3)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(weights, values, integer, integer, sums, integer, parts, stride), generate


score_rows: Any = intrinsic(prefer_literal=True)(_score_rows)
add_value_rows: Any = intrinsic(prefer_literal=True)(_add_value_rows)
configure: Any = intrinsic(_configure)
release: Any = intrinsic(_release)
multiply_block: Any = intrinsic(_multiply_block)
round_block: Any = intrinsic(_round_block)
gate_block: Any = intrinsic(_gate_block)

#: Tile registers 0 to 3 are sums, one row of columns behind the other, 4 and 5 rows, 6 and 7 columns.
_FIRST_ROWS, _SECOND_ROWS = (0, 1, 4), (2, 3, 5)
_SUM_TILES = 4


def _multiply(builder: Any, operands: list[Any], row_tiles: int, vectors: int, lines: int) -> None:
    """The products of one block. Operands 0 and 1 are the tiles of rows, 2 and 3 those of columns, 4 what is asked for,
    5 the number of steps; inputs that don't change begin with 12: bytes from row to row, bytes from one pair of inputs
    to the next, sums, and bytes from one row of them to the next."""
    cells = [(r, c) for r in range(row_tiles) for c in range(vectors)]
    code = [f"tilezero %tmm{2 * r + c}" for r, c in cells]
    code.append(".Lblock${:uid}:")
    # Rows pass by once; the hint keeps them from driving the columns out of the first-level cache.
    code.append("tileloaddt1 ($0,$12,1), %tmm4")
    code.append("tileloadd ($2,$13,1), %tmm6")
    if row_tiles == 2:
        code.append("tileloaddt1 ($1,$12,1), %tmm5")
    for c in range(vectors):
        if c == 1:
            code.append("tileloadd ($3,$13,1), %tmm7")
        code += [f"tdpbf16ps %tmm{6 + c}, %tmm{4 + r}, %tmm{2 * r + c}" for r in range(row_tiles)]
    code += [f"prefetcht1 {LINE_BYTES * line}($4)" for line in range(lines)]
    steps = ((0, LINE_BYTES), (1, LINE_BYTES), (2, _TILE_BYTES), (3, _TILE_BYTES), (4, LINE_BYTES * lines))
    code += [f"addq $${size}, ${operand}" for operand, size in steps]
    code += ["decq $5", "jnz .Lblock${:uid}"]
    code += [
        f"tilestored %tmm{2 * r + c}, {4 * (r * TILE_ROWS * BLOCK_COLUMNS + c * LANES)}($14,$15,1)" for r, c in cells
    ]
    _emit(builder, code, operands, changed=6)


def _emit(builder: Any, code: list[str], operands: list[Any], changed: int = 0) -> None:
    """Assembler over operands, the first `changed` of which are counted up and down: they are outputs too, so that the
    inputs come behind them twice."""
    kinds = [operand.type for operand in operands]
    constraints = ["=&r"] * changed + [str(operand) for operand in range(changed)]
    constraints += ["r"] * (len(operands) - changed) + ["~{memory}", "~{flags}"]
    result = ir.LiteralStructType(kinds[:changed]) if changed else ir.VoidType()
    function_type = ir.FunctionType(result, kinds)
    builder.asm(function_type, "\n".join(code), ",".join(constraints), operands, side_effect=True)
