"""`sarathi-tune selftest`: what the load generator itself adds on this machine."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sarathi_tune.cli import options as flags
from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.output import STDOUT, check_target, emit_document
from sarathi_tune.errors import ExitCode
from sarathi_tune.units import parse_duration_ms

if TYPE_CHECKING:
    from rich.console import Console

    from sarathi_tune.loadgen.selftest import Level


@edge
def selftest(
    streams: Annotated[
        str | None, typer.Option("--streams", metavar="N,N,...", help="Streams at once. (default: 1 to 800)")
    ] = None,
    seconds: Annotated[
        str | None, typer.Option("--seconds", metavar="TIME", help="Length of each. (default: 2s)")
    ] = None,
    workers: Annotated[
        str | None, typer.Option("--workers", metavar="N", help="Client processes. (default: 1)")
    ] = None,
    json_target: flags.JsonTarget = None,
    quiet: flags.Quiet = False,
) -> ExitCode:
    """Time a local server with a known schedule: what the client adds, and how many streams it can be trusted with."""
    asked = flags.parse_list(streams, flags.parse_count, "--streams")
    length_s = 2.0 if seconds is None else parse_duration_ms(seconds, "--seconds") / 1e3
    count = flags.parse_count(workers, "--workers") or 1
    check_target(json_target)
    from sarathi_tune.cli.ui import make_ui
    from sarathi_tune.loadgen.selftest import EVENTS_PER_S, LEVELS, run_selftest, trusted_streams

    levels = tuple(sorted(set(asked))) or LEVELS
    with make_ui(quiet=quiet).phase("Streams from a server with a known schedule", len(levels)) as phase:
        done = run_selftest(levels, seconds=length_s, workers=count, on_level=lambda _: phase.advance())
    trusted = trusted_streams(done)
    document: dict[str, Any] = {
        "schema": "sarathi-tune/selftest",
        "version": 1,
        "events_per_s_per_stream": EVENTS_PER_S,
        "trusted_streams": trusted,
        "levels": [level.as_dict() for level in done],
    }
    emit_document(document, json_target)
    if json_target != STDOUT:
        from sarathi_tune.cli.consoles import data_console

        _print(done, trusted, data_console(), quiet=quiet)
    return ExitCode.MET if trusted else ExitCode.INCONCLUSIVE


def _print(levels: "tuple[Level, ...]", trusted: int, console: "Console", *, quiet: bool) -> None:
    from rich.text import Text

    from sarathi_tune.loadgen.selftest import TRUSTED_GAP_MS, TRUSTED_LAG_MS
    from sarathi_tune.report.console import figure_table, print_heading, print_prose
    from sarathi_tune.report.figures import count_figure, ms_figure
    from sarathi_tune.report.glyphs import glyphs_for

    workers = levels[0].workers
    client = f"{workers} client process{'es' if workers > 1 else ''}"
    if not trusted:
        line = (
            f"The client can't be trusted on this machine with {client}: it is late with {levels[0].streams} already."
        )
    elif trusted == levels[-1].streams:
        line = f"The client can be trusted with {trusted} streams and {client}; more were not tried."
    else:
        beyond = next(level.streams for level in levels if level.streams > trusted)
        line = f"The client can be trusted with {trusted} streams and {client}, and no longer with {beyond}."
    console.print(Text(line, style="bold"), soft_wrap=True)
    if quiet:
        return
    print_heading("What the client adds to a server with a known schedule, ms", console)
    names = ("streams", "to TTFT\np50", "\np99", "\nmax", "to gaps\np50", "\np99", "\nmax", "lag\np99", "events\nper s")
    table = figure_table(glyphs_for(console), *names, "per\nCPU s", text=("ok",))
    for level in levels:
        first, gap = level.first_added, level.gap_error
        table.add_row(
            "",
            count_figure(level.streams),
            *(ms_figure(value) for value in (first.p50_ms, first.p99_ms, first.max_ms)),
            *(ms_figure(value) for value in (gap.p50_ms, gap.p99_ms, gap.max_ms)),
            ms_figure(level.lag_p99_ms),
            count_figure(round(level.events_per_s)),
            count_figure(round(level.events_per_cpu_s)),
            "yes" if level.is_trusted else "no",
        )
    console.print(table)
    print_prose(
        Text(
            f"ok: no failure, p99 of what is added to gaps at most {TRUSTED_GAP_MS:g} ms, p99 lag behind the "
            f"schedule at most {TRUSTED_LAG_MS:g} ms. The server ran on the same machine (its own steps were late by "
            f"p99 {max(level.server_lag_p99_ms for level in levels):.1f} ms at worst)."
        ),
        console,
    )
