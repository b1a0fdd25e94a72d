"""What numba has no words for: bfloat16 elements, a vectorised exp, and dot products that keep their sums in registers.

Elements are `uint16` (the bits of a bfloat16) or `float32`; every intrinsic takes both. The generated code is plain
LLVM vector arithmetic of 16 lanes, which LLVM lowers to whatever the CPU has. The docstring of a function here says
what the intrinsic does; its own arguments are numba's types, and what it returns generates the code.
"""

# llvmlite has no types, numba few.
# mypy: allow-untyped-calls, disable-error-code="import-untyped"

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from sarathi_tune.runtime.kernels.availability import KERNEL_LANES

LANES = KERNEL_LANES

_F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_BYTE_POINTER = ir.PointerType(ir.IntType(8))
#: Sums may be reordered and contracted to FMA; NaN and infinity keep their meaning.
_FLAGS = ("reassoc", "contract", "nsz")

_LOG2_E = math.log2(math.e)
#: 2^x = sum of x^k ln(2)^k / k!
_TAYLOR = tuple(math.log(2) ** k / math.factorial(k) for k in range(8))
#: Terms for a relative error of 5e-9, below float32's, and of 4e-5, a hundredth of bfloat16's, where |x| <= 1/2.
_FULL_DEGREE, _BFLOAT16_DEGREE = 7, 4


