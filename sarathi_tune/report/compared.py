"""A comparison that reads at a glance: what it shows in words, the figures, the gaps over time, real beside virtual."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from sarathi_tune.report.comparison import Comparison, Contender
from sarathi_tune.report.console import (
    PROSE,
    WIDE,
    figure_table,
    print_facts,
    print_heading,
    print_notices,
    print_prose,
)
from sarathi_tune.report.figures import count_figure, ms_figure, percent_figure, rate_figure
from sarathi_tune.report.gaps import gap_strips
from sarathi_tune.report.glyphs import Glyphs, glyphs_for
from sarathi_tune.units import format_ms, format_tokens


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print everything a person wants to know about `comparison`."""
    glyphs = glyphs_for(console)
    for line in _findings(comparison):
        print_prose(Text(line, style="bold"), console, indent=0)
    _print_figures(comparison, console, glyphs)
    print_heading("Gaps between tokens over time", console)
    for strip in gap_strips(comparison, min(console.width, PROSE + 20), glyphs):
        console.print(strip, no_wrap=True, overflow="crop")
    _print_predictions(comparison, console, glyphs)
    _print_basis(comparison, console)
    print_notices(comparison.notices, console, glyphs)


def _findings(comparison: Comparison) -> list[str]:
    """The paper's two sentences, with this run's numbers: whose gaps are long, and who waits for a first token."""
    stalls = max(comparison.contenders, key=lambda contender: contender.outcome.itl_max_ms or 0.0)
    waits = max(comparison.contenders, key=lambda contender: contender.outcome.ttft_p99_ms or 0.0)
    lines = []
    sarathi = comparison.find("sarathi")
    if sarathi is not None and sarathi.outcome.largest_gap_p99_units is not None:
        step = sarathi.budgeted_step or comparison.budgeted_step
        lines.append(
            f"Under sarathi no token waited longer than {format_ms(sarathi.outcome.itl_max_ms or 0.0)}: "
            f"{_units(sarathi)} budgeted steps ({format_ms(step.p99_ms)} at p99, {format_ms(step.p50_ms)} "
            "in the median)."
        )
    if stalls.scheduler != "sarathi" and stalls.outcome.itl_max_ms is not None:
        lines.append(
            f"{stalls.scheduler} let one wait {format_ms(stalls.outcome.itl_max_ms)}: {_units(stalls)} budgeted steps."
        )
    if waits.outcome.ttft_p99_ms is not None and len(comparison.contenders) > 1:
        lines.append(f"The longest wait for a first token was {waits.scheduler}'s: {_seconds(waits)} at p99.")
    return lines


def _units(contender: Contender) -> str:
    return _figure(contender.outcome.largest_gap_p99_units)


def _figure(units: float | None) -> str:
    return "-" if units is None else f"{units:.2f}" if units < 10 else f"{units:.1f}"


def _seconds(contender: Contender) -> str:
    return f"{(contender.outcome.ttft_p99_ms or 0.0) / 1e3:.3g} s"


def _print_figures(comparison: Comparison, console: Console, glyphs: Glyphs) -> None:
    is_wide = console.width >= WIDE
    how = "measured" if comparison.is_real else "virtual clock"
    budget = format_tokens(comparison.budget_tokens)
    print_heading(f"Schedulers, {how}, at a budget of {budget}; times in ms", console)
    heads = ["TTFT\np50", "\np99", "ITL\np50", "\np99", "\nmax", "max /\nstep", "\nmedian", "over\nSLO"]
    if is_wide:
        heads += ["stalled\ngaps", "tokens\nper s", "preemp-\ntions", "cached\ntokens"]
    table = figure_table(glyphs, *heads, _capacity_head(comparison))
    table.columns[0].width = None
    for contender in comparison.contenders:
        table.add_row(*_row(contender, is_wide))
    console.print(table)
    for line in _legend(comparison):
        print_prose(Text(line, style="dim"), console)


def _capacity_head(comparison: Comparison) -> str:
    unit = "prompts" if comparison.load.get("kind") == "steady" else "requests"
    return f"capacity\n{unit}/s"


def _row(contender: Contender, is_wide: bool) -> list[str]:
    seen = contender.outcome
    row = [
        contender.scheduler,
        ms_figure(seen.ttft_p50_ms),
        ms_figure(seen.ttft_p99_ms),
        ms_figure(seen.itl_p50_ms),
        ms_figure(seen.itl_p99_ms),
        ms_figure(seen.itl_max_ms),
        _units(contender),
        _figure(seen.largest_gap_units),
        percent_figure(seen.over_slo_share),
    ]
    if is_wide:
        row += [
            percent_figure(seen.stalled_share),
            f"{seen.output_tokens_per_s:,.0f}",
            count_figure(seen.preemptions),
            count_figure(seen.cached_tokens),
        ]
    return [*row, rate_figure(contender.capacity_per_s) if contender.capacity_per_s else "none"]


