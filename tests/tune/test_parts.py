"""The loop's own time, and exactly the shapes that were asked for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.config.presets import resolve_model
from sarathi_tune.config.run import DeviceConfig
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.errors import OutOfMemoryError, UsageError
from sarathi_tune.measure.shapes import parse_shape
from sarathi_tune.report.progress import SilentUi
from sarathi_tune.tune import predicting
from sarathi_tune.tune.machine import open_machine
from sarathi_tune.tune.measuring import time_shapes
from sarathi_tune.tune.predicting import loop_overhead_ms
from tests.tune.tiny import CONTEXT, tiny_model

CPU = DeviceConfig(device="cpu", threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.mark.parametrize(("budget", "max_model_len"), [(2048, 4096), (4, 4096), (2048, 8)])
def test_the_loop_is_timed_on_full_decode_batches(
    budget: int, max_model_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most steps hold all sequences, whatever the budget is and however short the context; and they take time."""
    sizes = []

    def execute(_device: object, plan: StepPlan) -> list[int]:
        sizes.append(len(plan))
        return [0 for piece in plan if piece.samples]

    monkeypatch.setattr(predicting._NoDevice, "execute", execute)
    config = EngineConfig(token_budget=budget, max_num_seqs=4, num_pages=512, max_model_len=max_model_len)
    assert 0.0 < loop_overhead_ms(config) < 100.0
    assert sizes.count(4) > len(sizes) / 2
    assert len(sizes) == min(200, max_model_len - 1)


def test_exactly_the_shapes_asked_for_are_timed(model: str) -> None:
    shapes = tuple(map(parse_shape, ("4x64", "32@0", "4x64+28@64")))
    profile = time_shapes(resolve_model(model), shapes, repeats=3, steps=CPU, seed=0, ui=SilentUi())
    assert {str(sample.shape): len(sample.times_ms) for sample in profile.samples} == dict.fromkeys(map(str, shapes), 3)
    assert profile.source == "sarathi-tune profile"
    assert profile.model["serve_name"] == model
    assert profile.engine["threads"] == 1
    # Four decodes of 64 tokens in four pages each, and a chunk that ends at 92.
    assert profile.engine["num_pages"] == 4 * 4 + 6


def test_a_shape_beyond_the_context_is_refused_before_anything_is_loaded(model: str) -> None:
    for shape in (f"1x{CONTEXT + 1}", f"{CONTEXT}@1"):
        with pytest.raises(UsageError, match="needs 4,097 tokens of context and tiny has 4,096"):
            time_shapes(resolve_model(model), (parse_shape(shape),), repeats=1, steps=CPU, seed=0, ui=SilentUi())


def test_more_cache_than_memory(model: str) -> None:
    with pytest.raises(OutOfMemoryError, match="use at most"):
        open_machine(resolve_model(model), CPU, num_pages=1 << 40, seed=0, max_num_seqs=4)


def test_threads_beyond_the_machine_are_told(model: str) -> None:
    machine = open_machine(
        resolve_model(model), DeviceConfig(device="cpu", threads=64), num_pages=8, seed=0, max_num_seqs=4
    )
    assert machine.gpu is None
    assert machine.runner.description["threads"] == 64
    assert any("64" in notice.cause for notice in machine.notices)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_model_without_weights_file(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no model\.safetensors"):
        open_machine(resolve_model(str(directory)), CPU, num_pages=8, seed=0, max_num_seqs=4)
