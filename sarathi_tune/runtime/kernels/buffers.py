"""Memory that begins with a cache line: a load of 64 bytes across two lines takes twice as long, and numba's own arrays
begin anywhere."""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np

from sarathi_tune.runtime.kernels.options import OPTIONS

LINE_BYTES = 64


@numba.njit(**OPTIONS)
def empty_bytes(num_bytes):
    """So many bytes, not set to anything."""
    buffer = np.empty(num_bytes + LINE_BYTES, np.uint8)
    first = -buffer.ctypes.data % LINE_BYTES
    return buffer[first : first + num_bytes]


@numba.njit(**OPTIONS)
def empty_rows(num_rows, columns):
    """[num_rows, columns] elements of bfloat16."""
    return empty_bytes(2 * num_rows * columns).view(np.uint16).reshape((num_rows, columns))
