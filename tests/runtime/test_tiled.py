"""Layers by tiles of our own: against float64 products, whole models against transformers, and where they are used."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.runtime.kernels.availability import has_bfloat16_dot
from sarathi_tune.runtime.kernels.linear import COLUMNS_ONLY_ROWS
from sarathi_tune.runtime.layers.elementwise import TorchElementwise
from sarathi_tune.runtime.layers.linear import (
    ALL_ROWS,
    FEW_ROWS,
    FEW_ROWS_BESIDE_AMX,
    MOST_INPUTS,
    LinearChoice,
    PackedLinear,
    PlainGated,
    TiledGated,
    TiledLinear,
)
from sarathi_tune.runtime.runner import Runner
from tests.hf_models import FAMILIES, hf_logits
from tests.runtime.conftest import PAGE_TOKENS, ReferenceMaker, chunk, decode, prompt_of, request_of

needs_dot = pytest.mark.skipif(not has_bfloat16_dot(), reason="no AVX-512 bfloat16 dot product here")
PACKED = LinearChoice(True, "packed", "")
#: Single rows, a tile's and others, the most that share out columns alone, and more.
ROWS = (*range(1, 14), FEW_ROWS, COLUMNS_ONLY_ROWS, COLUMNS_ONLY_ROWS + 1, 2 * COLUMNS_ONLY_ROWS + 11)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, has_dot: bool, has_amx: bool) -> None:
    monkeypatch.setattr("sarathi_tune.runtime.layers.linear.has_bfloat16_dot", lambda: has_dot)
    monkeypatch.setattr("sarathi_tune.runtime.layers.linear.has_dot_tiles", lambda: has_dot and not has_amx)


class Drawn:
    """Reproducible bfloat16 numbers."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self._generator).to(torch.bfloat16)


@needs_dot
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("inputs", [2, 48, 576])
@pytest.mark.parametrize("columns", [16, 80, 144, 960])
def test_products_equal_those_in_float64(columns: int, inputs: int) -> None:
    draw = Drawn(columns + inputs)
    weight, bias = draw(columns, inputs), draw(columns)
    for has_bias in (False, True):
        layer = TiledLinear(weight, bias if has_bias else None, ALL_ROWS, None)
        for rows in ROWS:
            x, residual = draw(rows, inputs), draw(rows, columns)
            expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
            for added in (None, residual):
                whole = expected if added is None else expected + added.double()
                # half a unit in the last of bfloat16's eight places, and float32 sums
                torch.testing.assert_close(layer(x, added).double(), whole, rtol=2**-8, atol=1e-4 * inputs**0.5)


@needs_dot
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("inner", "inputs"), [(16, 2), (48, 48), (80, 576), (1536, 64)])
def test_gated_products_equal_those_in_float64(inner: int, inputs: int, has_bias: bool) -> None:
    draw = Drawn(inner + inputs)
    weight, bias = draw(2 * inner, inputs) * (4 / inputs**0.5), draw(2 * inner)
    layer = TiledGated(weight, bias if has_bias else None, ALL_ROWS, None)
    for rows in ROWS:
        x = draw(rows, inputs)
        gate, up = (x.double() @ weight.double().T + (bias.double() if has_bias else 0)).chunk(2, dim=-1)
        # gate and up are rounded to bfloat16 before they meet, the product once more
        torch.testing.assert_close(layer(x).double(), functional.silu(gate) * up, rtol=2**-6, atol=2e-2)


@needs_dot
def test_gates_far_from_zero() -> None:
    """silu(x) is x for large ones, and nothing for very negative ones; NaN stays NaN."""
    gates = torch.tensor([-3e38, -1e4, -200.0, -89.0, -20.0, 0.0, 20.0, 89.0, 200.0, 1e4, float("nan")])
    x = torch.zeros(len(gates), 2)
    x[:, 0], x[:, 1] = gates, 1.0
    weight = torch.zeros(32, 2)
    weight[:16, 0], weight[16:, 1] = 1.0, 1.0
    layer = TiledGated(weight.to(torch.bfloat16), None, ALL_ROWS, None)
    rounded = x.to(torch.bfloat16)
    expected = functional.silu(rounded[:, 0].double())
    # A product with NaN has NaN in every column that it meets.
    for row, (value, silu) in enumerate(zip(layer(rounded)[:, 0].double(), expected, strict=True)):
        assert value.isnan() if silu.isnan() else abs(value - silu) <= 2**-8 * abs(silu) + 1e-6, row


