"""The architecture of a model: everything that decides what a step costs, and nothing about where weights live."""

from dataclasses import dataclass, field
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
DtypeName = Literal["float32", "bfloat16", "float16"]

BYTES_PER_ELEMENT: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 rotary scaling (`rope_type: llama3`), or plain linear scaling (`rope_type: linear`)."""

    rope_type: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder (Llama, Mistral, Qwen2, Qwen3). Names follow Hugging Face's `config.json`."""

    name: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    #: On the query, key and value projections; `output_bias` is the output projection's.
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    #: Keys that a token sees in every layer, itself included; None is full attention.
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: DtypeName = "bfloat16"
    #: Where the model is published, for the command line that is recommended; empty when unknown. A name, and no
    #: property of the architecture.
    hub_id: str = field(default="", compare=False)

    @property
    def num_parameters(self) -> int:
        """Weights in elements, embeddings counted once when tied."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        if self.attention_bias:
            attention += q + 2 * kv
        if self.output_bias:
            attention += self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + self.hidden_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * (attention + mlp + norms) + embeddings + self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights at `dtype`."""
        return self.num_parameters * BYTES_PER_ELEMENT[self.dtype]

    @property
    def most_inputs(self) -> int:
        """Inputs of the widest matmul of a layer."""
        return max(self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers at `dtype`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_ELEMENT[self.dtype]
