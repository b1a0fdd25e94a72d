"""What the server writes of its own steps."""

import json
import signal
from pathlib import Path

import pytest

from sarathi_tune.engine.loop import StepResult
from sarathi_tune.engine.plan import StepShape
from sarathi_tune.errors import ExitCode, UsageError
from sarathi_tune.measure.profile import load_profile
from sarathi_tune.server.record import StepRecord, noise_of
from sarathi_tune.server.text import load_text
from tests.cli.running import run
from tests.server.conftest import TinyModel, tiny_config
from tests.server.running import serving
from tests.server.test_process import started


def step(shape: StepShape, start_s: float, end_s: float, num_preempted: int = 0) -> StepResult:
    return StepResult(0, shape, start_s, end_s, (), num_waiting=0, num_running=0, num_preempted=num_preempted)


def rows(record: StepRecord) -> dict[str, list[float]]:
    return {str(sample.shape): [round(time_ms, 6) for time_ms in sample.times_ms] for sample in record.samples()}


def test_steps_of_about_the_same_context_are_one_row() -> None:
    record = StepRecord()
    record.add(step(StepShape((1000, 1010)), 1.0, 1.02))
    record.add(step(StepShape((1002, 1012)), 2.0, 2.03))
    record.add(step(StepShape((1002, 1012), ((256, 254),)), 3.0, 3.1))
    record.add(step(StepShape((), ((0, 7),)), 4.0, 4.004))
    # the nearest multiples of 64 to 1,005 and 1,007
    assert rows(record) == {"2x1024": [20.0, 30.0], "2x1024+254@256": [100.0], "7@0": [4.0]}


def test_steps_that_are_no_row_are_left_out() -> None:
    record = StepRecord()
    record.add(step(StepShape((64,), ((0, 8), (0, 9))), 1.0, 1.02))
    record.add(step(StepShape((64,)), 2.0, 2.5, num_preempted=1))
    assert rows(record) == {}
    assert noise_of(record.samples()) is None


def test_the_oldest_steps_give_way() -> None:
    record = StepRecord(most_steps=3)
    for number in range(1, 6):
        record.add(step(StepShape((64,)), 0.0, number / 1e3))
    assert rows(record) == {"1x64": [3.0, 4.0, 5.0]}


def test_noise_is_that_of_the_step_that_came_most_often() -> None:
    record = StepRecord()
    for number in range(40):
        record.add(step(StepShape((64,)), 0.0, 0.020 if number // 5 % 2 else 0.030))
    record.add(step(StepShape((512,)), 0.0, 0.5))
    # medians of 20 and 30 ms
    assert noise_of(record.samples()) == pytest.approx(0.4)


def test_the_profile_of_a_server_has_what_clients_sent(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "steps" / "traffic.json"
    source = tiny.reference.source
    with serving(tiny_config(tiny, record=path), source, load_text(source)) as running:
        running.post("/v1/completions", prompt=list(range(10, 50)), max_tokens=5, ignore_eos=True, temperature=0)
        running.wait_idle()
        running.send_signal(signal.SIGTERM)
        assert running.join() is ExitCode.MET
    # 40 tokens with a budget of 32, and four tokens behind the first, which see 41 to 44 keys: multiples of 4
    times = {str(sample.shape): len(sample.times_ms) for sample in load_profile(path).samples}
    assert times == {"32@0": 1, "8@32": 1, "1x40": 2, "1x44": 2}
    assert running.lines[-1] == f"6 steps of 4 shapes are in {path}; `sarathi-tune derive` takes it."
    document = json.loads(path.read_text())
    assert document["model"]["name"] == source.config.name
    assert document["engine"]["threads"] == 1
    assert document["source"] == "sarathi-tune serve --record"


def test_a_server_without_traffic_says_so(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    source = tiny.reference.source
    with serving(tiny_config(tiny, record=path), source, load_text(source)) as running:
        running.send_signal(signal.SIGTERM)
        assert running.join() is ExitCode.MET
    assert running.lines[-1] == f"No step was computed, so there is nothing to write to {path}."
    assert not path.exists()


def test_a_place_that_went_away_meanwhile_is_an_error(tiny: TinyModel, tmp_path: Path) -> None:
    place = tmp_path / "steps"
    source = tiny.reference.source
    with serving(tiny_config(tiny, record=place / "traffic.json"), source, load_text(source)) as running:
        running.post("/v1/completions", prompt=[5], max_tokens=1)
        running.wait_idle()
        place.write_text("a file where the folder was")
        running.send_signal(signal.SIGTERM)
        ended = running.join()
    assert isinstance(ended, UsageError)
    assert str(place) in str(ended)


def test_derive_takes_what_a_server_recorded(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    with started(tiny, "--record", str(path)) as (server, url):
        import httpx

        for length in (3, 20, 60, 120):
            body = {"prompt": [7] * length, "max_tokens": 30, "ignore_eos": True}
            assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=20).status_code == 200
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=20)
        assert server.returncode == 0, err
    assert f"in {path}" in err
    ended = run("derive", str(path), "--slo-itl", "10s", "--max-num-seqs", "1", "--context", "100")
    assert ended.code in (0, 4), ended.err  # steps of a tiny model scatter, and then there is no advice
    assert "Rule of thumb" in ended.out


def test_a_file_that_cannot_be_written_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    for target, reason in ((str(tmp_path), "is not a file that can be replaced"), ("-", "stdout stays empty")):
        ended = run("serve", "--port", "0", "--record", target)
        assert ended.code == 2
        assert reason in ended.err
