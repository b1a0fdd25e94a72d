"""A result that reads at a glance, at 80 columns, at 120 and in a pipe.

In this order: the verdict, the line to paste, the three steps of the rule of thumb, the reason, the picture, the
neighbours with their price, predicted against measured, what was measured on, and warnings with their remedies last.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sarathi_tune.report.figures import count_figure, ms_figure, percent_figure, rate_figure
from sarathi_tune.report.glyphs import Glyphs, glyphs_for
from sarathi_tune.report.outside import running_now, seen_facts
from sarathi_tune.report.plot import EDGE, step_plot
from sarathi_tune.report.result import Advice, FitError, Latency, Neighbour, Result, RuleOfThumb, Run
from sarathi_tune.report.wording import Headline, fitted_words, headline, in_reach, run_verdict, serve_line, why_title
from sarathi_tune.units import format_ms, format_tokens

_STYLE = {"good": "bold green", "bad": "bold red", "unsure": "bold yellow"}
#: From this width on, tables show the columns that 80 can't hold.
WIDE = 110
#: Prose is not set wider than this: longer lines are hard to read.
PROSE = 100


def print_result(result: Result, console: Console) -> None:
    """Print everything a person wants to know about `result`."""
    glyphs = glyphs_for(console)
    _print_verdict(result, console)
    if result.advice.rule_of_thumb:
        _print_rule_of_thumb(result.advice.rule_of_thumb, console)
    _print_why(result, console)
    _print_plot(result, console, glyphs)
    _print_neighbours(result.advice, console, glyphs)
    if result.server is not None:
        print_facts("The server as it runs", list(seen_facts(result.server)), console)
    _print_runs(result, console, glyphs)
    _print_basis(result, console)
    print_notices(result.notices, console, glyphs)


def print_serve_line(result: Result, console: Console) -> None:
    """Only the line to paste; nothing when no budget is advised."""
    line = serve_line(result)
    if line is not None:
        print_unbroken(Text(line), console)


def print_notices(notices: Iterable[Mapping[str, str]], console: Console, glyphs: Glyphs) -> None:
    """Warnings, each with its remedy."""
    notices = tuple(notices)
    if not notices:
        return
    print_heading("Warnings" if any(notice["severity"] == "warning" for notice in notices) else "Notes", console)
    for notice in notices:
        style = "yellow" if notice["severity"] == "warning" else ""
        print_prose(Text(notice["cause"], style=style), console)
        print_prose(Text(notice["remedy"]), console, indent=4, label=Text(f"{glyphs.arrow} "))


def _print_verdict(result: Result, console: Console) -> None:
    verdict: Headline = headline(result)
    console.print(Text(verdict.text, style=_STYLE[verdict.tone]))
    now = running_now(result)
    if now is not None:
        print_prose(Text(now), console, indent=0)
    for line in in_reach(result):
        console.print(Text(line))
    to_paste = serve_line(result)
    if to_paste is not None:
        console.print()
        print_unbroken(Text(to_paste, style="bold"), console)


def print_unbroken(text: Text, console: Console) -> None:
    """A line that somebody will copy: the terminal may wrap it, we never do."""
    console.print(text, soft_wrap=True)


def _print_rule_of_thumb(rule: RuleOfThumb, console: Console) -> None:
    print_heading("Rule of thumb", console)
    steps = Table.grid(padding=(0, 2))
    steps.add_column(justify="right")
    steps.add_column()
    steps.add_column(justify="right")
    budget = "none" if rule.budget_tokens is None else f"{format_tokens(rule.budget_tokens)} tokens"
    steps.add_row("1", f"decode step ({rule.decode_source})", format_ms(rule.decode_step_ms))
    steps.add_row("2", f"prefill per token ({rule.prefill_source})", f"{rule.prefill_ms_per_token:.3g} ms")
    steps.add_row("3", "budget = 1 / 2: a step of at most 2x the decode step", budget)
    console.print(Padding(steps, (0, 0, 0, 2), expand=False))
    if rule.additive_n and rule.additive_bias is not None:
        print_prose(Text(_additive_bias(rule.additive_bias, rule.additive_n)), console)


def _additive_bias(bias: float, count: int) -> str:
    verb = "overstates" if bias >= 0 else "understates"
    return f"Adding 1 and 2 up {verb} the hybrid steps that were measured by {percent_figure(abs(bias))} (n = {count})."


def _print_why(result: Result, console: Console) -> None:
    advice = result.advice
    print_heading(why_title(advice), console)
    print_prose(Text(advice.why), console)
    if advice.interval_tokens:
        low, high = map(format_tokens, advice.interval_tokens)
        level = percent_figure(advice.interval_level)
        print_prose(Text(f"{level} interval of the budget: {low} to {high} tokens."), console)
    if advice.fitted_tokens is not None:
        print_prose(Text(fitted_words(advice.fitted_tokens)), console)
    if result.fit_error:
        print_prose(Text(_fit_error(result.fit_error)), console)


def _fit_error(error: FitError) -> str:
    if error.median is None:
        return "The profile has too few shapes to state the step model's error."
    text = (
        f"On {error.shapes} shapes kept from the fit ({error.method}) the step model is off by "
        f"{percent_figure(error.median)} (median) and {percent_figure(error.p95)} (95th percentile)"
    )
    if error.hybrid_median is not None:
        text += f"; on hybrid steps by {percent_figure(error.hybrid_median)}"
    if error.additive_median is not None:
        text += f", where adding up is off by {percent_figure(error.additive_median)}"
    return text + "."


def _print_plot(result: Result, console: Console, glyphs: Glyphs) -> None:
    advice = result.advice
    promise = result.objective.itl_ms - result.objective.overhead_ms
    if advice.verdict == "inconclusive" or not any(point.step_p99_ms < EDGE * promise for point in advice.curve):
        return
    print_heading("Step time against budget", console)
    for line in step_plot(advice.curve, promise, advice.budget_tokens, min(console.width, PROSE), glyphs):
        console.print(line, no_wrap=True, overflow="crop")


def _print_neighbours(advice: Advice, console: Console, glyphs: Glyphs) -> None:
    if not advice.neighbours or advice.verdict == "inconclusive":
        return
    print_heading(f"Neighbours and their price{_price_basis(advice.neighbours)}", console)
    columns = [(name, figures) for name, figures in _prices(advice.neighbours) if any(f != "-" for f in figures)]
    names = ["budget", "p99 step\nms", "meets\nSLO", *(name for name, _ in columns)]
    table = figure_table(glyphs, *names, text=("",))
    for index, row in enumerate(advice.neighbours):
        is_chosen = row.budget_tokens == advice.budget_tokens
        table.add_row(
            glyphs.pointer if is_chosen else "",
            count_figure(row.budget_tokens),
            ms_figure(row.step_p99_ms),
            "yes" if row.meets_slo else "no",
            *(figures[index] for _, figures in columns),
            row.label,
            style="bold" if is_chosen else None,
        )
    console.print(table)


def _price_basis(neighbours: Sequence[Neighbour]) -> str:
    """What the prices hold for."""
    rate = next((row.rate_per_s for row in neighbours if row.rate_per_s is not None), None)
    if rate is not None:
        return f", predicted at {rate_figure(rate)} req/s"
    prompt = next((row.prompt_tokens for row in neighbours if row.prompt_tokens is not None), None)
    return f", for a prompt of {format_tokens(prompt)} tokens" if prompt is not None else ""


def _prices(neighbours: Sequence[Neighbour]) -> list[tuple[str, list[str]]]:
    """The columns that may be there: heading and figures. A rate's figures replace those of a prompt alone."""
    at_rate = any(row.rate_per_s is not None for row in neighbours)
    alone = [] if at_rate else [("TTFT\nms", [ms_figure(row.ttft_alone_ms) for row in neighbours])]
    return [
        *alone,
        ("TTFT p50\nms", [ms_figure(row.ttft_p50_ms) for row in neighbours]),
        ("TTFT p99\nms", [ms_figure(row.ttft_p99_ms) for row in neighbours]),
        ("goodput\nreq/s", [rate_figure(row.goodput_per_s) for row in neighbours]),
    ]


