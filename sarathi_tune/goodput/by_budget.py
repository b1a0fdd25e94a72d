"""The same load on one server with several budgets: what each of them did, and which is best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.verified import Verification, VerifiedVerdict

SCHEMA, SCHEMA_VERSION = "sarathi-tune/budgets", 1


@dataclass(frozen=True, slots=True)
class BudgetRun:
    """The server with one budget (None: its default). `verification` is None when the server didn't start, and
    `failure` says why; it also says so when the server died while it was measured."""

    budget_tokens: int | None
    command: tuple[str, ...]
    log: str
    ready_s: float | None = None
    verification: Verification | None = None
    failure: str | None = None

    @property
    def name(self) -> str:
        """The budget as a person calls it."""
        return "default" if self.budget_tokens is None else f"{self.budget_tokens:,}"

    @property
    def verdict(self) -> VerifiedVerdict:
        """Of its verification; a server that failed has none to speak of."""
        return "failed" if self.failure is not None or self.verification is None else self.verification.verdict

    @property
    def goodput_per_s(self) -> float:
        """Requests per second that met the objective: of the search where there was one, else of the run."""
        verification = self.verification
        if verification is None or verification.point is None:
            return 0.0
        if verification.capacity is not None:
            return verification.capacity.rate_per_s or 0.0
        return verification.point.report.goodput_per_s

    def as_dict(self) -> dict[str, Any]:
        """The run as it stands in a result document."""
        return {
            "budget_tokens": self.budget_tokens,
            "verdict": self.verdict,
            "goodput_per_s": self.goodput_per_s,
            "command": list(self.command),
            "log": self.log,
            "ready_s": self.ready_s,
            "failure": self.failure,
            "verification": self.verification.as_dict() if self.verification else None,
        }


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What measuring the server with its default budget advised, with its notices; the whole result lies in `folder`.

    `fitted_tokens`: the budget by the fit alone, where that was too uncertain to be advised. `tried_tokens`: the
    budgets that were run for it.
    """

    budget_tokens: int | None
    verdict: str
    why: str
    folder: str | None
    fitted_tokens: int | None = None
    tried_tokens: tuple[int, ...] = ()
    notices: tuple[Mapping[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The recommendation as it stands in a result document."""
        return {
            "budget_tokens": self.budget_tokens,
            "verdict": self.verdict,
            "why": self.why,
            "folder": self.folder,
            "fitted_tokens": self.fitted_tokens,
            "tried_tokens": list(self.tried_tokens),
            "notices": list(self.notices),
        }


@dataclass(frozen=True, slots=True)
class BudgetComparison:
    """All runs, in the order in which they were made."""

    engine: str
    model: str
    slo: Slo
    runs: tuple[BudgetRun, ...]
    recommendation: Recommendation | None = None
    is_complete: bool = True

    @property
    def best(self) -> BudgetRun | None:
        """Of the budgets that meet the objective the one with the most goodput; the first of equals."""
        met = [run for run in self.runs if run.verdict == "met"]
        return max(met, key=lambda run: run.goodput_per_s, default=None)

    @property
    def verdict(self) -> VerifiedVerdict:
        """Met when any budget meets it, missed when none does; failed only when no server could be measured."""
        verdicts = {run.verdict for run in self.runs}
        order: Sequence[VerifiedVerdict] = ("met", "inconclusive", "missed")
        return next((verdict for verdict in order if verdict in verdicts), "failed")

    def as_dict(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The result document."""
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "engine": self.engine,
            "model": self.model,
            "objective": {
                "itl_ms": self.slo.itl_ms,
                "ttft_ms": self.slo.ttft_ms,
                "percentile": self.slo.percentile,
            },
            "verdict": self.verdict,
            "complete": self.is_complete,
            "best": None if self.best is None else self.runs.index(self.best),
            "recommendation": self.recommendation.as_dict() if self.recommendation else None,
            "settings": dict(settings),
            "runs": [run.as_dict() for run in self.runs],
        }
