"""What meeting the SLO means, criterion by criterion."""

from typing import Any

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.objective import shortfalls
from sarathi_tune.loadgen.latency import LatencyReport, summarise_records
from sarathi_tune.loadgen.record import RequestRecord


def rows(gaps_ms: list[float], stalled: list[bool], n: int = 100, **changes: Any) -> list[RequestRecord]:
    stamps = [1.0]
    for gap in gaps_ms:
        stamps.append(stamps[-1] + gap / 1e3)
    fields: dict[str, Any] = {
        "request_id": 0,
        "intended_s": 0.9,
        "prompt_tokens": 8,
        "output_asked": len(stamps),
        "outcome": "finished",
        "sent_s": 0.9,
        "scheduled_s": 0.9,
        "token_s": tuple(stamps),
        "stalled": tuple(stalled),
        "output_got": len(stamps),
    }
    return [RequestRecord(**(fields | changes)) for _ in range(n)]


def report(records: list[RequestRecord], slo: Slo) -> LatencyReport:
    return summarise_records(records, slo, duration_s=10.0, intervals=False)


def test_rare_long_stalls_meet_the_pooled_objective_only() -> None:
    # one gap of 200 in 200: half a percent, at ten times the objective
    found = report(rows([20.0] * 199 + [500.0], [False] * 199 + [True]), Slo(50))
    assert shortfalls(found, "pooled") == ()
    assert shortfalls(found, "every-step") == ("p99 ITL of stalled gaps 500 ms > 50.0 ms",)
    # nobody's own p99 sees it
    assert shortfalls(found, "per-request") == ()


def test_a_request_in_ten_that_suffers_breaks_the_per_request_objective() -> None:
    bad = rows([60.0] * 20, [True] * 20, n=10)
    good = rows([20.0] * 400, [False] * 400, n=90)
    found = report(bad + good, Slo(50))
    assert shortfalls(found, "pooled") == ()
    assert shortfalls(found, "per-request") == ("90.0% of the requests are good, 99% are promised",)


def test_failures_break_every_criterion() -> None:
    records = rows([20.0] * 10, [True] * 10, n=98) + rows([], [], n=2, token_s=(), outcome="failed")
    found = report(records, Slo(50))
    assert "2 of 100 requests failed or were not sent" in shortfalls(found, "pooled")


def test_the_papers_scheduling_delay_limit_counts() -> None:
    waiting = report(rows([20.0] * 10, [False] * 10, intended_s=-1.2), Slo(50))
    assert shortfalls(waiting) == ("median scheduling delay 2100 ms > 2000 ms",)
    assert shortfalls(report(rows([20.0] * 10, [False] * 10, intended_s=-1.0), Slo(50))) == ()


def test_nothing_asked_is_nothing_met() -> None:
    empty = report([], Slo(50))
    assert shortfalls(empty) == ("no request was intended in the window",)
