"""The kernel benchmarks on a tiny model: the work they count is right, and every group has its figures."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.run import DeviceConfig
from sarathi_tune.measure.kernels.attention import SHAPES
from sarathi_tune.measure.kernels.figure import GROUPS
from sarathi_tune.measure.kernels.linear import HEAD_TOKENS, TOKENS, matrices
from sarathi_tune.measure.kernels.suite import NUM_FIGURES, measure_kernels
from sarathi_tune.runtime.kernels.availability import has_bfloat16_dot
from sarathi_tune.runtime.layers.linear import ALL_ROWS, LinearChoice

ROOT = Path(__file__).parent.parent.parent.parent

TINY = ModelConfig(
    name="tiny",
    family="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=1040,
    dtype="float32",
)


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


def test_matrices_of_a_layer() -> None:
    # q: 64 rows, k and v: 32 each; gate and up: 96 each
    assert matrices(TINY) == {"qkv": (64, 128), "output": (64, 64), "gate-up": (64, 192), "down": (96, 64)}


def test_every_group_has_its_figures() -> None:
    seen = []
    report = measure_kernels(
        TINY, DeviceConfig(device="cpu", threads=1), GROUPS, seconds=1e-3, ceiling_seconds=0.05, progress=seen.append
    )
    assert tuple(seen) == report.figures
    assert len(report.of("attention")) == len(SHAPES)
    assert len(report.of("linear")) == 4 * len(TOKENS) + len(HEAD_TOKENS)
    assert len(report.figures) == NUM_FIGURES
    kernels = {figure.kernel for figure in report.of("linear")}
    assert kernels == {"torch"}, "float32 weights aren't packed"
    assert all(figure["kernel"] == "torch" for figure in report.as_dict()["figures"] if figure["group"] == "linear")
    skipped = {figure.name: figure.skipped for figure in report.figures if figure.skipped}
    assert set(skipped) == {"512@1024", "2048@0", "8x1024+504@1024", "hidden states"}
    assert all(figure.median_ms for figure in report.figures if not figure.skipped)
    json.dumps(report.as_dict())


@pytest.mark.parametrize("rows", [32, ALL_ROWS])
def test_each_size_says_which_kernel_computes_it(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_bfloat16_dot():
        pytest.skip("this CPU has no bfloat16 dot product")
    choice = LinearChoice(packed=True, name="x", reason="", tiled_rows=rows)
    monkeypatch.setattr("sarathi_tune.measure.kernels.linear.pick", lambda _: choice)
    tiny, steps = replace(TINY, dtype="bfloat16"), DeviceConfig(device="cpu", threads=1)
    figures = measure_kernels(tiny, steps, ("linear",), seconds=1e-3, ceiling_seconds=0.05).figures
    for figure in figures:
        assert figure.kernel == ("tiles" if figure.tokens <= rows and figure.name != "head" else "oneDNN")


def test_bytes_and_flops_of_a_decode_batch() -> None:
    report = measure_kernels(
        TINY, DeviceConfig(device="cpu", threads=1), ("attention",), seconds=1e-3, ceiling_seconds=0.05
    )
    figure = next(figure for figure in report.figures if figure.name == "8x1024")
    # K and V of 2 heads of 16 float32; queries and outputs of 4 heads; two products of 2 FLOP each per key and query
    assert figure.num_bytes == 8 * 1024 * 2 * 2 * 16 * 4 + 2 * 8 * 4 * 16 * 4
    assert figure.num_flops == 8 * 1024 * 4 * 16 * 4


@pytest.mark.slow
def test_all_reduce_runs_in_two_processes_and_only_the_first_one_speaks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "kernels_bench.all_reduce", "--threads", "1", "--quiet"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, "one process reports"
    assert done.stdout.splitlines()[-1] == lines[0], "the document comes last"
    figures = json.loads(lines[0])["figures"]
    assert [figure["tokens"] for figure in figures] == [8, 512]
    # a ring of two moves each tensor once: 512 x 576 bfloat16
    assert figures[1]["bytes"] == 512 * 576 * 2
    assert all(figure["bound"] == "link" and figure["ceiling"] > 0 for figure in figures)
