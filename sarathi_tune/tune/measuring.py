"""The measuring part of a run: the shapes that the question needs, timed, and the profile."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from sarathi_tune.config.run import TuneConfig
from sarathi_tune.machine.conditions import ConditionsProbe
from sarathi_tune.machine.description import describe_machine
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.design import Design, DesignSpace, plan_design, probe_cost
from sarathi_tune.measure.journal import Journal, Resumed
from sarathi_tune.measure.profile import Profile, save_profile
from sarathi_tune.measure.rounds import Measurement, Progress, measure_all
from sarathi_tune.report.progress import Phase, Ui
from sarathi_tune.tune.job import Job
from sarathi_tune.tune.settings import Settings


def measure(job: Job, seconds: float, ui: Ui) -> Profile:
    """Time the steps that the question needs in about `seconds`, and keep the profile in the run's folder."""
    bench = Bench.build(job.runner, vocab_size=job.settings.source.config.vocab_size, seed=job.config.seed)
    journal, design, resumed = _open_journal(job, bench, seconds, ui)
    with journal, ui.phase("measure", total=len(design.points) * (design.min_rounds + 1)) as phase:
        measurement = measure_all(
            bench,
            design,
            journal=journal,
            resumed=resumed,
            probe=ConditionsProbe(gpu=job.gpu),
            progress=_teller(phase),
        )
    profile = _profile(job, measurement, design)
    save_profile(profile, job.folder.profile)
    return profile


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
        control_budget=min(config.control_budget_tokens, settings.max_budget),
        max_model_len=settings.max_model_len,
        seconds=seconds,
    )


def _identity(job: Job) -> Mapping[str, Any]:
    """What makes two runs the same for the journal."""
    computed = ("device", "dtype", "threads", "attention", "linear", "page_tokens")
    return job.settings.as_dict() | {
        "slo_itl_ms": job.config.slo.itl_ms,
        "seed": job.config.seed,
        **{name: job.runner.description[name] for name in computed},
    }


def _teller(phase: Phase) -> Callable[[Progress], None]:
    def tell(progress: Progress) -> None:
        phase.describe(str(progress.shape))
        phase.expect(progress.total)
        phase.advance()

    return tell


def _profile(job: Job, measurement: Measurement, design: Design) -> Profile:
    config, description = job.settings.source.config, job.runner.description
    return Profile(
        samples=measurement.samples,
        machine=describe_machine(job.gpu).as_dict(),
        model={
            "name": config.name,
            "serve_name": job.settings.source.serve_name,
            "dtype": description["dtype"],
            "weights": description["weights"],
            "parameters": config.num_parameters,
        },
        engine=dict(description) | {"rounds": measurement.num_rounds, "shapes": len(design.points)},
        conditions=measurement.conditions,
        notices=tuple(notice.as_dict() for notice in (*job.notices, *measurement.notices)),
        noise=measurement.noise,
        max_model_len=job.settings.max_model_len,
        source="sarathi-tune",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
