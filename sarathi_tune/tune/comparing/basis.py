"""What a comparison stands on: step times (a profile, given or measured now)."""

from dataclasses import replace

from sarathi_tune.config.compare import CompareConfig
from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.config.run import DEFAULT_BUDGET_TOKENS
from sarathi_tune.config.source import ModelSource
from sarathi_tune.loadgen.record import LoadResult
from sarathi_tune.machine.conditions import ConditionsProbe
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.design import DesignSpace, plan_design, probe_cost
from sarathi_tune.measure.profile import Profile, Sample, save_profile
from sarathi_tune.measure.rounds import measure_all
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.report.progress import Ui
from sarathi_tune.stats import median
from sarathi_tune.tune.comparing.load import STREAM_PROMPT_TOKENS, answers_alone
from sarathi_tune.tune.comparing.playing import play_really
from sarathi_tune.tune.machine import Machine
from sarathi_tune.tune.measuring import profile_of
from sarathi_tune.tune.telling import tell_shapes

#: Seconds for the short profile: enough for the region around the objective and for a whole prompt.
MEASURE_S = 18.0
#: The running answers alone in the engine's loop: seconds, and least and most steps. A p99 of theirs needs hundreds.
SCATTER_S, LEAST_SCATTER_STEPS, MOST_SCATTER_STEPS = 3.0, 60, 300
#: Steps that make a row: in so few the context hardly grows.
SCATTER_ROW_STEPS = 20
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
    num_steps = _num_scatter_steps(bench.time_shape(batch), profile.max_model_len or 0)
    if num_steps:
        with ui.phase("measure scatter", total=batch.decodes) as phase:
            load = answers_alone(batch.decodes, num_steps + 1, config.seed, vocab_size=source.config.vocab_size)
            engine = EngineConfig(
                token_budget=max(DEFAULT_BUDGET_TOKENS, batch.decodes),
                max_num_seqs=batch.decodes,
                num_pages=machine.runner.cache.num_pages,
                page_tokens=config.device.page_tokens,
                max_model_len=load.longest_tokens,
            )
            seen = play_really(engine, load, machine.runner, phase)
        profile = replace(profile, samples=(*profile.samples, *scatter_rows(seen, batch.decodes)))
    if config.save_profile is not None:
        save_profile(profile, config.save_profile)
    return profile


def scatter_rows(seen: LoadResult, decodes: int) -> tuple[Sample, ...]:
    """Steps of `decodes` decodes alone as rows of a profile, some of them next to each other in each.

    A design times each of its decode rows a few times, between others: their p99 would be the second worst of all, and
    three disturbed steps made it half as long again.
    """
    steps = [step for step in seen.steps if len(step.shape.decode_contexts) == decodes and not step.shape.chunks]
    rows = []
    for start in range(0, len(steps) - SCATTER_ROW_STEPS + 1, SCATTER_ROW_STEPS):
        row = steps[start : start + SCATTER_ROW_STEPS]
        context = round(median([float(max(step.shape.decode_contexts)) for step in row]))
        rows.append(Sample(Shape(decodes, context), tuple(step.duration_ms for step in row)))
    return tuple(rows)


def _num_scatter_steps(step_ms: float, max_model_len: int) -> int:
    """How many steps of the answers alone are watched; none where the context is too short for them."""
    wanted = max(LEAST_SCATTER_STEPS, min(MOST_SCATTER_STEPS, round(SCATTER_S * 1e3 / step_ms)))
    room = max_model_len - STREAM_PROMPT_TOKENS - 1
    return min(wanted, room) if room >= LEAST_SCATTER_STEPS else 0