@needs_dot
def test_more_rows_go_to_the_other_layer() -> None:
    seen: list[int] = []

    class Noting:
        def __call__(self, x: torch.Tensor, _residual: torch.Tensor | None = None) -> torch.Tensor:
            seen.append(len(x))
            return x

    draw = Drawn(0)
    for layer in (TiledLinear(draw(16, 4), None, 8, Noting()), TiledGated(draw(32, 4), None, 8, Noting())):
        for rows in (1, 8, 9, 40):
            layer(draw(rows, 4))
    assert seen == [9, 40, 9, 40]


@needs_dot
@pytest.mark.parametrize("has_amx", [False, True], ids=["tiles", "beside AMX"])
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_equal_transformers(
    family: str, has_amx: bool, reference: ReferenceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes and chunks: as near to transformers' float32 logits as bfloat16 gets."""
    on_a_cpu(monkeypatch, True, has_amx)
    monkeypatch.setattr("sarathi_tune.runtime.attention.cpu.has_dot_tiles", lambda: not has_amx)
    model = reference(family)
    runner = Runner.build(model.source, num_pages=40, page_tokens=PAGE_TOKENS, device="cpu", dtype="bfloat16")
    named = f"up to {FEW_ROWS_BESIDE_AMX} rows by a kernel of our own" if has_amx else "AVX-512's dot product"
    assert named in runner.description["linear_reason"]
    prompts = [prompt_of(length, seed=length) for length in (3, 16, 17, 40, 5, 9, 33, 2, 12, 21)]
    expected = [hf_logits(model.hf_model, prompt)[-1] for prompt in prompts]
    spread = torch.stack(expected).std()
    requests = [request_of(prompt, range(4 * i, 4 * i + 4)) for i, prompt in enumerate(prompts)]
    for request in requests:
        for start in range(0, request.num_tokens - 1, 11):  # the last token is left for a decode
            count = min(11, request.num_tokens - 1 - start)
            runner.execute(StepPlan((chunk(request, start, count),)))
    for count in range(1, len(requests) + 1):
        actual = runner.logits(StepPlan(tuple(decode(request) for request in requests[:count])))
        error = (actual - torch.stack(expected[:count])).square().mean().sqrt() / spread
        assert error < 0.04, f"{count} rows"


@pytest.mark.parametrize(
    ("has_dot", "has_amx", "inputs", "free_bytes", "rows"),
    [
        (False, False, 576, 10_000, 0),
        # Where tiles are the fastest there is one copy of the weights only.
        (True, False, 576, 0, ALL_ROWS),
        (True, False, MOST_INPUTS, 0, ALL_ROWS),
        # A second copy takes an eighth of the free memory at most.
        (True, False, MOST_INPUTS + 1, 800, FEW_ROWS),
        (True, False, MOST_INPUTS + 1, 799, 0),
        (True, True, 576, 800, FEW_ROWS_BESIDE_AMX),
        (True, True, 576, 799, 0),
    ],
)
def test_where_tiles_are_used(
    has_dot: bool, has_amx: bool, inputs: int, free_bytes: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cpu(monkeypatch, has_dot, has_amx)
    choice = PACKED.with_tiles(inputs, 100, free_bytes)
    assert choice.tiled_rows == rows
    assert LinearChoice(False, "torch", "").with_tiles(inputs, 100, free_bytes).tiled_rows == 0


def test_tiles_need_no_rows_that_fill_up() -> None:
    choice = LinearChoice(True, "dot-tiles", "", ALL_ROWS)
    assert [choice.padded_rows(count) for count in (1, 33, 257, 5000)] == [1, 33, 257, 5000]
    some = LinearChoice(True, "packed", "", FEW_ROWS)
    assert [some.padded_rows(count) for count in (1, 32, 33, 257)] == [1, 32, 40, 264]


@needs_dot
def test_sizes_that_do_not_fit_vectors_have_the_usual_layer() -> None:
    choice, draw = LinearChoice(True, "packed", "", FEW_ROWS), Drawn(1)
    odd, even, head = (
        choice.build(draw(211, 48)),
        choice.build(draw(32, 48)),
        choice.build(draw(32, 48), is_head=True),
    )
    assert [type(layer) for layer in (odd, even, head)] == [PackedLinear, TiledLinear, PackedLinear]
    gated = [choice.build_gated(draw(size, 48), None, TorchElementwise()) for size in (48, 64)]
    assert [type(layer) for layer in gated] == [PlainGated, TiledGated]
