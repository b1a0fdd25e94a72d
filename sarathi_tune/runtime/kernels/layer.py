"""The two halves of a decoder layer around attention: one call each.

With few rows a layer's nine kernels take about as long to call as to run. What isn't a matmul is then done by the
calling thread alone as long as that is quicker than waking the others.

Elements are `uint16`, the bits of a bfloat16. The functions take the number of threads first; a weight comes as a pair
of its packed form (`kernels.linear`) and its bias ([out] or [0]).
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import numba

from sarathi_tune.runtime.kernels.availability import KERNEL_LANES as LANES
from sarathi_tune.runtime.kernels.buffers import empty_rows
from sarathi_tune.runtime.kernels.elementwise import _rms_norm_rows, _rotate_and_store_tokens
from sarathi_tune.runtime.kernels.linear import apply_gated, apply_linear
from sarathi_tune.runtime.kernels.options import OPTIONS
from sarathi_tune.runtime.kernels.parallel import parallel_for

#: Up to so many rows the calling thread does alone what isn't a matmul.
_ROWS_ALONE = 8


@numba.njit(**OPTIONS)
def before_attention(
    threads, hidden, norm, eps, qkv_weight, cos, sin, positions, slots, head_norms, head_eps, query, keys, values
):
    """Norm, q, k and v, rotation; writes keys and values into their slots, and `query`.

    hidden: [rows, hidden]. query: [num_kv_heads, rows, group, head_dim]. The rest as `rotate_and_store` takes it.
    """
    packed, bias = qkv_weight
    num_rows = hidden.shape[0]
    normed = empty_rows(num_rows, hidden.shape[1])
    qkv = empty_rows(num_rows, packed.shape[0] * LANES)
    helpers = threads if num_rows > _ROWS_ALONE else 1
    parallel_for(_rms_norm_rows, num_rows, helpers, (hidden, norm, eps, normed))
    apply_linear(threads, normed, packed, bias, normed[:0], qkv)
    rotated = (qkv, cos, sin, positions, slots, head_norms, head_eps, query, keys, values)
    parallel_for(_rotate_and_store_tokens, num_rows, helpers, rotated)


@numba.njit(**OPTIONS)
def after_attention(threads, attended, hidden, output_weight, norm, eps, gated_weight, down_weight, out):
    """Output projection, norm and gated MLP, each added to `hidden`. attended: [rows, heads * head_dim]. hidden, out:
    [rows, hidden]. gated_weight: as `apply_gated` takes it."""
    packed_output, output_bias = output_weight
    packed_gated, gated_bias = gated_weight
    packed_down, down_bias = down_weight
    num_rows = hidden.shape[0]
    middle, normed = empty_rows(num_rows, hidden.shape[1]), empty_rows(num_rows, hidden.shape[1])
    inner = empty_rows(num_rows, packed_gated.shape[0] // 2 * LANES)
    apply_linear(threads, attended, packed_output, output_bias, hidden, middle)
    helpers = threads if num_rows > _ROWS_ALONE else 1
    parallel_for(_rms_norm_rows, num_rows, helpers, (middle, norm, eps, normed))
    apply_gated(threads, normed, packed_gated, gated_bias, inner)
    apply_linear(threads, inner, packed_down, down_bias, middle, out)
