"""Tiny reference models, and requests driven through a runner with chosen chunks."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch

from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.request import Request
from sarathi_tune.runtime.runner import Runner
from tests.hf_models import ReferenceModel, tiny_reference

PAGE_TOKENS = 16

ReferenceMaker = Callable[[str], ReferenceModel]


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads and lose much to them on a busy machine; `test_kernels` takes two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceMaker:
    """A tiny model of a family, made once per session."""

    @cache
    def make(family: str) -> ReferenceModel:
        return tiny_reference(tmp_path_factory.mktemp(family), family)

    return make


def build_runner(model: ReferenceModel, num_pages: int = 64, attention: str = "auto", **options: object) -> Runner:
    """A float32 runner on the CPU, all of whose pages are filled with NaN: nothing may read what it didn't write."""
    runner = Runner.build(
        model.source,
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        device="cpu",
        dtype="float32",
        attention=attention,
        **options,  # type: ignore[arg-type]
    )
    poison(runner)
    return runner


@torch.inference_mode()
def poison(runner: Runner) -> None:
    """Fill the whole cache with NaN."""
    for layer in runner.cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))


def prompt_of(length: int, seed: int = 0, vocab: int = 211) -> list[int]:
    """Random token ids."""
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request_of(prompt: Sequence[int], pages: Sequence[int], max_output_tokens: int = 8, request_id: int = 0) -> Request:
    """A request that owns pages."""
    return Request(request_id, prompt, max_output_tokens, pages=list(pages))


def chunk(request: Request, start: int, count: int) -> Slice:
    """A prefill slice; samples when it reaches the request's last token."""
    return Slice(request, start, count, is_decode=False, samples=start + count == request.num_tokens)


def decode(request: Request) -> Slice:
    """The next token of a request whose other tokens are all in the cache."""
    return Slice(request, request.num_tokens - 1, 1, is_decode=True, samples=True)


def prefill(runner: Runner, request: Request, stop: int) -> None:
    """Put the K and V of the first `stop` tokens into the cache, in one chunk."""
    runner.logits(StepPlan((Slice(request, 0, stop, is_decode=False, samples=False),)))


def step_logits(runner: Runner, *slices: Slice) -> torch.Tensor:
    """Logits of one step."""
    return runner.logits(StepPlan(tuple(slices)))
