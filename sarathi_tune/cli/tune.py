"""`sarathi-tune --slo-itl 20ms`: the main job."""

import shlex
import sys
from collections.abc import Sequence

from sarathi_tune.cli.options import given, parse_device, parse_rate, parse_shared, parse_slo, parse_token_count
from sarathi_tune.cli.output import check_target, emit_result
from sarathi_tune.config.run import DeviceConfig, SchedulingConfig, TuneConfig
from sarathi_tune.errors import ExitCode

__all__ = ["build_config", "check", "command_line", "parse_device", "tune"]


def build_config(
    *,
    objective: tuple[str | None, str | None, str | None, str | None],
    subject: tuple[str | None, str | None],
    load: tuple[str | None, str | None, str | None, str | None],
    steps: DeviceConfig,
    scheduling: SchedulingConfig,
    budget: str | None = None,
    verify: bool = True,
    resume: bool = False,
    time_limit: str | None = None,
    seed: str | None = None,
    out: str | None = None,
) -> TuneConfig:
    """The flags of the main job as a configuration: (ITL, TTFT, overhead, headroom), (model, workload), (max_num_seqs,
    context, prefix, rate), and so on. Raises UsageError for the first one that can't be used."""
    itl, ttft, overhead, headroom = objective
    max_num_seqs, context, prefix, rate = load
    return TuneConfig(
        slo=parse_slo(itl, ttft, "sarathi-tune --slo-itl 20ms (or sarathi-tune --help)."),
        device=steps,
        scheduling=scheduling,
        verify=verify,
        resume=resume,
        command=command_line(),
        **parse_shared((overhead, headroom), subject, (max_num_seqs, context, prefix), time_limit, seed, out),
        **given(rate_per_s=parse_rate(rate), budget_tokens=parse_token_count(budget, "--budget")),
    )


def check(config: TuneConfig, budgets_tokens: Sequence[int] = ()) -> None:
    """Refuse what can't be run before torch is loaded: model, workload, context, budgets. Raises UsageError.

    The device isn't known yet; a CPU's defaults are the smaller ones, so nothing is refused that a GPU would take.
    """
    from sarathi_tune.tune.settings import settle

    settle(config, "cpu", budgets_tokens)


def tune(config: TuneConfig, *, json_target: str | None, quiet: bool, dry_run: bool) -> ExitCode:
    """Run the main job, or say what it would do."""
    check(config)
    if dry_run:
        return _print_plan(config)
    check_target(json_target, config.out_dir)
    from sarathi_tune.cli.ui import make_ui
    from sarathi_tune.tune import run_tune

    return emit_result(run_tune(config, make_ui(quiet=quiet)), json_target, quiet=quiet)


def _print_plan(config: TuneConfig) -> ExitCode:
    from sarathi_tune.cli.consoles import data_console
    from sarathi_tune.report.plan import print_plan
    from sarathi_tune.tune import plan_tune

    print_plan(plan_tune(config), data_console())
    return ExitCode.MET


def command_line() -> str:
    """The command as typed, for the result document."""
    return shlex.join(["sarathi-tune", *sys.argv[1:]])
