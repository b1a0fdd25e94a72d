"""`sarathi-tune compare`: one load through every scheduler, for real or under the virtual clock.

step times (given or measured) -> objective and budget -> the load -> each scheduler really, each scheduler virtually ->
capacity on the virtual clock. All schedulers get the same requests at the same times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sarathi_tune.budget.derive import derive
from sarathi_tune.budget.question import BudgetQuestion
from sarathi_tune.config.compare import CompareConfig
from sarathi_tune.config.engine import EngineConfig, SchedulerName
from sarathi_tune.config.presets import resolve_model
from sarathi_tune.config.run import DEFAULT_BUDGET_TOKENS
from sarathi_tune.config.slo import Slo
from sarathi_tune.config.source import ModelSource
from sarathi_tune.errors import InconclusiveError, InfeasibleError, UsageError
from sarathi_tune.goodput.surface import Scenario, saturation_rate
from sarathi_tune.loadgen.record import LoadResult
from sarathi_tune.machine.conditions import ConditionsProbe, condition_notices
from sarathi_tune.machine.description import describe_machine
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.profile import Profile, load_profile
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.notices import Notice
from sarathi_tune.report.build import versions
from sarathi_tune.report.comparison import BudgetedStep, Comparison, Contender, Outcome
from sarathi_tune.report.progress import Ui
from sarathi_tune.stats import median
from sarathi_tune.stepmodel.fit import StepModel, fit_step_model
from sarathi_tune.tune.comparing.basis import SLO_DECODE_STEPS, measure_profile
from sarathi_tune.tune.comparing.load import STREAM_PROMPT_TOKENS, Load, SteadyPace, steady_load, workload_load
from sarathi_tune.tune.comparing.outcome import outcome
from sarathi_tune.tune.comparing.pace import Pacer, default_prompt_tokens, mean_context, settle_pace
from sarathi_tune.tune.comparing.playing import Arena, play_really, steady_capacity, workload_capacity
from sarathi_tune.tune.drift import Anchors, Drift, drifted, mean_drift, measure_drift
from sarathi_tune.tune.machine import Machine, open_machine
from sarathi_tune.tune.predicting import loop_overhead_ms
from sarathi_tune.tune.settings import batch_context, chunk_prefix
from sarathi_tune.units import format_ms
from sarathi_tune.workload.load import load_workload
from sarathi_tune.workload.spec import Workload

__all__ = ["check_compare", "run_compare"]

#: Context of a running answer before it is known how long the answers are.
_ASSUMED_ANSWER_TOKENS = 512
#: A workload's default rate, as a share of what the budget can compute, and seconds of arrivals.
_RATE_SHARE, _WORKLOAD_S = 0.5, 10.0
#: Answers that run at once in a workload when nothing is said: a small batch that a CPU serves.
_WORKLOAD_SEQS = 8
#: How often the budgeted step is timed before and behind each real run, after one that is dropped.
_LOOK_REPEATS = 7


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is settled before anything is measured: the model, and the step that the budget must hold at worst."""

    source: ModelSource | None
    workload: Workload | None
    decodes: int
    context: int
    prompt_tokens: int
    max_model_len: int

    @property
    def vocab_size(self) -> int:
        """Token ids to draw from; without a model nothing reads them."""
        return self.source.config.vocab_size if self.source else 32_768


def check_compare(config: CompareConfig) -> None:
    """Refuse what can't be run before torch is loaded. Raises UsageError or DocumentError."""
    if not config.schedulers:
        raise UsageError("Name at least one scheduler, for example --schedulers sarathi,prefill-first.")
    profile = _given_profile(config)
    subject = _subject(config, profile)
    if config.budget_tokens is not None and config.budget_tokens <= subject.decodes:
        raise UsageError(
            f"--budget {config.budget_tokens} leaves no token for a prompt beside {subject.decodes} decodes: "
            f"give at least {subject.decodes + 1}."
        )


