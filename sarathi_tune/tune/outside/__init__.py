"""`sarathi-tune --target URL --slo-itl 120ms`: what a live server's steps cost and which budget it runs with, inferred
from outside, and the budget that it should have.

    plan       what to send, in which order
    session    sending it: streams that decode, prompts among them
    seen       what came back, as stamps
    steps      stamps to steps
    running    the budget that explains how prompts were cut
    playing    the order of the scenes
    rows       steps to rows of a profile
    evidence   what the server's own metrics say
    margin     how far the worst step is from those of a steady load
    findings   all of it together: profile, advice, result

Everything but `session` works from values, without a socket.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sarathi_tune.config.outside import OutsideConfig
from sarathi_tune.errors import InterruptedRunError
from sarathi_tune.loadgen.heap import frozen_heap
from sarathi_tune.loadgen.http.dialogue import Dialogue
from sarathi_tune.loadgen.http.limits import ensure_descriptors
from sarathi_tune.loadgen.http.probe import ServerFacts, probe
from sarathi_tune.loadgen.http.target import Target, parse_target
from sarathi_tune.loadgen.http.wire import Timeouts
from sarathi_tune.measure.profile import save_profile
from sarathi_tune.report.plan import PlannedPhase, RunPlan
from sarathi_tune.report.progress import Phase, Ui
from sarathi_tune.report.result import PhaseTime, Result
from sarathi_tune.report.store import save_result
from sarathi_tune.tune.folder import new_folder
from sarathi_tune.tune.outside import plan
from sarathi_tune.tune.outside.evidence import Exposition, Sent
from sarathi_tune.tune.outside.findings import Observation, conclude
from sarathi_tune.tune.outside.plan import Limits, Question
from sarathi_tune.tune.outside.playing import Play
from sarathi_tune.tune.outside.seen import Seen
from sarathi_tune.tune.outside.session import Observer
from sarathi_tune.workload.load import load_workload

__all__ = ["plan_outside", "run_outside"]

#: The context length that is assumed where the server names none.
ASSUMED_MODEL_LEN = 8192


def plan_outside(config: OutsideConfig) -> RunPlan:
    """What `run_outside` would do. Doesn't talk to the server."""
    parse_target(config.target)
    question = plan.settle(config, ASSUMED_MODEL_LEN)
    share = config.time_limit_s / 10
    return RunPlan(
        phases=(
            PlannedPhase("look", "the model, its context, what the server accepts"),
            PlannedPhase("prompts alone", "their time to the first token, by length", share),
            PlannedPhase("few decodes", f"{plan.FEW} streams, prompts up to the longest among them", 3 * share),
            PlannedPhase("full batch", f"{question.decodes} streams, prompts around the objective", 4 * share),
            PlannedPhase("refine", "prompts on both sides of multiples of the budget seen", 2 * share),
            PlannedPhase("again", "decodes and prompts among them, where half of the time is left"),
            PlannedPhase("derive", "running budget, step model, budget for the objective", 1.0),
        ),
        settings=_settings(config, question, None),
        writes=(str(config.out_dir / "DATE-MODEL/profile.json"), str(config.out_dir / "DATE-MODEL/result.json")),
    )


def run_outside(config: OutsideConfig, ui: Ui, environment: Mapping[str, str] | None = None) -> Result:
    """Measure a live server and advise. Raises TargetError, UsageError or InterruptedRunError."""
    target = parse_target(config.target, os.environ if environment is None else environment)
    load_workload(config.workload)  # one that doesn't exist is told before anything is sent
    started_s = time.perf_counter()
    with ui.phase("Looking at the server"):
        facts = probe(target, model=config.model, timeouts=Timeouts(first_byte_s=60.0))
    question = plan.settle(config, facts.max_model_len or ASSUMED_MODEL_LEN)
    ensure_descriptors(question.decodes + 1, is_certain=True)
    looked_s = time.perf_counter()
    try:
        with ui.phase("Measuring") as phase:
            observation = asyncio.run(_observe(config, target, facts, question, phase))
    except KeyboardInterrupt:
        raise InterruptedRunError(
            "Interrupted; nothing was kept, and the server has been told to drop what was sent."
        ) from None
    measured_s = time.perf_counter()
    with ui.phase("derive"):
        profile, result = conclude(config, observation)
    phases = (
        PhaseTime("look", round(looked_s - started_s, 2)),
        PhaseTime("measure", round(measured_s - looked_s, 2)),
        PhaseTime("derive", round(time.perf_counter() - measured_s, 2)),
    )
    folder = new_folder(config.out_dir, facts.dialect.model)
    save_profile(profile, folder.profile)
    result = replace(
        result,
        settings=_settings(config, observation.question, facts),
        phases=phases,
        profile=folder.profile.name,
        folder=str(folder.path),
    )
    save_result(result, folder.result)
    return result


def _tell_defects(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What nobody asks a task for is printed, as always, but not the Ctrl-C that came while it ran: the loop has raised
    that already."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


async def _observe(
    config: OutsideConfig, target: Target, facts: ServerFacts, question: Question, phase: Phase
) -> Observation:
    """Everything that needs the server."""
    asyncio.get_running_loop().set_exception_handler(_tell_defects)
    end_s = time.perf_counter() + config.time_limit_s
    async with Dialogue(target, facts.dialect, Timeouts(first_byte_s=300.0, request_s=3600.0)) as dialogue:
        limits = Limits(facts.max_model_len or ASSUMED_MODEL_LEN, None, config.time_limit_s)
        observer = Observer(dialogue, limits, end_s, phase)
        before = await observer.metrics()
        observer.limits = replace(limits, kv_tokens=before.kv_tokens if before else None)
        play = Play(config, observer, question, phase)
        with frozen_heap():
            await play.run()
        after = await observer.metrics()
    return Observation(
        facts=facts,
        url=target.base_url,
        question=play.question,
        seen=Seen(tuple(observer.alone), tuple(observer.scenes)),
        before=before or Exposition(),
        after=after or Exposition(),
        sent=Sent(observer.prompt_tokens, tuple(observer.prompts)),
        lags_ms=tuple(observer.lags_ms),
        is_stamped_on_arrival=observer.is_stamped_on_arrival,
        tokens_per_event=observer.tokens_per_event,
        notices=tuple(play.notices),
    )


def _settings(config: OutsideConfig, question: Question, facts: ServerFacts | None) -> dict[str, Any]:
    """What was asked, for the plan and the result."""
    known = {} if facts is None else facts.as_dict()
    return {
        "target": config.target,
        "workload": question.workload.name,
        "max_num_seqs": question.decodes,
        "context": question.context,
        "prefix": question.prefix,
        "time_limit_s": config.time_limit_s,
        "origins": dict(question.origins),
        **({"server": known} if known else {}),
    }
