"""`sarathi-tune --target` as a whole, over real sockets: a server whose schedule is known, and the built-in one."""

import asyncio
import gc
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sarathi_tune.measure.profile import load_profile
from sarathi_tune.report.stored import load_stored, stored_from_dict
from sarathi_tune.tune.outside import _tell_defects
from tests.cli.running import ROOT, Ended, run
from tests.loadgen.http.servers import free_port, noted_arrivals
from tests.server.running import wait_for
from tests.tune.outside.stepping import SteppingServer, stepping

QUICK = ("--workload", "fixed:64:32", "--max-num-seqs", "8", "--time-limit", "6s")


def tune(url: str, out: Path, *arguments: str | Path) -> Ended:
    return run("--target", url, "--slo-itl", "40ms", "--out", out, *QUICK, *arguments)


def document_of(ended: Ended) -> dict[str, Any]:
    found = json.loads(ended.out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("budget", [128, 300])
def test_a_known_schedule_is_inferred(budget: int, tmp_path: Path) -> None:
    with stepping(SteppingServer(budget)) as (url, log):
        ended = tune(url, tmp_path, "--json", "-")
    found = document_of(ended)
    server = found["server"]
    assert server["is_lower_bound"] is False
    assert server["budget_tokens"] == pytest.approx(budget, rel=0.15)
    assert server["has_metrics"] is True
    assert server["own_gap_ms"] > 4
    assert server["seen_gap_ms"] == pytest.approx(server["own_gap_ms"], rel=0.05)
    scenes = {scene["name"]: scene for scene in server["scenes"]}
    assert set(scenes) >= {"one", "few", "full", "short"}
    assert scenes["one"]["decodes"] == 1
    assert scenes["one"]["prompts"] == 0
    assert scenes["full"]["prompts"] > 0
    assert all(scene["seen_ms"] == pytest.approx(scene["own_ms"], rel=0.1) for scene in scenes.values())
    prompts = [tuple(seen.body["prompt"]) for seen in log.requests if seen.path == "/v1/completions"]
    long = [prompt for prompt in prompts if len(prompt) > 16]
    assert len({prompt[:16] for prompt in long}) == len(long), "no two prompts begin alike"
    profile = load_profile(Path(found["folder"]) / found["profile"])
    assert {sample.shape.kind for sample in profile.samples} == {"decode", "prefill", "hybrid"}
    assert {8, 7} & {sample.shape.decodes for sample in profile.samples}
    assert load_stored(Path(found["folder"]) / "result.json")[0] == stored_from_dict(found)


def test_a_server_without_metrics_that_runs_fewer_than_asked(tmp_path: Path) -> None:
    with stepping(SteppingServer(128, max_num_seqs=5, has_metrics=False)) as (url, _):
        ended = tune(url, tmp_path, "--json", "-")
    found = document_of(ended)
    assert found["server"]["has_metrics"] is False
    assert all(scene["own_ms"] is None for scene in found["server"]["scenes"])
    assert found["server"]["budget_tokens"] == pytest.approx(128, rel=0.15)
    assert found["advice"]["max_num_seqs"] == 5
    assert "server-runs-fewer" in {notice["code"] for notice in found["notices"]}


def test_streams_of_a_measurement_are_stamped_on_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sarathi_tune.loadgen.record.MAX_COALESCED_SHARE", 1.0)  # a busy machine's client reads late
    with noted_arrivals() as are_told, stepping(SteppingServer(128)) as (url, _):
        ended = tune(url, tmp_path, "--json", "-")
    assert document_of(ended)["server"]["is_stamped_on_arrival"] is are_told


def test_a_server_whose_clock_disagrees_is_told(tmp_path: Path) -> None:
    with stepping(SteppingServer(128, clock=0.5)) as (url, _):
        ended = tune(url, tmp_path, "--json", "-")
    assert "gaps-differ" in {notice["code"] for notice in document_of(ended)["notices"]}


def test_prompts_of_others_make_it_inconclusive(tmp_path: Path) -> None:
    with stepping(SteppingServer(128, others=0.5)) as (url, _):
        ended = tune(url, tmp_path)
    assert ended.code == 4
    assert ended.out.startswith("Inconclusive")
    assert "33% of the prompt tokens" in " ".join(ended.out.split())
    assert "vllm serve" not in ended.out


def test_several_tokens_per_event_make_it_inconclusive(tmp_path: Path) -> None:
    with stepping(SteppingServer(128, tokens_per_event=4)) as (url, _):
        ended = tune(url, tmp_path)
    assert ended.code == 4
    assert "tokens per event" in " ".join(ended.out.split())


def test_quiet_prints_the_line_to_paste(tmp_path: Path) -> None:
    with stepping(SteppingServer(64)) as (url, _):
        for _attempt in range(5):
            ended = tune(url, tmp_path, "--slo-itl", "5s", "--quiet")
            if ended.code != 4:  # a machine that stands still for a moment has no advice
                break
    assert ended.out.startswith("vllm serve m --max-num-batched-tokens ")
    assert ended.err == ""


def test_a_dry_run_sends_nothing(tmp_path: Path) -> None:
    with stepping(SteppingServer(64)) as (url, log):
        ended = tune(url, tmp_path, "--dry-run")
    assert ended.code == 0
    assert log.requests == []
    assert list(tmp_path.iterdir()) == []
    assert "8 streams" in ended.out


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    ended = tune(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert ended.code == 6
    assert "Nothing listens" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_breaks_off_in_the_middle(tmp_path: Path) -> None:
    server = SteppingServer(64)
    counted = 0
    complete = server.complete

    async def breaks(seen: Any, line: Any) -> None:
        nonlocal counted
        counted += 1
        if counted > 12:
            line.reset()
            return
        await complete(seen, line)

    server.complete = breaks  # type: ignore[method-assign]
    with stepping(server) as (url, _):
        ended = tune(url, tmp_path)
    assert ended.code == 6
    assert "failed while it was measured" in " ".join(ended.err.split())
    assert "Traceback" not in ended.err


def test_a_server_that_answers_with_one_token_at_most(tmp_path: Path) -> None:
    with stepping(SteppingServer(64, most_tokens=1)) as (url, _):
        ended = tune(url, tmp_path)
    assert ended.code == 6
    assert "no step could be seen" in " ".join(ended.err.split())
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    server = SteppingServer(64)
    with stepping(server) as (url, log):
        command = [sys.executable, "-m", "sarathi_tune", "--target", url, "--slo-itl", "40ms", "--out", str(tmp_path)]
        with subprocess.Popen([*command, *QUICK], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            wait_for(lambda: len(log.requests) > 30, timeout_s=60)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Interrupted; nothing was kept" in said
        assert "Traceback" not in said
        wait_for(lambda: not server.running and not server.waiting, timeout_s=60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "512"), "--budget can't be used with --target"),
        (("--device", "cpu", "--threads", "2"), "--device, --threads can't be used with --target"),
        (("--workload", "nothing-like-it"), "nothing-like-it"),
        (("--time-limit", "1s"), "at least 5 s"),
        (("--context", "1m"), "--context 1,048,576 is longer than the server's context"),
    ],
)
def test_what_can_not_be_used_is_refused(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with stepping(SteppingServer(64)) as (url, _):
        ended = tune(url, tmp_path, *arguments)
    assert ended.code == 2
    assert said in " ".join(ended.err.split())


def test_an_objective_is_needed() -> None:
    ended = run("--target", "http://127.0.0.1:1")
    assert ended.code == 2
    assert "--slo-itl" in ended.err


def test_an_interruption_inside_a_task_is_not_told_twice(caplog: pytest.LogCaptureFixture) -> None:
    """The signal's handler raises wherever the loop is: here in a task that nobody asks for its result any more."""

    async def interrupted() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(_tell_defects)
        task = asyncio.create_task(interrupted())
        await asyncio.sleep(0.01)
        del task

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    gc.collect()
    assert not caplog.records
