"""Every document that can be shown again, read back from its JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sarathi_tune.config.slo import Slo
from sarathi_tune.errors import DocumentError
from sarathi_tune.goodput import by_budget, verified
from sarathi_tune.goodput.by_budget import BudgetComparison, BudgetRun, Recommendation
from sarathi_tune.goodput.server_account import ServerAccount
from sarathi_tune.goodput.validity import Facts, Validity
from sarathi_tune.goodput.verified import FoundCapacity, Point, Verification, VerifiedVerdict
from sarathi_tune.loadgen.latency import EventViews, LatencyReport
from sarathi_tune.loadgen.record import ClientFacts, LoadResult
from sarathi_tune.measure.documents import check_version, read_json
from sarathi_tune.notices import Notice
from sarathi_tune.report import comparison, result
from sarathi_tune.report.codec import from_json
from sarathi_tune.report.comparison import Comparison
from sarathi_tune.report.result import Result

Stored = Result | Verification | BudgetComparison | Comparison

#: The documents by their schemas, with the newest version that is read here.
_NEWEST = {
    result.SCHEMA: result.SCHEMA_VERSION,
    verified.SCHEMA: verified.SCHEMA_VERSION,
    by_budget.SCHEMA: by_budget.SCHEMA_VERSION,
    comparison.SCHEMA: comparison.SCHEMA_VERSION,
}


def load_stored(path: Path) -> tuple[Stored, dict[str, Any]]:
    """A document, and its JSON. Raises DocumentError with the path in its text."""
    document = read_json(path, "result")
    try:
        return stored_from_dict(document), document
    except DocumentError as error:
        raise DocumentError(f"{path}: {error}") from error


def stored_from_dict(document: object) -> Stored:
    """Raises DocumentError for anything that can't be shown again, a newer version included."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(schema, str) or schema not in _NEWEST:
        said = f', and this has "schema": "{schema}"' if isinstance(schema, str) else ""
        raise DocumentError(f"this is no result: one has a schema of {', '.join(sorted(_NEWEST))}{said}.")
    check_version(document.get("version"), _NEWEST[schema], "result")
    if schema == result.SCHEMA:
        return from_json(Result, document, "result")
    if schema == comparison.SCHEMA:
        return from_json(Comparison, document, "comparison")
    if schema == by_budget.SCHEMA:
        return _budgets(document, "budgets")
    return _verification(document, "verification")


@dataclass(frozen=True, slots=True)
class _Verification:
    """What a verification's document has word for word."""

    target: str
    objective: Slo
    verdict: VerifiedVerdict
    why: str
    complete: bool
    capacity: Mapping[str, Any] | None
    decisive: int | None
    server: Mapping[str, Any]
    workload: Mapping[str, Any]
    settings: Mapping[str, Any]
    notices: tuple[Notice, ...]
    points: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Point:
    rate_per_s: float | None
    attempt: int
    misses: tuple[str, ...]
    pass_probability: float
    window_s: tuple[float, float]
    elapsed_s: float
    complete: bool
    latency: Mapping[str, Any]
    events: EventViews
    validity: Mapping[str, Any]
    client: ClientFacts | None
    server: ServerAccount | None = None


@dataclass(frozen=True, slots=True)
class _Validity:
    problems: tuple[Notice, ...]
    remarks: tuple[Notice, ...]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _MoreFacts:
    """What is shown of a run's other facts; an older document has not all of it."""

    workers: int = 1
    loop_lag_p99_ms: float = 0.0
    stamped_on_arrival: bool = False


@dataclass(frozen=True, slots=True)
class _Budgets:
    engine: str
    model: str
    objective: Slo
    complete: bool
    recommendation: Recommendation | None
    runs: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _BudgetRun:
    budget_tokens: int | None
    command: tuple[str, ...]
    log: str
    ready_s: float | None
    failure: str | None
    verification: Mapping[str, Any] | None


def _verification(document: object, where: str) -> Verification:
    read = from_json(_Verification, document, where)
    points = tuple(_point(point, read.objective, f"{where}.points[{index}]") for index, point in enumerate(read.points))
    if read.decisive is not None and not 0 <= read.decisive < len(points):
        raise DocumentError(f"{where}.decisive must be one of the {len(points)} points, not {read.decisive}.")
    capacity = None
    if read.capacity is not None:
        renamed = _renamed(read.capacity, confirmed="is_confirmed")
        capacity = from_json(FoundCapacity, renamed, f"{where}.capacity")
    return Verification(
        target=read.target,
        slo=read.objective,
        verdict=read.verdict,
        why=read.why,
        points=points,
        decisive=read.decisive,
        capacity=capacity,
        server=read.server,
        workload=read.workload,
        settings=read.settings,
        notices=read.notices,
        is_complete=read.complete,
    )


def _point(document: object, slo: Slo, where: str) -> Point:
    read = from_json(_Point, document, where)
    latency = _renamed(read.latency, requests="counts", preemptions="num_preemptions")
    latency["slo"] = asdict(slo)
    validity = from_json(_Validity, read.validity, f"{where}.validity")
    own = {field.name for field in fields(Facts)}
    shown = from_json(_MoreFacts, validity.facts, f"{where}.validity.facts")
    return Point(
        rate_per_s=read.rate_per_s,
        attempt=read.attempt,
        # the rows of its requests stay in the document
        result=LoadResult((), (), read.window_s, read.elapsed_s, read.complete, client=read.client),
        report=from_json(LatencyReport, latency, f"{where}.latency"),
        views=read.events,
        validity=Validity(
            problems=validity.problems,
            remarks=validity.remarks,
            facts=from_json(Facts, validity.facts, f"{where}.validity.facts"),
            more_facts=asdict(shown) | {name: value for name, value in validity.facts.items() if name not in own},
        ),
        misses=read.misses,
        probability=read.pass_probability,
        server=read.server,
    )


def _budgets(document: object, where: str) -> BudgetComparison:
    read = from_json(_Budgets, document, where)
    runs = []
    for index, row in enumerate(read.runs):
        here = f"{where}.runs[{index}]"
        run = from_json(_BudgetRun, row, here)
        found = None if run.verification is None else _verification(run.verification, f"{here}.verification")
        runs.append(BudgetRun(run.budget_tokens, run.command, run.log, run.ready_s, found, run.failure))
    return BudgetComparison(read.engine, read.model, read.objective, tuple(runs), read.recommendation, read.complete)


def _renamed(document: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """The object with other names for some of its fields."""
    return {names.get(name, name): value for name, value in document.items()}
