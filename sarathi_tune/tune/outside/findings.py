"""What was observed, as a profile, an advice and a result. Works from values alone."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from sarathi_tune.budget.derive import derive
from sarathi_tune.budget.question import BudgetQuestion, Derivation, settled_headroom
from sarathi_tune.config.outside import OutsideConfig
from sarathi_tune.config.run import DEFAULT_BUDGET_TOKENS
from sarathi_tune.errors import TargetError
from sarathi_tune.loadgen.http.probe import ServerFacts
from sarathi_tune.measure.profile import Profile
from sarathi_tune.measure.shapes import rounded_context
from sarathi_tune.notices import (
    Notice,
    budget_only_bounded,
    client_late,
    margin_is_wider,
    steps_miscounted,
)
from sarathi_tune.report.build import derived_result
from sarathi_tune.report.result import DecodeStep, Neighbour, PromptAlone, Result, RunningServer, SceneGaps
from sarathi_tune.stats import median, quantile
from sarathi_tune.stepmodel.fit import StepModel, fit_step_model
from sarathi_tune.tune.outside.evidence import (
    SPOILING_SHARE,
    Exposition,
    Sent,
    evidence,
    others_share,
    own_gap_ms,
)
from sarathi_tune.tune.outside.margin import margin
from sarathi_tune.tune.outside.plan import Question
from sarathi_tune.tune.outside.rows import FULL, drift, profile_rows, repeat_noise
from sarathi_tune.tune.outside.running import RunningBudget, infer_budget
from sarathi_tune.tune.outside.seen import Scene, Seen
from sarathi_tune.tune.outside.steps import Timeline, timeline

#: Where a client's event loop is later than this share of a decode step at p99, its stamps are no times of steps.
_STARVED, _LEAST_LAG_MS = 0.25, 2.0
#: A server that answers with more tokens per event than this bundles steps, or drafts tokens ahead.
_MOST_PER_EVENT = 1.05
#: With this share of prompts in another number of steps than the budget makes of them, nothing is known about it.
_MISCOUNTED_TOLD, _MISCOUNTED_SPOILS = 0.1, 0.34
#: From this misfit of the steps on, no budget explains them.
_LARGEST_MISFIT = 0.25


@dataclass(frozen=True, slots=True)
class Observation:
    """What a measurement leaves behind. `before` and `after` are empty where the server has no metrics. `lags_ms`: how
    late the client's event loop was, which is in the stamps unless those say when events arrived
    (`is_stamped_on_arrival`)."""

    facts: ServerFacts
    url: str
    question: Question
    seen: Seen
    before: Exposition
    after: Exposition
    sent: Sent
    lags_ms: tuple[float, ...] = ()
    is_stamped_on_arrival: bool = False
    tokens_per_event: float | None = None
    notices: tuple[Notice, ...] = ()


def conclude(config: OutsideConfig, observation: Observation) -> tuple[Profile, Result]:
    """The profile and the result of a measurement. Raises TargetError when there is no step in it."""
    timelines = [timeline(scene) for scene in observation.seen.scenes]
    injections = [item for line in timelines for item in line.injections]
    running = infer_budget(injections)
    found = [*observation.notices, *_notices(observation, timelines, running)]
    profile = _profile(observation, timelines, running, found)
    if not profile.samples:
        raise TargetError(
            f"{observation.url} answered no stream with more than a token or two, so that no step could be seen: does "
            "it limit max_tokens, or ignore ignore_eos?"
        )
    model = fit_step_model(profile)
    question = _budget_question(config, observation, profile, running)
    derivation = derive(profile, model, question)
    doubt = _doubt(observation, timelines, running)
    if doubt is not None:
        derivation = replace(derivation, verdict="inconclusive", budget=None, interval=None, why=doubt)
    result = derived_result(profile, model, question, derivation, seed=config.seed, command=config.command)
    if derivation.verdict == "recommended" and derivation.budget is not None:
        room = margin(model, question, observation.question.workload, derivation.budget)
        if room is not None:
            told = margin_is_wider(derivation.budget, question.decodes, room.decodes, room.step_ms, room.largest_budget)
            result = replace(result, notices=(*result.notices, told.as_dict()))
    advice = replace(result.advice, neighbours=_named(result.advice.neighbours, running))
    objective = replace(result.objective, ttft_ms=config.slo.ttft_ms)
    result = replace(result, advice=advice, objective=objective, workload=observation.question.workload.as_dict())
    server = _server(observation, timelines, running, model, question, derivation)
    return profile, replace(result, server=replace(server, is_doubted=doubt is not None))


def _profile(
    observation: Observation, timelines: Sequence[Timeline], running: RunningBudget | None, found: Sequence[Notice]
) -> Profile:
    facts = observation.facts
    full = [line for line in timelines if line.name == FULL]
    differences = [*map(repeat_noise, full), drift(full)]
    return Profile(
        samples=profile_rows(timelines, observation.seen.alone, running),
        machine={"name": f"behind {observation.url}, seen from {platform.node() or 'here'}"},
        model={"name": facts.dialect.model, "serve_name": facts.dialect.model},
        engine={"name": facts.server or "OpenAI-compatible server"}
        | ({"version": facts.version} if facts.version else {})
        | _engine_facts(observation),
        notices=tuple(notice.as_dict() for notice in found),
        noise=max((share for share in differences if share is not None), default=None),
        max_model_len=facts.max_model_len,
        source="sarathi-tune --target",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _engine_facts(observation: Observation) -> dict[str, Any]:
    facts: dict[str, Any] = {"measured": "over HTTP"}
    if observation.after.kv_tokens is not None:
        facts["kv_tokens"] = observation.after.kv_tokens
    return facts


def _budget_question(
    config: OutsideConfig, observation: Observation, profile: Profile, running: RunningBudget | None
) -> BudgetQuestion:
    question = observation.question
    return BudgetQuestion(
        slo_itl_ms=config.slo.itl_ms,
        decodes=question.decodes,
        context=question.context,
        prefix=question.prefix,
        overhead_ms=config.overhead_ms,
        headroom=settled_headroom(profile, config.headroom),
        max_model_len=observation.facts.max_model_len,
        percentile=config.slo.percentile,
        reference_prompt_tokens=question.workload.quantile_prompt(0.5),
        seed=config.seed,
        default_budget=DEFAULT_BUDGET_TOKENS if running is None else running.budget,
    )


def _notices(observation: Observation, timelines: Sequence[Timeline], running: RunningBudget | None) -> list[Notice]:
    # of events that bundle tokens the doubt speaks, and their gaps are others than the server's
    seen_ms = None if _bundles(observation) else _seen_gap_ms(observation)
    found = list(evidence(observation.before, observation.after, observation.sent, running, seen_ms))
    if running is not None and running.is_bound:
        largest = max(item.num_tokens for line in timelines for item in line.injections)
        found.append(budget_only_bounded(running.budget, largest))
    if running is not None and running.miscounted > _MISCOUNTED_TOLD:
        found.append(steps_miscounted(running.miscounted))
    step_ms = _step_ms(timelines)
    if _is_late(observation, 0.5 * _STARVED * step_ms):
        found.append(client_late(_lag_ms(observation), step_ms))
    return found


def _doubt(observation: Observation, timelines: Sequence[Timeline], running: RunningBudget | None) -> str | None:
    """Why nothing that was seen can be trusted, with what to do; None when it can."""
    per_event = observation.tokens_per_event
    share = others_share(observation.before, observation.after, observation.sent)
    step_ms = _step_ms(timelines)
    if observation.after.speculates or _bundles(observation):
        how = "drafts tokens ahead (speculative decoding)" if observation.after.speculates else "sends several at once"
        return (
            f"The server {how}, {per_event or 1.0:.1f} tokens per event: a gap between events is no single decode "
            "step, so neither steps nor the budget can be told from outside. Measure it with speculation off and "
            "--stream-interval 1."
        )
    if share is not None and share > SPOILING_SHARE:
        return (
            f"{share:.0%} of the prompt tokens that the server computed meanwhile were not ours: their chunks lie in "
            "the same steps. Measure when the server is idle, or a copy of it on the same hardware."
        )
    if _is_late(observation, _STARVED * step_ms):
        return (
            f"This client was up to {_lag_ms(observation):.1f} ms late (p99) in reading, and a decode step takes "
            f"{step_ms:.1f} ms: run it on another machine than the server, or on one that isn't busy."
        )
    if running is None:
        return "No prompt could be laid beside steady decodes: the streams ended too early. See the server's log."
    if running.miscounted > _MISCOUNTED_SPOILS or running.error > _LARGEST_MISFIT:
        return (
            f"No one budget explains the steps: {running.miscounted:.0%} of the prompts took another number of them, "
            f"and their times are off by {running.error:.0%} in the median. Other traffic, several engines behind "
            "one address, or a busy machine look like this: measure a single idle server."
        )
    return None


def _named(neighbours: Sequence[Neighbour], running: RunningBudget | None) -> tuple[Neighbour, ...]:
    """The engine's default of a derivation is what runs here."""
    label = "running now" if running is not None and not running.is_bound else "running now, at least"
    return tuple(replace(row, label=label) if row.label == "engine default" else row for row in neighbours)


