"""Token ids and logits against transformers in float32: every family, prompt lengths around page borders, budgets."""

import itertools

import pytest
import torch

from sarathi_tune.config.engine import UNLIMITED_TOKENS, EngineConfig
from sarathi_tune.engine.loop import Engine
from sarathi_tune.engine.request import Request
from sarathi_tune.runtime.runner import Runner
from tests.engine.doubles import ManualClock
from tests.hf_models import FAMILIES, hf_greedy, hf_logits
from tests.runtime.conftest import PAGE_TOKENS, ReferenceMaker, build_runner, chunk, poison, prompt_of, request_of
from tests.runtime.conftest import step_logits as logits_of

PROMPT_LENGTHS = (1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS + 1)
BUDGETS = (1, 2, 7, PAGE_TOKENS, 512, UNLIMITED_TOKENS)
OUTPUT_TOKENS = 8


def generate(runner: Runner, prompts: list[list[int]], budget: int, num_tokens: int = OUTPUT_TOKENS) -> list[list[int]]:
    """All prompts through the engine at once."""
    engine = Engine(
        EngineConfig(budget, len(prompts), runner.cache.num_pages, PAGE_TOKENS, max_model_len=2048),
        runner,
        ManualClock(),
    )
    requests = [Request(i, prompt, num_tokens) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.check_idle()
    return [request.output for request in requests]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_transformers(family: str, reference: ReferenceMaker) -> None:
    model = reference(family)
    runner = build_runner(model)
    for length in PROMPT_LENGTHS:
        prompt = prompt_of(length, seed=length)
        expected = hf_greedy(model.hf_model, prompt, OUTPUT_TOKENS)
        for budget in BUDGETS:
            poison(runner)
            assert generate(runner, [prompt], budget) == [expected], f"prompt {length}, budget {budget}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [7, PAGE_TOKENS, 512, UNLIMITED_TOKENS])
def test_greedy_ids_of_a_long_prompt_equal_transformers(family: str, budget: int, reference: ReferenceMaker) -> None:
    model = reference(family)
    prompt = prompt_of(700, seed=7)
    assert generate(build_runner(model), [prompt], budget) == [hf_greedy(model.hf_model, prompt, OUTPUT_TOKENS)]


@pytest.mark.parametrize("budget", [7, 20, 100, UNLIMITED_TOKENS])
@pytest.mark.parametrize("family", ["llama3", "mistral-sliding", "qwen2", "qwen3"])
def test_requests_together_get_what_each_gets_alone(family: str, budget: int, reference: ReferenceMaker) -> None:
    model = reference(family)
    prompts = [prompt_of(length, seed=length) for length in (5, 40, 17, 90, 1)]
    expected = [hf_greedy(model.hf_model, prompt, OUTPUT_TOKENS) for prompt in prompts]
    assert generate(build_runner(model), prompts, budget) == expected


@pytest.mark.parametrize("attention", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_chunking_are_those_of_transformers(
    family: str, attention: str, reference: ReferenceMaker
) -> None:
    model = reference(family)
    runner = build_runner(model, attention=attention)
    prompt = prompt_of(77, seed=3)
    expected = hf_logits(model.hf_model, prompt)
    for cuts in ((0, 77), (0, 1, 77), (0, 16, 48, 77), (0, 33, 34, 76, 77), tuple(range(0, 78, 7))):
        poison(runner)
        request = request_of(prompt, range(3, 8))
        for start, stop in itertools.pairwise(cuts):
            # The request seems to end where the chunk ends, so that every chunk's last token gives logits.
            shortened = request_of(prompt[:stop], request.pages)
            actual = logits_of(runner, chunk(shortened, start, stop - start))
            torch.testing.assert_close(actual[0], expected[stop - 1], rtol=0, atol=1e-4)
