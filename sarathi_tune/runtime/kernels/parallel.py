"""Run a compiled kernel on torch's own OpenMP threads.

numba's own parallel loops bring a second pool of threads. Torch's idle threads spin for a while after each matmul, and
on as many cores as threads the two pools fight for them: a step takes ten times as long. So a kernel is handed to the
OpenMP runtime that torch has loaded, through the entry point that compiled C code uses (`GOMP_parallel`, which GNU's
and Intel's runtime both have).
"""

# llvmlite has no types, numba few.
# mypy: allow-untyped-calls, disable-error-code="import-untyped"

import ctypes
import os
from pathlib import Path
from typing import Any

import llvmlite.binding
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

_SYMBOLS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


def connect_openmp() -> str | None:
    """Make torch's OpenMP runtime known to compiled kernels. Returns why that is impossible, or None."""
    library_path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(library_path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        for name in _SYMBOLS:
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(name, address)
    except (OSError, AttributeError):
        return "torch's OpenMP runtime has no GOMP_parallel"
    return None


def _parallel_for(typing_context: Any, kernel: Any, num_items: Any, num_threads: Any, arguments: Any) -> Any:
    """`kernel(begin, end, *arguments)` on each of `num_threads` threads, [begin, end) being its share of `num_items`.

    One thread means the calling one: the others aren't woken. `kernel` is a numba function that returns nothing and
    raises nothing.
    """
    del num_items, num_threads
    if not isinstance(kernel, types.Dispatcher):
        return None
    called = kernel.get_call_type(typing_context, (types.int64, types.int64, *arguments.types), {})

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        _, items, threads, packed = values
        alone = builder.icmp_signed("<=", threads, ir.Constant(_I64, 1))
        with builder.if_else(alone) as (serially, in_parallel):
            with serially:
                zero = ir.Constant(_I64, 0)
                _call(context, builder, kernel, called, [zero, items, *cgutils.unpack_tuple(builder, packed)])
            with in_parallel:
                _run_on_threads(context, builder, kernel, called, items, threads, packed)
        return context.get_dummy_value()

    return types.void(kernel, types.int64, types.int64, arguments), generate


def _run_on_threads(
    context: Any, builder: Any, kernel: Any, called: Any, items: Any, threads: Any, packed: Any
) -> None:
    closure = cgutils.alloca_once(builder, ir.LiteralStructType([items.type, packed.type]))
    builder.store(items, cgutils.gep_inbounds(builder, closure, 0, 0))
    builder.store(packed, cgutils.gep_inbounds(builder, closure, 0, 1))
    body = _outline(context, builder.module, kernel, called, closure.type)
    function_type = ir.FunctionType(ir.VoidType(), [body.type, cgutils.voidptr_t, _I32, _I32])
    run = cgutils.get_or_insert_function(builder.module, function_type, "GOMP_parallel")
    count = builder.trunc(threads, _I32)
    builder.call(run, (body, builder.bitcast(closure, cgutils.voidptr_t), count, ir.Constant(_I32, 0)))


def _outline(context: Any, module: Any, kernel: Any, called: Any, closure_type: Any) -> Any:
    """The C function that every thread runs: works out its share of the items and calls the kernel."""
    function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
    body = ir.Function(module, function_type, name=module.get_unique_name("parallel_body"))
    body.linkage = "internal"
    builder = ir.IRBuilder(body.append_basic_block())
    closure = builder.bitcast(body.args[0], closure_type)
    items = builder.load(cgutils.gep_inbounds(builder, closure, 0, 0))
    packed = builder.load(cgutils.gep_inbounds(builder, closure, 0, 1))
    thread, num_threads = (_ask(builder, name) for name in ("omp_get_thread_num", "omp_get_num_threads"))
    begin = builder.sdiv(builder.mul(items, thread), num_threads)
    end = builder.sdiv(builder.mul(items, builder.add(thread, ir.Constant(_I64, 1))), num_threads)
    _call(context, builder, kernel, called, [begin, end, *cgutils.unpack_tuple(builder, packed)])
    builder.ret_void()
    return body


def _call(context: Any, builder: Any, kernel: Any, called: Any, arguments: list[Any]) -> None:
    compiled = kernel.dispatcher.get_compile_result(called)
    context.active_code_library.add_linking_library(compiled.library)
    context.call_internal_no_propagate(builder, compiled.fndesc, compiled.signature, arguments)


def _ask(builder: Any, name: str) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), name)
    return builder.sext(builder.call(function, ()), _I64)


parallel_for: Any = intrinsic(_parallel_for)
