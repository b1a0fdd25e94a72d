"""Layers by tiles of our own: against float64 products, whole models against transformers, and where they are used."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn import functional

from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.runtime.kernels.amx import BLOCK_ROWS
from sarathi_tune.runtime.kernels.amx_linear import PANEL_BYTES
from sarathi_tune.runtime.kernels.availability import AMX_INPUTS, amx_obstacle, has_bfloat16_dot
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
from tests.hf_models import FAMILIES, ReferenceModel, hf_logits, tiny_reference
from tests.runtime.conftest import PAGE_TOKENS, ReferenceMaker, chunk, decode, prompt_of, request_of

needs_dot = pytest.mark.skipif(not has_bfloat16_dot(), reason="no AVX-512 bfloat16 dot product here")
needs_amx = pytest.mark.skipif(amx_obstacle() is not None, reason=amx_obstacle() or "AMX is here")
#: Whether AMX's tiles multiply, or AVX-512's dot product.
by_either = pytest.mark.parametrize(
    "amx", [pytest.param(False, id="dot", marks=needs_dot), pytest.param(True, id="amx", marks=needs_amx)]
)
PACKED = LinearChoice(True, "packed", "")
#: Single rows, a tile's and others, the most that share out columns alone, and more.
ROWS = (*range(1, 14), FEW_ROWS, COLUMNS_ONLY_ROWS, COLUMNS_ONLY_ROWS + 1, 2 * COLUMNS_ONLY_ROWS + 11)
#: Every number that can be left over from a block of AMX's, up to two blocks; and several blocks with a rest.
AMX_ROWS = (*range(1, 2 * BLOCK_ROWS + 7), 255, 256, 257)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def wide_reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceMaker:
    """A tiny model of a family whose matmuls all have inputs that AMX's tiles take."""

    @cache
    def make(family: str) -> ReferenceModel:
        directory = tmp_path_factory.mktemp(family)
        return tiny_reference(directory, family, hidden_size=6 * AMX_INPUTS, intermediate_size=5 * AMX_INPUTS)

    return make


def on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, has_dot: bool, has_amx: bool, amx_obstacle: str | None = "no AMX here"
) -> None:
    monkeypatch.setattr("sarathi_tune.runtime.layers.linear.has_bfloat16_dot", lambda: has_dot)
    monkeypatch.setattr("sarathi_tune.runtime.layers.linear.has_dot_tiles", lambda: has_dot and not has_amx)
    monkeypatch.setattr("sarathi_tune.runtime.layers.linear.amx_obstacle", lambda: amx_obstacle)