def run_compare(config: CompareConfig, ui: Ui) -> Comparison:
    """Run the comparison. Raises a SarathiTuneError for whatever the user can cause."""
    profile = _given_profile(config)
    subject = _subject(config, profile)
    machine = _open(config, subject, None, ui) if config.virtual_profile is None else None
    if profile is None:
        assert machine is not None, "step times come from a document or from the machine"
        assert subject.source is not None, "a machine runs a model"
        batch = Shape(subject.decodes, subject.context)
        profile = measure_profile(config, machine, subject.source, batch, subject.prompt_tokens, ui)
    model = fit_step_model(profile)
    loop_ms = _loop_ms(subject) if machine else 0.0
    question = _question(config, subject, model, loop_ms)
    budget = config.budget_tokens or _derived_budget(profile, model, question)
    bout = _settle(config, subject, model, question, budget)
    if machine is not None and bout.arena.num_pages > machine.runner.cache.num_pages:
        machine = _open(config, subject, bout.arena.num_pages, ui)
    contenders, notices = _contend(config, bout, machine, profile, subject.vocab_size, ui)
    facts = machine.runner.description if machine else profile.engine
    return Comparison(
        slo_itl_ms=question.slo_itl_ms,
        budget_tokens=budget,
        budgeted_step=bout.budgeted,
        decode_step_ms=bout.pacer.decode_step_ms,
        contenders=contenders,
        load=bout.load.facts,
        arrivals_s=bout.load.arrivals_s,
        percentile=question.percentile,
        notices=tuple(notice.as_dict() for notice in dict.fromkeys((*bout.load.notices, *notices))),
        machine=describe_machine(machine.gpu).as_dict() if machine else profile.machine,
        model=profile.model,
        engine=facts,
        scheduling={
            "prefix_cache": config.scheduling.prefix_cache,
            "preemption": config.scheduling.preemption,
            "max_num_seqs": bout.arena.max_num_seqs,
            "kv_tokens": bout.arena.num_pages * bout.arena.page_tokens,
        },
        versions=versions(),
        seed=config.seed,
        command=config.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@dataclass(frozen=True, slots=True)
class _Bout:
    """The settled comparison. `budgeted` is the longest step that its budget allows; `pace` is None for a workload."""

    arena: Arena
    load: Load
    pacer: Pacer
    model: StepModel
    budgeted: BudgetedStep
    pace: SteadyPace | None
    workload: Workload | None

    def figures(self, result: LoadResult, budgeted: BudgetedStep) -> Outcome:
        """The figures of a run, its largest gap measured in `budgeted`."""
        return outcome(result, self.load, self.arena.slo.itl_ms, budgeted)

    def capacity(self, scheduler: SchedulerName) -> tuple[float | None, str]:
        """The largest rate within the objective."""
        if self.pace is not None:
            return steady_capacity(self.arena, self.model, scheduler, self.pacer, self.pace)
        assert self.workload is not None, "a load is steady or a workload"
        return workload_capacity(self.arena, self.model, scheduler, self.workload)


def _given_profile(config: CompareConfig) -> Profile | None:
    path = config.virtual_profile or config.profile
    return load_profile(path) if path is not None else None


def _subject(config: CompareConfig, profile: Profile | None) -> _Subject:
    """The model and the load's shape. Under the virtual clock the profile knows how long a context may be."""
    is_virtual = config.virtual_profile is not None
    source = None if is_virtual else resolve_model(config.model)
    limit = source.config.max_model_len if source else (profile.max_model_len if profile else None) or 8192
    if config.workload is None:
        prompt = config.steady.prompt_tokens or default_prompt_tokens(limit)
        if prompt >= limit:
            raise UsageError(f"--prompts {prompt:,} leaves no room for an answer in a context of {limit:,} tokens.")
        return _Subject(
            source, None, config.steady.streams, STREAM_PROMPT_TOKENS + _ASSUMED_ANSWER_TOKENS, prompt, limit
        )
    workload = load_workload(config.workload).fit_to_context(limit)
    decodes = config.max_num_seqs or _WORKLOAD_SEQS
    return _Subject(source, workload, decodes, batch_context(workload, decodes), chunk_prefix(workload), limit)


def _open(config: CompareConfig, subject: _Subject, num_pages: int | None, ui: Ui) -> Machine:
    """The machine, with pages for the short profile and for a load of the usual size unless it is known better."""
    assert subject.source is not None, "a machine runs a model"
    page = config.device.page_tokens
    prompts = 2 * min(subject.max_model_len, subject.prompt_tokens * 2 + subject.decodes)
    answers = subject.decodes * (subject.context + _ASSUMED_ANSWER_TOKENS)
    others = config.steady.num_prompts * subject.prompt_tokens
    usual = -(-(prompts + answers + others) // page) + subject.decodes
    with ui.phase("prepare"):
        return open_machine(
            subject.source,
            config.device,
            num_pages=num_pages or usual,
            seed=config.seed,
            max_num_seqs=subject.decodes,
        )


def _loop_ms(subject: _Subject) -> float:
    return loop_overhead_ms(
        EngineConfig(
            token_budget=DEFAULT_BUDGET_TOKENS,
            max_num_seqs=subject.decodes,
            num_pages=64 * subject.decodes,
            max_model_len=subject.max_model_len,
        )
    )


def _question(config: CompareConfig, subject: _Subject, model: StepModel, loop_ms: float) -> BudgetQuestion:
    decode_ms = model.predict_ms(Shape(subject.decodes, subject.context).step_shape) + loop_ms
    return BudgetQuestion(
        slo_itl_ms=config.slo_itl_ms or SLO_DECODE_STEPS * decode_ms,
        decodes=subject.decodes,
        context=subject.context,
        prefix=subject.prompt_tokens,
        overhead_ms=loop_ms,
        max_model_len=subject.max_model_len,
        resamples=0,
        seed=config.seed,
    )


def _derived_budget(profile: Profile, model: StepModel, question: BudgetQuestion) -> int:
    """The budget by the fit, without asking how certain it is: a comparison shows budgets at work, it advises none."""
    derivation = derive(profile, model, question)
    if derivation.budget is not None:
        return derivation.budget
    if derivation.verdict == "not-binding":
        return DEFAULT_BUDGET_TOKENS
    error = InconclusiveError if derivation.verdict == "inconclusive" else InfeasibleError
    raise error(
        f"No budget follows from an objective of {format_ms(question.slo_itl_ms)}: {derivation.why} "
        "To compare all the same, give --budget or another --slo-itl."
    )


def _settle(config: CompareConfig, subject: _Subject, model: StepModel, question: BudgetQuestion, budget: int) -> _Bout:
    """The requests, and the engine that is large enough for them."""
    pacer = Pacer(model, subject.decodes, subject.context, budget, question.overhead_ms)
    pace = None
    if subject.workload is None:
        for _ in range(2):  # how long the answers are decides what their steps take, and the other way round
            pace = settle_pace(config.steady, pacer, subject.prompt_tokens)
            pacer = replace(pacer, context=mean_context(pace.answer_tokens))
        assert pace is not None, "settled"
        load = steady_load(pace, config.seed, vocab_size=subject.vocab_size, max_model_len=subject.max_model_len)
    else:
        load = _workload_load(config, subject, model, question, budget)
    seqs = config.max_num_seqs or (subject.decodes + config.steady.num_prompts if pace else subject.decodes)
    page = config.device.page_tokens
    pages = load.num_pages(page) if pace else seqs * -(-load.longest_tokens // page)
    if config.kv_tokens is not None:
        pages = max(1, config.kv_tokens // page)
    arena = Arena(
        budget_tokens=budget,
        max_num_seqs=seqs,
        num_pages=pages,
        page_tokens=page,
        max_model_len=subject.max_model_len,
        scheduling=config.scheduling,
        slo=Slo(question.slo_itl_ms),
        loop_ms=question.overhead_ms,
        seed=config.seed,
    )
    context = STREAM_PROMPT_TOKENS + pace.answer_tokens if pace else subject.context
    budgeted = pacer.budgeted_step(load.longest_prompt, context)
    return _Bout(arena, load, pacer, model, budgeted, pace, subject.workload)


def _workload_load(
    config: CompareConfig, subject: _Subject, model: StepModel, question: BudgetQuestion, budget: int
) -> Load:
    assert subject.workload is not None, "there is a workload"
    rate = config.rate_per_s
    if rate is None:
        engine = EngineConfig(
            token_budget=budget,
            max_num_seqs=subject.decodes,
            num_pages=subject.decodes * -(-subject.max_model_len // config.device.page_tokens),
            page_tokens=config.device.page_tokens,
            max_model_len=subject.max_model_len,
        )
        scenario = Scenario(model, engine, subject.workload, Slo(question.slo_itl_ms), overhead_ms=question.overhead_ms)
        rate = _RATE_SHARE * saturation_rate(scenario, budget)
    count = config.num_requests or max(8, round(rate * _WORKLOAD_S))
    return workload_load(
        subject.workload,
        rate,
        count,
        config.seed,
        vocab_size=subject.vocab_size,
        max_model_len=subject.max_model_len,
    )


@dataclass(frozen=True, slots=True)
class _RealRun:
    """A scheduler on the real engine. `drift`: the machine's speed around it, over that of the profile; `budgeted`: the
    budgeted step as timed around it. `longest_gaps_ms`: of this run and of those that it stands for."""

    figures: Outcome
    budgeted: BudgetedStep
    drift: Drift | None
    longest_gaps_ms: tuple[float | None, ...] = ()


def _contend(
    config: CompareConfig, bout: _Bout, machine: Machine | None, profile: Profile, vocab_size: int, ui: Ui
) -> tuple[tuple[Contender, ...], tuple[Notice, ...]]:
    """Every scheduler: really first, while the machine is as it was profiled, then virtually."""
    runs: Mapping[str, _RealRun] = {}
    notices: tuple[Notice, ...] = ()
    if machine is not None:
        runs, notices = _run_really(config, bout, machine, profile, vocab_size, ui)
        notices = (*machine.notices, *notices)
    contenders = []
    with ui.phase("predict", total=2 * len(config.schedulers)) as phase:
        for scheduler in config.schedulers:
            phase.describe(scheduler)
            contenders.append(_contender(bout, scheduler, runs.get(scheduler)))
            phase.advance(2)
    return tuple(contenders), notices


def _contender(bout: _Bout, scheduler: SchedulerName, run: _RealRun | None) -> Contender:
    engine = bout.arena.engine_config(scheduler)
    drift = run.drift if run else None
    model = drifted(bout.model, drift) if drift else bout.model
    capacity, note = bout.capacity(scheduler)
    return Contender(
        scheduler=scheduler,
        token_budget=engine.token_budget,
        measured=run.figures if run else None,
        predicted=bout.figures(
            bout.arena.play_virtually(model, engine, bout.load), run.budgeted if run else bout.budgeted
        ),
        drift_decode=drift.decode if drift else None,
        drift_chunk=drift.chunk if drift else None,
        longest_gaps_ms=run.longest_gaps_ms if run else (),
        budgeted_step=run.budgeted if run else None,
        capacity_per_s=capacity,
        capacity_note=note,
    )


def _run_really(
    config: CompareConfig, bout: _Bout, machine: Machine, profile: Profile, vocab_size: int, ui: Ui
) -> tuple[dict[str, _RealRun], tuple[Notice, ...]]:
    """Each scheduler on the real engine, one after the other and all of them several times, each time between two looks
    at the machine's speed."""
    bench = Bench.build(machine.runner, vocab_size=vocab_size, seed=config.seed)
    anchors = Anchors.of(profile, bout.arena.budget_tokens)
    probe = ConditionsProbe(gpu=machine.gpu)
    before = _look(bout, machine, bench, anchors)
    plays: dict[str, list[_RealRun]] = {scheduler: [] for scheduler in config.schedulers}
    seen = []
    for number in range(1, config.num_plays + 1):
        name = "run" if config.num_plays == 1 else f"run {number} of {config.num_plays}"
        with ui.phase(name, total=len(config.schedulers) * len(bout.load.requests)) as phase:
            for scheduler in config.schedulers:
                probe.start()
                result = play_really(bout.arena.engine_config(scheduler), bout.load, machine.runner, phase)
                seen.append(probe.stop())
                after = _look(bout, machine, bench, anchors)
                drift = mean_drift([before.drift, after.drift]) if before.drift and after.drift else None
                times = [*before.budgeted_ms, *after.budgeted_ms]
                budgeted = bout.budgeted.timed(median(times)) if times else bout.budgeted
                plays[scheduler].append(_RealRun(bout.figures(result, budgeted), budgeted, drift))
                before = after
    return {scheduler: _middle(runs) for scheduler, runs in plays.items()}, condition_notices(seen)


@dataclass(frozen=True, slots=True)
class _Look:
    """The machine's speed at one moment: over that of the profile, and times of the budgeted step, loop included (none
    where the KV cache is too small for it)."""

    drift: Drift | None
    budgeted_ms: tuple[float, ...]


def _look(bout: _Bout, machine: Machine, bench: Bench, anchors: Anchors | None) -> _Look:
    step = bout.budgeted
    shape = Shape(step.decodes, step.context, step.chunk, step.prefix)
    times: list[float] = []
    if shape.num_pages(bout.arena.page_tokens) <= machine.runner.cache.num_pages:
        times = [bench.time_shape(shape) + bout.arena.loop_ms for _ in range(1 + _LOOK_REPEATS)]
    return _Look(measure_drift(bench, anchors) if anchors else None, tuple(times[1:]))


def _middle(plays: Sequence[_RealRun]) -> _RealRun:
    """The run whose longest gap is the median of all, the longer of two: what something else on the machine made of one
    run is in no other."""
    ordered = sorted(plays, key=lambda play: play.figures.itl_max_ms or 0.0)
    longest = tuple(play.figures.itl_max_ms for play in plays)
    return replace(ordered[len(ordered) // 2], longest_gaps_ms=longest)
