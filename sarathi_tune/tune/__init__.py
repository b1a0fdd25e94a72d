"""The main job: what `sarathi-tune --slo-itl 20ms` does, in the order in which it does it.

settle what was left open -> measure steps -> fit the step model -> derive the budget -> predict on the virtual clock ->
verify for real. Each part is a module beside this page; the documents that they hand on are the profile and the result.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from sarathi_tune.budget.derive import derive
from sarathi_tune.config.run import SweepConfig, TuneConfig
from sarathi_tune.errors import InterruptedRunError
from sarathi_tune.goodput.surface import Scenario
from sarathi_tune.goodput.verification import VERIFY_SHARE
from sarathi_tune.measure.profile import Profile
from sarathi_tune.notices import Notice
from sarathi_tune.report.build import derived_result, with_prices
from sarathi_tune.report.plan import RunPlan
from sarathi_tune.report.progress import Ui
from sarathi_tune.report.result import PhaseTime, Result, Run, RunRole
from sarathi_tune.report.store import save_result
from sarathi_tune.stepmodel.fit import fit_step_model
from sarathi_tune.tune import planning
from sarathi_tune.tune.job import Job, find_device, open_job
from sarathi_tune.tune.measuring import measure
from sarathi_tune.tune.predicting import Prediction, loop_overhead_ms, play, predict
from sarathi_tune.tune.settings import budget_question, settle
from sarathi_tune.tune.verifying import Trial, verify

__all__ = ["plan_tune", "run_sweep", "run_tune"]

#: Share of the time limit for measuring, and seconds kept for everything that is short.
MEASURE_SHARE, RESERVE_S = 0.28, 8.0
#: What a verification run takes besides its window: the drain, drawing prompts, the prediction of the same requests.
RUN_EXTRA_S = 7.0
SHORTEST_WINDOW_S, LONGEST_WINDOW_S = 10.0, 30.0
#: A sweep takes its time: the window of each cell, and the rates as shares of the predicted capacity.
SWEEP_WINDOW_S, SWEEP_SHARES = 20.0, (0.6, 0.8, 1.0)


@dataclass(slots=True)
class _Stopwatch:
    """How long the run and each of its parts took."""

    started_s: float = field(default_factory=time.perf_counter)
    phases: list[PhaseTime] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        before_s = time.perf_counter()
        yield
        self.phases.append(PhaseTime(name, round(time.perf_counter() - before_s, 2)))

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s


@dataclass(frozen=True, slots=True)
class _Findings:
    """What is known before anything is verified. Without a budget to test nothing is predicted."""

    result: Result
    profile: Profile
    played: Scenario
    tested: int | None = None
    prediction: Prediction | None = None


def plan_tune(config: TuneConfig) -> RunPlan:
    """What `run_tune` would do. Measures, loads and writes nothing."""
    device, gpu = find_device(config)
    return planning.plan(config, settle(config, device, gpu=gpu), device, MEASURE_SHARE * config.time_limit_s)


def run_tune(config: TuneConfig, ui: Ui) -> Result:
    """The main job. Raises a SarathiTuneError for whatever the user can cause; Ctrl-C leaves a folder to resume."""
    watch = _Stopwatch()
    with watch.part("prepare"):
        job = open_job(config, ui)
    with _kept(job):
        findings = _advise(job, _measured(job, watch, ui), watch, ui)
        trials = _trials(job, findings, watch) if config.verify else []
        return _finish(job, _verified(job, findings, trials, watch, ui), watch)


def run_sweep(config: SweepConfig, ui: Ui) -> Result:
    """Every budget at every rate for real, behind the measuring and the derivation of the main job.

    Budgets default to the derived one and its neighbours, rates to shares of its predicted capacity.
    """
    watch = _Stopwatch()
    with watch.part("prepare"):
        job = open_job(config.base, ui, config.budgets_tokens)
    with _kept(job):
        findings = _advise(job, _measured(job, watch, ui), watch, ui)
        return _finish(job, _verified(job, findings, _sweep_trials(config, findings), watch, ui), watch)


def _measured(job: Job, watch: _Stopwatch, ui: Ui) -> Profile:
    with watch.part("measure"):
        return measure(job, MEASURE_SHARE * job.config.time_limit_s, ui)


def _advise(job: Job, profile: Profile, watch: _Stopwatch, ui: Ui) -> _Findings:
    """Fit, derive and predict."""
    config, settings = job.config, job.settings
    with watch.part("derive"), ui.phase("derive"):
        model = fit_step_model(profile)
        loop_ms = job.folder.recall("loop_ms", partial(loop_overhead_ms, job.engine_config(settings.control_budget)))
        question = budget_question(config, settings, profile, loop_ms)
        derivation = derive(profile, model, question)
    result = derived_result(
        profile,
        model,
        question,
        derivation,
        seed=config.seed,
        command=config.command,
        profile_path=job.folder.profile.name,
    )
    result = replace(
        result,
        objective=replace(result.objective, ttft_ms=config.slo.ttft_ms),
        workload=settings.workload.as_dict(),
        settings=settings.as_dict() | config.scheduling.as_dict() | {"origins": dict(settings.origins)},
        folder=str(job.folder.path),
    )
    tested = config.budget_tokens or derivation.budget
    played = play(job, model, loop_ms)
    if tested is None:
        return _Findings(result, profile, played)
    budgets = {tested, settings.control_budget, *(neighbour.budget for neighbour in derivation.neighbours)}
    with watch.part("predict"):
        prediction = predict(job, played, tuple(sorted(budgets)), tested, LONGEST_WINDOW_S, ui)
    reports = {budget: cell.report for budget, cell in prediction.at_rate().items()}
    result = replace(
        result,
        advice=with_prices(result.advice, prediction.rate_per_s, reports),
        capacities=prediction.capacities,
        surface=tuple(cell.as_dict() for cell in prediction.surface.cells),
    )
    return _Findings(result, profile, played, tested, prediction)


def _trials(job: Job, findings: _Findings, watch: _Stopwatch) -> list[Trial]:
    """The tested budget and the engine's default at the same working rate, and the tested one at its capacity, in what
    is left of the time. The last one is the first to go when time is short: near capacity a short run is half luck."""
    tested, prediction = findings.tested, findings.prediction
    if tested is None or prediction is None:
        return []
    capacity = next((item.rate_per_s for item in prediction.capacities if item.budget_tokens == tested), None)
    plans: list[tuple[RunRole, int, float]] = [("recommended", tested, prediction.rate_per_s)]
    if job.settings.control_budget != tested:
        plans.append(("control", job.settings.control_budget, prediction.rate_per_s))
    left_s = job.config.time_limit_s - RESERVE_S - watch.elapsed_s
    if capacity is not None and not job.config.rate_per_s:
        # Heavier requests than usual had the working rate lowered; what they could be served at is lower as well.
        capacity = min(capacity, prediction.rate_per_s / VERIFY_SHARE)
    if capacity is not None and left_s / (len(plans) + 1) >= SHORTEST_WINDOW_S + RUN_EXTRA_S:
        plans.append(("capacity", tested, capacity))
    window_s = round(max(SHORTEST_WINDOW_S, min(LONGEST_WINDOW_S, left_s / len(plans) - RUN_EXTRA_S)))
    return [Trial(role, budget, rate, window_s, tested) for role, budget, rate in plans]


def _sweep_trials(config: SweepConfig, findings: _Findings) -> list[Trial]:
    rates = config.rates_per_s
    if not rates and findings.prediction is not None:
        top = next((item.rate_per_s for item in findings.prediction.capacities), findings.prediction.rate_per_s)
        rates = tuple(share * top for share in SWEEP_SHARES)
    budgets = config.budgets_tokens or tuple(n.budget_tokens for n in findings.result.advice.neighbours)
    anchor = findings.tested or min(budgets, default=1)
    return [Trial("sweep", budget, rate, SWEEP_WINDOW_S, anchor) for budget in budgets for rate in rates]


def _verified(job: Job, findings: _Findings, trials: list[Trial], watch: _Stopwatch, ui: Ui) -> Result:
    if not trials:
        return findings.result
    runs: list[Run] = []
    seen: dict[Notice, None] = {}
    with watch.part("verify"):
        for trial in trials:
            run, notices = verify(job, findings.played, findings.profile, trial, ui)
            runs.append(run)
            seen |= dict.fromkeys(notices)
    result = findings.result
    return replace(result, runs=tuple(runs), notices=(*result.notices, *(notice.as_dict() for notice in seen)))


def _finish(job: Job, result: Result, watch: _Stopwatch) -> Result:
    result = replace(result, phases=tuple(watch.phases))
    save_result(result, job.folder.result)
    return result


@contextmanager
def _kept(job: Job) -> Iterator[None]:
    """Ctrl-C becomes a sentence that says where the work is and how to go on; a folder without any work goes away."""
    try:
        yield
    except KeyboardInterrupt:
        if job.folder.remove_if_empty():
            raise InterruptedRunError("Interrupted before anything was measured.") from None
        raise InterruptedRunError(
            f"Interrupted. What was measured is kept in {job.folder.path}: go on with the same options and --resume."
        ) from None
