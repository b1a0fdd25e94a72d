"""The Triton kernel: in Triton's interpreter against the reference, and compiled (not run) for real GPUs."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sarathi_tune.runtime.attention.triton_paged import (
    Tile,
    chunk_tile,
    decode_tile,
    num_splits,
    triton_obstacle,
)
from tests.runtime.triton_cases import CASES

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

#: Rounding of the outputs, which are of order 1, and of the weights before they are multiplied with the values.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (pip install 'sarathi-tune[gpu]')"
)


def run_module(name: str, environment: dict[str, str]) -> str:
    run = subprocess.run(
        [sys.executable, "-m", name], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    """The largest difference of every case, from one process."""
    differences: dict[str, float] = json.loads(
        run_module("tests.runtime.triton_cases", {**os.environ, "TRITON_INTERPRET": "1"})
    )
    return differences


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_what_the_reference_does(interpreted: dict[str, float], name: str) -> None:
    assert interpreted[name] <= TOLERANCE[CASES[name].dtype]


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_for_gpus_and_fit_into_their_shared_memory(tmp_path: Path) -> None:
    """What the interpreter doesn't check: types, tensor cores, shared memory. Triton brings its own assembler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kernels = json.loads(
        run_module("tests.runtime.triton_compiled", {**environment, "TRITON_CACHE_DIR": str(tmp_path)})
    )
    assert {kernel["capability"] for kernel in kernels} == {80, 90}
    for kernel in kernels:
        # The least that a block may have: 99 KiB on compute capability 8.6 and 8.9 (CUDA programming guide, table of
        # technical specifications).
        assert kernel["shared_bytes"] <= 99 << 10, kernel
        assert kernel["uses_tensor_cores"] or kernel["name"] == "combine", kernel


def test_a_cpu_without_the_interpreter_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    obstacle = triton_obstacle(CPU, torch.float32)
    assert obstacle is not None
    assert "CUDA" in obstacle or "not installed" in obstacle


def test_a_missing_package_is_an_obstacle_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sarathi_tune.runtime.attention.triton_paged.find_spec", lambda _: None)
    obstacle = triton_obstacle(torch.device("cuda"), torch.bfloat16)
    assert obstacle is not None
    assert "pip install 'sarathi-tune[gpu]'" in obstacle


def test_other_dtypes_are_an_obstacle() -> None:
    assert triton_obstacle(torch.device("cuda"), torch.float64) is not None


def test_an_old_gpu_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sarathi_tune.runtime.attention.triton_paged.find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    obstacle = triton_obstacle(torch.device("cuda"), torch.float16)
    assert obstacle is not None
    assert "8.0" in obstacle
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert triton_obstacle(torch.device("cuda"), torch.float16) is None


def test_the_module_loads_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import sarathi_tune.runtime.attention.triton_paged"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "keys", "processors", "splits"),
    [
        (32, 8, 1024, 132, 2),  # 256 programs for 264 that are wanted
        (1, 8, 1024, 132, 4),  # 33 parts are wanted; 1024 keys make 4
        (1, 8, 32_768, 132, 32),  # 33 are wanted, 32 can be added up
        (256, 8, 32_768, 132, 1),  # full without
        (1, 1, 1, 132, 1),
    ],
)
def test_decodes_are_split_as_far_as_the_device_needs_it(
    sequences: int, kv_heads: int, keys: int, processors: int, splits: int
) -> None:
    assert num_splits(sequences, kv_heads, keys, processors) == splits


@pytest.mark.parametrize("group", [1, 3, 4, 8, 48])
def test_a_tile_holds_a_whole_group(group: int) -> None:
    for block_dim in (64, 128, 256):
        for itemsize in (2, 4):
            assert decode_tile(group, block_dim, itemsize).rows >= group
            assert chunk_tile(group, block_dim, itemsize).rows >= group


def test_tiles_of_a_usual_model() -> None:
    assert decode_tile(4, 128, 2) == Tile(rows=16, keys=64, num_warps=4)
    assert chunk_tile(4, 128, 2) == Tile(rows=128, keys=64, num_warps=8)
