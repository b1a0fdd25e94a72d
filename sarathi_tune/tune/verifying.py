"""The verifying part of a run: the built-in engine under real load, beside the prediction of the very same requests."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sarathi_tune.engine.loop import Engine
from sarathi_tune.goodput.objective import shortfalls
from sarathi_tune.goodput.surface import Scenario, predict_requests
from sarathi_tune.goodput.validity import check_run
from sarathi_tune.goodput.verification import VerificationPlan, plan_verification
from sarathi_tune.loadgen.clock import SystemClock
from sarathi_tune.loadgen.inprocess import TimedRequest, run_load
from sarathi_tune.loadgen.latency import summarise
from sarathi_tune.loadgen.record import LoadResult
from sarathi_tune.machine.conditions import ConditionsProbe, condition_notices
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.profile import Profile
from sarathi_tune.notices import Notice, machine_drifted
from sarathi_tune.report.build import latency
from sarathi_tune.report.progress import Ui
from sarathi_tune.report.result import Run, RunRole
from sarathi_tune.tune.drift import Anchors, Drift, drifted, mean_drift, measure_drift
from sarathi_tune.tune.job import Job
from sarathi_tune.tune.settings import Settings
from sarathi_tune.tune.telling import tell_requests

#: Longest that the requests of a run are followed behind its window, in seconds.
DRAIN_S = 30.0
#: From this change of the machine's speed on, it is told.
LARGEST_DRIFT = 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """One run to be made: this budget at this rate for these seconds. `anchor_tokens`: the size of the step that shows
    the machine's speed around it; that of the tested budget, since a step of the control's takes seconds."""

    role: RunRole
    budget_tokens: int
    rate_per_s: float
    seconds: float
    anchor_tokens: int


def verify(job: Job, played: Scenario, profile: Profile, trial: Trial, ui: Ui) -> tuple[Run, tuple[Notice, ...]]:
    """Run a trial for real, or take it from an interrupted run; with what there is to say about its validity."""
    key = {
        "role": trial.role,
        "budget_tokens": trial.budget_tokens,
        "rate_per_s": trial.rate_per_s,
        "seed": job.config.seed,
        **job.config.scheduling.as_dict(),
    }
    saved = job.folder.saved_run(key)
    if saved is not None:
        ui.note(f"{trial.budget_tokens:,} tokens at {trial.rate_per_s:.3g} req/s was verified before.")
        return saved
    plan = plan_verification(
        trial.rate_per_s, job.settings.workload, seconds=trial.seconds, max_seconds=2 * trial.seconds
    )
    started_s = time.perf_counter()
    requests, _ = plan.requests(
        job.settings.workload,
        job.config.seed,
        vocab_size=job.settings.source.config.vocab_size,
        max_model_len=job.settings.max_model_len,
    )
    observed = _observe(job, profile, trial, plan, requests, ui)
    run, notices = _judge(job, played, trial, plan, requests, observed)
    run, notices = replace(run, duration_s=time.perf_counter() - started_s), (*plan.notices, *notices)
    job.folder.save_run(key, run, notices)
    return run, notices


@dataclass(frozen=True, slots=True)
class _Observed:
    """What happened: the load run, and how the machine did around it. `drift` None: the profile has nothing to time."""

    result: LoadResult
    drift: Drift | None
    conditions: tuple[Notice, ...]


def _observe(
    job: Job, profile: Profile, trial: Trial, plan: VerificationPlan, requests: Sequence[TimedRequest], ui: Ui
) -> _Observed:
    """Run the requests on the real engine, between two looks at the machine's speed."""
    config, clock, probe = job.config, SystemClock(), ConditionsProbe(gpu=job.machine.gpu)
    bench = Bench.build(job.machine.runner, vocab_size=job.settings.source.config.vocab_size, seed=config.seed)
    anchors = Anchors.of(profile, trial.anchor_tokens)
    engine = Engine(job.engine_config(trial.budget_tokens), job.machine.runner, clock)
    name = f"verify {trial.budget_tokens:,} at {plan.rate_per_s:.3g} req/s"
    with ui.phase(name, total=len(requests)) as phase:
        drifts = [measure_drift(bench, anchors)] if anchors else []
        probe.start()
        result = run_load(
            engine,
            clock,
            requests,
            stop_after_s=plan.window_s,
            drain_s=DRAIN_S,
            give_up_after_s=max(DRAIN_S, 10 * (config.slo.ttft_ms or 0.0) / 1e3),
            on_progress=tell_requests(phase),
        )
        conditions = condition_notices([probe.stop()])
        drifts += [measure_drift(bench, anchors)] if anchors else []
    engine.check_idle()
    return _Observed(result, mean_drift(drifts) if drifts else None, conditions)


def _judge(
    job: Job,
    played: Scenario,
    trial: Trial,
    plan: VerificationPlan,
    requests: Sequence[TimedRequest],
    observed: _Observed,
) -> tuple[Run, tuple[Notice, ...]]:
    """The run beside the prediction of the very same requests, and whether it counts.

    A run that meets its SLO beside other work on the machine counts; one that misses it then doesn't.
    """
    drift = observed.drift
    now = replace(played, model=drifted(played.model, drift)) if drift else played
    predicted = predict_requests(now, trial.budget_tokens, requests, plan.window_s)
    report = summarise(observed.result, job.config.slo, seed=job.config.seed)
    validity = check_run(observed.result, report, full_batch=_full_batch(job.settings, predicted.mean_decodes))
    misses = shortfalls(report, played.criterion)
    problems = (*validity.problems, *(observed.conditions if misses else ()))
    notices = [*validity.remarks, *validity.problems, *observed.conditions]
    if drift and max(abs(drift.decode - 1.0), abs(drift.chunk - 1.0)) > LARGEST_DRIFT:
        notices.append(machine_drifted(trial.budget_tokens, drift.decode, drift.chunk))
    run = Run(
        role=trial.role,
        budget_tokens=trial.budget_tokens,
        rate_per_s=plan.rate_per_s,
        predicted=latency(predicted.report),
        measured=latency(report),
        meets_slo=None if problems else not misses,
        problems=tuple(problem.cause for problem in problems),
        misses=misses,
        drift_decode=drift.decode if drift else None,
        drift_chunk=drift.chunk if drift else None,
        seed=job.config.seed,
    )
    return run, tuple(notices)


def _full_batch(settings: Settings, mean_decodes: float) -> int:
    """The decode batch that a prompt must have met for the run to count: what the rate keeps busy on average."""
    return max(1, min(settings.decodes, round(mean_decodes)))