class Drawn:
    """Reproducible bfloat16 numbers."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self._generator).to(torch.bfloat16)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("inputs", "amx"),
    [
        *(pytest.param(inputs, False, id=f"{inputs}-dot", marks=needs_dot) for inputs in (2, 48, 576)),
        *(pytest.param(inputs, True, id=f"{inputs}-amx", marks=needs_amx) for inputs in (32, 96, 576, 1536)),
    ],
)
@pytest.mark.parametrize("columns", [16, 80, 144, 960])
def test_products_equal_those_in_float64(columns: int, inputs: int, amx: bool) -> None:
    draw = Drawn(columns + inputs)
    weight, bias = draw(columns, inputs), draw(columns)
    for has_bias in (False, True):
        layer = TiledLinear(weight, bias if has_bias else None, ALL_ROWS, None, amx=amx)
        for rows in AMX_ROWS if amx else ROWS:
            x, residual = draw(rows, inputs), draw(rows, columns)
            expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
            for added in (None, residual):
                whole = expected if added is None else expected + added.double()
                # half a unit in the last of bfloat16's eight places, and float32 sums
                torch.testing.assert_close(layer(x, added).double(), whole, rtol=2**-8, atol=1e-4 * inputs**0.5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("inner", "inputs", "amx"),
    [
        *(pytest.param(*size, False, marks=needs_dot) for size in ((16, 2), (48, 48), (80, 576), (1536, 64))),
        *(pytest.param(*size, True, marks=needs_amx) for size in ((16, 32), (48, 96), (80, 576), (1536, 64))),
    ],
)
def test_gated_products_equal_those_in_float64(inner: int, inputs: int, amx: bool, has_bias: bool) -> None:
    draw = Drawn(inner + inputs)
    weight, bias = draw(2 * inner, inputs) * (4 / inputs**0.5), draw(2 * inner)
    layer = TiledGated(weight, bias if has_bias else None, ALL_ROWS, None, amx=amx)
    for rows in AMX_ROWS if amx else ROWS:
        x = draw(rows, inputs)
        gate, up = (x.double() @ weight.double().T + (bias.double() if has_bias else 0)).chunk(2, dim=-1)
        # gate and up are rounded to bfloat16 before they meet, the product once more
        torch.testing.assert_close(layer(x).double(), functional.silu(gate) * up, rtol=2**-6, atol=2e-2)


@needs_amx
@pytest.mark.parametrize("inputs", [32, 576, 1536])
def test_a_row_has_the_same_result_whatever_is_computed_beside_it(inputs: int, threads: int) -> None:
    draw = Drawn(inputs)
    weight, bias, residual = draw(160, inputs), draw(160), draw(600, 160)
    layer, gated = (kind(weight, bias, ALL_ROWS, None, amx=True) for kind in (TiledLinear, TiledGated))
    x = draw(600, inputs)
    torch.set_num_threads(1)
    alone = torch.cat([layer(x[i : i + 1], residual[i : i + 1]) for i in range(len(x))])
    gated_alone = torch.cat([gated(x[i : i + 1]) for i in range(len(x))])
    torch.set_num_threads(threads)
    for rows in (1, 15, 17, 33, 257, 600):
        assert torch.equal(layer(x[:rows], residual[:rows]), alone[:rows])
        assert torch.equal(gated(x[:rows]), gated_alone[:rows])


@needs_amx
def test_rows_fill_several_panels() -> None:
    """More rows than a panel of the second-level cache holds, the last panel shorter than the others."""
    draw = Drawn(7)
    rows, inputs = PANEL_BYTES // (2 * 4096) * 3 + BLOCK_ROWS + 5, 4096
    weight, x = draw(48, inputs), draw(rows, inputs)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(
        TiledLinear(weight, None, ALL_ROWS, None, amx=True)(x).double(), expected, rtol=2**-8, atol=1e-2
    )


@needs_amx
def test_onednn_multiplies_as_before_behind_tiles_of_ours() -> None:
    """Both set up the tile registers of the same threads."""
    draw = Drawn(3)
    weight, x = draw(64, 96), draw(40, 96)
    ours, theirs = TiledLinear(weight, None, ALL_ROWS, None, amx=True), PackedLinear(weight, None)
    expected = x.double() @ weight.double().T
    for rows in (40, 3, 16, 40, 33, 1):
        for layer in (theirs, ours, ours, theirs):
            torch.testing.assert_close(layer(x[:rows]).double(), expected[:rows], rtol=2**-8, atol=1e-3)


@by_either
def test_gates_far_from_zero(amx: bool) -> None:
    """silu(x) is x for large ones, and nothing for very negative ones; NaN stays NaN."""
    gates = torch.tensor([-3e38, -1e4, -200.0, -89.0, -20.0, 0.0, 20.0, 89.0, 200.0, 1e4, float("nan")])
    inputs = AMX_INPUTS if amx else 2
    x = torch.zeros(len(gates), inputs)
    x[:, 0], x[:, 1] = gates, 1.0
    weight = torch.zeros(32, inputs)
    weight[:16, 0], weight[16:, 1] = 1.0, 1.0
    layer = TiledGated(weight.to(torch.bfloat16), None, ALL_ROWS, None, amx=amx)
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
@pytest.mark.parametrize(
    ("has_amx", "amx_obstacle", "named"),
    [
        pytest.param(False, "no AMX here", "AVX-512's dot product", id="tiles"),
        pytest.param(
            True, "not permitted", f"up to {FEW_ROWS_BESIDE_AMX} rows by a kernel of our own", id="beside AMX"
        ),
        pytest.param(True, None, "AMX's tiles", id="AMX", marks=needs_amx),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_equal_transformers(
    family: str,
    has_amx: bool,
    amx_obstacle: str | None,
    named: str,
    wide_reference: ReferenceMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes and chunks: as near to transformers' float32 logits as bfloat16 gets."""
    on_a_cpu(monkeypatch, True, has_amx, amx_obstacle)
    monkeypatch.setattr("sarathi_tune.runtime.attention.cpu.has_dot_tiles", lambda: not has_amx)
    model = wide_reference(family)
    runner = Runner.build(model.source, num_pages=40, page_tokens=PAGE_TOKENS, device="cpu", dtype="bfloat16")
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
    ("has_dot", "has_amx", "amx_obstacle", "inputs", "free_bytes", "rows", "name"),
    [
        (False, False, "no AMX", 576, 10_000, 0, "packed"),
        # Where tiles are the fastest there is one copy of the weights only.
        (True, False, "no AMX", 576, 0, ALL_ROWS, "dot-tiles"),
        (True, False, "no AMX", MOST_INPUTS, 0, ALL_ROWS, "dot-tiles"),
        (True, True, None, 576, 0, ALL_ROWS, "amx-tiles"),
        (True, True, None, MOST_INPUTS, 0, ALL_ROWS, "amx-tiles"),
        # A second copy takes an eighth of the free memory at most.
        (True, False, "no AMX", MOST_INPUTS + 1, 800, FEW_ROWS, "packed"),
        (True, False, "no AMX", MOST_INPUTS + 1, 799, 0, "packed"),
        (True, True, None, MOST_INPUTS + 1, 800, FEW_ROWS_BESIDE_AMX, "packed"),
        (True, True, "not permitted", 576, 800, FEW_ROWS_BESIDE_AMX, "packed"),
        (True, True, "not permitted", 576, 799, 0, "packed"),
    ],
)
def test_where_tiles_are_used(
    has_dot: bool,
    has_amx: bool,
    amx_obstacle: str | None,
    inputs: int,
    free_bytes: int,
    rows: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_cpu(monkeypatch, has_dot, has_amx, amx_obstacle)
    choice = PACKED.with_tiles(inputs, 100, free_bytes)
    assert (choice.tiled_rows, choice.name, choice.amx) == (rows, name, name == "amx-tiles")
    if name == "packed" and has_amx:
        assert (amx_obstacle or "more inputs") in choice.reason
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
    amx = replace(choice, amx=True)
    built = [amx.build(draw(32, inputs)) for inputs in (48, 64)]
    assert [type(layer) for layer in built] == [PackedLinear, TiledLinear]
    gated = [choice.build_gated(draw(size, 48), None, TorchElementwise()) for size in (48, 64)]
    assert [type(layer) for layer in gated] == [PlainGated, TiledGated]
