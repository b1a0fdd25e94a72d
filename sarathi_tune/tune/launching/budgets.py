"""The server started with one budget after the other, and the same load on each."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sarathi_tune.config.launch import LaunchConfig
from sarathi_tune.config.outside import OutsideConfig
from sarathi_tune.errors import TargetError
from sarathi_tune.goodput.by_budget import BudgetComparison, BudgetRun, Recommendation
from sarathi_tune.report.progress import Ui
from sarathi_tune.report.result import Advice
from sarathi_tune.report.wording import fitted_words
from sarathi_tune.tune.folder import new_folder
from sarathi_tune.tune.launching.server import Launch, RunningServer, free_port, running
from sarathi_tune.tune.launching.tries import MOST_TRIES, first_try, next_try
from sarathi_tune.tune.launching.vllm import max_num_seqs_in, serve_command
from sarathi_tune.tune.target_run import run_verification


def compare_budgets(config: LaunchConfig, ui: Ui) -> BudgetComparison:
    """Start, measure, stop; then the next budget. A budget with which the server fails is a row, and the others go on.

    Where a recommendation is asked for, the server with its default budget is measured from outside as well, and what
    follows is run last: the advised budget, or what comes closest to one (see `tries`), and others that the load calls
    for. Raises UsageError when the executable can't be started, InterruptedRunError for Ctrl-C before there was a row;
    after it the comparison holds what there is.
    """
    serve_command(config.executable, config.model, 1, None, config.extra)  # refuses before anything is started
    comparing = _Comparing(config, new_folder(config.out_dir, f"{config.engine}-budgets").path, ui)
    runs: list[BudgetRun] = []
    is_complete = True
    try:
        for run in comparing.runs():
            runs.append(run)
            is_complete = run.verification is None or run.verification.is_complete
            if not is_complete:
                break
    except KeyboardInterrupt:
        if not runs:
            raise
        is_complete = False
    slo = config.verify.slo
    return BudgetComparison(config.engine, config.model, slo, tuple(runs), comparing.recommendation, is_complete)


class _Comparing:
    def __init__(self, config: LaunchConfig, folder: Path, ui: Ui) -> None:
        self.config, self.folder, self.ui = config, folder, ui
        self.recommendation: Recommendation | None = None
        self.advice: Advice | None = None

    def runs(self) -> Iterator[BudgetRun]:
        """A row for each budget, as it is done."""
        budgets = self.config.budgets_tokens
        if self.config.recommend:
            yield self._run(None, recommend=True)
            budgets = tuple(budget for budget in budgets if budget is not None)
        for budget in budgets:
            yield self._run(budget)
        yield from self._tries(budgets)

    def _tries(self, known: Sequence[int | None]) -> Iterator[BudgetRun]:
        """A row for each budget that is run for the recommendation."""
        slo, tried = self.config.verify.slo, list[BudgetRun]()
        budget = first_try(self.advice, slo) if self.advice else None
        while self.advice and self.recommendation and budget is not None and budget not in known:
            tokens = (*self.recommendation.tried_tokens, budget)
            self.recommendation = replace(self.recommendation, tried_tokens=tokens)
            tried.append(self._run(budget))
            yield tried[-1]
            budget = next_try(self.advice, slo, tried) if len(tried) < MOST_TRIES else None

    def _run(self, budget: int | None, *, recommend: bool = False) -> BudgetRun:
        config, ui = self.config, self.ui
        port = free_port()
        name = "default" if budget is None else str(budget)
        launch = Launch(
            command=serve_command(config.executable, config.model, port, budget, config.extra),
            url=f"http://127.0.0.1:{port}",
            log=self.folder / f"{config.engine}-{name}.log",
            ready_within_s=config.start_timeout_s,
        )
        row = BudgetRun(budget, launch.command, str(launch.log))
        shown = "its default budget" if budget is None else f"budget {budget}"
        try:
            with running(launch, ui, f"Starting {config.engine} with {shown}") as server:
                if recommend:
                    self._recommend(server)
                return self._measure(replace(row, ready_s=server.ready_s), server)
        except TargetError as error:
            ui.note(str(error))
            return replace(row, failure=str(error))

    def _recommend(self, server: RunningServer) -> None:
        """Measure the server's steps from outside and derive the budget."""
        from sarathi_tune.tune.outside import run_outside

        verify = self.config.verify
        outside = OutsideConfig(
            target=server.launch.url,
            slo=verify.slo,
            workload=verify.workload,
            max_num_seqs=max_num_seqs_in(self.config.extra),
            seed=verify.seed,
            out_dir=self.folder,
        )
        result = run_outside(outside, self.ui)
        self.advice = advice = result.advice
        self.recommendation = Recommendation(
            advice.budget_tokens,
            advice.verdict,
            advice.why,
            result.folder,
            fitted_tokens=advice.fitted_tokens,
            notices=result.notices,
        )
        budget = "no budget" if advice.budget_tokens is None else f"a budget of {advice.budget_tokens:,} tokens"
        self.ui.note(f"Measured from outside: {budget} ({advice.verdict}).")
        if advice.fitted_tokens is not None:
            self.ui.note(fitted_words(advice.fitted_tokens))

    def _measure(self, row: BudgetRun, server: RunningServer) -> BudgetRun:
        try:
            verification = run_verification(replace(self.config.verify, target=server.launch.url), self.ui)
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
            self.ui.note(str(error))
            return replace(row, failure=str(error))
        return row
