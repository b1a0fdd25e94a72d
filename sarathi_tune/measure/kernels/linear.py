"""The linear layers of a decoder layer over token counts around GEMM tiles, and the head over sampled rows.

Each matrix is what the runner builds from the model's weights: with tiles of our own where they are faster and there is
memory for them, with the product of gate and up behind their matmul, and with as many rows as a step has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.measure.kernels.figure import KernelFigure, bounded
from sarathi_tune.measure.kernels.setting import Setting
from sarathi_tune.runtime.layers.elementwise import pick_elementwise
from sarathi_tune.runtime.layers.linear import Gated, Linear, LinearChoice, TiledGated, TiledLinear, pick_linear
from sarathi_tune.runtime.memory import resident_weight_bytes
from sarathi_tune.runtime.weights import available_bytes

#: Decode batches, then the neighbours of tile edges: one token more can cost a tile more.
TOKENS = (1, 8, 32, 64, 128, 255, 256, 257, 511, 512, 513, 1024, 2048)
#: The head is computed for sampled rows only: one per decode, and one per prompt's last chunk.
HEAD_TOKENS = (1, 8, 32)

#: Copies of a matrix: as many as it takes until even a small one comes from memory.
MOST_LAYERS = 320

Layer = Linear | Gated


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of the four matrices of a layer; q, k and v are one, and so are gate and up."""
    heads = config.num_heads * config.head_dim
    return {
        "qkv": (config.hidden_size, heads + 2 * config.num_kv_heads * config.head_dim),
        "output": (heads, config.hidden_size),
        "gate-up": (config.hidden_size, 2 * config.intermediate_size),
        "down": (config.intermediate_size, config.hidden_size),
    }


def pick(setting: Setting) -> LinearChoice:
    """The linear layers that the engine would take."""
    config = setting.config
    weight_bytes = resident_weight_bytes(config)
    free_bytes = available_bytes(setting.device) - weight_bytes
    return pick_linear(setting.device, setting.dtype).with_tiles(config.most_inputs, weight_bytes, free_bytes)


def linear_figures(setting: Setting) -> Iterator[KernelFigure]:
    """Every matrix at every token count."""
    for name, size in matrices(setting.config).items():
        yield from _matrix(setting, name, size, TOKENS)
    yield from _matrix(setting, "head", (setting.config.hidden_size, setting.config.vocab_size), HEAD_TOKENS)


def _matrix(setting: Setting, name: str, size: tuple[int, int], tokens: tuple[int, ...]) -> Iterator[KernelFigure]:
    width, out = size
    choice = pick(setting)
    itemsize = setting.dtype.itemsize
    weight = setting.random(out, width)
    num_layers = setting.copies(out * width * itemsize, MOST_LAYERS)
    layers = [_build(setting, choice, name, weight.clone()) for _ in range(num_layers)]
    results = out // 2 if name == "gate-up" else out
    for count in tokens:
        num_rows = choice.padded_rows(count)
        work = partial(_apply, layers, setting.random(num_rows, width))
        num_bytes = (out * width + count * (width + results)) * itemsize
        figure = bounded(
            "linear",
            name,
            count,
            setting.time_ms(work, len(layers)),
            (num_bytes, 2.0 * count * width * out),
            setting.ceilings,
        )
        yield replace(figure, kernel=_kernel(choice, layers[0], num_rows))


def _build(setting: Setting, choice: LinearChoice, name: str, weight: torch.Tensor) -> Layer:
    if name == "gate-up":
        return choice.build_gated(weight, None, pick_elementwise(setting.device, setting.dtype).ops)
    return choice.build(weight, is_head=name == "head")


def _kernel(choice: LinearChoice, layer: Layer, num_rows: int) -> str:
    """What computes the layer: `tiles` of our own, `oneDNN` over packed weights, or `torch`."""
    if isinstance(layer, TiledLinear | TiledGated) and num_rows <= layer.most_rows:
        return "tiles"
    return "oneDNN" if choice.packed else "torch"


def _apply(layers: Sequence[Layer], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)
