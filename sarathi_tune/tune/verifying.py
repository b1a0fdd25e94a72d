"""The verifying part of a run: the built-in engine under real load, beside the prediction of the very same requests."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from sarathi_tune.engine.loop import Engine
from sarathi_tune.goodput.objective import shortfalls
from sarathi_tune.goodput.surface import Scenario, predict_requests
from sarathi_tune.goodput.validity import Validity, check_run
from sarathi_tune.goodput.verification import VerificationPlan, plan_verification
from sarathi_tune.loadgen.clock import SystemClock
from sarathi_tune.loadgen.inprocess import LoadProgress, run_load
from sarathi_tune.loadgen.latency import summarise
from sarathi_tune.notices import Notice
from sarathi_tune.report.build import latency
from sarathi_tune.report.progress import Phase, Ui
from sarathi_tune.report.result import Run, RunRole
from sarathi_tune.tune.job import Job
from sarathi_tune.tune.settings import Settings

#: Longest that the requests of a run are followed behind its window, in seconds.
DRAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One run to be made: this budget at this rate for these seconds."""

    role: RunRole
    budget_tokens: int
    rate_per_s: float
    seconds: float


def verify(job: Job, played: Scenario, trial: Trial, ui: Ui) -> tuple[Run, tuple[Notice, ...]]:
    """Run a trial for real, or take it from an interrupted run; with what there is to say about its validity."""
    key = {
        "role": trial.role,
        "budget_tokens": trial.budget_tokens,
        "rate_per_s": trial.rate_per_s,
        "seconds": trial.seconds,
        "seed": job.config.seed,
    }
    saved = job.folder.saved_run(key)
    if saved is not None:
        ui.note(f"{trial.budget_tokens:,} tokens at {trial.rate_per_s:.3g} req/s was verified before.")
        return saved, ()
    plan = plan_verification(
        trial.rate_per_s, job.settings.workload, seconds=trial.seconds, max_seconds=2 * trial.seconds, share=1.0
    )
    run, validity = _run(job, played, trial, plan, ui)
    job.folder.save_run(key, run)
    return run, (*plan.notices, *validity.remarks, *validity.problems)


def _run(job: Job, played: Scenario, trial: Trial, plan: VerificationPlan, ui: Ui) -> tuple[Run, Validity]:
    config, settings = job.config, job.settings
    seed, clock = config.seed, SystemClock()
    requests, _ = plan.requests(
        settings.workload,
        seed,
        vocab_size=settings.source.config.vocab_size,
        max_model_len=settings.max_model_len,
    )
    predicted = predict_requests(played, trial.budget_tokens, requests, plan.window_s)
    engine = Engine(job.engine_config(trial.budget_tokens), job.runner, clock)
    name = f"verify {trial.budget_tokens:,} at {plan.rate_per_s:.3g} req/s"
    started_s = time.perf_counter()
    with ui.phase(name, total=len(requests)) as phase:
        result = run_load(
            engine,
            clock,
            requests,
            stop_after_s=plan.window_s,
            drain_s=DRAIN_S,
            give_up_after_s=max(DRAIN_S, 10 * (config.slo.ttft_ms or 0.0) / 1e3),
            on_progress=_teller(phase),
        )
    engine.check_idle()
    report = summarise(result, config.slo, seed=seed)
    validity = check_run(result, report, full_batch=_full_batch(settings, predicted.mean_decodes))
    misses = shortfalls(report, played.criterion)
    return (
        Run(
            role=trial.role,
            budget_tokens=trial.budget_tokens,
            rate_per_s=plan.rate_per_s,
            predicted=latency(predicted.report),
            measured=latency(report),
            meets_slo=None if validity.problems else not misses,
            problems=tuple(problem.cause for problem in validity.problems),
            misses=misses,
            seed=seed,
            duration_s=time.perf_counter() - started_s,
        ),
        validity,
    )


def _full_batch(settings: Settings, mean_decodes: float) -> int:
    """The decode batch that a prompt must have met for the run to count: what the rate keeps busy on average."""
    return max(1, min(settings.decodes, round(mean_decodes)))


def _teller(phase: Phase) -> Callable[[LoadProgress], None]:
    told = 0

    def tell(progress: LoadProgress) -> None:
        nonlocal told
        phase.describe(f"{progress.num_running} running, {progress.num_waiting} waiting")
        phase.advance(progress.num_finished - told)
        told = progress.num_finished

    return tell
