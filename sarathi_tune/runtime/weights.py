"""A model's weights: from a directory of safetensors files, or random for a preset.

Weights are a dict from Hugging Face's tensor names to tensors, one per entry of `expected_shapes`. Whatever can be
wrong with a directory is found in the files' headers, before any data is read or memory is taken.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sarathi_tune.config.model import DtypeName, ModelConfig
from sarathi_tune.errors import ModelError, OutOfMemoryError
from sarathi_tune.runtime.memory import free_host_bytes
from sarathi_tune.runtime.shard import EMBEDDING, HEAD, NORM, WHOLE, Index, Shard, Share, kept_shape
from sarathi_tune.units import format_bytes

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

#: Types that can be read and converted, by their safetensors names.
_READABLE_TYPES = frozenset({"F64", "F32", "BF16", "F16"})
#: Buffers that old checkpoints carry and that are computed from the config instead.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
#: The format's own limit: https://github.com/huggingface/safetensors#format
_LARGEST_HEADER_BYTES = 100_000_000
#: Makes random attention weaker than the MLP beside it. With equal shares, layer after layer of averaging over random
#: keys leaves all positions alike, and a deep random model answers everything with the same few tokens.
_ATTENTION_SHARE = 0.25
#: Random weights are cut out of one pool of this many numbers. It is prime, so no two rows of a matrix, whatever its
#: width, start at the same number.
_POOL_NUMBERS = 4_194_301


@dataclass(frozen=True, slots=True)
class _Header:
    """What the header of one safetensors file says: type name and shape per tensor."""

    path: Path
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model, in the order of the forward pass.

    Linear weights are [out, in]. `lm_head.weight` is absent when the embeddings are tied.
    """
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes[NORM] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes[f"self_attn.{name}.weight"] = (rows, hidden)
        if config.attention_bias:
            shapes[f"self_attn.{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        shapes[f"mlp.{name}.weight"] = (rows, columns)
        if config.mlp_bias:
            shapes[f"mlp.{name}.bias"] = (rows,)
    return shapes


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    shard: Shard = WHOLE,
) -> dict[str, torch.Tensor]:
    """Read the tensors of `expected_shapes(config)` from `directory`, converted to `dtype`, on `device`; of those only
    the part that `shard` keeps.

    Raises ModelError when files or tensors are missing, damaged, of another shape or quantised, and OutOfMemoryError
    when the weights don't fit; both before any tensor is read. Pickles are never read.
    """
    shapes = expected_shapes(config)
    locations = _locate(directory, config)
    names = _stored_names(shapes, locations)
    _check_tensors(directory, config, shapes, names, locations)
    check_weights_fit(config, dtype, device, shard)
    share = _share(config, shapes, shard)
    weights: dict[str, torch.Tensor] = {}
    with _memory_errors(config):
        for path in dict.fromkeys(locations[names[name]].path for name in share):
            here = {name: names[name] for name in share if locations[names[name]].path == path}
            weights |= _read(path, here, dtype, device, share)
    if shard.is_first_stage:
        _check_tied_head(directory, weights[EMBEDDING], names, locations)
    return {name: weights[name] for name in share}


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    shard: Shard = WHOLE,
) -> dict[str, torch.Tensor]:
    """Random tensors for `expected_shapes(config)`: the same for the same seed, dtype and kind of device. Of those only
    the part that `shard` keeps, with the numbers that it has in the whole model.

    Linear weights have variance 1 / inputs, so that activations neither vanish nor grow; norms are near one; biases are
    random too. Numbers are drawn once and copied from shifted places, because drawing billions of them takes minutes
    and no step's time depends on the values. Raises OutOfMemoryError when the weights don't fit.
    """
    check_weights_fit(config, dtype, device, shard)
    shapes = expected_shapes(config)
    share = _share(config, shapes, shard)
    generator = torch.Generator(device).manual_seed(seed)
    normal = torch.randn(_POOL_NUMBERS, generator=generator, device=device)
    pools: dict[tuple[float, float], torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    position = 0
    with _memory_errors(config):
        for name, shape in shapes.items():
            if name not in share:
                position = (position + math.prod(shape)) % _POOL_NUMBERS
                continue
            deviation, mean = distribution = _distribution(name, shape)
            if distribution not in pools:
                pools[distribution] = (normal * deviation + mean).to(dtype)
            whole = torch.empty(shape, dtype=dtype, device=device)
            position = _fill_from_pool(whole.view(-1), pools[distribution], position)
            part = whole[share[name]]
            weights[name] = whole if part.shape == whole.shape else part.clone(memory_format=torch.contiguous_format)
    return weights


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Standard deviation and mean of a random tensor."""
    if name.endswith("norm.weight"):
        return 0.1, 1.0
    if name.endswith(".bias"):
        return 0.1, 0.0
    share = _ATTENTION_SHARE if name.endswith("o_proj.weight") else 1.0
    return share * float(shape[-1]) ** -0.5, 0.0


def _fill_from_pool(flat: torch.Tensor, pool: torch.Tensor, position: int) -> int:
    """Fill `flat` from `pool`, from `position` on and round again; return the position behind the last number."""
    filled = 0
    while filled < flat.numel():
        count = min(flat.numel() - filled, pool.numel() - position)
        flat[filled : filled + count] = pool[position : position + count]
        filled += count
        position = (position + count) % pool.numel()
    return position


def available_bytes(device: torch.device | str) -> int:
    """Memory that can still be taken on `device`, in bytes."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def shard_weight_bytes(config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> int:
    """Bytes of the part of the weights that `shard` keeps, without packed copies."""
    if shard.is_whole:
        return config.num_parameters * dtype.itemsize
    shapes = expected_shapes(config)
    share = _share(config, shapes, shard)
    return dtype.itemsize * sum(math.prod(kept_shape(shapes[name], index)) for name, index in share.items())


def check_weights_fit(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, shard: Shard = WHOLE
) -> None:
    """Raise OutOfMemoryError when the weights at `dtype` need more memory than `device` has left."""
    needed, available = shard_weight_bytes(config, dtype, shard), available_bytes(device)
    if needed > available:
        raise OutOfMemoryError(
            f"The weights of {config.name} need {format_bytes(needed)} as {str(dtype).removeprefix('torch.')} and "
            f"{format_bytes(available)} of memory are free on {device}: choose a smaller model or free memory."
        )


def _share(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], shard: Shard) -> Share:
    """What `shard` keeps of the model's tensors, in the order of the forward pass."""
    share = shard.share(config)
    return {name: share[name] for name in shapes if name in share}


