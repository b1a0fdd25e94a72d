"""`sarathi-tune kernels`: each kernel of a step beside the measured ceiling of this device."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sarathi_tune.cli import options as flags
from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.output import STDOUT, check_target, emit_document
from sarathi_tune.config.run import DEFAULT_MODEL, DeviceConfig
from sarathi_tune.errors import ExitCode
from sarathi_tune.units import parse_duration_ms

if TYPE_CHECKING:
    from sarathi_tune.measure.kernels.figure import Group, KernelFigure, KernelReport

#: For one kernel at one size.
DEFAULT_TIME = "0.25s"


@edge
def kernels(
    model: flags.Model = None,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="A,B,...", help="attention, linear, kv-write, sampling, all-reduce."),
    ] = None,
    per_kernel: Annotated[
        str | None,
        typer.Option("--time", metavar="TIME", help=f"For one kernel at one size. (default: {DEFAULT_TIME})"),
    ] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw the bars as PNG or SVG (by the name's end).")
    ] = None,
    device: flags.Device = None,
    attention: flags.Attention = None,
    dtype: flags.Dtype = None,
    threads: flags.Threads = None,
    seed: flags.Seed = None,
    json_target: flags.JsonTarget = None,
    json_line: Annotated[
        bool, typer.Option("--json-line", metavar="", help="The document as one more line on stdout, the last one.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="No progress.")] = False,
) -> ExitCode:
    """Time each kernel of a step and show what it achieves of the device's measured ceilings."""
    steps = flags.parse_device(device, attention, dtype, threads)
    groups = _parse_groups(only)
    seconds = parse_duration_ms(per_kernel or DEFAULT_TIME, "--time") / 1e3
    seeded = flags.parse_seed(seed) or 0
    picture = Path(plot) if plot is not None else None
    _check(picture, json_target)
    report = _measure(model or DEFAULT_MODEL, steps, groups, seconds, seeded, quiet=quiet)
    if report is not None:
        _show(report, picture, json_target, json_line=json_line)
    return ExitCode.MET


def _check(picture: Path | None, json_target: str | None) -> None:
    from sarathi_tune.report.gaps import check_picture

    if picture is not None:
        check_picture(picture)
    check_target(json_target)


def _parse_groups(only: str | None) -> "tuple[Group, ...]":
    from sarathi_tune.measure.kernels.figure import GROUPS

    if only is None:
        return GROUPS
    chosen = flags.parse_list(only, lambda part, flag: flags.parse_choice(part, flag, GROUPS), "--only")
    return tuple(group for group in GROUPS if group in chosen)


def _measure(
    model: str, steps: DeviceConfig, groups: "tuple[Group, ...]", seconds: float, seed: int, *, quiet: bool
) -> "KernelReport | None":
    """The report; None in every process of a group but the first, which speaks for all."""
    from sarathi_tune.cli.ui import make_ui
    from sarathi_tune.config.presets import resolve_model

    config = resolve_model(model).config
    from sarathi_tune.measure.kernels.collective import join_group, leave_group
    from sarathi_tune.measure.kernels.suite import NUM_FIGURES, measure_kernels

    rank = join_group()
    try:
        with make_ui(quiet=quiet or bool(rank)).phase("kernels", total=NUM_FIGURES) as phase:

            def tell(figure: "KernelFigure") -> None:
                phase.describe(f"{figure.group} {figure.name}")
                phase.advance()

            report = measure_kernels(config, steps, groups, seconds=seconds, seed=seed, progress=tell)
    finally:
        leave_group()
    return None if rank else report


def _show(report: "KernelReport", picture: Path | None, json_target: str | None, *, json_line: bool) -> None:
    from sarathi_tune.cli.consoles import data_console, write_data
    from sarathi_tune.report.kernels import print_kernels, save_kernel_plot

    if picture is not None:
        save_kernel_plot(report, picture)
    emit_document(report.as_dict(), json_target)
    if json_target != STDOUT:
        print_kernels(report, data_console())
    if json_line and json_target != STDOUT:
        write_data(json.dumps(report.as_dict()) + "\n")
