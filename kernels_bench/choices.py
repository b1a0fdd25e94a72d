"""`python -m kernels_bench.choices`: the alternatives that the CPU's kernels were chosen from, side by side.

    python -m kernels_bench.choices [--model NAME|DIR] [--only attention,linear,rows,last-layer] [--threads N]

attention     of chunks and decodes, per layer: kernels of our own by AMX, by the bfloat16 dot product, without them
              (chunks: oneDNN's matmuls with a fused softmax), and torch's own
linear        the four matrices of a layer, gate and up with their product: tiles of our own by AMX and by the dot
              product, oneDNN over packed weights, torch over plain ones
rows          oneDNN at a number of rows that it meets for the first time, and at 257 rows beside 264
last-layer    a prefill step whose last layer computes all rows, or only those that are sampled from

Alternatives take turns, so that a machine that slows down slows them all. Milliseconds are medians; the last line is
the document as JSON. Decisions 050 to 055 quote it.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.presets import resolve_model
from sarathi_tune.config.run import DEFAULT_MODEL
from sarathi_tune.config.source import ModelSource
from sarathi_tune.engine.pages import PagePool
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.machine.cpu import describe_cpu
from sarathi_tune.measure.bench import Bench, fill_kv
from sarathi_tune.measure.kernels.linear import matrices
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.runtime.attention.base import Attention, AttentionShape
from sarathi_tune.runtime.attention.cpu import CpuAttention
from sarathi_tune.runtime.attention.sdpa import SdpaAttention
from sarathi_tune.runtime.batch import RaggedBatch, build_batch, sampled_rows
from sarathi_tune.runtime.kernels.availability import amx_obstacle, has_bfloat16_dot
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.layers.elementwise import pick_elementwise
from sarathi_tune.runtime.layers.linear import ALL_ROWS, LinearChoice
from sarathi_tune.runtime.model import Model
from sarathi_tune.runtime.runner import RunnerOptions, load_model
from sarathi_tune.stats import median

GROUPS = ("attention", "linear", "rows", "last-layer")
CPU, DTYPE, PAGE_TOKENS = torch.device("cpu"), torch.bfloat16, 16
#: Layers that are gone through, so that neither weights nor keys stay in the cache.
COPIES = 16
ATTENTION = (
    *(Shape(chunk=512), Shape(chunk=512, prefix=1024), Shape(chunk=2048)),
    *(Shape(1, 1024), Shape(8, 1024), Shape(32, 1024)),
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
#: Numbers of rows that nobody has met before: warming up ends at 512.
NEW_ROWS = range(1025, 1065, 2)
STEPS = (Shape(chunk=256), Shape(chunk=512), Shape(8, 512, 504))

Work = Callable[[], object]
Layer = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Figure:
    """What was timed, and the milliseconds of each alternative."""

    group: str
    name: str
    ms: Mapping[str, float]


def attention(config: ModelConfig, seconds: float) -> Iterator[Figure]:
    """Chunks and decodes, per layer."""
    shape = AttentionShape.of(config)
    backends: dict[str, Attention] = {
        "no dot": CpuAttention(shape, PAGE_TOKENS, tiles=False),
        "torch": SdpaAttention(shape),
    }
    if has_bfloat16_dot():
        backends = {"dot": CpuAttention(shape, PAGE_TOKENS, tiles=True), **backends}
    if amx_obstacle() is None:
        backends = {"amx": CpuAttention(shape, PAGE_TOKENS, tiles=True, amx=True), **backends}
    for step in ATTENTION:
        if max(step.context, step.prefix + step.chunk) > config.max_model_len:
            continue
        num_pages = step.num_pages(PAGE_TOKENS)
        cache = KVCache(replace(config, num_layers=COPIES), num_pages, PAGE_TOKENS, CPU, DTYPE)
        fill_kv(cache.layers)
        batch = build_batch(_plan(config, step), cache, CPU)
        query = _random(config.num_kv_heads, step.num_tokens, shape.group, config.head_dim).permute(1, 0, 2, 3)
        works = {name: partial(_attend, backend, cache, query, batch) for name, backend in backends.items()}
        yield Figure("attention", str(step), _in_turns(works, seconds, COPIES))


def linear(config: ModelConfig, seconds: float) -> Iterator[Figure]:
    """All matrices of a layer, per layer."""
    choices = {"oneDNN": LinearChoice(True, "oneDNN", ""), "torch": LinearChoice(False, "torch", "")}
    if has_bfloat16_dot():
        choices = {"tiles": LinearChoice(True, "tiles", "", ALL_ROWS), **choices}
    if amx_obstacle() is None:
        choices = {"amx": LinearChoice(True, "amx", "", ALL_ROWS, amx=True), **choices}
    stacks = {name: [_layer(config, choice) for _ in range(COPIES)] for name, choice in choices.items()}
    for count in ROWS:
        works = {name: partial(_multiply, stack, _inputs(config, count)) for name, stack in stacks.items()}
        yield Figure("linear", f"{count:,} rows", _in_turns(works, seconds, COPIES))


def rows(config: ModelConfig, seconds: float) -> Iterator[Figure]:
    """oneDNN's packed matmuls of one layer."""
    stack = [_layer(config, LinearChoice(True, "oneDNN", ""))]
    first: list[float] = []
    again: list[float] = []
    for count in NEW_ROWS:
        work = partial(_multiply, stack, _inputs(config, count))
        for times in (first, again):
            times.append(_timed(work))
    name = f"{NEW_ROWS[0]:,} to {NEW_ROWS[-1]:,} rows"
    yield Figure("rows", name, {"first call": median(first), "second call": median(again)})
    works = {f"{count} rows": partial(_multiply, stack, _inputs(config, count)) for count in (256, 257, 264)}
    yield Figure("rows", "beside each other", _in_turns(works, seconds))


