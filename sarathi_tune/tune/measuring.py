"""Steps timed, and the profile of them: the shapes that a run's question needs, or exactly those asked for."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sarathi_tune.config.run import DeviceConfig, TuneConfig
from sarathi_tune.config.source import ModelSource
from sarathi_tune.errors import UsageError
from sarathi_tune.machine.conditions import ConditionsProbe
from sarathi_tune.machine.description import describe_machine
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.design import Design, DesignSpace, design_for_shapes, plan_design, probe_cost
from sarathi_tune.measure.journal import Journal, Resumed
from sarathi_tune.measure.profile import Profile, describe_model, load_profile, save_profile
from sarathi_tune.measure.rounds import Measurement, measure_all
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.report.progress import Ui
from sarathi_tune.tune.job import Job
from sarathi_tune.tune.machine import Machine, open_machine
from sarathi_tune.tune.settings import Settings
from sarathi_tune.tune.telling import tell_shapes


def measure(job: Job, seconds: float, ui: Ui) -> Profile:
    """Time the steps that the question needs in about `seconds`, and keep the profile in the run's folder."""
    machine, settings = job.machine, job.settings
    bench = Bench.build(machine.runner, vocab_size=settings.source.config.vocab_size, seed=job.config.seed)
    journal, design, resumed = _open_journal(job, bench, seconds, ui)
    if resumed and resumed.complete and job.folder.profile.exists():
        journal.close()
        return load_profile(job.folder.profile)
    with journal, ui.phase("measure", total=len(design.points) * (design.min_rounds + 1)) as phase:
        measurement = measure_all(
            bench,
            design,
            journal=journal,
            resumed=resumed,
            probe=ConditionsProbe(gpu=machine.gpu),
            progress=tell_shapes(phase),
        )
    profile = profile_of(machine, settings.source, design, measurement, "sarathi-tune")
    save_profile(profile, job.folder.profile)
    return profile


def time_shapes(
    source: ModelSource, shapes: Sequence[Shape], *, repeats: int, steps: DeviceConfig, seed: int, ui: Ui
) -> Profile:
    """Time exactly these shapes, interleaved, `repeats` times each behind a first that is dropped, with as many pages
    as the largest of them needs.

    Raises UsageError for a shape beyond the model's context, and whatever `open_machine` raises.
    """
    config = source.config
    longest = max(max(shape.context, shape.prefix + shape.chunk) for shape in shapes)
    if longest > config.max_model_len:
        raise UsageError(
            f"A shape needs {longest:,} tokens of context and {config.name} has {config.max_model_len:,}: "
            "choose smaller shapes or another model."
        )
    num_pages = max(shape.num_pages(steps.page_tokens) for shape in shapes)
    with ui.phase("prepare"):
        most = max(shape.decodes for shape in shapes)
        machine = open_machine(source, steps, num_pages=num_pages, seed=seed, max_num_seqs=most)
        bench = Bench.build(machine.runner, vocab_size=config.vocab_size, seed=seed)
    design = design_for_shapes(shapes, repeats, seed)
    with ui.phase("measure", total=len(shapes) * (repeats + 1)) as phase:
        measurement = measure_all(bench, design, probe=ConditionsProbe(gpu=machine.gpu), progress=tell_shapes(phase))
    return profile_of(machine, source, design, measurement, "sarathi-tune profile")


def profile_of(
    machine: Machine, source: ModelSource, design: Design, measurement: Measurement, made_by: str
) -> Profile:
    """The profile document of what was measured on that machine."""
    description = machine.runner.description
    return Profile(
        samples=measurement.samples,
        machine=describe_machine(machine.gpu).as_dict(),
        model=describe_model(source, description),
        engine=dict(description) | {"rounds": measurement.num_rounds, "shapes": len(design.points)},
        conditions=measurement.conditions,
        notices=tuple(notice.as_dict() for notice in (*machine.notices, *measurement.notices)),
        noise=measurement.noise,
        max_model_len=source.config.max_model_len,
        source=made_by,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _open_journal(job: Job, bench: Bench, seconds: float, ui: Ui) -> tuple[Journal, Design, Resumed | None]:
    identity = _identity(job)
    if job.folder.is_resumed:
        journal, resumed = Journal.resume(job.folder.journal, identity)
        ui.note(f"Going on with {job.folder.path}: {len(resumed.collection.done)} timed steps are there.")
        return journal, resumed.design, resumed
    with ui.phase("probe"):
        space = design_space(job.config, job.settings, seconds)
        design = plan_design(space, probe_cost(space, bench.time_shape), job.config.seed)
    return Journal.create(job.folder.journal, identity, design), design, None


def design_space(config: TuneConfig, settings: Settings, seconds: float) -> DesignSpace:
    """The question to the design of experiments."""
    return DesignSpace(
        decodes=settings.decodes,
        context=settings.context,
        prefix=settings.prefix,
        slo_ms=config.slo.itl_ms,
        num_pages=settings.num_pages,
        page_tokens=config.device.page_tokens,
        max_budget=settings.max_budget,
        control_budget=min(settings.control_budget, settings.max_budget),
        max_model_len=settings.max_model_len,
        seconds=seconds,
    )


def _identity(job: Job) -> Mapping[str, Any]:
    """What makes two runs the same for the journal."""
    computed = (
        "device",
        "dtype",
        "threads",
        "attention",
        "linear",
        "page_tokens",
        "tensor_parallel",
        "pipeline_parallel",
    )
    return job.settings.as_dict() | {
        "slo_itl_ms": job.config.slo.itl_ms,
        "seed": job.config.seed,
        **{name: job.machine.runner.description[name] for name in computed},
    }
