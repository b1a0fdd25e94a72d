"""Checks the GPU path on a machine that has one: `make gpu-check`, or, where nothing is
installed, `python -m scripts.gpu_check` in the repository.

Needs torch, triton and what the package itself needs; no network. In this order:

1. every attention back end against the float32 reference, on ragged batches whose unused slots are NaN;
2. replayed decode graphs against the model run kernel by kernel, at other lengths than they were captured with;
3. decode, prefill and hybrid steps of a model beside the memory bandwidth and the GEMM rate measured here;
4. the main job.

Writes results/<machine>/gpu-check.json and gpu-check.md. Exit codes: 0 all is right, 1 something is wrong, 4 no GPU.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sarathi_tune.config.model import BYTES_PER_ELEMENT, ModelConfig
from sarathi_tune.config.presets import resolve_model
from sarathi_tune.engine.plan import Slice, StepPlan
from sarathi_tune.engine.request import Request
from sarathi_tune.errors import OutOfMemoryError, UsageError
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.ceilings import Ceilings, measure_ceilings
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.runtime.attention.base import AttentionShape
from sarathi_tune.runtime.attention.pick import pick_attention
from sarathi_tune.runtime.attention.reference import ReferenceAttention
from sarathi_tune.runtime.batch import build_batch
from sarathi_tune.runtime.graphs import GraphedStep, Step, graph_obstacle
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.layers.elementwise import TorchElementwise
from sarathi_tune.runtime.layers.linear import pick_linear
from sarathi_tune.runtime.model import build_model
from sarathi_tune.runtime.weights import TORCH_DTYPES, random_weights

#: As in the README: the GPU can't be measured where there is none.
EXIT_WRONG, EXIT_NO_GPU = 1, 4
NO_CUDA = "There is no CUDA device that torch can use here, so nothing was checked: run this on a machine with a GPU."

#: Exit codes of the main job that are answers: met, missed, infeasible, inconclusive.
ANSWERS = (0, 1, 3, 4)

BACK_ENDS = ("flash", "triton", "sdpa")
#: Of flash-attn's block table (256 and multiples) and everybody's default.
PAGE_SIZES = (16, 256)
#: Heads and windows of Llama-3-8B, SmolLM2, a multi-query model with a sliding window.
SHAPES = (
    AttentionShape(32, 8, 128, None),
    AttentionShape(9, 3, 64, None),
    AttentionShape(8, 1, 128, 100),
)
#: (prefix, count) of each slice: decodes around page borders, chunks with and without a prefix, a long decode.
LENGTHS = ((0, 1), (14, 1), (15, 1), (16, 1), (4999, 1), (33, 200), (0, 17), (1000, 130), (255, 1))
#: Largest difference from the reference on outputs of order 1: rounding of the output and of the softmax weights.
TOLERANCES = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-4}

STEPS = (
    Shape(decodes=1, context=1024),
    Shape(decodes=8, context=1024),
    Shape(decodes=32, context=1024),
    Shape(decodes=64, context=1024),
    Shape(decodes=8, context=8000),
    Shape(chunk=512),
    Shape(chunk=2048),
    Shape(chunk=512, prefix=4096),
    Shape(decodes=32, context=1024, chunk=480),
)
NUM_WARM_UPS, NUM_SAMPLES = 3, 9


def step_bytes(config: ModelConfig, shape: Shape) -> int:
    """Bytes that a step must read: every weight but the embedding table (a step reads some rows of it; a tied one is
    read whole as the LM head), and the keys and values of all that its tokens see, once per request."""
    table = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size * BYTES_PER_ELEMENT[config.dtype]
    return config.weight_bytes - table + shape.num_kv_tokens * config.kv_bytes_per_token


def step_flops(config: ModelConfig, shape: Shape) -> int:
    """Floating-point operations of a step's matrix products: two per weight and token (the LM head's for one token per
    request only), four per head element and pair of query and key."""
    table = config.vocab_size * config.hidden_size
    body = config.num_parameters - table * (1 if config.tie_embeddings else 2)
    num_seqs = shape.decodes + (1 if shape.chunk else 0)
    pairs = shape.decodes * shape.context + shape.chunk * shape.prefix + shape.chunk * (shape.chunk + 1) // 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * body * shape.num_tokens + 2 * table * num_seqs + attention


def machine_slug(name: str) -> str:
    """A device name as a directory name: "NVIDIA H100 80GB HBM3" is nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def ragged_plan(
    lengths: Sequence[tuple[int, int]], page_tokens: int, num_pages: int, vocab_size: int, seed: int
) -> StepPlan:
    """Slices of (prefix, count) tokens of requests that own pages in random order."""
    draw = random.Random(seed)
    free = draw.sample(range(num_pages), num_pages)
    slices = []
    for number, (prefix, count) in enumerate(lengths):
        pages = [free.pop() for _ in range(-(-(prefix + count) // page_tokens))]
        ids = draw.choices(range(vocab_size), k=prefix + count)
        request = Request(number, ids, max_output_tokens=1, pages=pages)
        slices.append(Slice(request, prefix, count, is_decode=count == 1, samples=True))
    return StepPlan(tuple(slices))


def pages_for(lengths: Sequence[tuple[int, int]], page_tokens: int) -> int:
    """Pages that such a plan needs, and a few that stay unused."""
    return sum(-(-(prefix + count) // page_tokens) for prefix, count in lengths) + 4


def fill_written(cache: KVCache, plan: StepPlan, generator: torch.Generator) -> None:
    """Random keys and values in every slot that the plan's requests have written, NaN in all others."""
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            tensor.fill_(float("nan"))
            for piece in plan:
                position = torch.arange(piece.stop)
                pages = torch.tensor(piece.request.pages)
                slots = pages[position // cache.page_tokens] * cache.page_tokens + position % cache.page_tokens
                shape = (piece.stop, *tensor.shape[1:])
                tensor[slots.to(tensor.device)] = torch.randn(
                    shape, generator=generator, device=tensor.device, dtype=torch.float32
                ).to(tensor.dtype)


def check_attention(
    name: str,
    shape: AttentionShape,
    dtype_name: str,
    page_tokens: int,
    device: torch.device,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
) -> dict[str, Any]:
    """One back end on one ragged batch: its largest difference from the reference, or why it can't run."""
    dtype = TORCH_DTYPES[dtype_name]  # type: ignore[index]
    window = f", window {shape.window}" if shape.window else ""
    row: dict[str, Any] = {
        "back_end": name,
        "heads": f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim}{window}",
        "dtype": dtype_name,
        "page_tokens": page_tokens,
    }
    try:
        attention = pick_attention(shape, device, dtype, page_tokens, name).attention
    except UsageError as obstacle:
        return {**row, "status": "unavailable", "why": str(obstacle)}
    config = replace(
        resolve_model("llama-3-8b").config,
        num_layers=1,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    num_pages = pages_for(lengths, page_tokens)
    cache = KVCache(config, num_pages, page_tokens, device, dtype)
    plan = ragged_plan(lengths, page_tokens, num_pages, 1000, seed=0)
    generator = torch.Generator(device).manual_seed(0)
    fill_written(cache, plan, generator)
    batch = build_batch(plan, cache, device)
    heads = (shape.num_kv_heads, shape.group, shape.head_dim)
    query = torch.randn((batch.num_tokens, *heads), generator=generator, device=device).to(dtype)
    expected = ReferenceAttention(shape)(query, cache.layers[0], batch).float()
    error = float((attention(query, cache.layers[0], batch).float() - expected).abs().max())
    # A NaN is not smaller than anything, and fails too.
    status = "right" if error <= TOLERANCES[dtype_name] else "wrong"
    return {**row, "status": status, "largest_difference": error, "tolerance": TOLERANCES[dtype_name]}


def check_graphs(device: torch.device) -> dict[str, Any]:
    """Two layers of Llama-3-8B: decode steps replayed at lengths and sizes they weren't captured with."""
    config = replace(resolve_model("llama-3-8b").config, num_layers=2, vocab_size=4096)
    built = build_step(config, 1024, 16, device, "triton")
    obstacle = graph_obstacle(built.attention, device)
    if obstacle is not None:
        return {"status": "wrong", "why": obstacle}
    graphed = GraphedStep.build(built.step, built.cache, device, max_rows=16, max_key_length=2048)
    generator = torch.Generator(device).manual_seed(1)
    rows = []
    for lengths in ((1,), (17, 1000), (2000, 15, 16, 33, 512), (40, 1999) * 8):
        plan = ragged_plan([(keys, 1) for keys in lengths], 16, 1024, config.vocab_size, seed=len(lengths))
        fill_written(built.cache, plan, generator)
        batch = build_batch(plan, built.cache, device)
        expected = built.step(batch, built.cache).float()
        error = float((graphed(batch, built.cache).float() - expected).abs().max() / expected.abs().max())
        rows.append({"decodes": len(lengths), "largest_relative_difference": error})
    # Padding changes the shapes of the matrix products and with it their rounding.
    is_right = all(row["largest_relative_difference"] <= 3e-2 for row in rows)
    coverage = dict(graphed.coverage.as_dict())
    is_right = is_right and coverage["replayed"] == len(rows)
    return {"status": "right" if is_right else "wrong", "sizes": list(graphed.sizes), "steps": rows, **coverage}


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A model of random weights, its cache, and what computes its attention."""

    step: Step
    cache: KVCache
    attention: Any
    attention_name: str


def build_step(
    config: ModelConfig, num_pages: int, page_tokens: int, device: torch.device, attention: str
) -> BuiltStep:
    """A model of this architecture on the device. Raises OutOfMemoryError."""
    dtype = TORCH_DTYPES[config.dtype]
    choice = pick_attention(AttentionShape.of(config), device, dtype, page_tokens, attention)
    weights = random_weights(config, dtype, device, seed=0)
    num_positions = min(config.max_model_len, num_pages * page_tokens)
    linear = pick_linear(device, dtype)
    model = build_model(config, weights, choice.attention, TorchElementwise(), linear, num_positions)
    return BuiltStep(model, KVCache(config, num_pages, page_tokens, device, dtype), choice.attention, choice.name)


class StepRunner:
    """A step as the bench wants it: computed, sampled greedily, waited for."""

    def __init__(self, step: Step, cache: KVCache, device: torch.device) -> None:
        self.description: Mapping[str, Any] = MappingProxyType({"device": str(device)})
        self.cache = cache
        self._step = step
        self._device = device

    def execute(self, plan: StepPlan) -> list[int]:
        """Compute a step."""
        tokens: list[int] = self._step(build_batch(plan, self.cache, self._device), self.cache).argmax(-1).tolist()
        return tokens


def time_steps(
    config: ModelConfig, ceilings: Ceilings, device: torch.device, steps: Sequence[Shape] = STEPS
) -> list[dict[str, Any]]:
    """Median milliseconds of each step, from graphs where there are some, beside what the device could do at most."""
    page_tokens = 16
    num_pages = max(shape.num_pages(page_tokens) for shape in steps)
    try:
        built = build_step(config, num_pages, page_tokens, device, "auto")
        variants: dict[str, Step] = {"eager": built.step}
        if graph_obstacle(built.attention, device) is None:
            max_rows = max(shape.decodes for shape in steps)
            variants["graph"] = GraphedStep.build(
                built.step, built.cache, device, max_rows=max_rows, max_key_length=config.max_model_len
            )
    except OutOfMemoryError as error:
        return [{"status": "missing", "why": str(error)}]
    rows = []
    for name, step in variants.items():
        bench = Bench.build(StepRunner(step, built.cache, device), vocab_size=config.vocab_size)
        for shape in steps:
            if name == "eager" or shape.kind == "decode":
                row = {"launch": name, "attention": built.attention_name}
                rows.append({**row, **time_step(config, ceilings, bench, shape)})
    return rows


def time_step(config: ModelConfig, ceilings: Ceilings, bench: Bench, shape: Shape) -> dict[str, Any]:
    """One row: a step's median, the bytes and operations it takes, and the time that the ceilings allow for them."""
    for _ in range(NUM_WARM_UPS):
        bench.time_shape(shape)
    median_ms = statistics.median(bench.time_shape(shape) for _ in range(NUM_SAMPLES))
    num_bytes, num_flops = step_bytes(config, shape), step_flops(config, shape)
    read_ms = num_bytes / ceilings.read_gb_per_s / 1e6
    compute_ms = num_flops / ceilings.gemm_tflop_per_s / 1e9
    return {
        "status": "measured",
        "shape": str(shape),
        "kind": shape.kind,
        "median_ms": median_ms,
        "gb_per_s": num_bytes / median_ms / 1e6,
        "tflop_per_s": num_flops / median_ms / 1e9,
        "bound_by": "memory" if read_ms >= compute_ms else "arithmetic",
        "share_of_ceiling": max(read_ms, compute_ms) / median_ms,
    }


def run_main_job(slo_itl: str, model: str, directory: Path) -> dict[str, Any]:
    """`sarathi-tune --slo-itl ...` in a process of its own; its document is kept beside this script's."""
    command = [sys.executable, "-m", "sarathi_tune", "--slo-itl", slo_itl, "--model", model]
    document = directory / "main-job.json"
    run = subprocess.run(
        [*command, "--json", str(document), "--out", str(directory / "runs")],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "status": "right" if run.returncode in ANSWERS and document.exists() else "wrong",
        "command": f"sarathi-tune --slo-itl {slo_itl} --model {model}",
        "exit_code": run.returncode,
        "stdout": run.stdout.splitlines()[-40:],
        "stderr": run.stderr.splitlines()[-20:],
    }


def as_markdown(report: Mapping[str, Any]) -> str:
    """The report as tables."""
    ceilings = report["ceilings"]
    lines = [
        f"# GPU check: {report['device']}",
        "",
        f"torch {report['torch']}, CUDA {report['cuda']}; memory read {ceilings['read_gb_per_s']} GB/s, "
        f"GEMM {ceilings['gemm_tflop_per_s']} TFLOP/s ({ceilings['dtype']}).",
        "",
        "## Attention against the reference",
        "",
        *_table(
            ("back end", "heads", "dtype", "page", "status", "largest difference"),
            [
                (
                    row["back_end"],
                    row["heads"],
                    row["dtype"],
                    row["page_tokens"],
                    row["status"],
                    f"{row['largest_difference']:.1e}" if "largest_difference" in row else row["why"],
                )
                for row in report["attention"]
            ],
        ),
        "",
        f"## Decode graphs: {report['graphs']['status']}",
        "",
        *[
            f"- {row['decodes']} decodes: relative difference {row['largest_relative_difference']:.1e}"
            for row in report["graphs"].get("steps", [])
        ],
        "",
        f"## Steps of {report['model']}",
        "",
        *_table(
            ("step", "launch", "attention", "ms", "GB/s", "TFLOP/s", "bound by", "of the ceiling"),
            [_step_cells(row) for row in report["steps"]],
        ),
        "",
    ]
    job = report["main_job"]
    if job is not None:
        lines += [f"## Main job: {job['status']}", "", f"`{job['command']}` ended with {job['exit_code']}.", "", "```"]
        lines += [*job["stdout"], "```", ""]
    return "\n".join(lines)


def _step_cells(row: Mapping[str, Any]) -> tuple[Any, ...]:
    if row["status"] == "missing":
        return (row["why"], "", "", "", "", "", "", "")
    return (
        row["shape"],
        row["launch"],
        row["attention"],
        f"{row['median_ms']:.2f}",
        f"{row['gb_per_s']:.0f}",
        f"{row['tflop_per_s']:.1f}",
        row["bound_by"],
        f"{row['share_of_ceiling']:.0%}",
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def problems(report: Mapping[str, Any]) -> list[str]:
    """What is wrong, one sentence each. A back end that isn't installed is not wrong; none at all beside SDPA is."""
    found = [
        f"{row['back_end']} differs by {row['largest_difference']} ({row['heads']}, {row['dtype']})."
        for row in report["attention"]
        if row["status"] == "wrong"
    ]
    if not any(row["status"] == "right" and row["back_end"] == "triton" for row in report["attention"]):
        found.append("The Triton kernel was not checked: is triton installed?")
    if report["graphs"]["status"] == "wrong":
        found.append("Replayed decode graphs don't compute what the model does.")
    found += [f"Steps were not timed: {row['why']}" for row in report["steps"] if row["status"] == "missing"]
    if report["main_job"] is not None and report["main_job"]["status"] == "wrong":
        found.append(f"The main job ended with {report['main_job']['exit_code']}.")
    return found


def check(model: str, slo_itl: str, out: Path, device: torch.device, with_main_job: bool) -> int:
    """Run all checks, write the report, print the table; returns the exit code."""
    name = torch.cuda.get_device_name(device)
    directory = out / machine_slug(name)
    directory.mkdir(parents=True, exist_ok=True)
    config = resolve_model(model).config
    with torch.inference_mode():
        ceilings = measure_ceilings(str(device), config.dtype)
        attention = [
            check_attention(back_end, shape, dtype, page_tokens, device)
            for back_end in BACK_ENDS
            for page_tokens in PAGE_SIZES
            for shape in SHAPES
            for dtype in TOLERANCES
        ]
        graphs = check_graphs(device)
        steps = time_steps(config, ceilings, device)
    torch.cuda.empty_cache()  # the main job is another process and needs the memory
    report = {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "model": model,
        "ceilings": ceilings.as_dict(),
        "attention": attention,
        "graphs": graphs,
        "steps": steps,
        "main_job": run_main_job(slo_itl, model, directory) if with_main_job else None,
    }
    (directory / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (directory / "gpu-check.md").write_text(as_markdown(report), encoding="utf-8")
    print(as_markdown(report))
    found = problems(report)
    for sentence in found:
        print(sentence, file=sys.stderr)
    return EXIT_WRONG if found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, refuse without a GPU, check."""
    parser = argparse.ArgumentParser(description="Check the GPU path of sarathi-tune on this machine.")
    parser.add_argument("--model", default="llama-3-8b", help="preset to time (random weights)")
    parser.add_argument("--slo-itl", default="50ms", help="objective of the main job")
    parser.add_argument("--out", type=Path, default=Path("results"), help="where results/<machine>/ goes")
    parser.add_argument("--no-main-job", action="store_true", help="leave the main job out")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_CUDA, file=sys.stderr)
        return EXIT_NO_GPU
    return check(options.model, options.slo_itl, options.out, torch.device("cuda", 0), not options.no_main_job)


if __name__ == "__main__":
    sys.exit(main())
