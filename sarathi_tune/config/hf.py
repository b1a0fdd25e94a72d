"""Reads a Hugging Face `config.json` into a ModelConfig.

Four dense decoder families are known; what differs between them (biases, head size, sliding window, defaults of absent
fields) stands in the tables and small functions below and follows the configuration classes of transformers 5.
Whatever would change the arithmetic and isn't known here is refused by name: a wrong model is worse than none.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from sarathi_tune.config.model import BYTES_PER_ELEMENT, DtypeName, Family, ModelConfig, RopeScaling
from sarathi_tune.errors import ModelError

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

#: What transformers assumes when the field is absent (a null is something else: see the functions that use these).
_ABSENT_KV_HEADS: dict[Family, int] = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_ABSENT_HEAD_DIM: dict[Family, int] = {"qwen3": 128}
_ABSENT_SLIDING_WINDOW = 4096
_ABSENT_MAX_WINDOW_LAYERS = 28
_ABSENT_RMS_NORM_EPS = 1e-6
_ABSENT_ROPE_THETA = 10_000.0

#: Larger than any dimension of any model, small enough that no product of ours overflows or fills the memory.
_LARGEST_INTEGER = 1 << 26


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one JSON object, read with their types; `where` names the object in error messages."""

    values: Mapping[str, Any]
    where: str

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{self.where}: {problem}")

    def has(self, key: str) -> bool:
        """Whether the field is there and isn't null."""
        return self.values.get(key) is not None

    def integer(self, key: str, absent: int | None = None, smallest: int = 1) -> int:
        value = self._value(key, absent)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"{key} must be a whole number, not {_shown(value)}.")
        if not smallest <= value <= _LARGEST_INTEGER:
            self.fail(f"{key} must be between {smallest} and {_LARGEST_INTEGER}, not {value}.")
        return value

    def number(self, key: str, absent: float | None = None) -> float:
        """A finite number greater than zero."""
        value = self._value(key, absent)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"{key} must be a number, not {_shown(value)}.")
        if not 0 < value < math.inf:
            self.fail(f"{key} must be finite and greater than zero, not {value}.")
        return float(value)

    def flag(self, key: str, absent: bool = False) -> bool:
        value = self._value(key, absent)
        if not isinstance(value, bool):
            self.fail(f"{key} must be true or false, not {_shown(value)}.")
        return value

    def text(self, key: str, absent: str | None = None) -> str:
        value = self._value(key, absent)
        if not isinstance(value, str):
            self.fail(f"{key} must be a string, not {_shown(value)}.")
        return value

    def object(self, key: str) -> "_Fields":
        """A nested object; empty when absent."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            self.fail(f"{key} must be an object, not {_shown(value)}.")
        return _Fields(value, f"{self.where}, {key}")

    def _value(self, key: str, absent: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if absent is None:
            self.fail(f"{key} is missing; it is needed to know the model's shapes.")
        return absent


def load_model_config(directory: Path) -> ModelConfig:
    """The architecture in `directory/config.json`; the model is named after the directory.

    Raises ModelError with one sentence when the directory, the file, a field or the architecture can't be used.
    """
    fields = _read_config(directory)
    family = _family(fields)
    _refuse_unsupported(fields)
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    rope_theta, rope_scaling = _rope(fields)
    qkv_bias, output_bias = _attention_biases(fields, family)
    return ModelConfig(
        name=directory.resolve().name,
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, family, num_heads),
        head_dim=_head_dim(fields, family, num_heads),
        max_model_len=_max_model_len(fields, rope_scaling),
        rms_norm_eps=fields.number("rms_norm_eps", _ABSENT_RMS_NORM_EPS),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(fields, family, num_layers),
        eos_token_ids=_token_ids(fields, "eos_token_id"),
        bos_token_id=fields.integer("bos_token_id", smallest=0) if fields.has("bos_token_id") else None,
        dtype=_dtype(fields),
    )


def _read_config(directory: Path) -> _Fields:
    wanted = "give a directory that holds config.json and .safetensors files"
    path = directory / "config.json"
    try:
        if not directory.exists():
            raise ModelError(f"The model directory {directory} doesn't exist: {wanted}, or a preset's name.")
        if not directory.is_dir():
            raise ModelError(f"{directory} is a file, not a model directory: {wanted}.")
        if not path.exists():
            raise ModelError(f"The model directory {directory} has no config.json: {wanted}.")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} isn't valid JSON ({error}): copy or download the file again.") from error
    if not isinstance(values, dict):
        raise ModelError(
            f"{path} must hold a JSON object, not {_shown(values)}: give a directory with a model's config."
        )
    return _Fields(values, str(path))


def _family(fields: _Fields) -> Family:
    """The family, by `architectures`, or by `model_type` where a config has none."""
    supported = ", ".join(ARCHITECTURES)
    architectures = fields.values.get("architectures")
    if not architectures:
        known: dict[str, Family] = {family: family for family in ARCHITECTURES.values()}
        model_type = fields.text("model_type", "unknown")
        if model_type in known:
            return known[model_type]
        fields.fail(f"it names no architecture and model_type is {model_type!r}; supported are {supported}.")
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        fields.fail(f"architectures must be a list of names, not {_shown(architectures)}.")
    name = architectures[0]
    if name not in ARCHITECTURES:
        fields.fail(
            f"the architecture {name}{_kind_of_unsupported(fields, name)} isn't supported; these are: {supported}."
        )
    return ARCHITECTURES[name]


def _kind_of_unsupported(fields: _Fields, architecture: str) -> str:
    if _num_experts(fields) > 1 or "moe" in architecture.lower() or "mixtral" in architecture.lower():
        return " (a mixture of experts)"
    if "vision_config" in fields.values or "VL" in architecture:
        return " (a vision-language model)"
    return ""


def _num_experts(fields: _Fields) -> int:
    counts = [fields.values.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")]
    return max((count for count in counts if isinstance(count, int)), default=0)


def _refuse_unsupported(fields: _Fields) -> None:
    """Refuse what shares a supported architecture's name and computes something else."""
    if _num_experts(fields) > 1:
        fields.fail("the model is a mixture of experts; only dense models are supported.")
    if fields.has("vision_config"):
        fields.fail("the model has a vision part; only text models are supported.")
    for key in ("quantization_config", "compression_config"):
        if fields.has(key):
            method = fields.object(key).values.get("quant_method", "unknown method")
            fields.fail(f"the checkpoint is quantised ({method}); use the bfloat16 version of the model.")
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.fail(f"hidden_act {activation!r} isn't supported, only silu is.")
    if fields.flag("rope_interleaved"):
        fields.fail("interleaved rotary embeddings (rope_interleaved) aren't supported.")


