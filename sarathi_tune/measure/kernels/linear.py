"""The linear layers of a decoder layer over token counts around GEMM tiles, and the head over sampled rows."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.measure.kernels.figure import KernelFigure, bounded
from sarathi_tune.measure.kernels.setting import Setting
from sarathi_tune.runtime.layers.linear import Linear, pick_linear

#: Decode batches, then the neighbours of tile edges: one token more can cost a tile more.
TOKENS = (1, 8, 32, 64, 128, 255, 256, 257, 511, 512, 513, 1024, 2048)
#: The head is computed for sampled rows only: one per decode, and one per prompt's last chunk.
HEAD_TOKENS = (1, 8, 32)


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of the four matrices of a layer; q, k and v are one, and so are gate and up."""
    heads = config.num_heads * config.head_dim
    return {
        "qkv": (config.hidden_size, heads + 2 * config.num_kv_heads * config.head_dim),
        "output": (heads, config.hidden_size),
        "gate-up": (config.hidden_size, 2 * config.intermediate_size),
        "down": (config.intermediate_size, config.hidden_size),
    }


def linear_figures(setting: Setting) -> Iterator[KernelFigure]:
    """Every matrix at every token count."""
    for name, size in matrices(setting.config).items():
        yield from _matrix(setting, name, size, TOKENS)
    yield from _matrix(setting, "head", (setting.config.hidden_size, setting.config.vocab_size), HEAD_TOKENS)


def _matrix(setting: Setting, name: str, size: tuple[int, int], tokens: tuple[int, ...]) -> Iterator[KernelFigure]:
    width, out = size
    choice = pick_linear(setting.device, setting.dtype)
    itemsize = setting.dtype.itemsize
    weight = setting.random(out, width)
    layers = [choice.build(weight.clone()) for _ in range(setting.copies(out * width * itemsize, 32))]
    for count in tokens:
        work = partial(_apply, layers, setting.random(count, width))
        num_bytes = (out * width + count * (width + out)) * itemsize
        yield bounded(
            "linear",
            name,
            count,
            setting.time_ms(work, len(layers)),
            (num_bytes, 2.0 * count * width * out),
            setting.ceilings,
        )


def _apply(layers: Sequence[Linear], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)
