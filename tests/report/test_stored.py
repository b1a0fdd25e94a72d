"""Documents read back: what can't be shown again is refused with the field."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sarathi_tune.config.slo import Slo
from sarathi_tune.errors import DocumentError
from sarathi_tune.goodput.by_budget import BudgetComparison, BudgetRun, Recommendation
from sarathi_tune.goodput.http_validity import check_http_run
from sarathi_tune.goodput.server_account import Mean, ServerAccount
from sarathi_tune.goodput.verified import FoundCapacity, Point, Verification
from sarathi_tune.loadgen.latency import event_views, summarise
from sarathi_tune.loadgen.record import ClientFacts, LoadResult, RequestRecord
from sarathi_tune.notices import close_call
from sarathi_tune.report.stored import load_stored, stored_from_dict
from sarathi_tune.report.verified import print_verification

SLO = Slo(50.0, 800.0)


def point() -> Point:
    """One answered request and one that failed."""
    stamps = tuple(0.2 + 0.01 * number for number in range(400))
    records = (
        RequestRecord(0, 0.0, 32, 400, "finished", 0.001, token_s=stamps, stalled=(False,) * 399, output_got=400),
        RequestRecord(1, 0.5, 32, 400, "failed", 0.5, failure="stalled", detail="silence"),
    )
    client = ClientFacts(1, 0.2, 0.4, (1.5,), 0.03, 400, 400, kernel_stamped_reads=400)
    result = LoadResult(records, (), (0.0, 2.0), 4.5, True, client=client)
    report, views = summarise(result, SLO), event_views(records, SLO)
    server = ServerAccount.of(Mean(1, 90.5), Mean(399, 20.5), Mean(1, 3.5), 2, records)
    validity = check_http_run(result, report, views, server=server)
    return Point(2.0, 1, result, report, views, validity, ("p99 ITL",), 0.25, server)


def verification() -> Verification:
    return Verification(
        target="http://here/v1",
        slo=SLO,
        verdict="missed",
        why="because",
        points=(point(),),
        decisive=0,
        capacity=FoundCapacity(None, 2.0, False),
        server={"model": "m", "endpoint": "completions", "token_prompts": True},
        workload={"name": "fixed:32:400"},
        settings={"seed": 3},
        notices=(close_call(0.25),),
    )


def without_rows(document: dict[str, Any]) -> dict[str, Any]:
    """Neither the requests' own rows nor the client's origin are read back."""
    return document | {"points": [point | {"requests": []} for point in document["points"]]}


def test_a_verification_is_what_it_was() -> None:
    written = verification().as_dict()
    document = json.loads(json.dumps(written))
    again = stored_from_dict(document)
    assert isinstance(again, Verification)
    assert again.as_dict() == without_rows(written)
    assert again.points[0].validity.more_facts == point().validity.more_facts


def shown(found: Verification) -> str:
    text = io.StringIO()
    print_verification(found, Console(file=text, width=200))
    return text.getvalue()


def test_the_server_s_own_account_is_shown() -> None:
    text = " ".join(shown(verification()).split())
    seen = point().server
    assert seen is not None
    assert "By the server's own clock 20.5 ms between tokens in the mean" in text
    assert f"the first one after 90.5 ms (seen {seen.ttft.seen.mean_ms:.3g} ms; 3.50 ms of it queued)" in text
    assert "Answers begun 1 (1 of ours), preemptions 2." in text
    assert "The server preempted requests 2 times" in text


def test_an_older_verification_knows_less_of_its_client() -> None:
    document = json.loads(json.dumps(verification().as_dict()))
    del document["points"][0]["server"]
    del document["points"][0]["validity"]["facts"]["stamped_on_arrival"]
    again = stored_from_dict(document)
    assert isinstance(again, Verification)
    assert "event loop p99 0.20 ms late\n" in shown(again)
    assert "By the server's own clock" not in shown(again)


def test_budgets_are_what_they_were(tmp_path: Path) -> None:
    advice = Recommendation(None, "inconclusive", "why", "folder", 64, (64, 91), (close_call(0.5).as_dict(),))
    runs = (
        BudgetRun(None, ("vllm", "serve"), "a.log", 12.5, verification()),
        BudgetRun(64, ("vllm",), "b.log", failure="It ended with 3."),
    )
    comparison = BudgetComparison("vllm", "m", SLO, runs, advice, is_complete=False)
    written = comparison.as_dict({"seed": 1})
    path = tmp_path / "found.json"
    path.write_text(json.dumps(written))
    again, document = load_stored(path)
    assert document == json.loads(json.dumps(written))
    assert isinstance(again, BudgetComparison)
    written["runs"][0]["verification"] = without_rows(written["runs"][0]["verification"])
    assert again.as_dict({"seed": 1}) == written


def spoiled(change: dict[str, Any], *path: str | int) -> dict[str, Any]:
    """The verification's document with fields changed in the object at `path`."""
    document = json.loads(json.dumps(verification().as_dict()))
    place: Any = document
    for step in path:
        place = place[step]
    place.update(change)
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"schema": "sarathi-tune/profile", "version": 1}, 'and this has "schema": "sarathi-tune/profile"'),
        ({"schema": ["sarathi-tune/result"]}, "this is no result"),
        (spoiled({"version": 2}), "has version 2 and this sarathi-tune reads up to version 1"),
        (spoiled({"verdict": "maybe"}), "verification.verdict must be one of met, missed, inconclusive, failed"),
        (spoiled({"decisive": 1}), "verification.decisive must be one of the 1 points, not 1"),
        (spoiled({"decisive": -1}), "verification.decisive must be one of"),
        (spoiled({"points": [3]}), "verification.points[0] must be an object"),
        (spoiled({"objective": {"ttft_ms": 3.0}}), "verification.objective.itl_ms is missing"),
        (spoiled({"p99_ms": "slow"}, "points", 0, "latency", "itl"), "verification.points[0].latency.itl.p99_ms"),
        (spoiled({"intended": None}, "points", 0, "validity", "facts"), "points[0].validity.facts.intended must be"),
        (spoiled({"workers": "2"}, "points", 0, "validity", "facts"), "points[0].validity.facts.workers must be"),
        (spoiled({"confirmed": 1}, "capacity"), "verification.capacity.is_confirmed must be true or false"),
        ({"schema": "sarathi-tune/budgets", "version": 1}, "budgets.engine is missing"),
        ({"schema": "sarathi-tune/comparison", "version": 1}, "is missing"),
    ],
)
def test_what_cannot_be_shown_again_names_the_field(document: dict[str, Any], words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        stored_from_dict(document)
    assert words in str(caught.value)
