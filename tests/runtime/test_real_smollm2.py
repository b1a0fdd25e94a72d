"""The real SmolLM2-135M: sense in its answers, and the same tokens and logits as transformers in float32."""

import itertools
import json.decoder
from pathlib import Path

import pytest
import torch

from sarathi_tune.config.engine import UNLIMITED_TOKENS
from sarathi_tune.runtime.runner import Runner
from tests.hf_models import ReferenceModel, hf_greedy, hf_logits, real_smollm2, smollm2_tokenizer
from tests.runtime.conftest import PAGE_TOKENS, build_runner, chunk, poison, request_of, step_logits
from tests.runtime.test_against_transformers import generate

pytestmark = pytest.mark.slow

LENGTHS = (1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS + 1)
BUDGETS = (1, 2, 7, PAGE_TOKENS, 512, UNLIMITED_TOKENS)
LONG = 700
#: Budgets of one and two would take hundreds of steps, and every prompt length above has them already.
LONG_BUDGETS = (7, PAGE_TOKENS, 512, UNLIMITED_TOKENS)
OUTPUT_TOKENS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    return real_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def runner(model: ReferenceModel) -> Runner:
    return build_runner(model)


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    """Tokens of a real text: a module of the standard library."""
    ids: list[int] = smollm2_tokenizer()(Path(json.decoder.__file__).read_text())["input_ids"]
    assert len(ids) > LONG
    return ids


def test_the_capital_of_france(model: ReferenceModel, runner: Runner) -> None:
    """transformers proves that the weights are the real ones; float32 and the model's own bfloat16 must agree."""
    tokenizer = smollm2_tokenizer()
    prompt = tokenizer("The capital of France is")["input_ids"]
    expected = hf_greedy(model.hf_model, prompt, 8)
    assert tokenizer.decode(expected).startswith(" Paris.")
    assert generate(runner, [prompt], 3, num_tokens=8) == [expected]
    own_dtype = Runner.build(model.source, num_pages=4, page_tokens=PAGE_TOKENS, device="cpu")
    assert own_dtype.description["dtype"] == "bfloat16"
    [tokens] = generate(own_dtype, [prompt], 3, num_tokens=2)
    assert tokenizer.decode(tokens) == " Paris."


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_ids_equal_transformers(length: int, model: ReferenceModel, runner: Runner, text_ids: list[int]) -> None:
    prompt = text_ids[:length]
    expected = hf_greedy(model.hf_model, prompt, OUTPUT_TOKENS)
    for budget in BUDGETS:
        poison(runner)
        assert generate(runner, [prompt], budget, OUTPUT_TOKENS) == [expected], f"budget {budget}"


def test_greedy_ids_of_a_long_prompt_equal_transformers(
    model: ReferenceModel, runner: Runner, text_ids: list[int]
) -> None:
    prompt = text_ids[:LONG]
    expected = hf_greedy(model.hf_model, prompt, OUTPUT_TOKENS)
    for budget in LONG_BUDGETS:
        poison(runner)
        assert generate(runner, [prompt], budget, OUTPUT_TOKENS) == [expected], f"budget {budget}"


def test_requests_together_get_what_each_gets_alone(model: ReferenceModel, runner: Runner, text_ids: list[int]) -> None:
    prompts = [text_ids[start : start + length] for start, length in ((0, 5), (50, 120), (9, 1), (300, 33))]
    expected = [hf_greedy(model.hf_model, prompt, OUTPUT_TOKENS) for prompt in prompts]
    for budget in (20, UNLIMITED_TOKENS):
        poison(runner)
        assert generate(runner, prompts, budget, OUTPUT_TOKENS) == expected, f"budget {budget}"


def test_logits_are_those_of_transformers(model: ReferenceModel, runner: Runner, text_ids: list[int]) -> None:
    expected = hf_logits(model.hf_model, text_ids[:LONG])
    for cuts in ((0, LONG), (0, 1, 16, 49, 512, LONG), (0, 333, 334, 699, LONG)):
        poison(runner)
        for start, stop in itertools.pairwise(cuts):
            request = request_of(text_ids[:stop], range(3, 50))
            actual = step_logits(runner, chunk(request, start, stop - start))
            torch.testing.assert_close(actual[0], expected[stop - 1], rtol=0, atol=1e-4)