def _widen(_: Any, element: Any) -> Any:
    """An element as float32."""
    if element == types.float32:
        return types.float32(types.float32), lambda _context, _builder, _signature, arguments: arguments[0]

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        shifted = builder.shl(builder.zext(arguments[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(shifted, _F32)

    return types.float32(types.uint16), generate


def _narrow(_: Any, value: Any, like: Any) -> Any:
    """A float32 rounded to the nearest element of the type of `like`, ties to even."""
    del value
    if like == types.float32:
        signature = types.float32(types.float32, types.float32)
        return signature, lambda _context, _builder, _signature, arguments: arguments[0]

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _round_to_bfloat16(builder, arguments[0])

    return types.uint16(types.float32, types.uint16), generate


def _exp(_: Any, value: Any) -> Any:
    """e to a float32, to a few units in the last place, clamped to 2^-125 and 2^126. numba's own exp calls libm for
    every single element."""
    del value

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        exponent, highest = builder.fmul(arguments[0], _filled(_F32, _LOG2_E)), _filled(_F32, 126.0)
        exponent = builder.select(builder.fcmp_ordered(">", exponent, highest), highest, exponent)
        return _power_of_two(builder, exponent, _FULL_DEGREE)

    return types.float32(types.float32), generate


widen: Any = intrinsic(_widen)
narrow: Any = intrinsic(_narrow)
exp: Any = intrinsic(_exp)


def _row_top(_: Any, row: Any, at: Any, num_vectors: Any) -> Any:
    """The largest of `16 * num_vectors` elements from `at` on of a flat array, as float32."""
    del at, num_vectors

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.gep(_data(context, builder, signature, arguments, 0), [arguments[1]])
        tops = cgutils.alloca_once_value(builder, _filled(_VECTOR, -3e38))
        with cgutils.for_range(builder, arguments[2]) as loop:
            vector = _load(builder, _nth_vector(builder, first, loop.index), 0)
            top = builder.load(tops)
            builder.store(builder.select(builder.fcmp_ordered(">", vector, top), vector, top), tops)
        return _reduce(builder, builder.load(tops), "max")

    return types.float32(row, types.int64, types.int64), generate


def _row_weights(_: Any, row: Any, at: Any, num_vectors: Any, scale: Any, top: Any) -> Any:
    """Replace each of `16 * num_vectors` elements x by exp(x * scale - top); return their sum, as float32."""
    del at, num_vectors, scale, top

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.gep(_data(context, builder, signature, arguments, 0), [arguments[1]])
        degree = _FULL_DEGREE if row.dtype == types.float32 else _BFLOAT16_DEGREE
        log2e = _filled(_F32, _LOG2_E)
        scales = _broadcast(builder, builder.fmul(arguments[3], log2e))
        offset = _broadcast(builder, builder.fneg(builder.fmul(arguments[4], log2e)))
        sums = cgutils.alloca_once_value(builder, _filled(_VECTOR, 0.0))
        with cgutils.for_range(builder, arguments[2]) as loop:
            pointer = _nth_vector(builder, first, loop.index)
            exponents = _fma(builder, _load(builder, pointer, 0), scales, offset)
            weights = _power_of_two(builder, exponents, degree)
            builder.store(builder.fadd(builder.load(sums), weights), sums)
            _store(builder, weights, pointer, 0)
        return _reduce(builder, builder.load(sums), "add")

    return types.float32(row, types.int64, types.int64, types.float32, types.float32), generate


row_top: Any = intrinsic(_row_top)
row_weights: Any = intrinsic(_row_weights)


def _rotate(
    _: Any, head: Any, at: Any, cos: Any, sin: Any, angle_at: Any, half: Any, num_vectors: Any, out: Any, out_at: Any
) -> Any:
    """Rotate the first `16 * num_vectors` numbers of a head's two halves against each other.

    head: flat elements, from `at` on, the second half behind `half` numbers. cos, sin: flat float32, from `angle_at`
    on. out: flat elements, from `out_at` on.
    """
    del at, angle_at, half, num_vectors, out_at

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = {index: _data(context, builder, signature, arguments, index) for index in (0, 2, 3, 7)}
        first_half = builder.gep(pointers[0], [arguments[1]])
        second_half = builder.gep(first_half, [arguments[5]])
        first_out = builder.gep(pointers[7], [arguments[8]])
        second_out = builder.gep(first_out, [arguments[5]])
        cosines, sines = (builder.gep(pointers[index], [arguments[4]]) for index in (2, 3))
        with cgutils.for_range(builder, arguments[6]) as loop:
            first, second, c, s = (
                _load(builder, _nth_vector(builder, pointer, loop.index), 0)
                for pointer in (first_half, second_half, cosines, sines)
            )
            low = builder.fsub(
                builder.fmul(first, c, flags=_FLAGS), builder.fmul(second, s, flags=_FLAGS), flags=_FLAGS
            )
            high = builder.fadd(
                builder.fmul(second, c, flags=_FLAGS), builder.fmul(first, s, flags=_FLAGS), flags=_FLAGS
            )
            _store(builder, low, _nth_vector(builder, first_out, loop.index), 0)
            _store(builder, high, _nth_vector(builder, second_out, loop.index), 0)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(head, integer, cos, sin, integer, integer, integer, out, integer), generate


rotate: Any = intrinsic(_rotate)


def _scores(_: Any, q: Any, keys: Any, key_at: Any, out: Any, out_at: Any, parts: Any, heads: Any, stride: Any) -> Any:
    """Dot products of `group` queries with 16 consecutive keys, each key read once for the whole group.

    q: flat float32, query j at j * head_dim. keys: flat elements, the first key at `key_at`. The scores of query j go
    to out[out_at + j * stride ...]. head_dim is 16 times the length of the tuple `parts`, the number of queries is the
    length of the tuple `heads`; they and `stride` are constants.
    """
    del key_at, out_at
    num_parts, num_heads, step = len(parts), len(heads), stride.literal_value
    width = num_parts * LANES

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        q_data, key_data, out_data = (_data(context, builder, signature, arguments, i) for i in (0, 1, 3))
        first_key = builder.gep(key_data, [arguments[2]])
        first_out = builder.gep(out_data, [arguments[4]])
        for chosen in _head_blocks(num_heads, num_parts):
            queries = [[_load(builder, q_data, j * width + p * LANES) for p in range(num_parts)] for j in chosen]
            sums = [_TransposedSum(builder) for _ in chosen]
            for key in _BIT_REVERSED:
                if chosen.start == 0:
                    _prefetch(builder, first_key, key * width, width)
                row = [_load(builder, first_key, key * width + p * LANES) for p in range(num_parts)]
                for query, total in zip(queries, sums, strict=True):
                    total.add(_dot(builder, query, row))
            for j, total in zip(chosen, sums, strict=True):
                _store(builder, total.result(), first_out, j * step)
        return context.get_dummy_value()

    return types.void(q, keys, types.int64, out, types.int64, parts, heads, stride), generate


def _accumulate(
    _: Any, p: Any, p_at: Any, values: Any, value_at: Any, count: Any, out: Any, parts: Any, heads: Any, stride: Any
) -> Any:
    """out[j] += sum over `count` values of p[j] * value, for `group` rows j. Reads nothing behind `count`.

    p: flat float32, the weight of value t for row j at p_at + j * stride + t. values: flat elements, the first value at
    `value_at`. out: flat float32, row j at j * head_dim. head_dim is 16 times the length of the tuple `parts`, the
    number of rows is the length of the tuple `heads`; they and `stride` are constants.
    """
    del p_at, value_at, count
    num_parts, num_heads, step = len(parts), len(heads), stride.literal_value
    width = num_parts * LANES

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        p_data, value_data, out_data = (_data(context, builder, signature, arguments, i) for i in (0, 2, 5))
        first_p = builder.gep(p_data, [arguments[1]])
        first_value = builder.gep(value_data, [arguments[3]])
        for chosen in _head_blocks(num_heads, num_parts):
            offsets = [[j * width + part * LANES for part in range(num_parts)] for j in chosen]
            sums = [
                [cgutils.alloca_once_value(builder, _load(builder, out_data, offset)) for offset in row]
                for row in offsets
            ]
            with cgutils.for_range(builder, arguments[4]) as loop:
                value = builder.gep(first_value, [builder.mul(loop.index, ir.Constant(_I64, width))])
                if chosen.start == 0:
                    _prefetch(builder, value, 0, width)
                vectors = [_load(builder, value, part * LANES) for part in range(num_parts)]
                for j, head_sums in zip(chosen, sums, strict=True):
                    at = builder.add(loop.index, ir.Constant(_I64, j * step))
                    weight = _broadcast(builder, builder.load(builder.gep(first_p, [at])))
                    for vector, total in zip(vectors, head_sums, strict=True):
                        builder.store(_fma(builder, weight, vector, builder.load(total)), total)
            for row, head_sums in zip(offsets, sums, strict=True):
                for offset, total in zip(row, head_sums, strict=True):
                    _store(builder, builder.load(total), out_data, offset)
        return context.get_dummy_value()

    signature = types.void(p, types.int64, values, types.int64, types.int64, out, parts, heads, stride)
    return signature, generate


scores: Any = intrinsic(prefer_literal=True)(_scores)
accumulate: Any = intrinsic(prefer_literal=True)(_accumulate)

#: The order in which neighbours in the tree of `_TransposedSum` come one behind the other.
_BIT_REVERSED = tuple(int(f"{i:04b}"[::-1], 2) for i in range(LANES))

#: Accumulators that are kept in registers at once: AVX-512 has 32, and the loaded row and a weight need some.
_REGISTERS = 16

#: How far ahead keys and values are asked for; the arithmetic waits for memory otherwise. Best of 1 to 16 KiB, Zen 5.
_PREFETCH_BYTES = 8192
#: Into which caches a line is fetched, as LLVM's prefetch counts: all of them, or from the second level on.
_FIRST_LEVEL, _SECOND_LEVEL = 3, 2


def _head_blocks(group: int, parts: int) -> list[range]:
    size = max(1, min(group, _REGISTERS // parts))
    return [range(first, min(first + size, group)) for first in range(0, group, size)]


class _TransposedSum:
    """Sums over the lanes of 16 vectors, as one vector: a binary tree of shuffles and adds, built as vectors arrive (in
    `_BIT_REVERSED` order), so that at most four are live."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._pending: list[tuple[int, Any]] = []

    def add(self, vector: Any) -> None:
        width = LANES // 2
        while self._pending and self._pending[-1][0] == width:
            vector = self._combine(self._pending.pop()[1], vector, width)
            width //= 2
        self._pending.append((width, vector))

    def result(self) -> Any:
        ((width, vector),) = self._pending
        assert width == 0
        return vector

    def _combine(self, first: Any, second: Any, width: int) -> Any:
        """Halve each group of 2 * width lanes of both, and lay the halves' sums alternately."""
        low = [
            source * LANES + start + lane
            for start in range(0, LANES, 2 * width)
            for source in (0, 1)
            for lane in range(width)
        ]
        high = [index + width for index in low]
        builder = self._builder
        return builder.fadd(_shuffle(builder, first, second, low), _shuffle(builder, first, second, high), flags=_FLAGS)


def _filled(kind: Any, value: float) -> Any:
    """A constant of a scalar or vector float type."""
    number = float(np.float32(value))
    return ir.Constant(kind, number if kind == _F32 else [number] * LANES)


def _integers(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * LANES if isinstance(kind, ir.VectorType) else value)


def _integer_type(kind: Any, bits: int) -> Any:
    """The integer type with as many lanes as a float type."""
    return ir.VectorType(ir.IntType(bits), LANES) if isinstance(kind, ir.VectorType) else ir.IntType(bits)


def _round_to_bfloat16(builder: Any, value: Any) -> Any:
    wide = _integer_type(value.type, 32)
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, _integers(wide, 16)), _integers(wide, 1))
    rounded = builder.add(bits, builder.add(odd, _integers(wide, 0x7FFF)))
    return builder.trunc(builder.lshr(rounded, _integers(wide, 16)), _integer_type(value.type, 16))


def _power_of_two(builder: Any, exponent: Any, degree: int) -> Any:
    """2 to the exponent, scalar or vector: a whole power of two times the Taylor series of the rest, which is at most a
    half. 2^-125 for anything smaller; NaN stays NaN."""
    kind = exponent.type
    lowest = _filled(kind, -125.0)
    exponent = builder.select(builder.fcmp_ordered("<", exponent, lowest), lowest, exponent)
    whole = _call(builder, "llvm.rint", exponent)
    rest = builder.fsub(exponent, whole)
    series = _filled(kind, _TAYLOR[degree])
    for coefficient in reversed(_TAYLOR[:degree]):
        series = _fma(builder, series, rest, _filled(kind, coefficient))
    wide = _integer_type(kind, 32)
    shift = builder.shl(builder.fptosi(whole, wide), _integers(wide, 23))
    return builder.bitcast(builder.add(builder.bitcast(series, wide), shift), kind)


def _reduce(builder: Any, vector: Any, operation: str) -> Any:
    """The sum or maximum over the lanes of a vector, as a scalar."""
    width = LANES // 2
    while width:
        other = _shuffle(builder, vector, vector, [(lane + width) % LANES for lane in range(LANES)])
        if operation == "add":
            vector = builder.fadd(vector, other)
        else:
            vector = builder.select(builder.fcmp_ordered(">", vector, other), vector, other)
        width //= 2
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _nth_vector(builder: Any, pointer: Any, index: Any) -> Any:
    return builder.gep(pointer, [builder.mul(index, ir.Constant(_I64, LANES))])


def _data(context: Any, builder: Any, signature: Any, arguments: Any, index: int) -> Any:
    array_type = signature.args[index]
    return context.make_array(array_type)(context, builder, arguments[index]).data


def _load(builder: Any, pointer: Any, offset: int) -> Any:
    """16 elements from `offset` on, as float32."""
    at = builder.gep(pointer, [ir.Constant(_I64, offset)])
    element = pointer.type.pointee
    raw = builder.load(
        builder.bitcast(at, ir.PointerType(ir.VectorType(element, LANES))), align=_element_bytes(element)
    )
    if element == _F32:
        return raw
    wide = builder.zext(raw, ir.VectorType(_I32, LANES))
    sixteen = ir.Constant(ir.VectorType(_I32, LANES), [16] * LANES)
    return builder.bitcast(builder.shl(wide, sixteen), _VECTOR)


def _prefetch(builder: Any, pointer: Any, offset: int, count: int, ahead_bytes: int = _PREFETCH_BYTES) -> None:
    """Ask for the cache lines of `count` elements that are `ahead_bytes` ahead. Reading ahead of the last page is
    harmless: a prefetch never faults."""
    size = _element_bytes(pointer.type.pointee)
    first = builder.bitcast(builder.gep(pointer, [ir.Constant(_I64, offset)]), _BYTE_POINTER)
    for line in range(0, count * size, 64):
        _prefetch_line(builder, builder.gep(first, [ir.Constant(_I64, ahead_bytes + line)]), _FIRST_LEVEL)


def _prefetch_line(builder: Any, pointer: Any, locality: int) -> None:
    """Ask for the cache line at `pointer`, to be read soon. `locality`: LLVM's, `_FIRST_LEVEL` or `_SECOND_LEVEL`."""
    function_type = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(_I32, value) for value in (0, locality, 1))
    builder.call(prefetch, (builder.bitcast(pointer, _BYTE_POINTER), read, keep, data))


def _element_bytes(element: Any) -> int:
    """Bytes of an LLVM element type."""
    return 4 if element == _F32 else 2


def _store(builder: Any, vector: Any, pointer: Any, offset: int) -> None:
    """16 float32 to elements from `offset` on."""
    at = builder.gep(pointer, [ir.Constant(_I64, offset)])
    element = pointer.type.pointee
    stored = vector if element == _F32 else _round_to_bfloat16(builder, vector)
    builder.store(stored, builder.bitcast(at, ir.PointerType(stored.type)), align=_element_bytes(element))


def _dot(builder: Any, first: list[Any], second: list[Any]) -> Any:
    """The lane-wise part of a dot product."""
    total = builder.fmul(first[0], second[0], flags=_FLAGS)
    for a, b in zip(first[1:], second[1:], strict=True):
        total = _fma(builder, a, b, total)
    return total


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fma", a, b, c)


def _call(builder: Any, name: str, *operands: Any) -> Any:
    """An LLVM intrinsic over floats or vectors of them."""
    kind = operands[0].type
    suffix = "f32" if kind == _F32 else f"v{LANES}f32"
    function_type = ir.FunctionType(kind, [kind] * len(operands))
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"{name}.{suffix}"), operands)


def _broadcast(builder: Any, scalar: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return _shuffle(builder, vector, ir.Constant(_VECTOR, ir.Undefined), [0] * LANES)


def _shuffle(builder: Any, first: Any, second: Any, indices: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, len(indices)), indices)
    return builder.shuffle_vector(first, second, mask)
