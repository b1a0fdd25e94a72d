"""Where a result goes, and which exit code it means."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sarathi_tune.cli.consoles import data_console, write_data
from sarathi_tune.errors import ExitCode, InterruptedRunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from sarathi_tune.goodput.by_budget import BudgetComparison
    from sarathi_tune.goodput.verified import Verification
    from sarathi_tune.report.comparison import Comparison
    from sarathi_tune.report.result import Result

STDOUT = "-"

_Verified = TypeVar("_Verified", "Verification", "BudgetComparison")

_VERIFIED_CODES = {
    "met": ExitCode.MET,
    "missed": ExitCode.MISSED,
    "inconclusive": ExitCode.INCONCLUSIVE,
    "failed": ExitCode.TARGET_FAILED,
}


def check_target(json_target: str | None, out: Path | None = None) -> None:
    """Prove that what the run will write can be written, before it begins. Raises UsageError."""
    from sarathi_tune.report.store import check_writable

    if out is not None:
        check_writable(out)
    if json_target is None or json_target == STDOUT:
        return
    path = Path(json_target)
    try:
        is_other = path.exists() and not path.is_file()
    except OSError as error:  # a name that is too long for the file system
        raise UsageError(f"Can't write {path}: {error.strerror}; choose another name.") from error
    if is_other or not json_target.strip():
        raise UsageError(
            f"{json_target!r} is not a file that can be replaced; give a file's name, or write - for stdout."
        )
    check_writable(path.parent)


def emit_result(result: "Result", json_target: str | None, *, quiet: bool) -> ExitCode:
    """Write the JSON where it was asked for and show the result to a person, unless stdout belongs to the JSON."""
    from sarathi_tune.report.console import print_result, print_serve_line
    from sarathi_tune.report.store import result_as_dict

    emit_document(result_as_dict(result), json_target)
    if json_target != STDOUT:
        show = print_serve_line if quiet else print_result
        show(result, data_console())
    return exit_code_of(result)


def emit_verification(
    verification: "Verification", document: dict[str, Any], json_target: str | None, *, quiet: bool
) -> ExitCode:
    """Write the document where it was asked for and show the verification. Raises InterruptedRunError for one that was
    cut off."""
    from sarathi_tune.report.verified import print_verification, verified_headline

    return _emit_verified(verification, document, json_target, None if quiet else print_verification, verified_headline)


def emit_budgets(
    comparison: "BudgetComparison", document: dict[str, Any], json_target: str | None, *, quiet: bool
) -> ExitCode:
    """As `emit_verification`, for budgets side by side."""
    from sarathi_tune.report.by_budget import budgets_headline, print_budgets

    return _emit_verified(comparison, document, json_target, None if quiet else print_budgets, budgets_headline)


def _emit_verified(
    found: _Verified,
    document: dict[str, Any],
    json_target: str | None,
    show: "Callable[[_Verified, Console], None] | None",
    headline: "Callable[[_Verified], str]",
) -> ExitCode:
    emit_document(document, json_target)
    if json_target != STDOUT:
        if show is None:
            data_console().print(headline(found), soft_wrap=True)
        else:
            show(found, data_console())
    if not found.is_complete:
        raise InterruptedRunError("Interrupted; what had come until then is in the result.")
    return _VERIFIED_CODES[found.verdict]


def emit_comparison(comparison: "Comparison", json_target: str | None) -> ExitCode:
    """As `emit_result`, for schedulers side by side, which no objective judges."""
    from sarathi_tune.report.compared import print_comparison
    from sarathi_tune.report.comparison import comparison_as_dict

    emit_document(comparison_as_dict(comparison), json_target)
    if json_target != STDOUT:
        print_comparison(comparison, data_console())
    return ExitCode.MET


def show_engines(result: "Result") -> None:
    """The flags of other engines, on stdout below the result."""
    from sarathi_tune.report.snippets import print_snippets

    print_snippets(result, data_console())


def emit_document(document: dict[str, Any], json_target: str | None) -> None:
    """Write `document` to stdout or to a file, or nowhere."""
    if json_target is None:
        return
    if json_target == STDOUT:
        write_data(json.dumps(document, indent=2) + "\n")
        return
    from sarathi_tune.measure.documents import write_json

    write_json(Path(json_target), document, "document")


def exit_code_of(result: "Result") -> ExitCode:
    """0 when the objective is met or nothing limits it, 1 when the verification or the verdict says that it is missed.

    A derived budget that wasn't verified counts as met: nothing contradicts it.
    """
    match result.advice.verdict:
        case "infeasible":
            return ExitCode.INFEASIBLE
        case "inconclusive":
            return ExitCode.INCONCLUSIVE
        case "not-the-budget":
            return ExitCode.MISSED
    run = result.run("recommended")
    if run is None or run.measured is None:
        return ExitCode.MET
    if run.problems or run.meets_slo is None:
        return ExitCode.INCONCLUSIVE
    return ExitCode.MET if run.meets_slo else ExitCode.MISSED