def _num_kv_heads(fields: _Fields, family: Family, num_heads: int) -> int:
    """Absent and null both mean "as many as query heads", except that a family may have a default for absent."""
    absent = num_heads if "num_key_value_heads" in fields.values else _ABSENT_KV_HEADS.get(family, num_heads)
    num_kv_heads = fields.integer("num_key_value_heads", absent)
    if num_heads % num_kv_heads:
        fields.fail(f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads}).")
    return num_kv_heads


def _head_dim(fields: _Fields, family: Family, num_heads: int) -> int:
    if not fields.has("head_dim") and family not in _ABSENT_HEAD_DIM:
        hidden_size = fields.integer("hidden_size")
        if hidden_size % num_heads:
            fields.fail(
                f"head_dim is missing and hidden_size ({hidden_size}) isn't a multiple of num_attention_heads "
                f"({num_heads})."
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = fields.integer("head_dim", _ABSENT_HEAD_DIM.get(family))
    if head_dim % 2:
        fields.fail(f"the head size must be even for rotary embeddings, not {head_dim}.")
    return head_dim


def _attention_biases(fields: _Fields, family: Family) -> tuple[bool, bool]:
    """Whether the query, key and value projections have a bias, and whether the output projection has one."""
    match family:
        case "qwen2":
            return True, False
        case "mistral":
            return False, False
        case _:
            bias = fields.flag("attention_bias")
            return bias, bias


def _sliding_window(fields: _Fields, family: Family, num_layers: int) -> int | None:
    """Keys that a token sees, itself included, when *every* layer slides; None when none does.

    Llama has no window whatever the field says. Mistral slides in all layers unless the field is null. Qwen slides only
    where use_sliding_window is set, from layer max_window_layers on or as layer_types says.
    """
    if family == "llama":
        return None
    if family == "mistral":
        if "sliding_window" in fields.values and not fields.has("sliding_window"):
            return None
        return fields.integer("sliding_window", _ABSENT_SLIDING_WINDOW)
    if not fields.flag("use_sliding_window") or (
        "sliding_window" in fields.values and not fields.has("sliding_window")
    ):
        return None
    slides = _sliding_layers(fields, num_layers)
    if any(slides) and not all(slides):
        fields.fail(
            f"{sum(slides)} of {num_layers} layers use a sliding window; models that mix sliding and full attention "
            "aren't supported."
        )
    return fields.integer("sliding_window", _ABSENT_SLIDING_WINDOW) if any(slides) else None


def _sliding_layers(fields: _Fields, num_layers: int) -> list[bool]:
    """Per layer, whether its attention slides."""
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", _ABSENT_MAX_WINDOW_LAYERS, smallest=0)
        return [layer >= first for layer in range(num_layers)]
    types = fields.values["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        fields.fail(f"layer_types must be a list of {num_layers} names, one per layer.")
    unknown = [name for name in types if name not in ("full_attention", "sliding_attention")]
    if unknown:
        fields.fail(
            f"the layer type {_shown(unknown[0])} isn't supported, only full_attention and sliding_attention are."
        )
    return [name == "sliding_attention" for name in types]


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """The rotary base and scaling. transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 one object
    `rope_parameters` with both; the older key wins where both are there, as in transformers."""
    rope = fields.object("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
    if any(isinstance(value, dict) for value in rope.values.values()):
        rope.fail("rotary parameters that differ between layers aren't supported.")
    theta = (rope if rope.has("rope_theta") else fields).number("rope_theta", _ABSENT_ROPE_THETA)
    for holder in (rope, fields):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            holder.fail("rotary embeddings over a part of the head (partial_rotary_factor) aren't supported.")
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if rope_type not in ("default", "linear", "llama3"):
        rope.fail(f"the rotary scaling {rope_type!r} isn't supported; default, linear and llama3 are.")
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, RopeScaling("linear", _rope_factor(rope))
    return theta, _llama3_scaling(fields, rope)


def _llama3_scaling(fields: _Fields, rope: _Fields) -> RopeScaling:
    scaling = RopeScaling(
        "llama3",
        factor=_rope_factor(rope),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer(
            "original_max_position_embeddings", fields.integer("max_position_embeddings")
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.fail(
            f"high_freq_factor ({scaling.high_freq_factor:g}) must be greater than low_freq_factor "
            f"({scaling.low_freq_factor:g})."
        )
    return scaling


def _rope_factor(rope: _Fields) -> float:
    factor = rope.number("factor")
    if factor < 1:
        rope.fail(f"factor must be at least 1, not {factor:g}.")
    return factor


def _max_model_len(fields: _Fields, scaling: RopeScaling | None) -> int:
    """The context in tokens. Linear scaling stretches `max_position_embeddings`, which holds the unscaled length, and
    Llama 3's is in it already: the rule by which vLLM derives its own max_model_len."""
    length = fields.integer("max_position_embeddings")
    if scaling is not None and scaling.rope_type == "linear":
        return int(length * scaling.factor)
    return length


def _token_ids(fields: _Fields, key: str) -> tuple[int, ...]:
    """One id, a list of ids, or none."""
    value = fields.values.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        fields.fail(f"{key} must be a token id or a list of token ids, not {_shown(value)}.")
    return tuple(ids)


def _dtype(fields: _Fields) -> DtypeName:
    """`dtype` (transformers 5) or `torch_dtype` (transformers 4); bfloat16 when neither says anything."""
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    name = fields.text(key, "bfloat16").removeprefix("torch.")
    if name == "auto":
        return "bfloat16"
    if name not in BYTES_PER_ELEMENT:
        fields.fail(f"{key} {name!r} isn't supported; {', '.join(BYTES_PER_ELEMENT)} are.")
    return cast(DtypeName, name)


def _shown(value: Any) -> str:
    """A value as it looks in the file, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
