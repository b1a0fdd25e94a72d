"""`sarathi-tune derive PROFILE`: the budget from a profile document, without torch and without measuring."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sarathi_tune.cli import options as flags
from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.output import STDOUT, check_target, emit_result, show_engines
from sarathi_tune.cli.tune import command_line
from sarathi_tune.config.slo import Slo
from sarathi_tune.errors import ExitCode
from sarathi_tune.notices import decodes_assumed

if TYPE_CHECKING:
    from sarathi_tune.budget.question import BudgetQuestion
    from sarathi_tune.measure.profile import Profile

#: The batch that the paper's objectives are stated for (OSDI 2024, section 5), at a usual context.
_USUAL_DECODES, _USUAL_CONTEXT = 32, 1024


@edge
def derive(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A profile document, measured or hand-written.")],
    slo_itl: flags.SloItl = None,
    overhead: flags.Overhead = None,
    headroom: flags.Headroom = None,
    max_num_seqs: flags.MaxNumSeqs = None,
    context: flags.Context = None,
    prefix: flags.Prefix = None,
    seed: flags.Seed = None,
    json_target: flags.JsonTarget = None,
    engines: flags.Engines = False,
    quiet: flags.Quiet = False,
) -> ExitCode:
    """Derive the budget from a profile document. Loads no torch, measures nothing."""
    slo = flags.parse_slo(slo_itl, None, "sarathi-tune derive PROFILE --slo-itl 20ms.")
    reserves = flags.parse_reserves(overhead, headroom)
    decodes = flags.parse_count(max_num_seqs, "--max-num-seqs")
    tokens = flags.parse_token_count(context, "--context")
    prefix_tokens = flags.parse_token_count(prefix, "--prefix", zero=True)
    draws = flags.parse_seed(seed) or 0
    check_target(json_target)

    from sarathi_tune.budget.derive import derive as derive_budget
    from sarathi_tune.measure.profile import load_profile
    from sarathi_tune.report.build import derived_result
    from sarathi_tune.stepmodel.fit import fit_step_model

    document = load_profile(Path(profile))
    question = _question(document, slo, reserves, (decodes, tokens, prefix_tokens), draws)
    model = fit_step_model(document)
    derivation = derive_budget(document, model, question)
    result = derived_result(
        document, model, question, derivation, seed=draws, command=command_line(), profile_path=profile
    )
    if None in (decodes, tokens) and not any(sample.shape.decodes for sample in document.samples):
        assumed = decodes_assumed(question.decodes, question.context)
        result = replace(result, notices=(*result.notices, assumed.as_dict()))
    code = emit_result(result, json_target, quiet=quiet)
    if engines and json_target != STDOUT:
        show_engines(result)
    return code


def _question(
    profile: "Profile", slo: Slo, reserves: dict[str, Any], load: tuple[int | None, int | None, int | None], seed: int
) -> "BudgetQuestion":
    """What is asked: (decodes, context, prefix) as given, the largest that the profile holds for those that weren't,
    and a usual batch where it holds no decodes."""
    from sarathi_tune.budget.question import BudgetQuestion, settled_headroom

    decodes, context, prefix = load
    shapes = [sample.shape for sample in profile.samples if sample.times_ms]
    if decodes is None:
        decodes = max(shape.decodes for shape in shapes) or _USUAL_DECODES
    if context is None:
        context = max((shape.context for shape in shapes if shape.decodes), default=_USUAL_CONTEXT)
    if prefix is None:
        # a prompt that leaves less context than this behind it can't have a longer prefix before it
        prefix = min(context, max((shape.prefix for shape in shapes), default=0))
    return BudgetQuestion(
        slo_itl_ms=slo.itl_ms,
        decodes=decodes,
        context=context,
        prefix=prefix,
        percentile=slo.percentile,
        seed=seed,
        **(reserves | {"headroom": settled_headroom(profile, reserves.get("headroom"))}),
    )
