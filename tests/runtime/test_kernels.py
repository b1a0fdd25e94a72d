"""The compiled CPU kernels and the attention over them against torch and the float32 reference; one and two threads."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from sarathi_tune.runtime.attention.base import AttentionShape
from sarathi_tune.runtime.attention.cpu import BLOCK_QUERIES, SEGMENT_KEYS, CpuAttention
from sarathi_tune.runtime.attention.reference import ReferenceAttention
from sarathi_tune.runtime.attention.sdpa import SdpaAttention
from sarathi_tune.runtime.batch import build_batch
from sarathi_tune.runtime.kernels.arrays import as_array
from sarathi_tune.runtime.kernels.availability import amx_obstacle, has_dot_tiles
from sarathi_tune.runtime.kernels.chunk import BLOCK_KEYS
from sarathi_tune.runtime.kernels.elementwise import rms_norm, silu_mul
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.layers.elementwise import HeadShape, TorchElementwise
from sarathi_tune.runtime.layers.fused import FusedElementwise
from sarathi_tune.runtime.layers.rotary import build_rotary_table
from tests.runtime.ragged import CPU, ragged

#: Chunks in bfloat16 are computed by matmuls, and by tiles where the CPU has the instruction.
needs_dot = pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="no AVX-512 bfloat16 dot product here")
needs_amx = pytest.mark.skipif(amx_obstacle() is not None, reason=amx_obstacle() or "AMX is here")
#: By the dot product, and by AMX's tiles.
by_either = pytest.mark.parametrize(
    "amx", [pytest.param(False, id="dot", marks=needs_dot), pytest.param(True, id="amx", marks=needs_amx)]
)
DTYPES = [torch.float32, torch.bfloat16]
#: Rounding of the stored result, and of the scores between a chunk's two matmuls in bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield request.param
    torch.set_num_threads(before)


SHAPES = {
    "smollm2": AttentionShape(9, 3, 64, None),
    "llama-3": AttentionShape(8, 2, 128, None),
    "qwen2.5": AttentionShape(14, 2, 64, None),
    "no groups": AttentionShape(2, 2, 16, None),
    "window": AttentionShape(6, 2, 32, 37),
    "gemma": AttentionShape(10, 2, 80, 100),
}
DECODES = [
    (0, 1),
    (15, 1),
    (16, 1),
    (17, 1),
    (127, 1),
    (128, 1),
    (300, 1),
    (SEGMENT_KEYS, 1),
    (2 * SEGMENT_KEYS + 5, 1),
]
CHUNKS = [(0, 2), (0, 16), (5, 40), (33, 17), (130, 3), (7, BLOCK_QUERIES), (90, BLOCK_QUERIES + 11), (0, 300)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "lengths", [DECODES, CHUNKS, [*CHUNKS[:3], *DECODES[3:5], *CHUNKS[5:7]]], ids=["d", "c", "mix"]
)
def test_cpu_attention_equals_the_reference(name: str, dtype: torch.dtype, lengths: list[tuple[int, int]]) -> None:
    shape = SHAPES[name]
    case = ragged(shape, lengths, dtype=dtype, by_head=True)
    expected = ReferenceAttention(shape)(case.query.float(), case.cache, case.batch)
    actual = CpuAttention(shape, 16, tiles=False)(case.query, case.cache, case.batch)
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=TOLERANCE[dtype])


@by_either
@pytest.mark.parametrize("page_tokens", [16, 32])
@pytest.mark.parametrize("name", SHAPES)
def test_tiles_equal_the_reference(name: str, page_tokens: int, amx: bool) -> None:
    """Scores stay in float32 here, so it is closer than two matmuls with rounded scores between them. The lengths reach
    over several blocks of rows and of keys, and end inside and at the end of tiles."""
    lengths = [*CHUNKS, (700, 300), (BLOCK_KEYS - 40, 80), (BLOCK_KEYS, 16), (0, 2 * BLOCK_KEYS + 1), *DECODES]
    shape = SHAPES[name]
    case = ragged(shape, lengths, dtype=torch.bfloat16, page_tokens=page_tokens, by_head=True)
    expected = ReferenceAttention(shape)(case.query.float(), case.cache, case.batch)
    actual = CpuAttention(shape, page_tokens, tiles=True, amx=amx)(case.query, case.cache, case.batch)
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=1.2e-2)


def test_pages_of_32_tokens_are_read_right() -> None:
    shape = SHAPES["smollm2"]
    case = ragged(shape, [*DECODES, *CHUNKS], page_tokens=32, by_head=True)
    expected = ReferenceAttention(shape)(case.query, case.cache, case.batch)
    torch.testing.assert_close(CpuAttention(shape, 32)(case.query, case.cache, case.batch), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_sdpa_equals_the_reference(name: str) -> None:
    shape = SHAPES[name]
    case = ragged(shape, [*DECODES[:5], *CHUNKS])
    expected = ReferenceAttention(shape)(case.query, case.cache, case.batch)
    torch.testing.assert_close(SdpaAttention(shape)(case.query, case.cache, case.batch), expected, rtol=0, atol=2e-6)


def test_nan_in_a_key_that_is_seen_reaches_the_output() -> None:
    """The kernels must not swallow NaN: the tests that poison free pages rely on seeing it."""
    shape = SHAPES["smollm2"]
    for lengths in ([(40, 1)], [(0, 40)]):
        case = ragged(shape, lengths, by_head=True)
        case.cache.keys[int(case.batch.page_table[0, 1]) * 16 + 3] = float("nan")
        assert CpuAttention(shape, 16)(case.query, case.cache, case.batch)[-1].isnan().all()


@by_either
@pytest.mark.parametrize(("tensor", "first_lost"), [("keys", 35), ("values", 32)])
def test_nan_in_a_tile_reaches_those_who_see_it_and_nobody_before(tensor: str, first_lost: int, amx: bool) -> None:
    """Values are taken 16 at once, by AMX 32, and hidden ones with a weight of zero: zero times NaN is NaN. The scores
    of hidden keys are replaced."""
    shape = SHAPES["smollm2"]
    case = ragged(shape, [(0, 90)], dtype=torch.bfloat16, by_head=True)
    getattr(case.cache, tensor)[int(case.batch.page_table[0, 2]) * 16 + 3] = float("nan")
    lost = CpuAttention(shape, 16, tiles=True, amx=amx)(case.query, case.cache, case.batch).isnan().all(dim=1)
    assert lost.tolist() == [position >= first_lost for position in range(90)]


@by_either
@pytest.mark.parametrize("lengths", [[(0, 5)], [(0, 17)], [(30, 20)], [(BLOCK_KEYS, 33)]], ids=str)
def test_what_lies_behind_the_last_key_of_a_chunk_is_not_used(lengths: list[tuple[int, int]], amx: bool) -> None:
    shape = SHAPES["smollm2"]
    case = ragged(shape, lengths, dtype=torch.bfloat16, by_head=True)
    expected = CpuAttention(shape, 16, True, amx)(case.query, case.cache, case.batch)
    num_keys = sum(lengths[0])
    behind = int(case.batch.page_table[0, (num_keys - 1) // 16]) * 16 + (num_keys - 1) % 16 + 1
    for tensor in (case.cache.keys, case.cache.values):
        tensor[behind : -(-behind // 16) * 16] = float("nan")
    assert torch.equal(CpuAttention(shape, 16, True, amx)(case.query, case.cache, case.batch), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("tiles", [False, pytest.param(True, marks=needs_dot)])
@pytest.mark.parametrize("lengths", [[(prefix, 1)] for prefix in (0, 1, 16, 17, 30, 31, 300)], ids=str)
def test_what_lies_behind_the_last_key_of_a_decode_is_not_used(lengths: list[tuple[int, int]], tiles: bool) -> None:
    shape = SHAPES["smollm2"]
    case = ragged(shape, lengths, dtype=torch.bfloat16, by_head=True)
    expected = CpuAttention(shape, 16, tiles)(case.query, case.cache, case.batch)
    num_keys = lengths[0][0] + 1
    behind = int(case.batch.page_table[0, (num_keys - 1) // 16]) * 16 + (num_keys - 1) % 16 + 1
    for tensor in (case.cache.keys, case.cache.values):
        tensor[behind : -(-behind // 16) * 16] = float("nan")
    assert torch.equal(CpuAttention(shape, 16, tiles)(case.query, case.cache, case.batch), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize(
    ("tiles", "amx"),
    [(False, False), pytest.param(True, False, marks=needs_dot), pytest.param(True, True, marks=needs_amx)],
)
def test_rows_behind_the_last_slice_are_zero_and_change_nothing(tiles: bool, amx: bool) -> None:
    shape = SHAPES["smollm2"]
    case = ragged(shape, [*CHUNKS[:3], *DECODES[:2]], dtype=torch.bfloat16, by_head=True)
    expected = CpuAttention(shape, 16, tiles, amx)(case.query, case.cache, case.batch)
    query = torch.cat((case.query, torch.full_like(case.query[:5], float("nan"))))
    actual = CpuAttention(shape, 16, tiles, amx)(query, case.cache, case.batch)
    torch.testing.assert_close(actual[:-5], expected, rtol=0, atol=0)
    assert not actual[-5:].any()


@pytest.mark.parametrize(
    ("bfloat16_dot", "amx", "expected"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_tiles_are_for_cpus_with_the_dot_product_and_without_amx(
    bfloat16_dot: bool, amx: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16_dot)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert has_dot_tiles() is expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 70])
def test_rms_norm_equals_torch(rows: int, dtype: torch.dtype, threads: int) -> None:
    x, weight = torch.randn(rows, 576).to(dtype) * 3, torch.randn(576).to(dtype)
    out = torch.empty_like(x)
    rms_norm(threads, as_array(x), as_array(weight), np.float32(1e-5), as_array(out))
    expected = functional.rms_norm(x.float(), (576,), weight.float(), 1e-5)
    torch.testing.assert_close(out.float(), expected, rtol=2e-6 if dtype is torch.float32 else 4e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_equals_torch_even_where_exp_overflows(dtype: torch.dtype, threads: int) -> None:
    gate_up = torch.randn(70, 192).to(dtype) * 4
    gate_up[:, :6] = torch.tensor([-1e4, -200.0, -89.0, 89.0, 200.0, 1e4]).to(dtype)
    out = torch.empty(70, 96, dtype=dtype)
    silu_mul(threads, as_array(gate_up), as_array(out))
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = (functional.silu(gate) * up).float()
    torch.testing.assert_close(out.float(), expected, rtol=3e-6 if dtype is torch.float32 else 4e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 16, 128])
def test_fused_rotation_equals_the_plain_one(head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    """Halves of 40 and 8 numbers aren't whole vectors."""
    from sarathi_tune.config.presets import PRESETS
    from sarathi_tune.engine.plan import StepPlan
    from tests.runtime.conftest import chunk, request_of

    config = replace(PRESETS["smollm2-135m"], head_dim=head_dim)
    table = build_rotary_table(config, 128, CPU)
    plan = StepPlan(
        (chunk(request_of([5] * 60, [7, 0, 3, 2]), 9, 40), chunk(request_of([5] * 90, range(10, 16)), 88, 2))
    )
    norms = [torch.randn(head_dim).to(dtype) if has_norm else None for _ in range(2)]
    heads = HeadShape(9, 3, head_dim, 1e-5, *norms)
    qkv = torch.randn(42, 15 * head_dim).to(dtype)
    caches = [KVCache(config, 16, 16, CPU, dtype) for _ in range(2)]
    batch = build_batch(plan, caches[0], CPU)
    plain, fused = (
        ops.rotate_and_store(qkv, heads, table, batch, cache.layers[0])
        for ops, cache in zip((TorchElementwise(), FusedElementwise()), caches, strict=True)
    )
    tolerance = {"rtol": 2e-6, "atol": 2e-6}
    if dtype is torch.bfloat16:
        # half a unit (2^-9 of numbers up to the largest there is) for each of six roundings, however small the sum is:
        # the plain one's norm and product of both operands, and either result
        tolerance = {"rtol": 0.0, "atol": 6 * 2**-9 * float(plain.abs().max())}
    torch.testing.assert_close(fused, plain, **tolerance)
    torch.testing.assert_close(caches[1].layers[0].keys, caches[0].layers[0].keys, **tolerance)
    torch.testing.assert_close(caches[1].layers[0].values, caches[0].layers[0].values, rtol=0, atol=0)
