"""Several processes on one schedule, and Ctrl-C in the middle."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sarathi_tune.config.slo import Slo
from sarathi_tune.loadgen.http.client import HttpSettings
from sarathi_tune.loadgen.http.worker import LoadInterrupted, run_http_load, workers_for
from sarathi_tune.loadgen.latency import failure_of, judge, ttft_ms
from sarathi_tune.workload.arrivals import constant
from tests.loadgen.http.servers import DIALECT, Line, Seen, requests_at, serving, target, tokens


async def quick(_seen: Seen, line: Line) -> None:
    await tokens(line, [0.01, 0.02, 0.03])


async def endless(_seen: Seen, line: Line) -> None:
    await tokens(line, [0.02 * number for number in range(1, 2000)])


def test_two_workers_share_one_schedule() -> None:
    with serving(quick) as (url, log):
        result = run_http_load(target(url), DIALECT, requests_at(*constant(50.0, n=20)), HttpSettings(workers=2))
    assert result.client is not None
    assert result.client.workers == 2
    assert [record.request_id for record in result.records] == list(range(20))
    assert [failure_of(record) for record in result.records] == [None] * 20
    assert {record.intended_s for record in result.records} == set(constant(50.0, n=20))
    assert len(log.requests) == 20
    for record in result.records:
        assert record.sent_s is not None
        assert -1e-6 <= record.sent_s - record.intended_s < 0.05
        assert (ttft_ms(record) or 0.0) > 9


def test_a_closed_loop_over_two_workers_keeps_its_limit() -> None:
    with serving(quick) as (url, _):
        result = run_http_load(
            target(url), DIALECT, requests_at(*[None] * 60), HttpSettings(workers=2, in_flight=3, stop_after_s=0.3)
        )
    for record in result.records:
        others = [other for other in result.records if other is not record and other.end_s is not None]
        assert record.sent_s is not None
        assert sum((o.sent_s or 0) <= record.sent_s < (o.end_s or 0) for o in others) <= 2


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_keeps_what_there_is(workers: int) -> None:
    threading.Timer(1.5 if workers else 0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started_s = time.monotonic()
    times_s = [0.0, 0.1, 30.0, 31.0]
    requests, settings = requests_at(*times_s, output_tokens=9999), HttpSettings(workers=workers)
    with serving(endless) as (url, log):
        with pytest.raises(LoadInterrupted) as stopped:
            run_http_load(target(url), DIALECT, requests, settings)
        deadline_s = time.monotonic() + 2
        while len(log.gone) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert len(log.gone) == 2, "the server sees both streams closed"
    assert time.monotonic() - started_s < 6
    result = stopped.value.result
    assert not result.is_complete
    assert [judge(record, Slo(50)) for record in result.records] == ["failed", "failed", "not_sent", "not_sent"]
    assert [record.failure for record in result.records[:2]] == ["interrupted", "interrupted"]
    assert all(len(record.token_s) > 3 for record in result.records[:2]), "the tokens until then are kept"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\n"
        "from sarathi_tune.loadgen.http.client import HttpSettings\n"
        "from sarathi_tune.loadgen.http.worker import run_http_load\n"
        "from tests.loadgen.http.servers import DIALECT, requests_at, target\n"
        "if __name__ == '__main__':\n"
        "    requests = requests_at(0.0, output_tokens=9999)\n"
        "    run_http_load(target(sys.argv[1]), DIALECT, requests, HttpSettings(workers=1))\n"
    )
    root = Path(__file__).parents[3]
    with serving(endless) as (url, log):
        parent = subprocess.Popen([sys.executable, str(script), url], env={**os.environ, "PYTHONPATH": str(root)})
        deadline_s = time.monotonic() + 15
        while not log.requests and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert log.requests
        parent.kill()
        parent.wait()
        deadline_s = time.monotonic() + 5
        while not log.gone and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert log.gone, "the worker has closed its stream, because it is gone"


def test_what_still_runs_at_the_end_is_unfinished() -> None:
    with serving(endless) as (url, _):
        result = run_http_load(target(url), DIALECT, requests_at(0.0, output_tokens=9999), HttpSettings(drain_s=0.3))
    assert result.is_complete
    assert result.records[0].failure == "unfinished"
    assert len(result.records[0].token_s) > 3


def test_clients_that_leave_are_noticed_at_once() -> None:
    left: list[float] = []

    async def answer(_seen: Seen, line: Line) -> None:
        started_s = time.monotonic()
        try:
            await tokens(line, [0.02 * number for number in range(1, 500)])
        finally:
            left.append(time.monotonic() - started_s)
            await asyncio.sleep(0)

    with serving(answer) as (url, _):
        run_http_load(target(url), DIALECT, requests_at(0.0, output_tokens=9999), HttpSettings(drain_s=0.2))
        deadline_s = time.monotonic() + 2
        while not left and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert left
    assert left[0] < 1.5


def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert [workers_for(streams) for streams in (0.2, 256, 257, 1000, 1e9, float("inf"))] == [1, 1, 2, 4, 8, 8]
