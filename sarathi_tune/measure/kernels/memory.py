"""What only moves memory: rotating and writing keys and values into the cache, and choosing tokens from logits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from sarathi_tune.engine.plan import Slice
from sarathi_tune.engine.request import Request, Sampling
from sarathi_tune.measure.kernels.figure import KernelFigure, bounded
from sarathi_tune.measure.kernels.setting import Setting, planning_bench
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.runtime.batch import RaggedBatch, build_batch
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.layers.elementwise import Elementwise, HeadShape, pick_elementwise
from sarathi_tune.runtime.layers.rotary import RotaryTable, build_rotary_table
from sarathi_tune.runtime.sampling import sample_tokens

_WRITES = (Shape(8, 128), Shape(32, 128), Shape(chunk=512))
_ROWS = 32
_LAYERS = 8


def write_figures(setting: Setting) -> Iterator[KernelFigure]:
    """Rotary embedding and the write into the cache, per layer: fused rows in, queries, keys and values out."""
    config = replace(setting.config, num_layers=_LAYERS)
    ops = pick_elementwise(setting.device, setting.dtype).ops
    norm = setting.random(config.head_dim) if config.qk_norm else None
    heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, norm, norm)
    for shape in _WRITES:
        num_pages = shape.num_pages(setting.page_tokens)
        cache = KVCache(config, num_pages, setting.page_tokens, setting.device, setting.dtype)
        table = build_rotary_table(config, num_pages * setting.page_tokens, setting.device)
        bench = planning_bench(num_pages, setting)
        batch = build_batch(bench.make_plan(shape), cache, setting.device)
        rows = setting.random(shape.num_tokens, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        work = partial(_write, ops, (rows, heads, table, batch), cache)
        num_bytes = 2.0 * rows.numel() * setting.dtype.itemsize
        times = setting.time_ms(work, _LAYERS)
        yield bounded("kv-write", str(shape), shape.num_tokens, times, (num_bytes, 0.0), setting.ceilings)


def _write(
    ops: Elementwise, operands: tuple[torch.Tensor, HeadShape, RotaryTable, RaggedBatch], cache: KVCache
) -> None:
    for layer in cache.layers:
        ops.rotate_and_store(*operands, layer)


def sampling_figures(setting: Setting) -> Iterator[KernelFigure]:
    """Greedy and with temperature, over a batch of logits."""
    logits = setting.random(_ROWS, setting.config.vocab_size)
    num_bytes = float(logits.numel() * setting.dtype.itemsize)
    for name, temperature in (("greedy", 0.0), ("temperature", 0.8)):
        slices = [
            Slice(Request(row, [1], 1, sampling=Sampling(temperature, row)), 0, 1, is_decode=True, samples=True)
            for row in range(_ROWS)
        ]
        times = setting.time_ms(partial(sample_tokens, logits, slices))
        yield bounded("sampling", f"{name} {_ROWS} rows", _ROWS, times, (num_bytes, 0.0), setting.ceilings)