def last_layer(source: ModelSource, seconds: float) -> Iterator[Figure]:
    """Whole steps."""
    steps = [step for step in STEPS if step.chunk + step.prefix <= source.config.max_model_len]
    loaded = load_model(source, RunnerOptions(max(step.num_pages(PAGE_TOKENS) for step in steps), PAGE_TOKENS, "cpu"))
    fill_kv(loaded.cache.layers)
    for step in steps:
        batch = build_batch(_plan(loaded.config, step), loaded.cache, CPU)
        run = partial(_compute, loaded.model, loaded.cache, batch)
        works = {"all rows": partial(run, is_cut=False), "sampled rows": partial(run, is_cut=True)}
        yield Figure("last-layer", str(step), _in_turns(works, seconds))


def measure(source: ModelSource, groups: tuple[str, ...], seconds: float) -> Iterator[Figure]:
    """The figures of some groups, `seconds` for each alternative."""
    config = replace(source.config, dtype="bfloat16")
    with torch.inference_mode():
        for group in groups:
            match group:
                case "attention":
                    yield from attention(config, seconds)
                case "linear":
                    yield from linear(config, seconds)
                case "rows":
                    yield from rows(config, seconds)
                case _:
                    yield from last_layer(replace(source, config=config), seconds)


def _in_turns(works: Mapping[str, Work], seconds: float, calls: int = 1) -> dict[str, float]:
    """Median milliseconds of each work over `calls`, three runs at least; the first one is dropped."""
    times: dict[str, list[float]] = {name: [] for name in works}
    end_s = time.perf_counter() + seconds * len(works)
    for turn in itertools.count():
        if turn > 3 and time.perf_counter() > end_s:
            break
        for name, work in works.items():
            times[name].append(_timed(work) / calls)
    return {name: median(values[1:]) for name, values in times.items()}


def _timed(work: Work) -> float:
    start_s = time.perf_counter()
    work()
    return (time.perf_counter() - start_s) * 1e3


def _attend(backend: Attention, cache: KVCache, query: torch.Tensor, batch: RaggedBatch) -> None:
    for layer in cache.layers:
        backend(query, layer, batch)


def _multiply(stack: list[Layer], inputs: Mapping[str, torch.Tensor]) -> None:
    for layer in stack:
        for name, matrix in layer.items():
            matrix(inputs[name])


def _compute(model: Model, cache: KVCache, batch: RaggedBatch, *, is_cut: bool) -> None:
    """`Model.compute` and `finish`, which leave rows out whenever they can."""
    hidden = model.embed(batch)
    for index, (layer, layer_cache) in enumerate(zip(model.layers, cache.layers, strict=True)):
        kept = sampled_rows(batch) if is_cut and index == len(model.layers) - 1 else None
        hidden = layer(hidden, batch, layer_cache, model.rotary, model.attention, model.ops, kept)
    model.finish(hidden if is_cut else hidden.index_select(0, batch.sample_rows))


def _layer(config: ModelConfig, choice: LinearChoice) -> Layer:
    ops = pick_elementwise(CPU, DTYPE).ops
    return {
        name: choice.build_gated(_random(out, width), None, ops)
        if name == "gate-up"
        else choice.build(_random(out, width))
        for name, (width, out) in matrices(config).items()
    }


def _inputs(config: ModelConfig, count: int) -> dict[str, torch.Tensor]:
    return {name: _random(count, width) for name, (width, _) in matrices(config).items()}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DTYPE)


def _plan(config: ModelConfig, step: Shape) -> StepPlan:
    """The step over requests that own pages from the first one on."""
    pool = PagePool(step.num_pages(PAGE_TOKENS), PAGE_TOKENS)
    return Bench(_Nobody(), pool, vocab_size=config.vocab_size).make_plan(step)


class _Nobody:
    def execute(self, plan: StepPlan) -> list[int]:  # noqa: ARG002
        raise AssertionError("plans are made, not computed")


def main() -> None:
    """Parse the flags, measure, print a line per figure and the document."""
    parser = argparse.ArgumentParser(description="The alternatives that the CPU's kernels were chosen from.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--only", default=",".join(GROUPS), help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--threads", type=int, default=describe_cpu().threads)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each alternative at each size")
    asked = parser.parse_args()
    groups = tuple(asked.only.split(","))
    if not set(groups) <= set(GROUPS):
        parser.error(f"--only takes some of {', '.join(GROUPS)}")
    torch.set_num_threads(asked.threads)
    figures = []
    for figure in measure(resolve_model(asked.model), groups, asked.seconds):
        figures.append(asdict(figure))
        print(f"{figure.group:<11}{figure.name:<22}" + "   ".join(f"{k} {v:.3f} ms" for k, v in figure.ms.items()))
    print(json.dumps({"model": asked.model, "threads": asked.threads, "figures": figures}))


if __name__ == "__main__":
    main()
