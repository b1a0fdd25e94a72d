"""Several processes on one schedule, and Ctrl-C in the middle."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sarathi_tune.config.slo import Slo
from sarathi_tune.loadgen.http.client import HttpSettings
from sarathi_tune.loadgen.http.worker import LoadInterrupted, WorkerLostError, run_http_load, workers_for
from sarathi_tune.loadgen.latency import failure_of, judge, ttft_ms
from sarathi_tune.workload.arrivals import constant
from tests.loadgen.http.servers import DIALECT, Line, Seen, requests_at, serving, target, tokens


async def quick(_seen: Seen, line: Line) -> None:
    await tokens(line, [0.01, 0.02, 0.03])


async def endless(_seen: Seen, line: Line) -> None:
    await tokens(line, [0.02 * number for number in range(1, 20_000)])


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Until it holds, or the limit is over."""
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)


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
        assert record.sent_s - record.intended_s >= -1e-6
        assert record.lag_s == pytest.approx(record.sent_s - record.intended_s, abs=1e-6)
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
    streaming: list[int] = []

    async def answer(seen: Seen, line: Line) -> None:
        async def note() -> None:
            await line.wait_until(0.5)
            streaming.append(seen.number)
            if len(streaming) == 2:  # both have had tokens
                os.kill(os.getpid(), signal.SIGINT)

        await asyncio.gather(endless(seen, line), note())

    times_s = [0.0, 0.1, 300.0, 301.0]
    requests, settings = requests_at(*times_s, output_tokens=9999), HttpSettings(workers=workers)
    with serving(answer) as (url, log):
        with pytest.raises(LoadInterrupted) as stopped:
            run_http_load(target(url), DIALECT, requests, settings)
        wait_for(lambda: len(log.gone) == 2)
        assert len(log.gone) == 2, "the server sees both streams closed"
    result = stopped.value.result
    assert not result.is_complete
    assert [judge(record, Slo(50)) for record in result.records] == ["failed", "failed", "not_sent", "not_sent"]
    assert [record.failure for record in result.records[:2]] == ["interrupted", "interrupted"]
    assert all(record.token_s for record in result.records[:2]), "the tokens until then are kept"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Deadly(list[int]):
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (7,)


def test_a_worker_that_cannot_start_ends_the_run() -> None:
    first, second = requests_at(0.0, 0.01)
    deadly = replace(second, spec=replace(second.spec, prompt=Deadly([1])))
    with serving(quick) as (url, _):
        started_s = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"A client process ended with exit code 7 before its share") as ended:
            run_http_load(target(url), DIALECT, [first, deadly], HttpSettings(workers=2))
    assert time.monotonic() - started_s < 60, "the other one doesn't wait for ever for the common start"
    assert ended.value.exit_code == 4
    assert [record.outcome for record in ended.value.result.records] == ["not_sent", "not_sent"]


def test_a_worker_killed_within_the_run_ends_it_and_the_others_keep_theirs() -> None:
    async def answer(seen: Seen, line: Line) -> None:
        async def kill() -> None:
            await line.wait_until(0.5)
            if seen.number == 0:
                workers = sorted(multiprocessing.active_children(), key=lambda process: process.pid or 0)
                os.kill(workers[0].pid or 0, signal.SIGKILL)

        await asyncio.gather(endless(seen, line), kill())

    requests = requests_at(0.0, 0.0, 300.0, 301.0, output_tokens=9999)
    with serving(answer) as (url, _), pytest.raises(WorkerLostError, match=r"was killed \(SIGKILL\)") as ended:
        run_http_load(target(url), DIALECT, requests, HttpSettings(workers=2))
    records = ended.value.result.records
    kept = [record for record in records if record.outcome != "not_sent"]
    assert [record.failure for record in kept] == ["interrupted"]
    assert kept[0].token_s
    assert len(records) == 4


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
        wait_for(lambda: bool(log.requests))
        assert log.requests
        parent.kill()
        parent.wait()
        wait_for(lambda: bool(log.gone))
        assert log.gone, "the worker has closed its stream, because it is gone"


def test_what_still_runs_at_the_end_is_unfinished() -> None:
    with serving(endless) as (url, _):
        result = run_http_load(target(url), DIALECT, requests_at(0.0, output_tokens=9999), HttpSettings(drain_s=2.0))
    assert result.is_complete
    assert result.records[0].failure == "unfinished"
    assert result.records[0].token_s


def test_clients_that_leave_are_noticed_at_once() -> None:
    left: list[float] = []

    async def answer(_seen: Seen, line: Line) -> None:
        started_s = time.monotonic()
        try:
            await tokens(line, [0.02 * number for number in range(1, 5000)])
        finally:
            left.append(time.monotonic() - started_s)
            await asyncio.sleep(0)

    with serving(answer) as (url, _):
        run_http_load(target(url), DIALECT, requests_at(0.0, output_tokens=9999), HttpSettings(drain_s=0.2))
        wait_for(lambda: bool(left))
    assert left
    assert left[0] < 60, "the whole answer would have taken 100 s"


def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert [workers_for(streams) for streams in (0.2, 256, 257, 1000, 1e9, float("inf"))] == [1, 1, 2, 4, 8, 8]