def _server(
    observation: Observation,
    timelines: Sequence[Timeline],
    running: RunningBudget | None,
    model: StepModel,
    question: BudgetQuestion,
    derivation: Derivation,
) -> RunningServer:
    advised = next((row for row in derivation.neighbours if row.budget == derivation.budget), None)
    now = next((row for row in derivation.neighbours if running and row.budget == running.budget), None)
    step_ms = None
    if running is not None and running.budget > question.decodes:
        chunk = running.budget - question.decodes
        step_ms = model.centre_ms(question.decodes, question.decodes * question.context, ((0, chunk),))
    interval = None
    if running is not None and running.interval[1] is not None:
        interval = running.interval[0], running.interval[1]
    return RunningServer(
        url=observation.url,
        budget_tokens=None if running is None else running.budget,
        interval_tokens=interval,
        is_lower_bound=running is not None and running.is_bound,
        misfit=None if running is None else running.error,
        full_steps=0 if running is None else running.num_full,
        prompts=0 if running is None else running.num_injections,
        step_ms=step_ms,
        prompt_tokens=question.reference_prompt_tokens,
        ttft_ms=now.ttft_ms if now else None,
        ttft_advised_ms=advised.ttft_ms if advised else None,
        alone=_alone(observation),
        decode_steps=_decode_steps(timelines),
        client_lag_p99_ms=_lag_ms(observation),
        is_stamped_on_arrival=observation.is_stamped_on_arrival,
        has_metrics=bool(observation.after.values),
        own_gap_ms=own_gap_ms(observation.before, observation.after),
        seen_gap_ms=_seen_gap_ms(observation),
        scenes=_scene_gaps(observation),
    )


