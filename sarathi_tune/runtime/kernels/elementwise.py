"""The element-wise part of a decoder layer, one pass over memory each; `layers.elementwise` says what they compute.

Elements are `uint16` (bfloat16's bits) or `float32`. The functions without underscore take the number of threads first.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np

from sarathi_tune.runtime.kernels.intrinsics import exp, narrow, widen
from sarathi_tune.runtime.kernels.options import OPTIONS
from sarathi_tune.runtime.kernels.parallel import parallel_for

_f32 = np.float32


@numba.njit(**OPTIONS)
def _rms_norm_rows(begin, end, x, weight, eps, out):
    num_columns = x.shape[1]
    like = out.dtype.type(0)
    for row in range(begin, end):
        squares = _f32(0)
        for column in range(num_columns):
            value = widen(x[row, column])
            squares += value * value
        factor = _f32(1) / np.sqrt(squares / _f32(num_columns) + eps)
        for column in range(num_columns):
            out[row, column] = narrow(widen(x[row, column]) * factor * widen(weight[column]), like)


@numba.njit(**OPTIONS)
def rms_norm(threads, x, weight, eps, out):
    """x, out: [rows, columns] elements. weight: [columns] elements. eps: float32."""
    parallel_for(_rms_norm_rows, x.shape[0], threads, (x, weight, eps, out))


@numba.njit(**OPTIONS)
def _silu_mul_rows(begin, end, gate_up, out):
    num_columns = out.shape[1]
    like = out.dtype.type(0)
    for row in range(begin, end):
        for column in range(num_columns):
            gate = widen(gate_up[row, column])
            up = widen(gate_up[row, num_columns + column])
            out[row, column] = narrow(gate / (_f32(1) + exp(-gate)) * up, like)


@numba.njit(**OPTIONS)
def silu_mul(threads, gate_up, out):
    """gate_up: [rows, 2 * columns] elements. out: [rows, columns]."""
    parallel_for(_silu_mul_rows, out.shape[0], threads, (gate_up, out))


@numba.njit(**OPTIONS)
def _rotate_head(row, at, norm, eps, cosines, sines, rotated, wide, turned, like):
    """One head: norm it if there is a norm, and rotate its halves against each other.

    `wide`, `turned`: scratch, [head_dim] float32. Several plain loops, because each of them is vectorised and one loop
    over all these arrays isn't.
    """
    head_dim = rotated.shape[0]
    half = head_dim // 2
    for d in range(head_dim):
        wide[d] = widen(row[at + d])
    if norm.shape[0] == head_dim:
        squares = _f32(0)
        for d in range(head_dim):
            squares += wide[d] * wide[d]
        factor = _f32(1) / np.sqrt(squares / _f32(head_dim) + eps)
        for d in range(head_dim):
            wide[d] *= factor * widen(norm[d])
    for d in range(half):
        turned[d] = wide[d] * cosines[d] - wide[half + d] * sines[d]
    for d in range(half):
        turned[half + d] = wide[half + d] * cosines[d] + wide[d] * sines[d]
    for d in range(head_dim):
        rotated[d] = narrow(turned[d], like)


@numba.njit(**OPTIONS)
def _rotate_and_store_tokens(begin, end, qkv, cos, sin, positions, slots, norms, eps, query, keys, values):
    query_norm, key_norm = norms
    num_kv_heads, group, head_dim = query.shape[0], query.shape[2], query.shape[3]
    first_key = num_kv_heads * group
    like = qkv.dtype.type(0)
    wide, turned = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    for token in range(begin, end):
        row, slot = qkv[token], slots[token]
        cosines, sines = cos[positions[token]], sin[positions[token]]
        for head in range(num_kv_heads):
            for j in range(group):
                at = (head * group + j) * head_dim
                _rotate_head(row, at, query_norm, eps, cosines, sines, query[head, token, j], wide, turned, like)
            at = (first_key + head) * head_dim
            _rotate_head(row, at, key_norm, eps, cosines, sines, keys[head, slot], wide, turned, like)
            at += num_kv_heads * head_dim
            for d in range(head_dim):
                values[head, slot, d] = row[at + d]


@numba.njit(**OPTIONS)
def rotate_and_store(threads, qkv, cos, sin, positions, slots, norms, eps, query, keys, values):
    """qkv: [tokens, (heads + 2 * num_kv_heads) * head_dim] elements. cos, sin: [positions, head_dim / 2] float32.

    norms: weights of query and key norm, [head_dim] elements each, or empty. query: [num_kv_heads, tokens, group,
    head_dim]. keys, values: [num_kv_heads, slots, head_dim].
    """
    arguments = (qkv, cos, sin, positions, slots, norms, eps, query, keys, values)
    parallel_for(_rotate_and_store_tokens, qkv.shape[0], threads, arguments)
