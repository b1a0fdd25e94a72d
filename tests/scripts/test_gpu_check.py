"""The GPU check as far as a CPU goes: arithmetic, inputs, verdicts, tables, and what it says without a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.presets import resolve_model
from sarathi_tune.measure.ceilings import Ceilings
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.runtime.attention.base import AttentionShape
from scripts import gpu_check

CPU = torch.device("cpu")

TINY = ModelConfig(
    name="tiny",
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=128,
    dtype="float32",
)


def report(**changes: Any) -> dict[str, Any]:
    right = {
        "device": "NVIDIA X",
        "torch": "2.13",
        "cuda": "13",
        "model": "llama-3-8b",
        "ceilings": {"read_gb_per_s": 3000.0, "gemm_tflop_per_s": 700.0, "dtype": "bfloat16"},
        "attention": [
            {
                "back_end": "triton",
                "heads": "32/8 x 128",
                "dtype": "bfloat16",
                "page_tokens": 16,
                "status": "right",
                "largest_difference": 0.004,
                "tolerance": 0.02,
            },
            {
                "back_end": "flash",
                "heads": "32/8 x 128",
                "dtype": "bfloat16",
                "page_tokens": 16,
                "status": "unavailable",
                "why": "not installed",
            },
        ],
        "graphs": {"status": "right", "steps": [{"decodes": 3, "largest_relative_difference": 0.001}]},
        "steps": [
            {
                "status": "measured",
                "launch": "graph",
                "attention": "triton",
                "shape": "8x1024",
                "kind": "decode",
                "median_ms": 8.0,
                "gb_per_s": 2000.0,
                "tflop_per_s": 15.0,
                "bound_by": "memory",
                "share_of_ceiling": 0.67,
            }
        ],
        "main_job": {"status": "right", "command": "sarathi-tune", "exit_code": 0, "stdout": ["512"], "stderr": []},
    }
    return {**right, **changes}


def test_without_a_gpu_it_says_so_and_ends_with_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path)]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "no CUDA device" in captured.err
    assert not list(tmp_path.iterdir())


def test_bytes_of_a_step_by_hand() -> None:
    # Llama-3-8B: 8,030,261,248 parameters, of which 128,256 x 4,096 are the embedding table; K and V of a token take
    # 2 x 32 layers x 8 heads x 128 x 2 bytes.
    config = resolve_model("llama-3-8b").config
    weights = 2 * (8_030_261_248 - 128_256 * 4_096)
    assert gpu_check.step_bytes(config, Shape(decodes=32, context=1024)) == weights + 32 * 1024 * 131_072
    assert gpu_check.step_bytes(config, Shape(chunk=512, prefix=100)) == weights + 612 * 131_072


def test_operations_of_a_step_by_hand() -> None:
    # Per layer: q and o 32 x 32 each, k and v 16 x 32 each, three of 32 x 48, two norms of 32; a last norm of 32.
    body = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 64) + 32
    head = 64 * 32
    decode = 2 * 3 * body + 2 * 3 * head + 4 * 2 * 4 * 8 * 3 * 10
    assert gpu_check.step_flops(TINY, Shape(decodes=3, context=10)) == decode
    # Chunk of 4 behind 5: its tokens see 6, 7, 8 and 9 keys.
    assert gpu_check.step_flops(TINY, Shape(chunk=4, prefix=5)) == 2 * 4 * body + 2 * head + 4 * 2 * 4 * 8 * 30


def test_a_device_name_becomes_a_directory() -> None:
    assert gpu_check.machine_slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_a_back_end_is_compared_with_the_reference() -> None:
    lengths = ((0, 1), (15, 1), (40, 1), (33, 20), (0, 17))
    row = gpu_check.check_attention("sdpa", AttentionShape(4, 2, 16, 20), "float32", 16, CPU, lengths)
    assert row["status"] == "right"
    assert 0 < row["largest_difference"] < 1e-5
    assert row["heads"] == "4/2 x 16, window 20"


def test_a_wrong_back_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel forgets the window.
    monkeypatch.setattr(
        "sarathi_tune.runtime.attention.pick.SdpaAttention",
        lambda shape: gpu_check.ReferenceAttention(AttentionShape(shape.num_heads, shape.num_kv_heads, 16, None)),
    )
    row = gpu_check.check_attention("sdpa", AttentionShape(4, 2, 16, 20), "float32", 16, CPU, ((0, 17), (40, 1)))
    assert row["status"] == "wrong"


def test_a_back_end_that_cant_run_says_why() -> None:
    row = gpu_check.check_attention("flash", AttentionShape(4, 2, 16, None), "float32", 16, CPU, ((0, 1),))
    assert row["status"] == "unavailable"
    assert "CUDA" in row["why"]


def test_steps_stand_beside_their_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "NUM_SAMPLES", 3)
    steps = (Shape(decodes=2, context=30), Shape(chunk=20), Shape(decodes=1, context=9, chunk=5))
    # Nothing bounds but memory: 1 GB/s of it.
    with torch.inference_mode():
        rows = gpu_check.time_steps(TINY, Ceilings(1.0, 1e9, "float32"), CPU, steps)
    assert [(row["shape"], row["launch"], row["bound_by"]) for row in rows] == [
        ("2x30", "eager", "memory"),
        ("20@0", "eager", "memory"),
        ("1x9+5@0", "eager", "memory"),
    ]
    for row, shape in zip(rows, steps, strict=True):
        ideal_ms = gpu_check.step_bytes(TINY, shape) / 1e6
        assert row["share_of_ceiling"] == pytest.approx(ideal_ms / row["median_ms"])


def test_nothing_is_wrong_with_a_right_report() -> None:
    assert gpu_check.problems(report()) == []
    assert gpu_check.problems(report(main_job=None)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention": [{**report()["attention"][0], "status": "wrong"}]}, "differs"),
        ({"attention": report()["attention"][1:]}, "Triton kernel was not checked"),
        ({"graphs": {"status": "wrong"}}, "graphs"),
        ({"steps": [{"status": "missing", "why": "no memory"}]}, "no memory"),
        ({"main_job": {**report()["main_job"], "status": "wrong", "exit_code": 5}}, "5"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], said: str) -> None:
    assert any(said in sentence for sentence in gpu_check.problems(report(**changes)))
    assert gpu_check.as_markdown(report(**changes))


def test_the_report_is_a_document_and_a_table() -> None:
    json.dumps(report())
    text = gpu_check.as_markdown(report())
    assert "| 8x1024 | graph | triton | 8.00 | 2000 | 15.0 | memory | 67% |" in text
    assert "| flash | 32/8 x 128 | bfloat16 | 16 | unavailable | not installed |" in text


def test_the_main_job_is_a_command_that_anybody_can_repeat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Run:
        returncode = 3
        stdout = "infeasible\n"
        stderr = ""

    def fake(command: list[str], **_: Any) -> Run:
        Path(command[command.index("--json") + 1]).write_text("{}", encoding="utf-8")
        return Run()

    monkeypatch.setattr(gpu_check.subprocess, "run", fake)
    row = gpu_check.run_main_job("20ms", "llama-3-8b", tmp_path)
    assert row["command"] == "sarathi-tune --slo-itl 20ms --model llama-3-8b"
    assert (row["status"], row["exit_code"]) == ("right", 3), "infeasible is an answer"


def test_a_main_job_that_fails_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Run:
        returncode = 5
        stdout = ""
        stderr = "out of memory\n"

    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *_, **__: Run())
    assert gpu_check.run_main_job("20ms", "llama-3-8b", tmp_path)["status"] == "wrong"