def _seen_gap_ms(observation: Observation) -> float | None:
    """The mean gap between the tokens of all streams, beside prompts and alone."""
    gaps_s = [gap_s for scene in observation.seen.scenes for gap_s in _gaps_s(scene, 0.0)]
    return 1e3 * sum(gaps_s) / len(gaps_s) if gaps_s else None


def _scene_gaps(observation: Observation) -> tuple[SceneGaps, ...]:
    found = []
    for scene in observation.seen.scenes:
        gaps_s = _gaps_s(scene, scene.own_since_s)
        if gaps_s:
            prompts = sum(len(prompts) for prompts in scene.injections)
            seen_ms = 1e3 * sum(gaps_s) / len(gaps_s)
            found.append(
                SceneGaps(scene.name, len(scene.streams), prompts, len(gaps_s), seen_ms, own_ms=scene.own_gap_ms)
            )
    return tuple(found)


def _gaps_s(scene: Scene, since_s: float) -> list[float]:
    """The gaps between tokens of each stream that ended after `since_s`."""
    return [after - before for stream in scene.streams for before, after in pairwise(stream.token_s) if after > since_s]


def _alone(observation: Observation) -> tuple[PromptAlone, ...]:
    alone = observation.seen.alone
    return tuple(
        PromptAlone(tokens, median([item.ttft_ms for item in alone if item.tokens == tokens]))
        for tokens in sorted({item.tokens for item in alone})
    )


def _decode_steps(timelines: Sequence[Timeline]) -> tuple[DecodeStep, ...]:
    """By number of decodes; scenes with as many are one entry."""
    found = []
    for decodes in sorted({step.decodes for line in timelines for step in line.plain}):
        steps = [step for line in timelines for step in line.plain if step.decodes == decodes]
        context = rounded_context(median([step.context for step in steps]))
        found.append(DecodeStep(decodes, context, median([step.duration_ms for step in steps]), len(steps)))
    return tuple(found)


def _bundles(observation: Observation) -> bool:
    """Whether events hold more than a token."""
    return (observation.tokens_per_event or 1.0) > _MOST_PER_EVENT


def _lag_ms(observation: Observation) -> float:
    return quantile(observation.lags_ms, 0.99) if observation.lags_ms else 0.0


def _is_late(observation: Observation, limit_ms: float) -> bool:
    """Whether the client's own lateness is in the stamps, and more than that."""
    return not observation.is_stamped_on_arrival and _lag_ms(observation) > max(_LEAST_LAG_MS, limit_ms)


def _step_ms(timelines: Sequence[Timeline]) -> float:
    times = [step.duration_ms for line in timelines for step in line.plain]
    return median(times) if times else 0.0