@contextmanager
def _memory_errors(config: ModelConfig) -> Iterator[None]:
    """Turn an allocator's failure into OutOfMemoryError: another process may have been faster."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _allocation_failed(config) from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # the CPU allocator raises a plain RuntimeError
            raise
        raise _allocation_failed(config) from error


def _allocation_failed(config: ModelConfig) -> OutOfMemoryError:
    return OutOfMemoryError(f"Memory ran out while making the weights of {config.name}: choose a smaller model.")


def _locate(directory: Path, config: ModelConfig) -> dict[str, _Header]:
    """Per tensor name, the header of the file that holds it: `model.safetensors`, or the shards of the index."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        header = _read_header(single)
        return dict.fromkeys(header.tensors, header)
    if not index.exists():
        raise ModelError(_no_safetensors(directory, config))
    locations: dict[str, _Header] = {}
    headers: dict[str, _Header] = {}
    for name, shard in _read_index(index).items():
        if shard not in headers:
            headers[shard] = _read_header(_shard_path(index, shard))
        if name not in headers[shard].tensors:
            raise ModelError(f"{index} places {name} in {shard}, which doesn't hold it: copy the model again.")
        locations[name] = headers[shard]
    return locations


def _no_safetensors(directory: Path, config: ModelConfig) -> str:
    names = [path.name for path in sorted(directory.iterdir())] if directory.is_dir() else []
    if "adapter_model.safetensors" in names:
        return (
            f"{directory} holds an adapter, not a model: merge it into its base model (peft's merge_and_unload) first."
        )
    pickles = [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
    if pickles:
        return (
            f"{directory} holds only pickled weights ({pickles[0]}), which can run code and aren't loaded: convert "
            "them with transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)."
        )
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    found = f" (it holds {others[0]})" if others else ""
    return (
        f"{directory} has no model.safetensors and no model.safetensors.index.json{found}: give a directory with the "
        f"weights of {config.name}, or a preset, which needs none."
    )


def _read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index: tensor name to shard file."""
    try:
        document: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} isn't valid JSON ({error}): copy or download the file again.") from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{path} has no weight_map from tensor names to file names: copy or download the file again.")
    return weight_map


def _shard_path(index: Path, shard: str) -> Path:
    """Where a shard lies. Only names inside the model directory are followed; a link there may point anywhere, since
    the hub's cache is made of links."""
    pure = PurePosixPath(shard)
    if pure.is_absolute() or ".." in pure.parts or pure.suffix != ".safetensors":
        raise ModelError(f"{index} names the shard {shard!r}, which isn't a .safetensors file in the model directory.")
    path = index.parent / pure
    if not path.exists():
        raise ModelError(f"{index} names the shard {shard}, which is missing: copy or download it.")
    return path


def _read_header(path: Path) -> _Header:
    """Parse a file's header and check that the file is as long as its header says."""
    again = "copy or download the file again"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise ModelError(f"{path} is a Git LFS pointer, not the weights themselves: run git lfs pull.")
            if len(start) < 8 or length > min(_LARGEST_HEADER_BYTES, size - 8):
                raise ModelError(f"{path} ({size} bytes) is truncated or isn't a safetensors file: {again}.")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        tensors = {name: (str(entry["dtype"]), tuple(map(int, entry["shape"]))) for name, entry in entries.items()}
        expected = 8 + length + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelError(f"{path} has a damaged header: {again}.") from error
    if size != expected:
        state = "truncated" if size < expected else "damaged"
        raise ModelError(f"{path} is {state}: it has {size} bytes and its header asks for {expected}; {again}.")
    return _Header(path, tensors)


def _stored_names(shapes: Mapping[str, tuple[int, ...]], locations: Mapping[str, _Header]) -> dict[str, str]:
    """Expected name to the name in the file. Savers that drop one of two tied tensors may keep `lm_head.weight`."""
    names = {name: name for name in shapes}
    if HEAD not in shapes and EMBEDDING not in locations and HEAD in locations:
        names[EMBEDDING] = HEAD
    return names


def _check_tensors(
    directory: Path,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    locations: Mapping[str, _Header],
) -> None:
    """Raise ModelError unless exactly the expected tensors are there, with their shapes, in a readable type."""
    missing = [name for name in shapes if names[name] not in locations]
    if missing:
        raise ModelError(_missing_message(directory, missing, len(shapes)))
    for name, stored in names.items():
        header = locations[stored]
        type_name, shape = header.tensors[stored]
        if type_name not in _READABLE_TYPES:
            raise ModelError(
                f"{header.path}: {stored} has the type {type_name}; quantised weights aren't supported, use the "
                "bfloat16 version of the model."
            )
        if shape != shapes[name]:
            raise ModelError(
                f"{header.path}: {stored} has the shape {list(shape)} and config.json asks for {list(shapes[name])}: "
                "the config and the weights belong to different models."
            )
    surplus = [name for name in locations if name not in shapes and name != HEAD and not _IGNORED.search(name)]
    if surplus:
        raise ModelError(
            f"{directory} holds {surplus[0]} ({len(surplus)} such tensors), which a {config.family} model with this "
            "config.json doesn't have: the config and the weights belong to different models."
        )


def _check_tied_head(
    directory: Path, embedding: torch.Tensor, names: Mapping[str, str], locations: Mapping[str, _Header]
) -> None:
    """Raise ModelError when tied embeddings are stored twice and differ: the config or the weights are wrong."""
    if HEAD in names or HEAD not in locations or names[EMBEDDING] == HEAD:
        return
    whole: dict[str, Index] = {HEAD: (slice(None),)}
    head = _read(locations[HEAD].path, {HEAD: HEAD}, embedding.dtype, embedding.device, whole)[HEAD]
    if not torch.equal(head, embedding):
        raise ModelError(
            f"{directory} holds an lm_head.weight that differs from the embeddings, and config.json says that they are "
            "the same: set tie_word_embeddings to false in config.json."
        )


def _missing_message(directory: Path, missing: list[str], num_expected: int) -> str:
    hint = (
        " Set tie_word_embeddings to true in config.json if the model shares its embeddings."
        if missing == [HEAD]
        else ""
    )
    return (
        f"{directory} lacks {len(missing)} of the {num_expected} tensors that config.json asks for, the first is "
        f"{missing[0]}.{hint or ' Copy the model again, or check that the config belongs to it.'}"
    )


def _read(
    path: Path, names: Mapping[str, str], dtype: torch.dtype, device: torch.device | str, share: Share
) -> dict[str, torch.Tensor]:
    """Read the shares of tensors of one file; `names` is expected name to stored name. Copies, so that the file may
    change later."""
    try:
        with safe_open(path, framework="pt") as file:
            return {
                name: file.get_slice(stored)[share[name]].contiguous().to(device, dtype, copy=True)
                for name, stored in names.items()
            }
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} can't be read as safetensors ({error}): copy or download the file again.") from error