def _print_runs(result: Result, console: Console, glyphs: Glyphs) -> None:
    if not result.runs:
        return
    print_heading("Predicted against measured", console)
    is_wide = console.width >= WIDE
    table = _runs_table(is_wide, glyphs)
    for run in result.runs:
        table.add_row(*_runs_row(run, is_wide, glyphs.pointer), style="bold" if run.role == "recommended" else None)
    console.print(table)
    for run in result.runs:
        for problem in run.problems:
            print_prose(
                Text(
                    f"Invalid at {format_tokens(run.budget_tokens)}, {rate_figure(run.rate_per_s)} req/s: {problem}",
                    "yellow",
                ),
                console,
            )
    recommended = result.run("recommended")
    if recommended and recommended.measured:
        print_prose(Text(_views(recommended, recommended.measured)), console)


def _runs_table(is_wide: bool, glyphs: Glyphs) -> Table:
    names = ["budget", "req/s", *_pair("p99 ITL"), *_pair("TTFT p99"), *_pair("goodput"), "\ngaps"]
    if is_wide:
        names[4:4] = ["stalled\nmeas.", *_pair("TTFT p50")]
    return figure_table(glyphs, *names, text=("meets\nSLO",))


def _pair(name: str) -> tuple[str, str]:
    return f"{name}\npred.", "\nmeas."


