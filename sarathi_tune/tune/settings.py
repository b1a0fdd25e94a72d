"""What a run is about, settled before anything is measured: every value that the user left open gets one here, and
`origins` says where each came from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from sarathi_tune.budget.question import BudgetQuestion, settled_headroom
from sarathi_tune.budget.rules import VLLM_VERSION, EngineSettings, default_budget, smallest_legal_budget
from sarathi_tune.config.parallel import check_layout
from sarathi_tune.config.presets import resolve_model
from sarathi_tune.config.run import TuneConfig
from sarathi_tune.config.source import ModelSource
from sarathi_tune.errors import UsageError
from sarathi_tune.machine.gpu import GpuDescription
from sarathi_tune.measure.profile import Profile
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.stats import quantile
from sarathi_tune.workload.load import load_workload
from sarathi_tune.workload.spec import Workload

DeviceType = Literal["cpu", "cuda"]

#: Decodes at once when the user doesn't say. 32 is the batch that the paper's SLOs are stated for (OSDI 2024, section
#: 5); a CPU has a fiftieth of a GPU's bandwidth, and a quarter of that batch is what it serves at tens of milliseconds.
DEFAULT_MAX_NUM_SEQS: Mapping[DeviceType, int] = {"cpu": 8, "cuda": 32}
#: How far into the workload's tail the promise reaches: the batch's context and the chunk's prefix at this quantile.
TAIL = 0.95
#: The largest budget that is measured and recommended; steps beyond it are compute-bound on every device known.
MAX_BUDGET_TOKENS = 8192
#: Batches drawn, and how many requests of each: the mean of more doesn't wander any further.
_DRAWS, _LARGEST_DRAW = 400, 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """The settled run. Each of `decodes` decodes sees `context` keys, a chunk lies behind `prefix` cached tokens;
    `control_budget` is run for comparison."""

    source: ModelSource
    workload: Workload
    decodes: int
    context: int
    prefix: int
    max_model_len: int
    num_pages: int
    max_budget: int
    control_budget: int
    origins: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The settings for the plan and the journal."""
        return {
            "model": self.source.config.name,
            "weights": str(self.source.directory) if self.source.directory else "random",
            "workload": self.workload.name,
            "max_num_seqs": self.decodes,
            "context": self.context,
            "prefix": self.prefix,
            "max_model_len": self.max_model_len,
            "kv_pages": self.num_pages,
            "control_budget": self.control_budget,
        }


def settle(
    config: TuneConfig, device: DeviceType, budgets_tokens: Sequence[int] = (), gpu: GpuDescription | None = None
) -> Settings:
    """Settle a run on that kind of device; `budgets_tokens` are those of a sweep, `gpu` the device where it is one.

    Raises UsageError for a model, a workload or a budget that can't be used.
    """
    source = resolve_model(config.model)
    check_layout(source.config, config.device.layout)
    max_model_len = source.config.max_model_len
    workload = load_workload(config.workload).fit_to_context(max_model_len)
    decodes = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device]
    if config.budget_tokens is not None:
        _check_budget("--budget", config.budget_tokens, decodes)
    for budget in budgets_tokens:
        _check_budget("--budgets", budget, decodes)
    context, prefix = config.context_tokens, config.prefix_tokens
    for flag, tokens in (("--context", context), ("--prefix", prefix)):
        if tokens is not None and tokens > max_model_len:
            raise UsageError(f"{flag} {tokens:,} is longer than the model's context of {max_model_len:,} tokens.")
    by_workload = f"p{TAIL * 100:g} of workload {workload.name}"
    origins = {
        "max_num_seqs": "given" if config.max_num_seqs else f"default on {device}",
        "context": "given" if context is not None else f"mean of the batch, {by_workload}",
        "prefix": "given" if prefix is not None else f"prompt tokens before a chunk, {by_workload}",
        "control_budget": f"default of vLLM {VLLM_VERSION} on {gpu.name if gpu else device}",
    }
    if config.control_budget_tokens is not None:
        origins["control_budget"] = "given"
    control = config.control_budget_tokens or _default_budget(device, gpu, config.device.layout.num_ranks)
    if context is None:
        context = batch_context(workload, decodes)
    if prefix is None:
        prefix = chunk_prefix(workload)
    largest = Shape(decodes, context, max(control, config.budget_tokens or 0), prefix)
    return Settings(
        source=source,
        workload=workload,
        decodes=decodes,
        context=context,
        prefix=prefix,
        max_model_len=max_model_len,
        num_pages=_pages(config, workload, largest, max_model_len),
        max_budget=min(MAX_BUDGET_TOKENS, max_model_len),
        control_budget=control,
        origins=origins,
    )


