"""Steps of few rows: the kernel against float64 products, whole models against transformers, memory that is plenty."""

import pytest
import torch

from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.runtime.kernels.availability import has_bfloat16_dot
from sarathi_tune.runtime.layers.linear import FEW_ROWS, FewRowsLinear, Linear, LinearChoice
from sarathi_tune.runtime.runner import Runner
from tests.hf_models import FAMILIES, hf_logits
from tests.runtime.conftest import PAGE_TOKENS, ReferenceMaker, chunk, decode, prompt_of, request_of

needs_dot = pytest.mark.skipif(not has_bfloat16_dot(), reason="no AVX-512 bfloat16 dot product here")
PACKED = LinearChoice(True, "packed", "")


class Refuses:
    """Stands for the layer for many rows where it must not be asked."""

    def __call__(self, _x: torch.Tensor, _residual: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("few rows are computed elsewhere")


@needs_dot
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inputs", [2, 48, 576])
@pytest.mark.parametrize("columns", [16, 80, 144, 960])
def test_products_equal_those_in_float64(columns: int, inputs: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(columns + inputs)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(torch.bfloat16)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    weight, bias = draw(columns, inputs), draw(columns)
    for has_bias in (False, True):
        layer = FewRowsLinear(weight, bias if has_bias else None, Refuses())
        for rows in (*range(1, 14), FEW_ROWS):
            x, residual = draw(rows, inputs), draw(rows, columns)
            expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
            for added in (None, residual):
                whole = expected if added is None else expected + added.double()
                # half a unit in the last of bfloat16's eight places, and float32 sums
                torch.testing.assert_close(layer(x, added).double(), whole, rtol=2**-8, atol=1e-4 * inputs**0.5)
    torch.set_num_threads(before)


@needs_dot
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_equal_transformers(family: str, reference: ReferenceMaker) -> None:
    """Decodes and short chunks of few rows: as near to transformers' float32 logits as bfloat16 gets."""
    model = reference(family)
    runner = Runner.build(model.source, num_pages=40, page_tokens=PAGE_TOKENS, device="cpu", dtype="bfloat16")
    assert "up to 32 rows by a kernel of our own" in runner.description["linear_reason"]
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


@pytest.mark.parametrize(("free_bytes", "has_copy"), [(800, True), (799, False)])
def test_a_second_copy_takes_an_eighth_of_the_memory_at_most(
    free_bytes: int, has_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sarathi_tune.runtime.layers.linear.has_bfloat16_dot", lambda: True)
    assert PACKED.with_copy_for_few_rows(100, free_bytes).few_rows is has_copy


@needs_dot
def test_sizes_that_do_not_fit_vectors_have_the_usual_layer() -> None:
    choice = LinearChoice(True, "packed", "", few_rows=True)
    layers: list[Linear] = [choice.build(torch.randn(*size).to(torch.bfloat16)) for size in ((211, 48), (32, 48))]
    head = choice.build(torch.randn(32, 48).to(torch.bfloat16), is_head=True)
    assert [isinstance(layer, FewRowsLinear) for layer in (*layers, head)] == [False, True, False]
