"""`sarathi-tune compare`: one load through every scheduler of the papers."""

from pathlib import Path
from typing import Annotated

import typer

from sarathi_tune.cli import options as flags
from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.output import check_target, emit_comparison
from sarathi_tune.cli.tune import command_line
from sarathi_tune.config.compare import ALL_SCHEDULERS, DEFAULT_PLAYS, CompareConfig, SteadyConfig
from sarathi_tune.errors import ExitCode, UsageError
from sarathi_tune.units import parse_duration_ms

_STEADY = SteadyConfig()


@edge
def compare(
    slo_itl: Annotated[
        str | None,
        typer.Option(
            "--slo-itl",
            metavar="TIME",
            help="p99 time between tokens. (default: five decode steps)",
            rich_help_panel="Objective",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="N",
            help="Tokens per step. (default: what the objective allows)",
            rich_help_panel="Objective",
        ),
    ] = None,
    schedulers: Annotated[
        str | None,
        typer.Option("--schedulers", metavar="A,B,...", help=f"(default: {','.join(ALL_SCHEDULERS)})"),
    ] = None,
    virtual: Annotated[
        str | None,
        typer.Option("--virtual", metavar="PROFILE", help="Run nothing: play it with a profile's step times."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="FILE", help="Step times for the predictions. (default: measured first)"),
    ] = None,
    save_profile: Annotated[
        str | None, typer.Option("--save-profile", metavar="FILE", help="Keep the step times that were measured.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw the gaps as PNG or SVG (by the name's end).")
    ] = None,
    steady: Annotated[
        str | None,
        typer.Option(
            "--steady",
            metavar="N",
            help=f"Answers that run all the time. (default: {_STEADY.streams})",
            rich_help_panel="Model and load",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="N",
            help="Tokens of the long prompts beside them. (default: 2000)",
            rich_help_panel="Model and load",
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            metavar="TIME",
            help="One long prompt in so long. (default: 1.2 to 2.2 times what one takes)",
            rich_help_panel="Model and load",
        ),
    ] = None,
    num_prompts: Annotated[
        str | None,
        typer.Option(
            "--num-prompts",
            metavar="N",
            help=f"How many of them. (default: {_STEADY.num_prompts})",
            rich_help_panel="Model and load",
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            metavar="NAME|FILE",
            help="A workload's requests instead of steady answers.",
            rich_help_panel="Model and load",
        ),
    ] = None,
    rate: flags.Rate = None,
    num_requests: Annotated[
        str | None,
        typer.Option(
            "--num-requests",
            metavar="N",
            help="Requests of the workload. (default: ten seconds of them)",
            rich_help_panel="Model and load",
        ),
    ] = None,
    plays: Annotated[
        str | None,
        typer.Option(
            "--plays",
            metavar="N",
            help=f"Times that each one runs; the run in the middle is shown. (default: {DEFAULT_PLAYS})",
            rich_help_panel="Model and load",
        ),
    ] = None,
    model: flags.Model = None,
    max_num_seqs: flags.MaxNumSeqs = None,
    kv_tokens: Annotated[
        str | None,
        typer.Option(
            "--kv-tokens",
            metavar="N",
            help="KV cache; with little of it, requests are preempted. (default: enough)",
            rich_help_panel="Model and load",
        ),
    ] = None,
    prefix_cache: flags.PrefixCache = None,
    preemption: flags.Preemption = None,
    device: flags.Device = None,
    attention: flags.Attention = None,
    dtype: flags.Dtype = None,
    threads: flags.Threads = None,
    seed: flags.Seed = None,
    json_target: flags.JsonTarget = None,
    quiet: flags.Quiet = False,
) -> ExitCode:
    """Run one load through all schedulers and show whose tokens stall and whose prompts wait."""
    _refuse_mixed(workload, {"--steady": steady, "--prompts": prompts, "--every": every, "--num-prompts": num_prompts})
    if workload is None and (rate is not None or num_requests is not None):
        raise UsageError("--rate and --num-requests belong to --workload; for steady answers give --every.")
    if virtual is not None and profile is not None:
        raise UsageError("--virtual already names the profile: leave --profile away.")
    if virtual is not None and plays is not None:
        raise UsageError("--plays is for real runs; the virtual clock plays the same each time: leave it away.")
    config = CompareConfig(
        command=command_line(),
        device=flags.parse_device(device, attention, dtype, threads),
        scheduling=flags.parse_scheduling(None, prefix_cache, preemption),
        steady=SteadyConfig(
            **flags.given(
                streams=flags.parse_count(steady, "--steady"),
                prompt_tokens=flags.parse_token_count(prompts, "--prompts"),
                every_s=parse_duration_ms(every, "--every") / 1e3 if every is not None else None,
                num_prompts=flags.parse_count(num_prompts, "--num-prompts"),
            )
        ),
        **flags.given(
            slo_itl_ms=parse_duration_ms(slo_itl, "--slo-itl") if slo_itl is not None else None,
            budget_tokens=flags.parse_token_count(budget, "--budget"),
            schedulers=_parse_schedulers(schedulers),
            workload=workload,
            rate_per_s=flags.parse_rate(rate),
            num_requests=flags.parse_count(num_requests, "--num-requests"),
            num_plays=flags.parse_count(plays, "--plays"),
            max_num_seqs=flags.parse_count(max_num_seqs, "--max-num-seqs"),
            kv_tokens=flags.parse_token_count(kv_tokens, "--kv-tokens"),
            model=model,
            virtual_profile=Path(virtual) if virtual is not None else None,
            profile=Path(profile) if profile is not None else None,
            save_profile=Path(save_profile) if save_profile is not None else None,
            seed=flags.parse_seed(seed),
        ),
    )
    return _run(config, Path(plot) if plot is not None else None, json_target, quiet=quiet)


def _run(config: CompareConfig, plot: Path | None, json_target: str | None, *, quiet: bool) -> ExitCode:
    from sarathi_tune.cli.ui import make_ui
    from sarathi_tune.report.gaps import check_picture, save_plot
    from sarathi_tune.tune.comparing import check_compare, run_compare

    if plot is not None:
        check_picture(plot)
    check_target(json_target)
    check_compare(config)
    comparison = run_compare(config, make_ui(quiet=quiet))
    if plot is not None:
        save_plot(comparison, plot)
    return emit_comparison(comparison, json_target)


def _refuse_mixed(workload: str | None, steady_flags: dict[str, str | None]) -> None:
    """A workload and steady answers are two different loads."""
    given = [name for name, value in steady_flags.items() if value is not None]
    if workload is not None and given:
        raise UsageError(f"--workload and {given[0]} are two different loads: give one of them.")


def _parse_schedulers(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = flags.parse_list(text, lambda part, flag: flags.parse_choice(part, flag, ALL_SCHEDULERS), "--schedulers")
    return tuple(dict.fromkeys(names))
