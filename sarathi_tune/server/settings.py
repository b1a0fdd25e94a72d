"""What `sarathi-tune serve` is asked to do, and the engine that follows from it on this machine."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.run import DEFAULT_BUDGET_TOKENS, DEFAULT_MODEL, DeviceConfig, SchedulingConfig
from sarathi_tune.errors import OutOfMemoryError, UsageError

#: The environment variable with the key that clients must send; without it the server is open.
API_KEY_VARIABLE = "SARATHI_TUNE_API_KEY"
#: The largest part of the fitting KV pages that is taken unasked: a GPU is there for this, a host has other work.
_UNASKED_SHARE = {"cuda": 0.95, "cpu": 0.25}


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The server. None means: from the model or the machine. Port 0 lets the system choose.

    `max_queue`: requests that may wait beside `max_num_seqs` running ones; the next one is answered with 429.
    `record`: where the steps are written as a profile when the server ends.
    `stop_timeout_s`: how long running requests may go on after the first signal to stop.
    """

    model: str = DEFAULT_MODEL
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8100
    token_budget: int = DEFAULT_BUDGET_TOKENS
    max_num_seqs: int = 32
    max_model_len: int | None = None
    kv_tokens: int | None = None
    max_queue: int = 1024
    device: DeviceConfig = field(default_factory=DeviceConfig)
    #: Unlike a measurement, a server computes what prompts share once.
    scheduling: SchedulingConfig = field(default_factory=lambda: SchedulingConfig(prefix_cache=True))
    seed: int = 0
    stop_timeout_s: float = 10.0
    record: Path | None = None
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port must be between 0 and 65535, not {self.port}.")
        if self.token_budget < self.max_num_seqs:
            raise UsageError(
                f"--max-num-batched-tokens {self.token_budget} is below --max-num-seqs {self.max_num_seqs}: a step "
                f"must hold one token per running request; give at least {self.max_num_seqs}, or fewer sequences."
            )


def engine_config(config: ServeConfig, model: ModelConfig, fitting_pages: int, device_type: str) -> EngineConfig:
    """The engine: `fitting_pages` KV pages fit beside the weights into the memory of a "cpu" or "cuda" device.

    The pool always holds one request of the whole context. Where it can't, the context is shortened, unless it was
    asked for: then UsageError. Raises OutOfMemoryError when no page fits.
    """
    page_tokens = config.device.page_tokens
    context = _context(config, model)
    if fitting_pages < 1:
        raise OutOfMemoryError(
            f"The weights of {model.name} leave no memory for a KV cache: use a smaller model, or a device with more "
            "memory."
        )
    pages = _num_pages(config, context, fitting_pages, device_type)
    if pages * page_tokens < context:
        if config.max_model_len is not None:
            raise UsageError(
                f"--max-model-len {context} is more than the KV cache holds ({pages * page_tokens} tokens): lower it, "
                "or raise --kv-tokens."
            )
        context = pages * page_tokens
    engine = EngineConfig(
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        num_pages=pages,
        page_tokens=page_tokens,
        max_model_len=context,
    )
    scheduling = config.scheduling
    return replace(
        engine,
        scheduler=scheduling.scheduler,
        prefix_cache=scheduling.prefix_cache,
        preemption=scheduling.preemption,
    )


def _context(config: ServeConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len
    if wanted is not None and wanted > model.max_model_len:
        raise UsageError(
            f"--max-model-len {wanted} is longer than the context of {model.name} ({model.max_model_len} tokens): "
            "lower it or leave it out."
        )
    return wanted or model.max_model_len


def _num_pages(config: ServeConfig, context: int, fitting_pages: int, device_type: str) -> int:
    page_tokens = config.device.page_tokens
    if config.kv_tokens is not None:
        return max(1, config.kv_tokens // page_tokens)  # what doesn't fit is refused with the numbers when allocated
    needed = config.max_num_seqs * -(-context // page_tokens)
    unasked = int(fitting_pages * _UNASKED_SHARE[device_type])
    return max(1, min(needed, max(unasked, min(fitting_pages, -(-context // page_tokens)))))
