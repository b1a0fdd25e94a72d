"""`sarathi-tune report RESULT`: show a stored result again."""

from pathlib import Path
from typing import Annotated

import typer

from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.options import Engines, JsonTarget, Quiet
from sarathi_tune.cli.output import STDOUT, check_target, emit_result, show_engines
from sarathi_tune.errors import ExitCode


@edge
def report(
    result: Annotated[str, typer.Argument(metavar="RESULT", help="A result document.")],
    json_target: JsonTarget = None,
    engines: Engines = False,
    quiet: Quiet = False,
) -> ExitCode:
    """Show a stored result again; ends with the exit code that the run had."""
    from sarathi_tune.report.store import load_result

    check_target(json_target)
    document = load_result(Path(result))
    code = emit_result(document, json_target, quiet=quiet)
    if engines and json_target != STDOUT:
        show_engines(document)
    return code
