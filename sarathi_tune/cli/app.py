"""The typer application: the main job without a subcommand, and one subcommand per file beside it."""

import sys
from typing import Annotated

import typer

from sarathi_tune import __version__
from sarathi_tune.cli import derive, doctor, profile, report, sweep, tune
from sarathi_tune.cli import options as flags
from sarathi_tune.cli.edge import edge
from sarathi_tune.errors import ExitCode, UsageError

_HELP = (
    "The token budget for your LLM server: measured, derived from an SLO, verified.\n\n"
    "Without a command: measure this machine, derive --max-num-batched-tokens from the p99 inter-token-latency "
    "objective, and verify it. For example: sarathi-tune --slo-itl 20ms"
)
_EPILOG = (
    "Exit codes: 0 met, 1 missed, 2 usage, 3 infeasible, 4 inconclusive, 5 out of memory, 6 target failed, "
    "130 interrupted."
)

app = typer.Typer(
    name="sarathi-tune",
    help=_HELP,
    epilog=_EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("profile")(profile.profile)
app.command("derive")(derive.derive)
app.command("sweep")(sweep.sweep)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sarathi-tune {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
@edge
def main_job(
    context: typer.Context,
    slo_itl: flags.SloItl = None,
    slo_ttft: flags.SloTtft = None,
    overhead: flags.Overhead = None,
    model: flags.Model = None,
    workload: flags.WorkloadName = None,
    max_num_seqs: flags.MaxNumSeqs = None,
    context_tokens: flags.Context = None,
    prefix: flags.Prefix = None,
    rate: flags.Rate = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="N", help="Verify this budget instead of the derived one."),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", metavar="", help="Stop after derivation and prediction.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Go on with the run that was interrupted.")
    ] = False,
    time_limit: Annotated[
        str | None, typer.Option("--time-limit", metavar="TIME", help="Aim to be done after this. (default: 150s)")
    ] = None,
    device: flags.Device = None,
    attention: flags.Attention = None,
    dtype: flags.Dtype = None,
    threads: flags.Threads = None,
    seed: flags.Seed = None,
    json_target: flags.JsonTarget = None,
    out: flags.Out = None,
    quiet: flags.Quiet = False,
    dry_run: flags.DryRun = False,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", metavar="", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> ExitCode | None:
    """The main job, or nothing when a subcommand follows."""
    arguments = {name: value for name, value in context.params.items() if value not in (None, False)}
    if context.invoked_subcommand is not None:
        _refuse_before(context.invoked_subcommand, arguments)
        return None
    config = tune.build_config(
        objective=(slo_itl, slo_ttft, overhead),
        subject=(model, workload),
        load=(max_num_seqs, context_tokens, prefix, rate),
        steps=flags.parse_device(device, attention, dtype, threads),
        budget=budget,
        verify=not no_verify,
        resume=resume,
        time_limit=time_limit,
        seed=seed,
        out=out,
    )
    return tune.tune(config, json_target=json_target, quiet=quiet, dry_run=dry_run)


def _refuse_before(command: str, arguments: dict[str, object]) -> None:
    """Flags of the main job that stand before a command would be ignored, so they are refused."""
    if arguments:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in arguments)
        raise UsageError(f"Flags of {command!r} belong behind it: sarathi-tune {command} ... {names} ...")


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app(prog_name="sarathi-tune")
