"""`sarathi-tune report RESULT`: show a stored result again."""

from pathlib import Path
from typing import Annotated

import typer

from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.options import Engines, JsonTarget, Quiet
from sarathi_tune.cli.output import (
    STDOUT,
    check_target,
    emit_budgets,
    emit_comparison,
    emit_result,
    emit_verification,
    show_engines,
)
from sarathi_tune.errors import ExitCode, UsageError


@edge
def report(
    result: Annotated[
        str,
        typer.Argument(metavar="RESULT", help="What --json wrote, of the main job, derive, verify or compare."),
    ],
    json_target: JsonTarget = None,
    engines: Engines = False,
    quiet: Quiet = False,
) -> ExitCode:
    """Show a stored result again; ends with the exit code that the run had."""
    from sarathi_tune.goodput.by_budget import BudgetComparison
    from sarathi_tune.goodput.verified import Verification
    from sarathi_tune.report.result import Result
    from sarathi_tune.report.stored import load_stored

    check_target(json_target)
    stored, document = load_stored(Path(result))
    if isinstance(stored, Result):
        code = emit_result(stored, json_target, quiet=quiet)
        if engines and json_target != STDOUT:
            show_engines(stored)
        return code
    if engines:
        raise UsageError(f"--engines is for a budget that was derived: {result} is no such result.")
    if isinstance(stored, Verification):
        return emit_verification(stored, document, json_target, quiet=quiet)
    if isinstance(stored, BudgetComparison):
        return emit_budgets(stored, document, json_target, quiet=quiet)
    return emit_comparison(stored, json_target)