def budget_question(config: TuneConfig, settings: Settings, profile: Profile, loop_ms: float) -> BudgetQuestion:
    """The question to the derivation. `loop_ms`: what the engine's loop adds to each step."""
    return BudgetQuestion(
        slo_itl_ms=config.slo.itl_ms,
        decodes=settings.decodes,
        context=settings.context,
        prefix=settings.prefix,
        overhead_ms=config.overhead_ms + loop_ms,
        headroom=settled_headroom(profile, config.headroom),
        max_model_len=settings.max_model_len,
        percentile=config.slo.percentile,
        default_budget=settings.control_budget,
        reference_prompt_tokens=settings.workload.quantile_prompt(0.5),
        seed=config.seed,
    )


def batch_context(workload: Workload, decodes: int, seed: int = 0) -> int:
    """Mean keys per decode of a batch, at the workload's `TAIL` over batches.

    A request is met while decoding in proportion to its output, somewhere in the middle of it. A large batch averages
    its requests, so this is well below the tail of a single request.
    """
    rng = Random(f"{seed}/context")
    turns = workload.sharing.turns
    lengths = [workload.lengths_at(_level(rng), _level(rng), index % turns) for index in range(4096)]
    weights = [max(0, output - 1) for _, output in lengths]
    if not any(weights):
        return max(prompt for prompt, _ in lengths)
    means = []
    for _ in range(_DRAWS):
        met = rng.choices(lengths, weights, k=min(decodes, _LARGEST_DRAW))
        means.append(sum(prompt + 1 + rng.random() * (output - 1) for prompt, output in met) / len(met))
    return max(1, round(quantile(means, TAIL)))


def chunk_prefix(workload: Workload, seed: int = 0) -> int:
    """Prompt tokens computed before a chunk, at the workload's `TAIL` over prompt tokens."""
    rng = Random(f"{seed}/prefix")
    turns = workload.sharing.turns
    prompts = [workload.lengths_at(_level(rng), 0.5, index % turns)[0] for index in range(4096)]
    met = rng.choices(prompts, prompts, k=4096)
    return round(quantile([rng.random() * prompt for prompt in met], TAIL))


def _level(rng: Random) -> float:
    return rng.random() or 2.0**-53


def _check_budget(flag: str, budget: int, decodes: int) -> None:
    smallest = smallest_legal_budget(EngineSettings(budget, decodes, None))
    if budget < smallest:
        raise UsageError(
            f"{flag} {budget} is below --max-num-seqs {decodes}: vLLM refuses to start with that; "
            f"give a budget of at least {smallest} tokens or fewer sequences."
        )


def _default_budget(device: DeviceType, gpu: GpuDescription | None, world_size: int) -> int:
    """What `vllm serve` takes here when nobody says anything."""
    if gpu is None:
        return default_budget(device, world_size=world_size)
    memory_gib = gpu.memory_bytes / 2**30 if gpu.memory_bytes is not None else None
    return default_budget(device, memory_gib, gpu.name, world_size)


def _pages(config: TuneConfig, workload: Workload, largest: Shape, max_model_len: int) -> int:
    """KV pages for a full batch of the workload's longest requests, and for the largest step that is timed."""
    page, decodes = config.device.page_tokens, largest.decodes
    longest = min(max_model_len, workload.quantile_total(0.999))
    served = decodes * -(-longest // page)
    widest = min(max_model_len, largest.prefix + largest.chunk)
    timed = decodes * -(-min(largest.context, max_model_len) // page) + -(-widest // page)
    return max(served, timed) + decodes