def _runs_row(run: Run, is_wide: bool, pointer: str) -> list[str]:
    nothing = Latency(requests=0, gaps=0)
    predicted, measured = run.predicted or nothing, run.measured or nothing
    row = [pointer if run.role == "recommended" else "", count_figure(run.budget_tokens), rate_figure(run.rate_per_s)]
    row += [ms_figure(predicted.itl_p99_ms), ms_figure(measured.itl_p99_ms)]
    if is_wide:
        row += [
            ms_figure(measured.itl_p99_stalled_ms),
            ms_figure(predicted.ttft_p50_ms),
            ms_figure(measured.ttft_p50_ms),
        ]
    row += [ms_figure(predicted.ttft_p99_ms), ms_figure(measured.ttft_p99_ms)]
    row += [rate_figure(predicted.goodput_per_s), rate_figure(measured.goodput_per_s)]
    return [*row, count_figure(run.measured.gaps if run.measured else predicted.gaps), run_verdict(run)]


def _views(run: Run, measured: Latency) -> str:
    """The same gaps seen in every way that other tools call p99 ITL."""
    views = [
        ("pooled p99", measured.itl_p99_ms),
        ("p99 of requests' p99", measured.itl_p99_per_request_ms),
        ("p99 of steps with prefill", measured.itl_p99_stalled_ms),
        ("p99.9", measured.itl_p999_ms),
        ("max", measured.itl_max_ms),
    ]
    shown = ", ".join(f"{name} {format_ms(value)}" for name, value in views if value is not None)
    text = f"ITL at {format_tokens(run.budget_tokens)} tokens: {shown}"
    if measured.stalled_share is not None:
        text += f"; {percent_figure(measured.stalled_share)} of the gaps waited for a chunk"
    if measured.preemptions:
        text += f"; {measured.preemptions:,} preemptions"
    return f"{text} (n = {measured.gaps:,} gaps of {measured.requests:,} requests)."


def _print_basis(result: Result, console: Console) -> None:
    lines = [
        ("model", _describe(result.model, "name", "dtype")),
        *_load(result.settings),
        ("workload", _workload(result.workload)),
        ("scheduler", _scheduling(result.settings)),
        ("machine", _describe(result.machine, "name", "device", "threads")),
        ("engine", _engine(result.engine)),
        ("time", ", ".join(f"{phase.name} {phase.seconds:.0f} s" for phase in result.phases)),
        ("profile", str(Path(result.folder) / result.profile) if result.profile else ""),
    ]
    print_facts("Rests on", [(name, value) for name, value in lines if value], console)


