"""What a comparison stands on: step times (a profile, given or measured now) and, for real runs, a runner."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sarathi_tune.config.compare import CompareConfig
from sarathi_tune.config.source import ModelSource
from sarathi_tune.machine.conditions import ConditionsProbe, thread_notices
from sarathi_tune.machine.cpu import describe_cpu
from sarathi_tune.machine.description import describe_machine
from sarathi_tune.machine.gpu import Gpu, open_gpu
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.design import DesignSpace, plan_design, probe_cost
from sarathi_tune.measure.profile import Profile, save_profile
from sarathi_tune.measure.rounds import Progress, measure_all
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.notices import Notice
from sarathi_tune.report.progress import Phase, Ui

if TYPE_CHECKING:
    from sarathi_tune.runtime.runner import Runner

#: Seconds for the short profile: enough for the region around the objective and for a whole prompt.
MEASURE_S = 18.0
#: The objective when none is given, in decode steps: the paper's strict one (OSDI 2024, section 5).
SLO_DECODE_STEPS = 5.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The device with its model loaded. `notices`: what there is to say about device and threads."""

    runner: "Runner"
    gpu: Gpu | None
    facts: Mapping[str, Any]
    notices: tuple[Notice, ...]


def open_machine(config: CompareConfig, source: ModelSource, num_pages: int, ui: Ui) -> Machine:
    """Load the model with its threads set. Raises OutOfMemoryError, ModelError or UsageError."""
    import torch

    from sarathi_tune.runtime.runner import Runner

    with ui.phase("prepare"):
        cpu = describe_cpu()
        threads = config.device.threads or cpu.threads
        torch.set_num_threads(threads)
        runner = Runner.build(
            source,
            num_pages=num_pages,
            page_tokens=config.device.page_tokens,
            device=config.device.device,
            dtype=config.device.dtype,
            attention=config.device.attention,
            seed=config.seed,
        )
        is_gpu = str(runner.description["device"]).startswith("cuda")
        gpu, gpu_notices = open_gpu() if is_gpu else (None, ())
    notices = (*gpu_notices, *thread_notices(threads, len(cpu.cores), cpu.quota))
    return Machine(runner, gpu, describe_machine(gpu).as_dict(), notices)


def measure_profile(
    config: CompareConfig, machine: Machine, source: ModelSource, batch: Shape, prompt_tokens: int, ui: Ui
) -> Profile:
    """A short profile: decode batches up to `batch`, hybrid steps around the objective, and a whole prompt."""
    bench = Bench.build(machine.runner, vocab_size=source.config.vocab_size, seed=config.seed)
    slo_ms = config.slo_itl_ms or SLO_DECODE_STEPS * min(bench.time_shape(batch) for _ in range(5))
    space = DesignSpace(
        decodes=batch.decodes,
        context=batch.context,
        prefix=prompt_tokens,
        slo_ms=slo_ms,
        num_pages=machine.runner.cache.num_pages,
        page_tokens=config.device.page_tokens,
        max_budget=min(8192, source.config.max_model_len),
        control_budget=min(prompt_tokens + batch.decodes, source.config.max_model_len),
        max_model_len=source.config.max_model_len,
        seconds=MEASURE_S,
    )
    design = plan_design(space, probe_cost(space, bench.time_shape), config.seed)
    with ui.phase("measure", total=len(design.points) * (design.min_rounds + 1)) as phase:
        measurement = measure_all(bench, design, probe=ConditionsProbe(gpu=machine.gpu), progress=_teller(phase))
    description = machine.runner.description
    profile = Profile(
        samples=measurement.samples,
        machine=machine.facts,
        model={"name": source.config.name, "dtype": description["dtype"], "weights": description["weights"]},
        engine=dict(description),
        conditions=measurement.conditions,
        notices=tuple(notice.as_dict() for notice in (*machine.notices, *measurement.notices)),
        noise=measurement.noise,
        max_model_len=source.config.max_model_len,
        source="sarathi-tune compare",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if config.save_profile is not None:
        save_profile(profile, config.save_profile)
    return profile


def _teller(phase: Phase) -> Callable[[Progress], None]:
    def tell(progress: Progress) -> None:
        phase.describe(str(progress.shape))
        phase.expect(progress.total)
        phase.advance()

    return tell
