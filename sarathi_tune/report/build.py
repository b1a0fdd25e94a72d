"""The result document from what the other layers hand over: derivation, step model, latencies."""

import platform
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from sarathi_tune import __version__
from sarathi_tune.budget import question as budget
from sarathi_tune.budget.rule_of_thumb import RuleOfThumb as DerivedRule
from sarathi_tune.budget.steps import Steps
from sarathi_tune.loadgen.latency import LatencyReport
from sarathi_tune.measure.profile import Profile
from sarathi_tune.report.result import (
    Advice,
    CurvePoint,
    FitError,
    Latency,
    LimitingStep,
    Neighbour,
    Objective,
    Result,
    RuleOfThumb,
)
from sarathi_tune.stepmodel.fit import HoldOutError, StepModel

#: Packages whose version may change a result.
_PACKAGES = ("torch", "numpy", "scipy", "transformers", "flash-attn")
#: Budgets that the curve shows, where they lie in its range.
_CURVE_TOKENS = tuple(1 << power for power in range(4, 18))


def derived_result(
    profile: Profile,
    model: StepModel,
    question: budget.BudgetQuestion,
    derivation: budget.Derivation,
    *,
    seed: int = 0,
    command: str = "",
    profile_path: str = "",
) -> Result:
    """A result that rests on a profile alone. What was predicted and verified is added with `dataclasses.replace`."""
    return Result(
        objective=Objective(question.slo_itl_ms, None, question.percentile, question.overhead_ms, question.headroom),
        advice=advice(profile, model, question, derivation),
        fit_error=fit_error(model.error),
        notices=(*profile.notices, *(notice.as_dict() for notice in derivation.notices)),
        machine=profile.machine,
        model=profile.model,
        engine=profile.engine,
        versions=versions(),
        seed=seed,
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        profile=profile_path,
    )


def advice(
    profile: Profile, model: StepModel, question: budget.BudgetQuestion, derivation: budget.Derivation
) -> Advice:
    """The derivation as the result keeps it, with the curve that the SLO cuts."""
    return Advice(
        verdict=derivation.verdict,
        why=derivation.why,
        max_num_seqs=question.max_num_seqs or question.decodes,
        budget_tokens=derivation.budget,
        fitted_tokens=derivation.fitted_budget,
        smallest_tokens=max(derivation.floor, question.decodes + derivation.min_chunk_tokens),
        interval_tokens=derivation.interval,
        interval_level=derivation.interval_level,
        decode_step=_step(derivation.decode_step),
        limiting=_step(derivation.limiting),
        rule_of_thumb=_rule(derivation.rule_of_thumb),
        curve=_curve(profile, model, question, derivation),
        neighbours=tuple(map(_neighbour, derivation.neighbours)),
        largest_batch=derivation.largest_batch,
        largest_decode_batch=derivation.largest_decode_batch,
        largest_max_num_seqs=derivation.largest_max_num_seqs,
        smallest_slo_ms=derivation.smallest_slo_ms,
        serial_chunk_tokens=derivation.serial_chunk,
    )


def with_prices(advice: Advice, rate_per_s: float, predictions: Mapping[int, LatencyReport]) -> Advice:
    """The advice with its neighbours priced at a rate: `predictions` has a report per budget, in tokens."""
    return replace(
        advice,
        neighbours=tuple(
            _priced(neighbour, rate_per_s, predictions[neighbour.budget_tokens])
            if neighbour.budget_tokens in predictions
            else neighbour
            for neighbour in advice.neighbours
        ),
    )


def fit_error(error: HoldOutError) -> FitError:
    """The step model's error as the result keeps it; what is unknown is None."""
    known = error.as_dict()
    return FitError(
        method=error.method,
        median=known["median"],
        p95=known["p95"],
        shapes=error.n,
        hybrid_median=known["hybrid_median"],
        hybrid_p95=known["hybrid_p95"],
        additive_median=known["additive_median"],
        additive_bias=known["additive_bias"],
    )


def latency(report: LatencyReport) -> Latency:
    """What requests saw, as the result keeps it."""
    return Latency(
        requests=report.counts.intended,
        gaps=report.itl.n,
        itl_p50_ms=report.itl.p50_ms,
        itl_p99_ms=report.itl.p99_ms,
        itl_p99_interval_ms=report.itl.tail_interval_ms,
        itl_p999_ms=report.itl.p999_ms,
        itl_max_ms=report.itl.max_ms,
        itl_p99_per_request_ms=report.itl_own.p99_ms,
        itl_p99_stalled_ms=report.itl_stalled.p99_ms,
        stalled_share=report.stalled_share,
        ttft_p50_ms=report.ttft.p50_ms,
        ttft_p99_ms=report.ttft.p99_ms,
        goodput_per_s=report.goodput_per_s,
        attained_share=report.attained_share,
        preemptions=report.num_preemptions,
    )


def versions() -> dict[str, str]:
    """Versions of what a result depends on, without importing any of it."""
    found = {"sarathi-tune": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _step(step: budget.LimitingStep) -> LimitingStep:
    return LimitingStep(step.decodes, step.context, step.chunk, step.prefix, step.centre_ms, step.p99_ms)


def _rule(rule: DerivedRule) -> RuleOfThumb:
    known = rule.as_dict()
    return RuleOfThumb(
        decode_step_ms=rule.decode_step_ms,
        decode_source=rule.decode_source,
        prefill_ms_per_token=rule.prefill_ms_per_token,
        prefill_source=rule.prefill_source,
        budget_tokens=rule.budget_tokens,
        additive_bias=known["additive_bias"],
        additive_n=rule.additive_n,
    )


def _neighbour(neighbour: budget.Neighbour) -> Neighbour:
    return Neighbour(
        budget_tokens=neighbour.budget,
        step_p99_ms=neighbour.p99_step_ms,
        meets_slo=neighbour.meets_slo,
        label=neighbour.label,
        prompt_tokens=neighbour.prompt_tokens,
        ttft_alone_ms=neighbour.ttft_ms,
    )


def _priced(neighbour: Neighbour, rate_per_s: float, report: LatencyReport) -> Neighbour:
    return replace(
        neighbour,
        rate_per_s=rate_per_s,
        ttft_p50_ms=report.ttft.p50_ms,
        ttft_p99_ms=report.ttft.p99_ms,
        goodput_per_s=report.goodput_per_s,
    )


def _curve(
    profile: Profile, model: StepModel, question: budget.BudgetQuestion, derivation: budget.Derivation
) -> tuple[CurvePoint, ...]:
    """The worst step at budgets a factor of two apart and at the advised one, over the measured range."""
    steps = Steps(
        model=model,
        decodes=question.decodes,
        context=question.context,
        prefix=question.prefix,
        percentile=question.percentile,
        max_model_len=question.max_model_len or profile.max_model_len,
    )
    largest = max(question.default_budget, derivation.budget or 0)
    budgets = {tokens for tokens in _CURVE_TOKENS if question.decodes < tokens <= largest}
    if derivation.budget is not None:
        budgets.add(derivation.budget)
    most = question.decodes + steps.widest_chunk
    return tuple(
        CurvePoint(tokens, steps.centre_ms(tokens - question.decodes), steps.worst_ms(tokens - question.decodes))
        for tokens in sorted(budgets)
        if tokens <= most
    )
