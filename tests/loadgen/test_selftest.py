"""The self-test: its server keeps its schedule, and what it says of the client is what the client did."""

import json
import os
import sys

import pytest

from sarathi_tune.loadgen.latency import distribution
from sarathi_tune.loadgen.record import ClientFacts, LoadResult, RequestRecord
from sarathi_tune.loadgen.selftest import Level, Served, compare, one_core_less, run_selftest, trusted_streams
from tests.cli.running import run


def result(*stamps: tuple[float, ...]) -> LoadResult:
    records = tuple(
        RequestRecord(index, 0.0, 1, len(token_s), "finished", sent_s=0.0, token_s=token_s, lag_s=0.003)
        for index, token_s in enumerate(stamps)
    )
    facts = ClientFacts(1, 0.5, 1.0, (), cpu_s=0.5, events=4, reads=4, origin_s=100.0)
    return LoadResult(records, (), (0.0, 1.0), 2.0, client=facts)


def test_what_the_client_adds() -> None:
    served = Served({0: (100.5, 100.6), 1: (100.5, 100.6)}, (0.1,))
    level = compare(result((0.501, 0.601), (0.502, 0.605)), served, 2)
    assert level.first_added.max_ms == pytest.approx(2)
    assert level.event_added.max_ms == pytest.approx(5)
    assert level.gap_error.max_ms == pytest.approx(3)
    assert level.lag_p99_ms == pytest.approx(3)
    assert (level.events_per_s, level.events_per_cpu_s) == (2.0, 8.0)
    assert level.failed == 0
    assert not level.is_trusted


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't let a process choose")
def test_the_server_has_a_core_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.sched_getaffinity(0)
    with one_core_less() as core:
        if core is None:
            assert len(cores) == 1
        else:
            assert os.sched_getaffinity(0) == cores - {core}
    assert os.sched_getaffinity(0) == cores

    def refuses(*_arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {3, 4})
    monkeypatch.setattr(os, "sched_setaffinity", refuses)
    with one_core_less() as core:
        assert core is None


def test_a_stream_that_is_not_whole_is_a_failure() -> None:
    level = compare(result((0.5,)), Served({0: (100.5, 100.6)}, ()), 1)
    assert level.failed == 1
    assert not level.is_trusted


def level(streams: int, gap_ms: float) -> Level:
    some = distribution([gap_ms] * 10)
    return Level(streams, 1, 0.1, 0.1, some, some, some, 0.1, 1.0, 1.0, 0)


def test_trust_ends_at_the_first_level_that_fails() -> None:
    assert trusted_streams([level(10, 0.1), level(50, 0.5), level(100, 3.0), level(200, 0.5)]) == 50
    assert trusted_streams([level(10, 9.0)]) == 0


def test_a_real_one() -> None:
    (only,) = run_selftest((8,), seconds=0.4)
    assert only.streams == 8
    assert only.failed == 0
    assert only.event_added.n == 8 * 8
    assert only.gap_error.n == 8 * 7
    assert only.event_added.p50_ms is not None
    assert 0 < only.event_added.p50_ms < 5000, "a client can't read an event before it is written"


def test_the_command() -> None:
    ended = run("selftest", "--streams", "1,4", "--seconds", "300ms", "--json", "-")
    document = json.loads(ended.out)
    assert [found["streams"] for found in document["levels"]] == [1, 4]
    assert ended.code == (0 if document["trusted_streams"] else 4)


def test_the_command_for_a_person() -> None:
    ended = run("selftest", "--streams", "2", "--seconds", "300ms")
    assert "The client can" in ended.out.splitlines()[0]
    assert "p99 of what is added to gaps" in " ".join(ended.out.split())
