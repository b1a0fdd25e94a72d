"""config.json against transformers' own reading of it, and one sentence for whatever can't be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from sarathi_tune.config.hf import load_model_config
from sarathi_tune.config.model import ModelConfig, RopeScaling
from sarathi_tune.errors import ModelError

# Published files, in the keys of transformers 4.
LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "vocab_size": 128256,
}
MISTRAL_NEMO: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 14336,
    "max_position_embeddings": 128000,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}
QWEN2_5_0_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 262144,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {"llama": LLAMA_3_2_1B, "mistral": MISTRAL_NEMO, "qwen2": QWEN2_5_0_5B, "qwen3": QWEN3_4B}

ABSENT = object()


def write(directory: Path, values: object) -> Path:
    (directory / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return directory


def changed(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**values, **changes}.items() if value is not ABSENT}


def refusal(directory: Path, values: object) -> str:
    with pytest.raises(ModelError) as caught:
        load_model_config(write(directory, values))
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def assert_as_transformers(config: ModelConfig, directory: Path) -> None:
    """Every field that transformers has under some name must be what transformers makes of the same file."""
    hf = AutoConfig.from_pretrained(directory)
    assert config.family == hf.model_type
    assert config.vocab_size == hf.vocab_size
    assert config.hidden_size == hf.hidden_size
    assert config.intermediate_size == hf.intermediate_size
    assert config.num_layers == hf.num_hidden_layers
    assert config.num_heads == hf.num_attention_heads
    assert config.num_kv_heads == hf.num_key_value_heads
    assert config.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
    assert config.rms_norm_eps == hf.rms_norm_eps
    assert config.tie_embeddings == hf.tie_word_embeddings
    assert config.bos_token_id == hf.bos_token_id
    assert list(config.eos_token_ids) == (hf.eos_token_id if isinstance(hf.eos_token_id, list) else [hf.eos_token_id])
    assert config.rope_theta == hf.rope_parameters["rope_theta"]
    rope_type = hf.rope_parameters["rope_type"]
    assert (config.rope_scaling.rope_type if config.rope_scaling else "default") == rope_type
    if config.rope_scaling is not None:
        assert config.rope_scaling.factor == hf.rope_parameters["factor"]
    if config.rope_scaling is not None and rope_type == "llama3":
        assert config.rope_scaling.low_freq_factor == hf.rope_parameters["low_freq_factor"]
        assert config.rope_scaling.high_freq_factor == hf.rope_parameters["high_freq_factor"]
        assert config.rope_scaling.original_max_position == hf.rope_parameters["original_max_position_embeddings"]


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_config_reads_as_transformers_reads_it(tmp_path: Path, family: str) -> None:
    config = load_model_config(write(tmp_path, PUBLISHED[family]))
    assert_as_transformers(config, tmp_path)
    assert config.max_model_len == PUBLISHED[family]["max_position_embeddings"]
    assert config.sliding_window is None
    assert config.dtype == "bfloat16"
    assert config.name == tmp_path.name


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_transformers_5_writes_reads_the_same(tmp_path: Path, family: str) -> None:
    old = load_model_config(write(tmp_path, PUBLISHED[family]))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written, "transformers 5 is meant to write the new key"
    assert "rope_theta" not in written
    assert load_model_config(tmp_path) == old


def test_llama3_rope_scaling(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, LLAMA_3_2_1B))
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert config.rope_theta == 500_000.0


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"head_dim": ABSENT, "num_key_value_heads": ABSENT}),
        ("llama", {"head_dim": None, "num_key_value_heads": None}),
        (
            "llama",
            {"rope_theta": ABSENT, "rope_scaling": ABSENT, "rms_norm_eps": ABSENT, "tie_word_embeddings": ABSENT},
        ),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("llama", {"rope_scaling": {**LLAMA_3_2_1B["rope_scaling"], "rope_theta": 7.0}}),
        ("llama", {"original_max_position_embeddings": 1024}),
        ("llama", {"eos_token_id": [128001, 128008, 128009]}),
        ("llama", {"num_attention_heads": 64}),
        ("mistral", {"head_dim": ABSENT, "num_key_value_heads": ABSENT, "tie_word_embeddings": ABSENT}),
        ("mistral", {"num_key_value_heads": 4, "rope_theta": ABSENT}),
        ("qwen2", {"num_attention_heads": 32, "num_key_value_heads": ABSENT, "tie_word_embeddings": ABSENT}),
        ("qwen2", {"num_key_value_heads": None, "head_dim": 128}),
        ("qwen3", {"head_dim": ABSENT, "num_key_value_heads": ABSENT, "tie_word_embeddings": ABSENT}),
    ],
)
def test_absent_and_unusual_fields_mean_what_they_mean_to_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    config = load_model_config(write(tmp_path, changed(PUBLISHED[family], **changes)))
    assert_as_transformers(config, tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        # query/key/value bias, output bias, MLP bias, norms on queries and keys
        ("llama", {}, (False, False, False, False)),
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("mistral", {"attention_bias": True}, (False, False, False, False)),
        ("qwen2", {}, (True, False, False, False)),
        ("qwen3", {}, (False, False, False, True)),
        ("qwen3", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_of_each_family(
    tmp_path: Path, family: str, changes: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    config = load_model_config(write(tmp_path, changed(PUBLISHED[family], **changes)))
    assert (config.attention_bias, config.output_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"sliding_window": 100}, None),
        ("mistral", {"sliding_window": 4096}, 4096),
        ("mistral", {"sliding_window": ABSENT}, 4096),  # the default of transformers' MistralConfig
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 100, "max_window_layers": 0}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0}, 100),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 24}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 36}, 9),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"] * 36}, None),
    ],
)
def test_sliding_window(tmp_path: Path, family: str, changes: dict[str, Any], expected: int | None) -> None:
    assert load_model_config(write(tmp_path, changed(PUBLISHED[family], **changes))).sliding_window == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": ABSENT, "dtype": "float32"}, "float32"),
        ({"torch_dtype": ABSENT}, "bfloat16"),
        ({"torch_dtype": "auto"}, "bfloat16"),
    ],
)
def test_dtype(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert load_model_config(write(tmp_path, changed(LLAMA_3_2_1B, **changes))).dtype == expected


def test_linear_scaling_stretches_the_context_as_in_vllm(tmp_path: Path) -> None:
    values = changed(LLAMA_3_2_1B, max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 4.0})
    assert load_model_config(write(tmp_path, values)).max_model_len == 16_384


def test_architecture_from_model_type(tmp_path: Path) -> None:
    assert load_model_config(write(tmp_path, changed(QWEN3_4B, architectures=ABSENT))).family == "qwen3"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "mixture of experts"]),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, ["Qwen2VL", "vision"]),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, ["Llava", "vision"]),
        ({"architectures": ABSENT, "model_type": "gpt2"}, ["gpt2", "LlamaForCausalLM"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
        ({"architectures": [7]}, ["architectures", "list"]),
        ({"num_local_experts": 8}, ["mixture of experts"]),
        ({"vision_config": {"depth": 3}}, ["vision"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ["awq", "bfloat16 version"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["fp8", "bfloat16 version"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"rope_interleaved": True}, ["rope_interleaved"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn", "bfloat16"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn", "llama3"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [], "long_factor": []}}, ["longrope"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "object"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "missing"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, ["factor", "number"]),
        (
            {"rope_scaling": {**LLAMA_3_2_1B["rope_scaling"], "high_freq_factor": 1.0}},
            ["high_freq_factor", "low_freq_factor"],
        ),
        ({"rope_scaling": ABSENT, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["layers"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_theta": -1.0}, ["rope_theta", "-1.0"]),
        ({"hidden_size": ABSENT}, ["hidden_size", "missing"]),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"max_position_embeddings": ABSENT}, ["max_position_embeddings", "missing"]),
        ({"num_hidden_layers": -3}, ["num_hidden_layers", "-3"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": 10**18}, ["num_hidden_layers", "1000000000000000000"]),
        ({"num_hidden_layers": "16"}, ["num_hidden_layers", "whole number", '"16"']),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "whole number"]),
        ({"num_hidden_layers": 16.0}, ["num_hidden_layers", "whole number"]),
        ({"hidden_size": [2048]}, ["hidden_size", "whole number"]),
        ({"num_key_value_heads": 5}, ["num_attention_heads (32)", "num_key_value_heads (5)"]),
        ({"head_dim": ABSENT, "num_attention_heads": 24}, ["head_dim", "hidden_size (2048)", "(24)"]),
        ({"head_dim": 63}, ["even", "63"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "number"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "token id"]),
        ({"eos_token_id": [1, "2"]}, ["eos_token_id", "token id"]),
        ({"bos_token_id": -1}, ["bos_token_id", "-1"]),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    message = refusal(tmp_path, changed(LLAMA_3_2_1B, **changes))
    assert str(tmp_path / "config.json") in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_window_layers": 20}, ["4 of 24 layers", "sliding"]),
        ({"layer_types": ["full_attention", "sliding_attention"] * 12}, ["12 of 24 layers", "sliding"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "24"]),
        ({"layer_types": ["chunked_attention"] * 24}, ["chunked_attention"]),
    ],
)
def test_layers_that_differ_are_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    message = refusal(tmp_path, changed(QWEN2_5_0_5B, use_sliding_window=True, **changes))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["isn't valid JSON"]),
        ('{"architectures": ["Llama', ["isn't valid JSON"]),
        ("[" * 100_000, ["isn't valid JSON"]),
        ("\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), ["isn't valid JSON"]),
        ("[1, 2]", ["JSON object", "[1, 2]"]),
        ("null", ["JSON object"]),
        ('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": NaN}', ["num_attention_heads"]),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refusal(tmp_path, text)
    for word in words:
        assert word in message


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff\xfe\xfa"}')
    with pytest.raises(ModelError, match=r"isn't valid JSON"):
        load_model_config(tmp_path)


def test_directories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere doesn't exist: give a directory"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"model\.safetensors is a file, not a model directory"):
        load_model_config(tmp_path / "model.safetensors")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        load_model_config(tmp_path)
