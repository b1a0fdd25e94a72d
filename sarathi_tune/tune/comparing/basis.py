"""What a comparison stands on: step times (a profile, given or measured now)."""

from sarathi_tune.config.compare import CompareConfig
from sarathi_tune.config.source import ModelSource
from sarathi_tune.machine.conditions import ConditionsProbe
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.design import DesignSpace, plan_design, probe_cost
from sarathi_tune.measure.profile import Profile, save_profile
from sarathi_tune.measure.rounds import measure_all
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.report.progress import Ui
from sarathi_tune.tune.machine import Machine
from sarathi_tune.tune.measuring import profile_of
from sarathi_tune.tune.telling import tell_shapes

#: Seconds for the short profile: enough for the region around the objective and for a whole prompt.
MEASURE_S = 18.0
#: The objective when none is given, in decode steps: the paper's strict one (OSDI 2024, section 5).
SLO_DECODE_STEPS = 5.0


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
        measurement = measure_all(bench, design, probe=ConditionsProbe(gpu=machine.gpu), progress=tell_shapes(phase))
    profile = profile_of(machine, source, design, measurement, "sarathi-tune compare")
    if config.save_profile is not None:
        save_profile(profile, config.save_profile)
    return profile
