"""The bench on the real runner, with a model of a few thousand weights."""

import pytest
import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.source import ModelSource
from sarathi_tune.errors import OutOfMemoryError
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.design import design_for_shapes
from sarathi_tune.measure.rounds import measure_all
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.runtime.runner import Runner

TINY = ModelConfig(
    name="tiny",
    family="llama",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=512,
    dtype="float32",
)


@pytest.fixture(scope="module")
def bench() -> Bench:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    runner = Runner.build(ModelSource(TINY, None), num_pages=32, page_tokens=16, device="cpu")
    return Bench.build(runner, vocab_size=TINY.vocab_size)


@pytest.mark.parametrize(
    "shape", [Shape(4, 64), Shape(chunk=64, prefix=32), Shape(4, 64, 40, 33), Shape(1, 1)], ids=str
)
def test_every_kind_of_step_runs(bench: Bench, shape: Shape) -> None:
    assert 0 < bench.time_shape(shape) < 10_000


def test_a_whole_measurement_with_a_shape_that_does_not_fit(bench: Bench) -> None:
    shapes = (Shape(4, 64), Shape(chunk=100), Shape(9, 64))
    fits, also_fits, too_large = measure_all(bench, design_for_shapes(shapes, repeats=2)).samples
    assert len(fits.times_ms) == len(also_fits.times_ms) == 2
    assert too_large.missing == "9x64 needs 36 pages of KV cache and there are 32."
    with pytest.raises(OutOfMemoryError):
        bench.time_shape(Shape(9, 64))
