"""A dense decoder (Llama, Mistral, Qwen2, Qwen3) over ragged batches and a paged cache, from Hugging Face weights."""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.runtime.attention.base import Attention
from sarathi_tune.runtime.batch import RaggedBatch, sampled_rows
from sarathi_tune.runtime.kvcache import KVCache
from sarathi_tune.runtime.layers.decoder import DecoderLayer
from sarathi_tune.runtime.layers.elementwise import Elementwise, HeadShape
from sarathi_tune.runtime.layers.linear import Linear, LinearChoice
from sarathi_tune.runtime.layers.parallel import RowParallel, TensorGroup, VocabParallel
from sarathi_tune.runtime.layers.rotary import RotaryTable, build_rotary_table
from sarathi_tune.runtime.shard import EMBEDDING, HEAD, NORM, WHOLE, Shard, vocabulary_part


@dataclass(frozen=True, slots=True)
class Model:
    """The weights of a model and how they are applied.

    Of a model that is spread over processes this is one rank's part: a pipeline stage has its layers only, the first
    one the embedding, the last one `norm` and `head`.
    """

    embedding: torch.Tensor | None
    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor | None
    norm_eps: float
    head: Linear | None
    rotary: RotaryTable
    attention: Attention
    ops: Elementwise
    linear: LinearChoice

    def __call__(self, batch: RaggedBatch, cache: KVCache) -> torch.Tensor:
        """Compute one step: fills the batch's cache slots and returns logits [slices that sample, vocab]."""
        return self.finish(self.compute(self.embed(batch), batch, cache))

    def embed(self, batch: RaggedBatch) -> torch.Tensor:
        """The hidden states of the step's tokens, [tokens, hidden]; on the first stage."""
        assert self.embedding is not None, "the embedding is on the first stage"
        return functional.embedding(batch.token_ids, self.embedding)

    def compute(self, hidden: torch.Tensor, batch: RaggedBatch, cache: KVCache) -> torch.Tensor:
        """Run the layers: fills the batch's cache slots; [tokens, hidden] -> [tokens, hidden], on the last stage of the
        rows that are sampled from only, [slices that sample, hidden]."""
        kept = self._kept_rows(batch)
        for index, (layer, layer_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            is_last = index == len(self.layers) - 1
            hidden = layer(hidden, batch, layer_cache, self.rotary, self.attention, self.ops, kept if is_last else None)
        is_cut = kept is not None or self.norm is None
        return hidden if is_cut else hidden.index_select(0, batch.sample_rows)

    def _kept_rows(self, batch: RaggedBatch) -> RaggedBatch | None:
        """What the last layer of all may leave the other rows out of: not worth copies to another device."""
        if self.norm is None or batch.token_ids.device.type != "cpu":
            return None
        return sampled_rows(batch) if len(batch.sample_rows) < batch.num_tokens else None

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [slices that sample, vocab] of what `compute` returned; on the last stage."""
        assert self.norm is not None, "the LM head is on the last stage"
        assert self.head is not None, "the LM head is on the last stage"
        return self.head(self.ops.rms_norm(hidden, self.norm, self.norm_eps))


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
    shard: Shard = WHOLE,
    group: TensorGroup | None = None,
) -> Model:
    """A model from weights under their Hugging Face names; empties `tensors`. `num_positions`: rotary table length.

    `tensors` is what `shard` keeps of the model's; `group` are the ranks that share the stage's layers, None when there
    is one.
    """
    device = next(iter(tensors.values())).device
    weights = _Weights(tensors)
    embedding = weights.take(EMBEDDING) if shard.is_first_stage else None
    local = shard.local(config)
    layers = tuple(_build_layer(local, weights, ops, linear, index, shard, group) for index in shard.layers(config))
    return Model(
        embedding=embedding,
        layers=layers,
        norm=weights.take(NORM) if shard.is_last_stage else None,
        norm_eps=config.rms_norm_eps,
        head=_build_head(config, weights, embedding, linear, shard, group) if shard.is_last_stage else None,
        rotary=build_rotary_table(config, num_positions, device),
        attention=attention,
        ops=ops,
        linear=linear,
    )


def _build_head(
    config: ModelConfig,
    weights: _Weights,
    embedding: torch.Tensor | None,
    linear: LinearChoice,
    shard: Shard,
    group: TensorGroup | None,
) -> Linear:
    """The rank's rows of the LM head: its own tensor, those of the embedding, or cut out of the whole embedding."""
    if not config.tie_embeddings:
        rows = weights.take(HEAD)
    elif embedding is not None:
        rows = embedding[shard.vocabulary(config)]
    else:
        rows = weights.take(EMBEDDING)
    head = linear.build(rows, is_head=True)
    if group is None:
        return head
    return VocabParallel(head, len(rows), vocabulary_part(config, shard.layout), config.vocab_size, group)


def _build_layer(
    config: ModelConfig,
    weights: _Weights,
    ops: Elementwise,
    linear: LinearChoice,
    index: int,
    shard: Shard,
    group: TensorGroup | None,
) -> DecoderLayer:
    """Layer `index`; `config` has the heads and the MLP columns of the rank."""
    at = f"model.layers.{index}."

    def taken(names: tuple[str, ...], has_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = weights.fuse([f"{at}{name}.weight" for name in names])
        return weight, weights.fuse([f"{at}{name}.bias" for name in names]) if has_bias else None

    def build(names: tuple[str, ...], has_bias: bool) -> Linear:
        return linear.build(*taken(names, has_bias))

    def build_row_parallel(name: str, has_bias: bool) -> Linear:
        """Partial sums are added over the ranks, so the bias is on the first one only (nano-vllm #125)."""
        is_first = shard.tensor_rank == 0
        part = build((name,), has_bias and is_first)
        return part if group is None else RowParallel(part, is_first, group)

    def head_norm(name: str) -> torch.Tensor | None:
        return weights.take(f"{at}self_attn.{name}.weight") if config.qk_norm else None

    layer = DecoderLayer(
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
        output=build_row_parallel("self_attn.o_proj", config.output_bias),
        mlp_norm=weights.take(f"{at}post_attention_layernorm.weight"),
        gated=linear.build_gated(*taken(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias), ops),
        down=build_row_parallel("mlp.down_proj", config.mlp_bias),
        norm_eps=config.rms_norm_eps,
    )
    if not linear.tiled_rows:
        return layer
    from sarathi_tune.runtime.layers.tiled import tiled_layer  # needs numba

    return replace(layer, tiled=tiled_layer(layer))
