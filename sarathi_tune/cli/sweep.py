"""`sarathi-tune sweep`: every budget at every rate, for real."""

from typing import Annotated

import typer

from sarathi_tune.cli import options as flags
from sarathi_tune.cli import tune
from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.output import check_target, emit_result
from sarathi_tune.config.run import SweepConfig
from sarathi_tune.errors import ExitCode


@edge
def sweep(
    slo_itl: flags.SloItl = None,
    slo_ttft: flags.SloTtft = None,
    overhead: flags.Overhead = None,
    headroom: flags.Headroom = None,
    budgets: Annotated[
        str | None,
        typer.Option("--budgets", metavar="N,N,...", help="Budgets to run. (default: around the derived one)"),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option("--rates", metavar="R,R,...", help="Requests per second. (default: around the capacity)"),
    ] = None,
    model: flags.Model = None,
    workload: flags.WorkloadName = None,
    max_num_seqs: flags.MaxNumSeqs = None,
    context_tokens: flags.Context = None,
    prefix: flags.Prefix = None,
    scheduler: flags.Scheduler = None,
    prefix_cache: flags.PrefixCache = None,
    preemption: flags.Preemption = None,
    device: flags.Device = None,
    attention: flags.Attention = None,
    dtype: flags.Dtype = None,
    threads: flags.Threads = None,
    tensor_parallel: flags.TensorParallel = None,
    pipeline_parallel: flags.PipelineParallel = None,
    resume: flags.Resume = False,
    seed: flags.Seed = None,
    json_target: flags.JsonTarget = None,
    out: flags.Out = None,
    quiet: flags.Quiet = False,
) -> ExitCode:
    """Run every budget at every rate for real. Takes long: the main job answers the same from a fitted model."""
    base = tune.build_config(
        objective=(slo_itl, slo_ttft, overhead, headroom),
        subject=(model, workload),
        load=(max_num_seqs, context_tokens, prefix, None),
        steps=flags.parse_device(device, attention, dtype, threads, (tensor_parallel, pipeline_parallel)),
        scheduling=flags.parse_scheduling(scheduler, prefix_cache, preemption),
        resume=resume,
        seed=seed,
        out=out,
    )
    config = SweepConfig(
        base=base,
        budgets_tokens=flags.parse_list(budgets, flags.parse_token_count, "--budgets"),
        rates_per_s=flags.parse_list(rates, flags.parse_rate, "--rates"),
    )
    tune.check(base, config.budgets_tokens)
    check_target(json_target, base.out_dir)
    from sarathi_tune.cli.ui import make_ui
    from sarathi_tune.tune import run_sweep

    return emit_result(run_sweep(config, make_ui(quiet=quiet)), json_target, quiet=quiet)
