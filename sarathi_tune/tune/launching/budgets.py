"""The server started with one budget after the other, and the same load on each."""

from dataclasses import replace
from pathlib import Path

from sarathi_tune.config.launch import LaunchConfig
from sarathi_tune.errors import TargetError
from sarathi_tune.goodput.by_budget import BudgetComparison, BudgetRun
from sarathi_tune.report.progress import Ui
from sarathi_tune.tune.folder import new_folder
from sarathi_tune.tune.launching.server import Launch, RunningServer, free_port, running
from sarathi_tune.tune.launching.vllm import serve_command
from sarathi_tune.tune.target_run import run_verification


def compare_budgets(config: LaunchConfig, ui: Ui) -> BudgetComparison:
    """Start, measure, stop; then the next budget. A budget with which the server fails is a row, and the others go on.

    Raises UsageError when the executable can't be started. After Ctrl-C the comparison holds what there is.
    """
    serve_command(config.executable, config.model, 1, None, config.extra)  # refuses before anything is started
    folder = new_folder(config.out_dir, f"{config.engine}-budgets").path
    runs: list[BudgetRun] = []
    is_complete = True
    for budget in config.budgets_tokens:
        try:
            run = _run(config, budget, folder, ui)
        except KeyboardInterrupt:
            if not runs:
                raise
            is_complete = False
            break
        runs.append(run)
        is_complete = run.verification is None or run.verification.is_complete
        if not is_complete:
            break
    return BudgetComparison(config.engine, config.model, config.verify.slo, tuple(runs), is_complete)


def _run(config: LaunchConfig, budget: int | None, folder: Path, ui: Ui) -> BudgetRun:
    port = free_port()
    name = "default" if budget is None else str(budget)
    launch = Launch(
        command=serve_command(config.executable, config.model, port, budget, config.extra),
        url=f"http://127.0.0.1:{port}",
        log=folder / f"{config.engine}-{name}.log",
        ready_within_s=config.start_timeout_s,
    )
    row = BudgetRun(budget, launch.command, str(launch.log))
    shown = "its default budget" if budget is None else f"budget {budget}"
    try:
        with running(launch, ui, f"Starting {config.engine} with {shown}") as server:
            return _measure(replace(row, ready_s=server.ready_s), server, config, ui)
    except TargetError as error:
        ui.note(str(error))
        return replace(row, failure=str(error))


def _measure(row: BudgetRun, server: RunningServer, config: LaunchConfig, ui: Ui) -> BudgetRun:
    try:
        verification = run_verification(replace(config.verify, target=server.launch.url), ui)
    except TargetError:
        server.check()  # a server that has ended has a better reason than a connection that was refused
        raise
    row = replace(row, verification=verification)
    if not verification.is_complete:
        server.hurry()
        return row
    try:
        server.check()
    except TargetError as error:
        ui.note(str(error))
        return replace(row, failure=str(error))
    return row