def _legend(comparison: Comparison) -> list[str]:
    step = comparison.budgeted_step
    timed = [c.budgeted_step.p50_ms for c in comparison.contenders if c.budgeted_step is not None]
    again = ""
    if timed:
        again = f", timed again around each run ({format_ms(min(timed))} to {format_ms(max(timed))} in the median)"
    lines = [
        f"One budgeted step, the longest that the budget allows ({step.decodes:,} decodes at {step.context:,} tokens, "
        f"{step.chunk:,} prompt tokens behind {step.prefix:,}), takes {format_ms(step.p99_ms)} at p99, which is what "
        f"a budget holds it to, and {format_ms(step.p50_ms)} in the median: the longest gap stands over both{again}. "
        f"Decodes alone take {format_ms(comparison.decode_step_ms)}; the objective is p99 ITL "
        f"{format_ms(comparison.slo_itl_ms)}.",
        "Capacity, under the virtual clock: the largest rate whose pooled p99 ITL meets it while half of the prompts "
        "start within 2 s and the queue doesn't grow.",
    ]
    plays = max(len(c.longest_gaps_ms) for c in comparison.contenders)
    if plays > 1:
        lines.append(f"Each scheduler ran {plays} times, in turn; shown is its run with the middle longest gap.")
    preempted = [c for c in comparison.contenders if c.outcome.preemptions]
    if preempted:
        counts = ", ".join(f"{c.scheduler} {c.outcome.preemptions:,}" for c in preempted)
        lines.append(f"Preemptions: {counts}.")
    cached = [c for c in comparison.contenders if c.outcome.cached_tokens]
    if cached:
        shares = ", ".join(
            f"{c.scheduler} {percent_figure(c.outcome.cached_tokens / c.outcome.prompt_tokens)}" for c in cached
        )
        lines.append(f"Prompt tokens found in the prefix cache: {shares}.")
    unfinished = [c for c in comparison.contenders if c.outcome.finished < c.outcome.requests]
    for contender in unfinished:
        missing = contender.outcome.requests - contender.outcome.finished
        lines.append(f"{contender.scheduler} did not finish {missing} of {contender.outcome.requests} requests.")
    return lines


def _print_predictions(comparison: Comparison, console: Console, glyphs: Glyphs) -> None:
    """Virtual beside real, where both were run."""
    pairs = [c for c in comparison.contenders if c.measured is not None and c.predicted is not None]
    if not pairs:
        return
    print_heading("Predicted under the virtual clock, and measured; times in ms", console)
    heads = ["p99 ITL\npred.", "\nmeas.", "\nerror", "max ITL\npred.", "\nmeas.", "TTFT p99\npred.", "\nmeas."]
    table = figure_table(glyphs, *heads)
    table.columns[0].width = None
    for contender in pairs:
        predicted, measured = contender.predicted, contender.measured
        assert predicted is not None, "chosen above"
        assert measured is not None, "chosen above"
        table.add_row(
            contender.scheduler,
            ms_figure(predicted.itl_p99_ms),
            ms_figure(measured.itl_p99_ms),
            _error(predicted.itl_p99_ms, measured.itl_p99_ms),
            ms_figure(predicted.itl_max_ms),
            ms_figure(measured.itl_max_ms),
            ms_figure(predicted.ttft_p99_ms),
            ms_figure(measured.ttft_p99_ms),
        )
    console.print(table)


def _error(predicted: float | None, measured: float | None) -> str:
    if not predicted or not measured:
        return "-"
    return f"{(predicted / measured - 1) * 100:+.0f} %"


def _print_basis(comparison: Comparison, console: Console) -> None:
    facts = [
        ("load", _load(comparison.load)),
        ("model", ", ".join(str(comparison.model[key]) for key in ("name", "dtype") if comparison.model.get(key))),
        ("machine", str(comparison.machine.get("name", ""))),
        ("engine", _engine(comparison)),
    ]
    print_facts("Rests on", [(name, value) for name, value in facts if value], console)


def _load(facts: Mapping[str, Any]) -> str:
    if facts.get("kind") == "steady":
        return (
            f"{facts['streams']} running answers of {facts['answer_tokens']:,} tokens, {facts['num_prompts']} prompts "
            f"of {facts['prompt_tokens']:,} tokens, one every {facts['every_s']:.3g} s"
        )
    text = f"{facts.get('num_requests')} requests of workload {facts.get('name')} at {rate_figure(facts['rate_per_s'])}"
    shared = f", a prefix of {facts['shared_prefix_tokens']:,} tokens" if facts.get("shared_prefix_tokens") else ""
    turns = f", {facts['turns']} turns a conversation" if facts.get("turns", 1) > 1 else ""
    return f"{text} req/s{shared}{turns}"


def _engine(comparison: Comparison) -> str:
    settings = comparison.scheduling
    parts = [f"{settings['max_num_seqs']} sequences", f"{settings['kv_tokens']:,} tokens of KV cache"]
    parts.append("prefix cache" if settings["prefix_cache"] else "no prefix cache")
    if settings["preemption"] != "recompute":
        parts.append(f"preemption by {settings['preemption']}")
    if comparison.engine.get("attention"):
        parts.append(f"attention {comparison.engine['attention']}")
    if comparison.engine.get("threads"):
        parts.append(f"{comparison.engine['threads']} threads")
    return ", ".join(parts)
