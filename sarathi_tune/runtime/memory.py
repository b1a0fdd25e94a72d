"""How much memory a model and its KV cache take, and whether the device has it. Arithmetic only: imports no torch.

Linux promises more memory than it has and kills the process later, so the check comes before the allocation.
"""

from pathlib import Path

from sarathi_tune.config.model import BYTES_PER_ELEMENT, ModelConfig
from sarathi_tune.errors import OutOfMemoryError
from sarathi_tune.machine.memory import describe_memory
from sarathi_tune.units import format_bytes

#: The part of the free memory that we are ready to take: activations, packing buffers and the rest of the machine
#: need some too.
USABLE_FRACTION = 0.9


def page_bytes(config: ModelConfig, page_tokens: int) -> int:
    """Bytes of one KV page over all layers."""
    return config.kv_bytes_per_token * page_tokens


def kv_cache_bytes(config: ModelConfig, num_pages: int, page_tokens: int) -> int:
    """Bytes of the KV cache of `num_pages` pages, the dummy page included."""
    return (num_pages + 1) * page_bytes(config, page_tokens)


def resident_weight_bytes(config: ModelConfig) -> int:
    """Bytes of the weights as the runtime keeps them: a tied embedding has a second, packed copy as LM head."""
    tied = config.vocab_size * config.hidden_size * BYTES_PER_ELEMENT[config.dtype] if config.tie_embeddings else 0
    return config.weight_bytes + tied


def max_kv_pages(config: ModelConfig, page_tokens: int, free_bytes: int) -> int:
    """How many KV pages fit beside the weights into `free_bytes` of free memory; zero when not even the weights do."""
    left = int(free_bytes * USABLE_FRACTION) - resident_weight_bytes(config)
    return max(0, left // page_bytes(config, page_tokens) - 1)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken on this machine, and in this container, without swapping. `root` is where `/proc` and
    `/sys` hang."""
    return describe_memory(root).available_bytes


def require_memory(
    config: ModelConfig, num_pages: int, page_tokens: int, free_bytes: int, device: str, weight_bytes: int
) -> None:
    """Raise OutOfMemoryError when the weights and the KV cache together don't fit into `free_bytes`.

    Of a rank that keeps a part of the model, `config` has its heads and layers and `weight_bytes` its weights.
    """
    cache = kv_cache_bytes(config, num_pages, page_tokens)
    left = int(free_bytes * USABLE_FRACTION) - weight_bytes
    if cache <= left:
        return
    fitting = max(0, left // page_bytes(config, page_tokens) - 1)
    remedy = (
        f"use at most {fitting * page_tokens} tokens of KV cache, or a smaller model."
        if fitting
        else "use a smaller model or a machine with more memory."
    )
    raise OutOfMemoryError(
        f"{config.name} needs {format_bytes(weight_bytes)} for its weights and {format_bytes(cache)} for "
        f"{num_pages * page_tokens} tokens of KV cache, and {device} has {format_bytes(free_bytes)} free: {remedy}"
    )
