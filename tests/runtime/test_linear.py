"""Numbers of rows that oneDNN generates code for, and warming them up."""

from dataclasses import dataclass, field

import pytest
import torch

from sarathi_tune.runtime.layers import warming
from sarathi_tune.runtime.layers.decoder import DecoderLayer
from sarathi_tune.runtime.layers.elementwise import HeadShape, TorchElementwise
from sarathi_tune.runtime.layers.linear import ALL_ROWS, FEW_ROWS, LinearChoice, PlainGated, pick_linear
from sarathi_tune.runtime.layers.warming import warm_up_linears

PACKED = LinearChoice(True, "packed", "")


@pytest.mark.parametrize(
    ("num_tokens", "num_rows"), [(1, 1), (31, 31), (32, 32), (33, 40), (40, 40), (257, 264), (512, 512), (2041, 2048)]
)
def test_steps_are_filled_up_to_eights(num_tokens: int, num_rows: int) -> None:
    assert PACKED.padded_rows(num_tokens) == num_rows


def test_unpacked_weights_take_any_number_of_rows() -> None:
    assert [pick_linear(torch.device("cpu"), torch.float32).padded_rows(count) for count in (33, 257)] == [33, 257]


@dataclass
class Recorder:
    """A linear layer that notes what it was applied to."""

    num_outputs: int
    shapes: list[tuple[int, int, bool]] = field(default_factory=list)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        self.shapes.append((*x.shape, residual is not None))
        return torch.zeros(len(x), self.num_outputs)


def recording_layer() -> tuple[DecoderLayer, dict[str, Recorder]]:
    parts = {"qkv": Recorder(24), "output": Recorder(10), "gate_up": Recorder(28), "down": Recorder(10)}
    heads, weight = HeadShape(4, 1, 4, 1e-5), torch.ones(10)
    gated = PlainGated(parts["gate_up"], TorchElementwise())
    layer = DecoderLayer(weight, parts["qkv"], heads, parts["output"], weight, gated, parts["down"], 1e-5)
    return layer, parts


def test_warming_up_meets_every_shape_that_a_step_of_512_tokens_has() -> None:
    layer, parts = recording_layer()
    head = Recorder(50)
    warm_up_linears(layer, head, PACKED, torch.float32)
    rows = [*range(1, 33), *range(40, 513, 8)]
    assert parts["qkv"].shapes == [(count, 10, False) for count in rows]
    assert parts["output"].shapes == [(count, 16, True) for count in rows]
    assert parts["gate_up"].shapes == [(count, 10, False) for count in rows]
    assert parts["down"].shapes == [(count, 14, True) for count in rows]
    assert head.shapes == [(count, 10, False) for count in range(1, 33)]


def test_warming_up_leaves_out_what_tiles_compute() -> None:
    for tiled_rows, rows in ((FEW_ROWS, [*range(40, 513, 8)]), (ALL_ROWS, [])):
        layer, parts = recording_layer()
        head = Recorder(50)
        warm_up_linears(layer, head, LinearChoice(True, "packed", "", tiled_rows), torch.float32)
        assert [count for count, _, _ in parts["qkv"].shapes] == rows
        assert head.shapes == [(count, 10, False) for count in range(1, 33)]


def test_warming_up_ends_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, parts = recording_layer()
    times = iter([0.0, 0.4, 0.9, 1.1])
    monkeypatch.setattr(warming.time, "perf_counter", lambda: next(times))
    warm_up_linears(layer, None, PACKED, torch.float32)
    assert [count for count, _, _ in parts["qkv"].shapes] == [1, 2]
