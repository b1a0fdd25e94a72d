"""The element-wise part of a decoder layer, one pass over memory each; `layers.elementwise` says what they compute.

Elements are `uint16` (bfloat16's bits) or `float32`. The functions without underscore take the number of threads first.
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba
import numpy as np

from sarathi_tune.runtime.kernels.availability import KERNEL_LANES as LANES
from sarathi_tune.runtime.kernels.intrinsics import exp, narrow, rotate, widen
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
def _rotate_and_store_tokens(begin, end, qkv, cos, sin, positions, slots, norms, eps, query, keys, values):
    # No calls and no views inside the loops: numba would count references to the arrays there, and threads that count
    # the same array's wait for each other, which takes longer than the rotation.
    query_norm, key_norm = norms
    num_kv_heads, num_tokens, group, head_dim = query.shape
    num_heads, half = num_kv_heads * group, head_dim // 2
    first_value = (num_heads + num_kv_heads) * head_dim
    width, num_slots, has_norm = qkv.shape[1], keys.shape[1], query_norm.shape[0] > 0
    like = qkv.dtype.type(0)
    flat_qkv, flat_query = qkv.reshape(-1), query.reshape(-1)
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    flat_cos, flat_sin, num_vectors = cos.reshape(-1), sin.reshape(-1), half // LANES
    is_whole = num_vectors * LANES == half
    wide = np.empty(head_dim, np.float32)
    for token in range(begin, end):
        angle_at, slot = positions[token] * half, slots[token]
        for head in range(num_heads + num_kv_heads):
            at = token * width + head * head_dim
            if head < num_heads:
                out_at = ((head // group * num_tokens + token) * group + head % group) * head_dim
                if is_whole and not has_norm:
                    rotate(flat_qkv, at, flat_cos, flat_sin, angle_at, half, num_vectors, flat_query, out_at)
                    continue
            else:
                out_at = ((head - num_heads) * num_slots + slot) * head_dim
                if is_whole and not has_norm:
                    rotate(flat_qkv, at, flat_cos, flat_sin, angle_at, half, num_vectors, flat_keys, out_at)
                    continue
            for d in range(head_dim):
                wide[d] = widen(flat_qkv[at + d])
            if has_norm:
                squares = _f32(0)
                for d in range(head_dim):
                    squares += wide[d] * wide[d]
                factor = _f32(1) / np.sqrt(squares / _f32(head_dim) + eps)
                if head < num_heads:
                    for d in range(head_dim):
                        wide[d] *= factor * widen(query_norm[d])
                else:
                    for d in range(head_dim):
                        wide[d] *= factor * widen(key_norm[d])
            if head < num_heads:
                rotate(wide, 0, flat_cos, flat_sin, angle_at, half, num_vectors, flat_query, out_at)
                for d in range(num_vectors * LANES, half):
                    c, s = flat_cos[angle_at + d], flat_sin[angle_at + d]
                    flat_query[out_at + d] = narrow(wide[d] * c - wide[half + d] * s, like)
                    flat_query[out_at + half + d] = narrow(wide[half + d] * c + wide[d] * s, like)
            else:
                rotate(wide, 0, flat_cos, flat_sin, angle_at, half, num_vectors, flat_keys, out_at)
                for d in range(num_vectors * LANES, half):
                    c, s = flat_cos[angle_at + d], flat_sin[angle_at + d]
                    flat_keys[out_at + d] = narrow(wide[d] * c - wide[half + d] * s, like)
                    flat_keys[out_at + half + d] = narrow(wide[half + d] * c + wide[d] * s, like)
        for head in range(num_kv_heads):
            at, out_at = token * width + first_value + head * head_dim, (head * num_slots + slot) * head_dim
            for d in range(head_dim):
                flat_values[out_at + d] = flat_qkv[at + d]


@numba.njit(**OPTIONS)
def rotate_and_store(threads, qkv, cos, sin, positions, slots, norms, eps, query, keys, values):
    """qkv: [tokens, (heads + 2 * num_kv_heads) * head_dim] elements. cos, sin: [positions, head_dim / 2] float32.

    norms: weights of query and key norm, [head_dim] elements each, or empty. query: [num_kv_heads, tokens, group,
    head_dim]. keys, values: [num_kv_heads, slots, head_dim].
    """
    arguments = (qkv, cos, sin, positions, slots, norms, eps, query, keys, values)
    parallel_for(_rotate_and_store_tokens, qkv.shape[0], threads, arguments)
