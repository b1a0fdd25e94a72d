"""Attention over the paged cache: decodes (bound by reading keys and values), chunks behind a prefix, both together."""

from collections.abc import Iterator
from dataclasses import replace

from sarathi_tune.measure.bench import fill_kv
from sarathi_tune.measure.kernels.figure import KernelFigure, bounded
from sarathi_tune.measure.kernels.setting import Setting, planning_bench
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.runtime.attention.base import Attention, AttentionShape
from sarathi_tune.runtime.attention.pick import AttentionChoice, pick_attention
from sarathi_tune.runtime.batch import build_batch
from sarathi_tune.runtime.kvcache import KVCache

SHAPES = (
    *(Shape(1, 128), Shape(1, 1024), Shape(8, 1024), Shape(32, 128), Shape(32, 1024)),
    *(Shape(chunk=512), Shape(chunk=512, prefix=1024), Shape(chunk=2048)),
    *(Shape(8, 1024, 504), Shape(8, 1024, 504, 1024)),
)


def pick(setting: Setting) -> AttentionChoice:
    """The back end that the engine would take."""
    shape = AttentionShape.of(setting.config)
    return pick_attention(shape, setting.device, setting.dtype, setting.page_tokens, setting.attention)


def attention_figures(setting: Setting) -> Iterator[KernelFigure]:
    """Each shape, per layer."""
    attention = pick(setting).attention
    for shape in SHAPES:
        if max(shape.context, shape.prefix + shape.chunk) > setting.config.max_model_len:
            yield KernelFigure("attention", str(shape), shape.num_tokens, skipped="longer than the model's context")
            continue
        yield _figure(setting, attention, shape)


def _figure(setting: Setting, attention: Attention, shape: Shape) -> KernelFigure:
    config = setting.config
    num_pages = shape.num_pages(setting.page_tokens)
    layer_bytes = num_pages * setting.page_tokens * config.kv_bytes_per_token // config.num_layers
    layers = setting.copies(layer_bytes, config.num_layers)
    cache = KVCache(replace(config, num_layers=layers), num_pages, setting.page_tokens, setting.device, setting.dtype)
    fill_kv(cache.layers, setting.seed)
    bench = planning_bench(num_pages, setting)
    batch = build_batch(bench.make_plan(shape), cache, setting.device)
    group = config.num_heads // config.num_kv_heads
    # As the engine's rotary kernel leaves the queries: those of a key head one behind the other.
    query = setting.random(config.num_kv_heads, shape.num_tokens, group, config.head_dim).permute(1, 0, 2, 3)

    def work() -> None:
        for layer in cache.layers:
            attention(query, layer, batch)

    return bounded(
        "attention",
        str(shape),
        shape.num_tokens,
        setting.time_ms(work, layers),
        _work(setting, shape),
        setting.ceilings,
    )


def _work(setting: Setting, shape: Shape) -> tuple[float, float]:
    """(bytes, flops) of a layer: every key and value is read once, every query meets the keys that it sees twice."""
    config = setting.config
    window = config.sliding_window or max(1, shape.context, shape.prefix + shape.chunk)
    decode_keys = shape.decodes * min(shape.context, window)
    chunk_keys = sum(min(shape.prefix + row + 1, window) for row in range(shape.chunk))
    keys_read = decode_keys + (min(shape.prefix + shape.chunk, window + shape.chunk) if shape.chunk else 0)
    itemsize = setting.dtype.itemsize
    num_bytes = keys_read * 2 * config.num_kv_heads * config.head_dim * itemsize
    num_bytes += 2 * shape.num_tokens * config.num_heads * config.head_dim * itemsize
    return num_bytes, 4.0 * config.num_heads * config.head_dim * (decode_keys + chunk_keys)
