"""How intrinsics read, write and multiply bfloat16: vectors of LLVM's own type, and pairs as AVX-512's dot product
takes them."""

# llvmlite has no types, numba few.
# mypy: allow-untyped-calls, disable-error-code="import-untyped"

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from sarathi_tune.runtime.kernels.intrinsics import (
    _BFLOAT16_DEGREE,
    _I32,
    _I64,
    _LOG2_E,
    _TAYLOR,
    _VECTOR,
    LANES,
    _call,
    _filled,
    _fma,
    _shuffle,
)

I16 = ir.IntType(16)


class _BFloat16Type(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite doesn't know."""

    def __str__(self) -> str:
        return "bfloat"


_BFLOAT16 = _BFloat16Type()
_BFLOAT16_LANES = ir.VectorType(_BFLOAT16, LANES)
#: 16 pairs of bfloat16.
PAIRS = ir.VectorType(_BFLOAT16, 2 * LANES)


def number(value: int) -> Any:
    return ir.Constant(_I64, value)


def pair_pointer(builder: Any, pointer: Any, offset: Any) -> Any:
    """The element at `offset`, taken as pairs of bfloat16."""
    return builder.bitcast(builder.gep(pointer, [offset]), ir.PointerType(_I32))


def put(builder: Any, vector: Any, pointer: Any, offset: int) -> None:
    """Store a vector as it is, from the element at `offset` on."""
    at = builder.gep(pointer, [ir.Constant(_I64, offset)])
    builder.store(vector, builder.bitcast(at, ir.PointerType(vector.type)), align=2)


def put_rounded(builder: Any, vector: Any, pointer: Any) -> None:
    """16 float32 as bfloat16."""
    builder.store(rounded(builder, vector), builder.bitcast(pointer, ir.PointerType(_BFLOAT16_LANES)), align=2)


def rounded(builder: Any, vector: Any) -> Any:
    """16 float32 to the nearest bfloat16, ties to even."""
    return _intrinsic(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _BFLOAT16_LANES, vector)


def load_row(builder: Any, pointer: Any, offset: int) -> Any:
    """32 bfloat16 from the element at `offset` on."""
    at = builder.gep(pointer, [number(offset)])
    return builder.load(builder.bitcast(at, ir.PointerType(PAIRS)), align=2)


def repeated(builder: Any, number: Any) -> Any:
    """A vector of 16 times the same integer."""
    kind = ir.VectorType(number.type, LANES)
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_I32, 0))
    return _shuffle(builder, vector, vector, [0] * LANES)


def add_products(builder: Any, sums: Any, first: Any, second: Any) -> Any:
    """Sums of 16 lanes, each plus the products of two neighbours."""
    return _intrinsic(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VECTOR, sums, first, second)


def scaled_power_of_two(builder: Any, exponent: Any) -> Any:
    """2 to a vector's finite exponents, to a hundredth of bfloat16's precision; 0 or infinity far from zero."""
    whole = _call(builder, "llvm.rint", exponent)
    rest = builder.fsub(exponent, whole)
    series = _filled(_VECTOR, _TAYLOR[_BFLOAT16_DEGREE])
    for coefficient in reversed(_TAYLOR[:_BFLOAT16_DEGREE]):
        series = _fma(builder, series, rest, _filled(_VECTOR, coefficient))
    every, as_usual = ir.Constant(I16, -1), ir.Constant(_I32, 4)
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    return _intrinsic(builder, name, _VECTOR, series, whole, series, every, as_usual)


def silu_mul(builder: Any, gate: Any, up: Any) -> Any:
    """silu(gate) * up of two vectors, to a hundredth of bfloat16's precision: a reciprocal to 14 bits is enough for
    that, and a division takes long."""
    one, minus = _filled(_VECTOR, 1.0), _filled(_VECTOR, -_LOG2_E)
    lowest, highest = _filled(_VECTOR, -1e3), _filled(_VECTOR, 1e3)  # beyond them the gate is shut or open
    exponent = builder.fmul(gate, minus)
    exponent = builder.select(builder.fcmp_ordered(">", exponent, highest), highest, exponent)
    exponent = builder.select(builder.fcmp_ordered("<", exponent, lowest), lowest, exponent)
    below = builder.fadd(one, scaled_power_of_two(builder, exponent))
    name, every = "llvm.x86.avx512.rcp14.ps.512", ir.Constant(I16, -1)
    share = _intrinsic(builder, name, _VECTOR, below, below, every)
    return builder.fmul(builder.fmul(gate, share), up)


def _intrinsic(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), operands)
