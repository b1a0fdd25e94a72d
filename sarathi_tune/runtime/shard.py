"""Which part of a model one rank computes, and which part of each weight that takes. Arithmetic only: no torch.

Tensor-parallel ranks of a stage split the heads and the MLP's inner columns: query, key, value, gate and up lose rows
("column-parallel"), output and down lose columns ("row-parallel", their partial sums are added over the ranks). Stages
split the layers. The embedding lies whole on the first stage; the LM head on the last, split by vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sarathi_tune.config.model import BYTES_PER_ELEMENT, ModelConfig
from sarathi_tune.config.parallel import Layout

_ONE_RANK = Layout()

#: Which rows (and columns) of a tensor are kept.
Index = tuple[slice, ...]
#: Tensor name to what is kept of it; a tensor that isn't named is on other ranks.
Share = Mapping[str, Index]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"

_WHOLE: Index = (slice(None),)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that rank `rank` of `layout` computes. The default is the whole model on one process."""

    rank: int = 0
    layout: Layout = _ONE_RANK

    @property
    def tensor_rank(self) -> int:
        """Which part of its stage's layers."""
        return self.layout.tensor_rank(self.rank)

    @property
    def stage(self) -> int:
        """Which stage."""
        return self.layout.stage(self.rank)

    @property
    def is_first_stage(self) -> bool:
        """Whether the rank turns token ids into hidden states."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank turns hidden states into logits."""
        return self.stage == self.layout.pipeline - 1

    @property
    def is_whole(self) -> bool:
        """Whether there is only this rank."""
        return self.layout.num_ranks == 1

    def layers(self, config: ModelConfig) -> range:
        """The layers of the rank's stage. The last stages get the fewer ones: the last has the LM head to do."""
        each, more = divmod(config.num_layers, self.layout.pipeline)
        first = self.stage * each + min(self.stage, more)
        return range(first, first + each + (self.stage < more))

    def local(self, config: ModelConfig) -> ModelConfig:
        """The architecture of what the rank computes: its layers, heads and MLP columns."""
        size = self.layout.tensor
        return replace(
            config,
            num_layers=len(self.layers(config)),
            num_heads=config.num_heads // size,
            num_kv_heads=max(1, config.num_kv_heads // size),
            intermediate_size=config.intermediate_size // size,
        )

    def vocabulary(self, config: ModelConfig) -> slice:
        """The rows of the LM head that the rank computes: equal parts, the last one shorter or even empty."""
        each = vocabulary_part(config, self.layout)
        return slice(
            min(self.tensor_rank * each, config.vocab_size), min((self.tensor_rank + 1) * each, config.vocab_size)
        )

    def packed_head_bytes(self, config: ModelConfig) -> int:
        """Bytes of the LM head's second copy, where it is cut out of an embedding that the rank keeps whole."""
        if not (config.tie_embeddings and self.is_first_stage and self.is_last_stage):
            return 0
        rows = self.vocabulary(config)
        return int(rows.stop - rows.start) * config.hidden_size * BYTES_PER_ELEMENT[config.dtype]

    def share(self, config: ModelConfig) -> Share:
        """What the rank keeps of each tensor of the model."""
        kept: dict[str, Index] = {}
        if self.is_first_stage:
            kept[EMBEDDING] = _WHOLE
        for layer in self.layers(config):
            kept |= {f"model.layers.{layer}.{name}": index for name, index in self._layer_share(config).items()}
        if self.is_last_stage:
            kept[NORM] = _WHOLE
            if not config.tie_embeddings:
                kept[HEAD] = (self.vocabulary(config),)
            else:
                kept.setdefault(EMBEDDING, (self.vocabulary(config),))
        return kept

    def _layer_share(self, config: ModelConfig) -> dict[str, Index]:
        rows = {
            "q_proj": self._queries(config),
            "k_proj": self._keys(config),
            "v_proj": self._keys(config),
            "gate_proj": self._inner(config),
            "up_proj": self._inner(config),
        }
        kept: dict[str, Index] = {}
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            kept[f"{name}.weight"] = _WHOLE
        for name, part in rows.items():
            at = f"{_block(name)}.{name}"
            kept |= {f"{at}.weight": (part,), f"{at}.bias": (part,)}
        for name, part in (("o_proj", self._queries(config)), ("down_proj", self._inner(config))):
            at = f"{_block(name)}.{name}"
            kept[f"{at}.weight"] = (slice(None), part)
            if self.tensor_rank == 0:
                # The partial sums are added up: a bias on every rank would count once per rank (nano-vllm #125).
                kept[f"{at}.bias"] = _WHOLE
        return kept

    def _queries(self, config: ModelConfig) -> slice:
        return _part(config.num_heads * config.head_dim, self.tensor_rank, self.layout.tensor)

    def _inner(self, config: ModelConfig) -> slice:
        return _part(config.intermediate_size, self.tensor_rank, self.layout.tensor)

    def _keys(self, config: ModelConfig) -> slice:
        """The rank's key heads; with more ranks than key heads, the one head that its query heads belong to."""
        size, heads = self.layout.tensor, config.num_kv_heads
        if heads >= size:
            return _part(heads * config.head_dim, self.tensor_rank, size)
        return _part(heads * config.head_dim, self.tensor_rank * heads // size, heads)


#: The whole model.
WHOLE = Shard()


def vocabulary_part(config: ModelConfig, layout: Layout) -> int:
    """Rows of the LM head per rank, rounded up."""
    return -(-config.vocab_size // layout.tensor)


def kept_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """The shape of what `index` keeps of a tensor."""
    cut = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=False)]
    return (*cut, *shape[len(cut) :])


def _block(name: str) -> str:
    return "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"


def _part(size: int, number: int, parts: int) -> slice:
    each = size // parts
    return slice(number * each, (number + 1) * each)
