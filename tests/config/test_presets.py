"""Presets against what is published about the models, and what a user can write after `--model`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sarathi_tune.config.hf import load_model_config
from sarathi_tune.config.presets import PRESETS, resolve_model
from sarathi_tune.errors import ModelError
from tests.config.test_hf import LLAMA_3_2_1B, QWEN2_5_0_5B

#: Parameter counts on the model cards (number of parameters of the safetensors files), in millions.
PUBLISHED_PARAMETERS_M = {
    "smollm2-135m": 134.5,
    "qwen2.5-0.5b": 494,
    "llama-3.2-1b": 1_236,
    "mistral-7b": 7_248,
    "qwen2.5-7b": 7_616,
    "llama-3-8b": 8_030,
    "llama-3.1-8b": 8_030,
    "qwen3-8b": 8_191,
    "yi-34b": 34_389,
    "llama-3-70b": 70_554,
}

#: Bytes of K and V per token in bfloat16, as counted in papers and model guides: 2 x layers x KV heads x head size x 2.
PUBLISHED_KV_KIB_PER_TOKEN = {"llama-3-8b": 128, "llama-3-70b": 320, "mistral-7b": 128, "qwen3-8b": 144, "yi-34b": 240}


@pytest.mark.parametrize("name", PRESETS)
def test_number_of_parameters_is_the_published_one(name: str) -> None:
    assert PRESETS[name].num_parameters / 1e6 == pytest.approx(PUBLISHED_PARAMETERS_M[name], rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED_KV_KIB_PER_TOKEN)
def test_kv_cache_per_token_is_the_published_one(name: str) -> None:
    assert PRESETS[name].kv_bytes_per_token == PUBLISHED_KV_KIB_PER_TOKEN[name] * 1024


@pytest.mark.parametrize(("name", "published"), [("llama-3.2-1b", LLAMA_3_2_1B), ("qwen2.5-0.5b", QWEN2_5_0_5B)])
def test_preset_equals_the_published_config(tmp_path: Path, name: str, published: dict[str, object]) -> None:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(published))
    assert load_model_config(directory) == PRESETS[name]


def test_preset_by_name() -> None:
    source = resolve_model(" Llama-3-8B ")
    assert source.config is PRESETS["llama-3-8b"]
    assert source.directory is None


def test_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "smollm2-135m"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_3_2_1B))
    assert resolve_model(str(directory)).directory == directory
    assert resolve_model(str(directory)).config.num_layers == 16
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2-135m").directory is None
    assert resolve_model("./smollm2-135m").config.num_layers == 16
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/smollm2-135m").config.num_layers == 16


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama-3-8b", ["Unknown model 'lama-3-8b'", "Did you mean llama-3-8b?", "directory with config.json"]),
        ("llama3-8b", ["Did you mean llama-3-8b?"]),
        ("gpt", ["Unknown model 'gpt'", "smollm2-135m", "yi-34b"]),
        ("", ["Unknown model ''", "smollm2-135m"]),
        ("x" * 5000, ["Unknown model 'xxx", "...'"]),
        ("meta-llama/Meta-Llama-3-8B", ["nothing is downloaded", "Did you mean llama-3-8b?", "directory"]),
        ("openai/gpt-oss-20b", ["nothing is downloaded", "smollm2-135m"]),
        ("./nowhere", ["nowhere doesn't exist", "config.json"]),
        ("/no/such/model", ["/no/such/model doesn't exist"]),
    ],
)
def test_unknown_models(name: str, words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_needs_no_torch() -> None:
    code = (
        "import sys, sarathi_tune.config.presets; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
