"""A dense decoder (Llama, Mistral, Qwen2, Qwen3) over ragged batches and a paged cache, from Hugging Face weights."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.runtime.attention.base import Attention
from sarathi_tune.runtime.batch import RaggedBatch
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.layers.decoder import DecoderLayer
from sarathi_tune.runtime.layers.elementwise import Elementwise, HeadShape
from sarathi_tune.runtime.layers.linear import Linear, LinearChoice
from sarathi_tune.runtime.layers.rotary import RotaryTable, build_rotary_table
from sarathi_tune.runtime.weights import EMBEDDING, HEAD


@dataclass(frozen=True, slots=True)
class Model:
    """The weights of a model and how they are applied."""

    embedding: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor
    norm_eps: float
    head: Linear
    rotary: RotaryTable
    attention: Attention
    ops: Elementwise

    def __call__(self, batch: RaggedBatch, cache: KVCache) -> torch.Tensor:
        """Compute one step: fills the batch's cache slots and returns logits [slices that sample, vocab]."""
        hidden = functional.embedding(batch.token_ids, self.embedding)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            hidden = layer(hidden, batch, layer_cache, self.rotary, self.attention, self.ops)
        sampled = hidden.index_select(0, batch.sample_rows)
        return self.head(self.ops.rms_norm(sampled, self.norm, self.norm_eps))


class _Weights:
    """Hands each weight out once, so that the unpacked copy is freed as soon as a layer has taken it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str) -> torch.Tensor:
        """The weight of this name; `runtime.weights` has checked that it is there and of the right shape."""
        return self._tensors.pop(name)

    def fuse(self, names: list[str]) -> torch.Tensor:
        """Several weights, one below the other."""
        return torch.cat([self.take(name) for name in names]) if len(names) > 1 else self.take(names[0])


def build_model(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    attention: Attention,
    ops: Elementwise,
    linear: LinearChoice,
    num_positions: int,
) -> Model:
    """A model from weights under their Hugging Face names; empties `tensors`. `num_positions`: rotary table length."""
    weights = _Weights(tensors)
    embedding = weights.take(EMBEDDING)
    layers = tuple(_build_layer(config, weights, linear, index) for index in range(config.num_layers))
    head = embedding if config.tie_embeddings else weights.take(HEAD)
    return Model(
        embedding=embedding,
        layers=layers,
        norm=weights.take("model.norm.weight"),
        norm_eps=config.rms_norm_eps,
        head=linear.build(head),
        rotary=build_rotary_table(config, num_positions, embedding.device),
        attention=attention,
        ops=ops,
    )


def _build_layer(config: ModelConfig, weights: _Weights, linear: LinearChoice, index: int) -> DecoderLayer:
    at = f"model.layers.{index}."

    def build(names: tuple[str, ...], has_bias: bool) -> Linear:
        weight = weights.fuse([f"{at}{name}.weight" for name in names])
        return linear.build(weight, weights.fuse([f"{at}{name}.bias" for name in names]) if has_bias else None)

    def head_norm(name: str) -> torch.Tensor | None:
        return weights.take(f"{at}self_attn.{name}.weight") if config.qk_norm else None

    return DecoderLayer(
        input_norm=weights.take(f"{at}input_layernorm.weight"),
        qkv=build(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.attention_bias),
        heads=HeadShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            head_norm("q_norm"),
            head_norm("k_norm"),
        ),
        output=build(("self_attn.o_proj",), config.output_bias),
        mlp_norm=weights.take(f"{at}post_attention_layernorm.weight"),
        gate_up=build(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        down=build(("mlp.down_proj",), config.mlp_bias),
        norm_eps=config.rms_norm_eps,
    )