def _engine(engine: Mapping[str, Any]) -> str:
    """The back ends, and how many steps were replayed from CUDA graphs."""
    back_ends = _describe(engine, "name", "version", attention="attention", linear="linear layers")
    graphs = engine.get("graphs")
    if not isinstance(graphs, Mapping):
        return back_ends
    counts = [graphs.get(name, 0) for name in ("replayed", "eager_decode", "eager_prefill")]
    if not graphs.get("captured"):
        return f"{back_ends}, no CUDA graphs"
    return f"{back_ends}, CUDA graphs for {counts[0]:,} of {sum(counts):,} steps"


def _scheduling(settings: Mapping[str, Any]) -> str:
    """The scheduler's name, and what differs from how steps are measured."""
    parts = [str(settings["scheduler"])] if "scheduler" in settings else []
    if settings.get("prefix_cache"):
        parts.append("prefix cache")
    if settings.get("preemption", "recompute") != "recompute":
        parts.append(f"preemption by {settings['preemption']}")
    return ", ".join(parts)


def _workload(facts: Mapping[str, Any]) -> str:
    """Its name and how long its requests are."""
    lengths = [
        f"{what} {tokens['p50']:,} tokens at p50 and {tokens['p99']:,} at p99"
        for what, tokens in (("prompts", facts.get("prompt_tokens")), ("outputs", facts.get("output_tokens")))
        if isinstance(tokens, Mapping) and {"p50", "p99"} <= set(tokens)
    ]
    return ", ".join([str(facts["name"]), *lengths]) if "name" in facts else ""


def _load(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The three numbers that the question consists of, and where each came from."""
    origins = settings.get("origins", {})
    names = [("decodes", "max_num_seqs"), ("context", "context"), ("prefix", "prefix")]
    return [
        (label, f"{settings[name]:,} ({origins[name]})" if name in origins else f"{settings[name]:,}")
        for label, name in names
        if isinstance(settings.get(name), int)
    ]


def print_facts(title: str, facts: Sequence[tuple[str, str]], console: Console) -> None:
    """A heading, and below it names with their values; nothing when there are none."""
    if not facts:
        return
    print_heading(title, console)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print_prose(Text(value), console, label=Text(name.ljust(width + 2), "dim"))


def _describe(facts: Mapping[str, Any], *keys: str, **named: str) -> str:
    """The values of the facts that are there: those of `keys` as they are, those of `named` behind their name."""
    parts = []
    for key in (*keys, *named):
        value = facts.get(key)
        if value is None or value == "":
            continue
        parts.append(
            f"{named[key]} {value}" if key in named else f"{value} {key}" if isinstance(value, int) else f"{value}"
        )
    return ", ".join(parts)


def print_heading(text: str, console: Console) -> None:
    """A blank line and a title."""
    console.print()
    console.print(Text(text, style="bold"))


def print_prose(text: Text, console: Console, indent: int = 2, label: Text | None = None) -> None:
    """Wrapped text without trailing blanks, behind `label`, below which the following lines are empty."""
    label = label if label is not None else Text()
    width = min(console.width, PROSE) - indent - len(label)
    for number, line in enumerate(text.wrap(console, max(width, 20)) or [Text()]):
        line.rstrip()
        before = Text(" " * len(label)) if number else label
        console.print(Text(" " * indent) + before + line, soft_wrap=True)


def figure_table(glyphs: Glyphs, *numbers: str, text: tuple[str, ...] = ()) -> Table:
    """A table of numbers behind a column for the pointer, then columns of text; a rule only under the head."""
    table = Table(box=glyphs.table, pad_edge=False, padding=(0, 0, 0, 1), header_style="dim", show_edge=False)
    table.add_column("", width=1)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in text:
        table.add_column(name, overflow="fold")
    return table
