"""`sarathi-tune --target URL --slo-itl 120ms`: the main job on a live server."""

from collections.abc import Mapping

from sarathi_tune.cli.options import parse_shared, parse_slo
from sarathi_tune.cli.output import check_target, emit_result
from sarathi_tune.cli.tune import command_line
from sarathi_tune.config.outside import OutsideConfig
from sarathi_tune.errors import ExitCode, UsageError

#: Flags of the main job that say how steps are computed here, or what is verified here.
_MEANINGLESS = (
    *("rate", "budget", "no_verify", "resume", "scheduler", "prefix_cache", "preemption"),
    *("device", "attention", "dtype", "threads", "tensor_parallel", "pipeline_parallel"),
)


def build_config(
    target: str,
    *,
    objective: tuple[str | None, str | None, str | None, str | None],
    subject: tuple[str | None, str | None],
    load: tuple[str | None, str | None, str | None],
    time_limit: str | None = None,
    seed: str | None = None,
    out: str | None = None,
) -> OutsideConfig:
    """The flags as a configuration: (ITL, TTFT, overhead, headroom), (model, workload), (max_num_seqs, context,
    prefix), and so on. Raises UsageError for the first one that can't be used."""
    itl, ttft, overhead, headroom = objective
    return OutsideConfig(
        target=target,
        slo=parse_slo(itl, ttft, "sarathi-tune --target http://127.0.0.1:8000 --slo-itl 120ms."),
        command=command_line(),
        **parse_shared((overhead, headroom), subject, load, time_limit, seed, out),
    )


def refuse_meaningless(arguments: Mapping[str, object]) -> None:
    """Refuse what would be ignored. `arguments`: the flags that were given, by their parameters' names."""
    names = [f"--{name.replace('_', '-')}" for name in _MEANINGLESS if name in arguments]
    if names:
        raise UsageError(
            f"{', '.join(names)} can't be used with --target: how a live server computes and schedules was settled at "
            "its start."
        )


def tune_outside(config: OutsideConfig, *, json_target: str | None, quiet: bool, dry_run: bool) -> ExitCode:
    """Measure a live server, or say what would be done."""
    from sarathi_tune.tune.outside import plan_outside, run_outside

    if dry_run:
        from sarathi_tune.cli.consoles import data_console
        from sarathi_tune.report.plan import print_plan

        print_plan(plan_outside(config), data_console())
        return ExitCode.MET
    check_target(json_target, config.out_dir)
    from sarathi_tune.cli.ui import make_ui

    return emit_result(run_outside(config, make_ui(quiet=quiet)), json_target, quiet=quiet)
