"""Budgets side by side for a person."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from sarathi_tune.goodput.by_budget import BudgetComparison, BudgetRun
from sarathi_tune.notices import Notice
from sarathi_tune.report.console import figure_table, print_heading, print_notices, print_prose
from sarathi_tune.report.figures import ms_figure, rate_figure
from sarathi_tune.report.glyphs import glyphs_for
from sarathi_tune.report.wording import fitted_words, sentence
from sarathi_tune.units import format_ms

_STYLE = {"met": "bold green", "missed": "bold red", "failed": "bold red", "inconclusive": "bold yellow"}
_SAID = {"met": "yes", "missed": "no", "inconclusive": "?", "failed": "failed"}


def print_budgets(comparison: BudgetComparison, console: Console) -> None:
    """The verdict, a row for each budget, and what is to be said about them."""
    glyphs = glyphs_for(console)
    console.print(Text(budgets_headline(comparison), style=_STYLE[comparison.verdict]))
    print_heading("The same load with each budget", console)
    columns = ("req/s", "p50 ITL\nms", "p99\nms", "beside\nprompts\nms", "TTFT p50\nms", "p99\nms", "goodput\nreq/s")
    table = figure_table(glyphs, "budget", *columns, text=("meets\nSLO",))
    for run in comparison.runs:
        is_best = run is comparison.best
        table.add_row(glyphs.pointer if is_best else "", run.name, *_figures(run), style="bold" if is_best else None)
    console.print(table)
    recommendation = comparison.recommendation
    if recommendation is not None:
        tokens = recommendation.budget_tokens
        budget = "no budget" if tokens is None else f"budget {tokens:,}"
        said = [sentence(recommendation.why)]
        if recommendation.fitted_tokens is not None:
            said.append(fitted_words(recommendation.fitted_tokens))
        if tokens is None and recommendation.tried_tokens:
            said.append(f"Tried, because the load decides: {_list([f'{n:,}' for n in recommendation.tried_tokens])}.")
        print_prose(Text(f"Recommended by measuring the default from outside: {budget}. {' '.join(said)}"), console)
    for run in comparison.runs:
        why = run.failure or (run.verification.why if run.verification else "")
        ready = "" if run.ready_s is None else f" Ready after {run.ready_s:.0f} s."
        print_prose(Text(f"{run.name}: {sentence(why)}{ready}"), console)
    if comparison.runs:
        print_prose(Text(f"Logs: {', '.join(run.log for run in comparison.runs)}"), console)
    advised = recommendation.notices if recommendation is not None else ()
    print_notices((*advised, *_notices_of_runs(comparison.runs)), console, glyphs)


def _notices_of_runs(runs: Sequence[BudgetRun]) -> list[dict[str, str]]:
    """What is to be said of the runs, with the budget's name; of several like it the last, with the others' names."""
    said: dict[str, list[tuple[str, Notice]]] = {}
    for run in runs:
        verification = run.verification
        if verification is not None:
            own = verification.point.validity.problems if verification.point else ()
            for code, notice in {notice.code: notice for notice in (*verification.notices, *own)}.items():
                said.setdefault(code, []).append((run.name, notice))
    found = []
    for told in said.values():
        *others, (name, notice) = told
        likewise = f", and likewise with {_list([other for other, _ in others])}" if others else ""
        found.append(notice.as_dict() | {"cause": f"With {name}{likewise}: {notice.cause}"})
    return found


def budgets_headline(comparison: BudgetComparison) -> str:
    """The verdict in one line."""
    promise = f"p99 ITL {format_ms(comparison.slo.itl_ms)}"
    if comparison.slo.ttft_ms is not None:
        promise += f" and p99 TTFT {format_ms(comparison.slo.ttft_ms)}"
    best = comparison.best
    names = _list([run.name for run in comparison.runs])
    match comparison.verdict:
        case "met":
            assert best is not None, "somebody met it"
            missed = [run.name for run in comparison.runs if run.verdict == "missed"]
            against = f"; {_list(missed)} {'misses' if len(missed) == 1 else 'miss'} it" if missed else ""
            return f"Budget {best.name} meets {promise} with {rate_figure(best.goodput_per_s)} good req/s{against}."
        case "missed":
            return f"{promise} is missed with {names}."
        case "inconclusive":
            return f"Inconclusive: this can't say whether {promise} is met with {names}."
        case "failed":
            return "No server could be measured."


def _figures(run: BudgetRun) -> tuple[str, ...]:
    verification = run.verification
    if verification is None or verification.point is None:
        return (*("-",) * 7, _SAID[run.verdict])
    point, report = verification.point, verification.point.report
    return (
        rate_figure(point.rate_per_s if point.rate_per_s is not None else report.offered_per_s),
        ms_figure(report.itl.p50_ms),
        ms_figure(report.itl.p99_ms),
        ms_figure(report.itl_stalled.p99_ms),
        ms_figure(report.ttft.p50_ms),
        ms_figure(report.ttft.p99_ms),
        rate_figure(run.goodput_per_s),
        _SAID[run.verdict],
    )


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
