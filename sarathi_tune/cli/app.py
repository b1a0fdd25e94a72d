"""The typer application: the main job without a subcommand, and one subcommand per file beside it."""

import os
import sys
from typing import Annotated, NoReturn

import typer

from sarathi_tune import __version__
from sarathi_tune.cli import (
    compare,
    derive,
    doctor,
    kernels,
    outside,
    profile,
    report,
    selftest,
    serve,
    sweep,
    tune,
    verify,
)
from sarathi_tune.cli import options as flags
from sarathi_tune.cli.edge import edge, open_missing_streams, unwritten
from sarathi_tune.errors import ExitCode, UsageError
from sarathi_tune.runtime.parallel.place import Place, end_with_parent

_HELP = (
    "The token budget for your LLM server: measured, derived from an SLO, verified.\n\n"
    "Without a command: measure this machine, derive --max-num-batched-tokens from the p99 inter-token-latency "
    "objective, and verify it. For example: sarathi-tune --slo-itl 20ms\n\n"
    "With --target URL: do so for a server that runs already, over HTTP."
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
app.command("compare")(compare.compare)
app.command("verify")(verify.verify)
app.command("selftest")(selftest.selftest)
app.command("kernels")(kernels.kernels)
app.command("serve")(serve.serve)
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
    headroom: flags.Headroom = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="URL", help="Measure this running server instead, from outside."),
    ] = None,
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
    resume: flags.Resume = False,
    time_limit: Annotated[
        str | None, typer.Option("--time-limit", metavar="TIME", help="Aim to be done after this. (default: 150s)")
    ] = None,
    scheduler: flags.Scheduler = None,
    prefix_cache: flags.PrefixCache = None,
    preemption: flags.Preemption = None,
    device: flags.Device = None,
    attention: flags.Attention = None,
    dtype: flags.Dtype = None,
    threads: flags.Threads = None,
    tensor_parallel: flags.TensorParallel = None,
    pipeline_parallel: flags.PipelineParallel = None,
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
    if target is not None:
        outside.refuse_meaningless(arguments)
        remote = outside.build_config(
            target,
            objective=(slo_itl, slo_ttft, overhead, headroom),
            subject=(model, workload),
            load=(max_num_seqs, context_tokens, prefix),
            time_limit=time_limit,
            seed=seed,
            out=out,
        )
        return outside.tune_outside(remote, json_target=json_target, quiet=quiet, dry_run=dry_run)
    config = tune.build_config(
        objective=(slo_itl, slo_ttft, overhead, headroom),
        subject=(model, workload),
        load=(max_num_seqs, context_tokens, prefix, rate),
        steps=flags.parse_device(device, attention, dtype, threads, (tensor_parallel, pipeline_parallel)),
        scheduling=flags.parse_scheduling(scheduler, prefix_cache, preemption),
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
    """The console script. Of the processes that torchrun started (or rank 0 itself), only rank 0 reads the command
    line; the others do what it tells them."""
    place = Place.from_environment()
    if place is not None and place.rank > 0:
        _follow(place)
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="sarathi-tune")
    except OSError as error:  # --help and --version print before a command begins
        sys.exit(unwritten(error))
    finally:
        if place is not None:
            from sarathi_tune.runtime.parallel.ranks import announce_end

            announce_end(place)


def _follow(place: Place) -> NoReturn:
    if place.parent is not None:
        end_with_parent(place.parent)
    from sarathi_tune.runtime.parallel.follower import follow

    # Nothing is to be saved, and threads of the process groups may not end by themselves.
    os._exit(follow(place))
