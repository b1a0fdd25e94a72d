"""Building a runner: what it says about itself, and what it refuses."""

from collections.abc import Callable

import psutil
import pytest
import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.presets import PRESETS
from sarathi_tune.config.source import ModelSource
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.errors import OutOfMemoryError, UsageError
from sarathi_tune.runtime.attention.base import AttentionShape
from sarathi_tune.runtime.attention.pick import pick_attention
from sarathi_tune.runtime.memory import max_kv_pages, resident_weight_bytes
from sarathi_tune.runtime.runner import Runner, resolve_device
from tests.runtime.conftest import ReferenceMaker, build_runner, chunk, decode, prompt_of, request_of

CPU = torch.device("cpu")
SHAPE = AttentionShape(9, 3, 64, None)


def test_the_description_names_each_back_end_and_its_reason(reference: ReferenceMaker) -> None:
    description = build_runner(reference("llama")).description
    assert description["attention"] == "cpu"
    assert description["linear"] == "torch"
    for part in ("attention", "linear", "elementwise"):
        assert len(description[f"{part}_reason"].split()) > 3
    assert (description["dtype"], description["device"], description["num_pages"]) == ("float32", "cpu", 64)


def test_bfloat16_with_packed_weights_agrees_with_float32(reference: ReferenceMaker) -> None:
    model = reference("llama-tied")
    request = request_of(prompt_of(50), range(4))
    logits = {}
    for dtype in ("float32", "bfloat16"):
        runner = Runner.build(model.source, num_pages=8, device="cpu", dtype=dtype)  # type: ignore[arg-type]
        runner.logits(StepPlan((chunk(request_of(request.prompt[:49], request.pages), 0, 49),)))
        logits[dtype] = runner.logits(StepPlan((decode(request),)))[0]
    spread = float(logits["float32"].std())
    assert float((logits["bfloat16"] - logits["float32"]).abs().max()) < 0.1 * spread


def test_steps_repeat_bit_by_bit(reference: ReferenceMaker) -> None:
    runner = build_runner(reference("qwen3"))
    plan = StepPlan((chunk(request_of(prompt_of(90), range(6)), 0, 90),))
    assert torch.equal(runner.logits(plan), runner.logits(plan))


def test_more_cache_than_memory_is_refused_before_it_is_allocated() -> None:
    source = ModelSource(PRESETS["smollm2-135m"])
    before = psutil.Process().memory_info().rss
    with pytest.raises(OutOfMemoryError, match=r"smollm2-135m needs .* KV cache, and cpu has .* free: use at most"):
        Runner.build(source, num_pages=10_000_000, device="cpu")
    assert psutil.Process().memory_info().rss - before < 100e6


def test_a_model_larger_than_memory_says_so() -> None:
    with pytest.raises(OutOfMemoryError, match="use a smaller model"):
        Runner.build(ModelSource(PRESETS["llama-3-70b"]), num_pages=1, device="cpu")


def test_fitting_pages_follow_from_the_arithmetic() -> None:
    """SmolLM2: 2 * 30 layers * 3 heads * 64 numbers * 2 bytes = 23,040 bytes per token; weights and tied head 2 bytes
    each: 134,515,008 parameters and 49,152 * 576 packed again."""
    config = PRESETS["smollm2-135m"]
    assert resident_weight_bytes(config) == 2 * (134_515_008 + 49_152 * 576)
    free = 2_000_000_000
    expected = int((0.9 * free - resident_weight_bytes(config)) // (23_040 * 16)) - 1
    assert max_kv_pages(config, 16, free) == expected
    assert max_kv_pages(config, 16, 100_000_000) == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [("flash", "needs a CUDA device and this is cpu"), ("fastest", "choose one of auto, ")],
)
def test_a_back_end_that_cannot_be_used_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        pick_attention(SHAPE, CPU, torch.bfloat16, 16, name)


def test_without_numba_torch_takes_over(hide: Callable[[str], None]) -> None:
    hide("numba")
    assert pick_attention(SHAPE, CPU, torch.bfloat16, 16).name == "sdpa"
    with pytest.raises(UsageError, match="numba is not installed"):
        pick_attention(SHAPE, CPU, torch.bfloat16, 16, "cpu")


def test_odd_pages_or_heads_fall_back_to_torch() -> None:
    assert pick_attention(SHAPE, CPU, torch.float32, 8).name == "sdpa"
    assert pick_attention(AttentionShape(4, 2, 24, None), CPU, torch.float32, 16).name == "sdpa"
    assert pick_attention(SHAPE, CPU, torch.float16, 16).name == "sdpa"


@pytest.mark.parametrize("name", ["cuda:7", "mps", "abacus"])
def test_devices_that_are_not_there_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="device"):
        resolve_device(name)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a package look as if it weren't installed."""
    from sarathi_tune.runtime.kernels import availability

    real = availability.find_spec

    def hide_package(package: str) -> None:
        monkeypatch.setattr(availability, "find_spec", lambda name: None if name == package else real(name))

    return hide_package


def test_a_config_without_weights_gets_random_ones_by_seed() -> None:
    config = ModelConfig("tiny", "llama", 64, 32, 48, 2, 2, 1, 16, 128)
    plan = StepPlan((chunk(request_of([3, 4, 5], [0]), 0, 3),))
    logits = [Runner.build(ModelSource(config), num_pages=4, seed=seed).logits(plan) for seed in (1, 1, 2)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
