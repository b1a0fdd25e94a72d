"""Attention over a paged KV cache as two Triton kernels. Importing this module needs triton; `triton_paged` calls it.

A program of `attend` computes one tile: some consecutive query rows of one sequence, all query heads that share one key
head, over one part of the sequence's keys. The heads of a group are rows of the tile, so keys are read once per group
(grouped-query decodes would otherwise read them `group` times). The softmax is computed online (Milakov and Gimelshein
2018) in base 2. Several parts per sequence (FlashDecoding) leave partial sums behind that `combine` adds up.

Every length is read on the device, so that a captured launch is right for other lengths than it was captured with.
"""

# Triton's decorators and its language carry no types that mypy could check a kernel with.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

import triton
import triton.language as tl


@triton.jit
def _dot(left, right, WIDEN: tl.constexpr):
    """Matrix product, summed in float32. float32 inputs are computed as three TF32 products, which is as exact and runs
    on tensor cores. Triton's interpreter multiplies the bit patterns of bfloat16 (3.7): `WIDEN` is for that."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _find_sequence(query_starts, tile, first_sequence, num_sequences, BLOCK_Q: tl.constexpr):
    """Which sequence a tile belongs to. Sequence i has room for tiles from floor(its first row / BLOCK_Q) + i on: that
    is enough for each, and the number of tiles depends on the number of rows and sequences only."""
    origin = tl.load(query_starts + first_sequence)
    low = first_sequence
    high = first_sequence + num_sequences
    while low < high:
        middle = (low + high) // 2
        begin = (tl.load(query_starts + middle) - origin) // BLOCK_Q + middle - first_sequence
        if begin <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


# Lengths that change from step to step must not be specialised on: that would compile in the middle of a measurement.
@triton.jit(do_not_specialize=["first_sequence", "num_sequences", "table_stride", "num_splits"])
def attend(
    query,  # [rows, num_heads, head_dim]
    keys,  # [slots, num_kv_heads, head_dim], as values
    values,
    output,  # [rows, num_heads, head_dim]
    partial_sums,  # [sequences, num_heads, num_splits, head_dim] float32; not split: anything
    partial_weights,  # [2, sequences, num_heads, num_splits] float32: the largest score, the sum of weights
    query_starts,  # [sequences + 1] int32
    key_starts,  # [sequences + 1] int32
    page_table,  # [sequences, pages] int32
    score_scale,  # scale of the scores times log2(e)
    first_sequence,
    num_sequences,
    table_stride,
    num_splits,
    query_row_stride,
    query_head_stride,
    slot_stride,
    key_head_stride,
    output_row_stride,
    output_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile: BLOCK_Q query rows times GROUP heads, or a few more
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,  # keys per iteration
    BLOCK_D: tl.constexpr,  # head_dim, or the next power of two
    ONE_ROW: tl.constexpr,  # every sequence is one query row
    IS_SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,  # see _dot
):
    """Grid: (tiles, num_kv_heads, num_splits)."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    if ONE_ROW:
        sequence = first_sequence + tile
        row = tl.load(query_starts + sequence)
        first = 0
    else:
        sequence = _find_sequence(query_starts, tile, first_sequence, num_sequences, BLOCK_Q)
        row = tl.load(query_starts + sequence)
        begin_tile = (row - tl.load(query_starts + first_sequence)) // BLOCK_Q + sequence - first_sequence
        first = (tile - begin_tile) * BLOCK_Q
    count = tl.load(query_starts + sequence + 1) - row
    if first >= count:
        return

    key_length = tl.load(key_starts + sequence + 1) - tl.load(key_starts + sequence)
    prefix = key_length - count

    member = tl.arange(0, BLOCK_M)
    offset = first + member // GROUP
    head = kv_head * GROUP + member % GROUP
    is_row = (member // GROUP < BLOCK_Q) & (offset < count)
    position = prefix + offset
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM

    query_at = (row + offset).to(tl.int64) * query_row_stride + head * query_head_stride
    tile_query = tl.load(
        query + query_at[:, None] + dim[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0
    )  # [BLOCK_M, BLOCK_D]

    # The keys that some row of the tile sees: lowest to last - 1. Nothing else is loaded.
    last = tl.minimum(key_length, prefix + first + BLOCK_Q)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(prefix + first - WINDOW + 1, 0)
    first_block = lowest // BLOCK_N
    num_blocks = (last + BLOCK_N - 1) // BLOCK_N - first_block
    blocks_per_split = (num_blocks + num_splits - 1) // num_splits
    begin = first_block + split * blocks_per_split
    end = tl.minimum(begin + blocks_per_split, first_block + num_blocks)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_row = page_table + sequence.to(tl.int64) * table_stride
    for block in range(begin, end):
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_key = (key >= lowest) & (key < last)
        page = tl.load(table_row + key // PAGE_TOKENS, mask=is_key, other=0)
        slot = page.to(tl.int64) * PAGE_TOKENS + key % PAGE_TOKENS
        key_at = slot * slot_stride + kv_head * key_head_stride
        block_keys = tl.load(
            keys + key_at[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        )  # [BLOCK_D, BLOCK_N]
        scores = _dot(tile_query, block_keys, WIDEN) * score_scale
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet: minus infinity less minus infinity is NaN, and its weights are to be zero.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(largest - reference)
        total = total * decay + tl.sum(weights, 1)
        # Masked as well: a weight of zero times the NaN of a slot that nobody has written is NaN.
        block_values = tl.load(
            values + key_at[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
        )  # [BLOCK_N, BLOCK_D]
        weighted = weighted * decay[:, None]
        weighted += _dot(weights.to(block_values.dtype), block_values, WIDEN)
        largest = new_largest

    if IS_SPLIT:
        rows_before = (sequence - first_sequence).to(tl.int64) * (tl.num_programs(1) * GROUP) + head
        part = rows_before * num_splits + split
        num_parts = num_sequences.to(tl.int64) * (tl.num_programs(1) * GROUP) * num_splits
        tl.store(partial_weights + part, largest, mask=is_row)
        tl.store(partial_weights + num_parts + part, total, mask=is_row)
        tl.store(
            partial_sums + part[:, None] * HEAD_DIM + dim[None, :], weighted, mask=is_row[:, None] & is_dim[None, :]
        )
    else:
        output_at = (row + offset).to(tl.int64) * output_row_stride + head * output_head_stride
        attended = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            output + output_at[:, None] + dim[None, :],
            attended.to(output.dtype.element_ty),
            mask=is_row[:, None] & is_dim[None, :],
        )


@triton.jit(do_not_specialize=["first_sequence", "num_sequences", "num_splits"])
def combine(
    partial_sums,  # as `attend` leaves them
    partial_weights,
    output,
    query_starts,
    first_sequence,
    num_sequences,
    num_splits,
    output_row_stride,
    output_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Add the parts of one query head of one sequence of one row. Grid: (sequences, num_heads)."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    split = tl.arange(0, MAX_SPLITS)
    is_split = split < num_splits
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM

    part = (sequence * num_heads + head).to(tl.int64) * num_splits + split
    num_parts = num_sequences.to(tl.int64) * num_heads * num_splits
    largest = tl.load(partial_weights + part, mask=is_split, other=float("-inf"))
    total = tl.load(partial_weights + num_parts + part, mask=is_split, other=0.0)
    sums = tl.load(
        partial_sums + part[:, None] * HEAD_DIM + dim[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0
    )
    reference = tl.max(largest, 0)
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    decay = tl.exp2(largest - reference)
    whole = tl.sum(total * decay, 0)
    attended = tl.sum(sums * decay[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    row = tl.load(query_starts + first_sequence + sequence).to(tl.int64)
    tl.store(
        output + row * output_row_stride + head * output_head_stride + dim,
        attended.to(output.dtype.element_ty),
        mask=is_dim,
    )
