"""`verify --engine vllm` as a whole, with a stand-in for vLLM: what is started is measured, and gone afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sarathi_tune.config.outside import OutsideConfig
from sarathi_tune.notices import margin_is_wider
from sarathi_tune.report.progress import Ui
from sarathi_tune.report.result import Advice, CurvePoint, LimitingStep
from tests.cli.running import ROOT, Ended, run

FAKE = Path(__file__).with_name("fake_vllm.py")
COMMAND = f"{sys.executable} {FAKE} serve"
LOAD = ("--workload", "fixed:32:12", "--rate", "30", "--seconds", "1s", "--workers", "1")


@pytest.fixture(autouse=True)
def _any_client_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from a verdict is tested here; a busy machine's late client would make each of them inconclusive."""
    for module in ("validity", "http_validity"):
        monkeypatch.setattr(f"sarathi_tune.goodput.{module}.MAX_LAG_SHARE", 1.0)


def arguments(folder: Path, budgets: str, *extra: str, slo: str = "600ms") -> list[str]:
    return [
        *("verify", "--engine", "vllm", "--engine-command", COMMAND, "--model", "tiny", "--budgets", budgets),
        *("--slo-itl", slo, "--out", str(folder / "out"), "--json", str(folder / "found.json"), *LOAD),
        *("--", "--pids", str(folder / "pids"), *extra),
    ]


def compare(folder: Path, budgets: str, *extra: str) -> Ended:
    """The budgets side by side, which `report` shows again from what was stored."""
    ended = run(*arguments(folder, budgets, *extra))
    again = run("report", folder / "found.json")
    assert (again.code, again.out) == (ended.code, ended.out)
    return ended


def found(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "found.json").read_text())
    assert isinstance(document, dict)
    return document


def pids(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "pids").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def advised(monkeypatch: pytest.MonkeyPatch, advice: Advice) -> None:
    """Looking at a server from outside ends with this advice."""

    def advise(_config: OutsideConfig, _ui: Ui) -> SimpleNamespace:
        return SimpleNamespace(advice=advice, folder="somewhere", notices=())

    monkeypatch.setattr("sarathi_tune.tune.outside.run_outside", advise)


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.05)
    return condition()


def test_two_budgets_side_by_side(tmp_path: Path) -> None:
    # gaps of 10 ms and of 0.7 s
    ended = compare(tmp_path, "100,7k")
    assert ended.code == 0, ended
    assert ended.out.splitlines()[0].startswith("Budget 100 meets p99 ITL 600 ms")
    assert "7,168 misses it" in ended.out.splitlines()[0]
    document = found(tmp_path)
    assert (document["schema"], document["verdict"], document["best"]) == ("sarathi-tune/budgets", "met", 0)
    good, bad = document["runs"]
    assert [good["verdict"], bad["verdict"]] == ["met", "missed"]
    assert good["command"][-4:] == ["--max-num-batched-tokens", "100", "--pids", str(tmp_path / "pids")]
    itl = good["verification"]["points"][0]["latency"]["itl"]
    assert 10 <= itl["p50_ms"] < 600
    assert "loading tiny" in Path(good["log"]).read_text()
    assert len(pids(tmp_path)) == 4
    assert not any(is_alive(pid) for pid in pids(tmp_path)), "servers and their children are gone"


def test_the_default_is_the_server_without_the_flag(tmp_path: Path) -> None:
    ended = compare(tmp_path, "default")
    assert ended.code == 0, ended
    (only,) = found(tmp_path)["runs"]
    assert only["budget_tokens"] is None
    assert "--max-num-batched-tokens" not in only["command"]
    assert only["verification"]["points"][0]["latency"]["itl"]["p50_ms"] >= 204.8


def test_the_recommended_budget_is_derived_at_the_default_and_run_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[OutsideConfig] = []

    def advise(config: OutsideConfig, _ui: Ui) -> SimpleNamespace:
        asked.append(config)
        advice = Advice("recommended", "It fits.", 8, budget_tokens=150)
        wider = margin_is_wider(150, 8, 3, 210.0, 400).as_dict()
        return SimpleNamespace(advice=advice, folder="somewhere", notices=(wider,))

    monkeypatch.setattr("sarathi_tune.tune.outside.run_outside", advise)
    ended = compare(tmp_path, "recommended,100", "--max-num-seqs", "8")
    assert ended.code == 0, ended
    document = found(tmp_path)
    assert [row["budget_tokens"] for row in document["runs"]] == [None, 100, 150]
    assert document["recommendation"]["budget_tokens"] == 150
    (only,) = asked
    assert (only.max_num_seqs, only.slo.itl_ms, only.workload) == (8, 600, "fixed:32:12")
    assert document["runs"][0]["verification"]["target"].startswith(only.target), "the very server that was measured"
    assert "Recommended by measuring the default from outside: budget 150." in " ".join(ended.out.split())
    assert [notice["code"] for notice in document["recommendation"]["notices"]] == ["margin-is-wider"]
    assert "a steady load would meet the objective up to a budget of about 400" in " ".join(ended.out.split())


def test_a_budget_that_the_fit_has_is_run_where_none_is_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = Advice("inconclusive", "Too restless.", 8, fitted_tokens=100)
    advised(monkeypatch, advice)
    ended = compare(tmp_path, "recommended", "--max-num-seqs", "8")
    assert ended.code == 0, ended
    document = found(tmp_path)
    assert [(row["budget_tokens"], row["verdict"]) for row in document["runs"]] == [(None, "met"), (100, "met")]
    recommendation = document["recommendation"]
    assert (recommendation["budget_tokens"], recommendation["fitted_tokens"]) == (None, 100)
    said = " ".join(ended.out.split())
    assert "from outside: no budget. Too restless. By the fit alone it would be 100 tokens" in said
    assert "Tried, because the load decides: 100." in said


def test_a_budget_that_misses_under_load_is_followed_by_a_smaller_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # gaps of a tenth of a millisecond per token: 2600 tokens take 260 ms, and 1800 of them 180
    decode = LimitingStep(8, 32, 0, 0, 0.8, 0.9)
    curve = (CurvePoint(3000, 300.0, 310.0),)
    advised(monkeypatch, Advice("recommended", "", 8, 2600, smallest_tokens=24, decode_step=decode, curve=curve))
    ended = run(*arguments(tmp_path, "recommended", "--max-num-seqs", "8", slo="200ms"))
    assert ended.code == 0, ended
    document = found(tmp_path)
    _, first, second = document["runs"]
    assert [first["budget_tokens"], first["verdict"], second["verdict"]] == [2600, "missed", "met"]
    assert 1500 < second["budget_tokens"] <= 1800
    assert document["recommendation"]["tried_tokens"] == [2600, second["budget_tokens"]]
    assert document["best"] == 2


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    ended = compare(tmp_path, "100", "--fail")
    assert ended.code == 6, ended
    said = " ".join(ended.err.split())
    assert "ended with exit code 3 before it was ready (ValueError: max_num_batched_tokens is too small)" in said
    assert str(tmp_path / "out") in said.replace(" ", "")
    (only,) = found(tmp_path)["runs"]
    assert (only["verdict"], only["verification"]) == ("failed", None)


def test_a_server_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    typed = arguments(tmp_path, "100", "--mute")
    typed[typed.index("--") : typed.index("--")] = ["--start-timeout", "3s"]
    ended = run(*typed)
    assert ended.code == 6, ended
    assert "was not ready within 3 s (loading tiny)" in " ".join(ended.err.split())
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_a_server_that_dies_under_load_leaves_a_row_and_the_next_budget_runs(tmp_path: Path) -> None:
    ended = compare(tmp_path, "100,120", "--die-after", "10")
    assert ended.code == 6, ended
    runs = found(tmp_path)["runs"]
    assert [row["verdict"] for row in runs] == ["failed", "failed"]
    assert "ended with exit code 9 while it was measured (RuntimeError: engine core died)" in runs[0]["failure"]
    assert not any(is_alive(pid) for pid in pids(tmp_path)), "the child of a server that died is ended as well"


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sarathi_tune.tune.launching.server.GRACE_S", 0.5)
    ended = compare(tmp_path, "100", "--stubborn")
    assert ended.code == 0, ended
    assert not any(is_alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_server(tmp_path: Path, number: signal.Signals) -> None:
    typed = arguments(tmp_path, "100")
    typed[typed.index("--seconds") + 1] = "300s"
    command = [sys.executable, "-m", "sarathi_tune", *typed]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert wait_for((tmp_path / "pids").exists)
        assert wait_for(lambda: len((tmp_path / "pids").read_text().split()) == 2)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -9), err
    assert b"Traceback" not in err
    assert wait_for(lambda: not any(is_alive(pid) for pid in pids(tmp_path))), "the keeper has ended them"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("--engine", "sglang", "--model", "m"), "--engine must be one of vllm"),
        (("--engine", "vllm"), "--model is missing"),
        (("--engine", "vllm", "--model", "m", "--budgets", "64,64"), "names a budget twice"),
        (("--engine", "vllm", "--model", "m", "--budgets", "64,x"), "--budgets 'x' is not a token count"),
        (("--engine", "vllm", "--model", "m", "--target", "h:1"), "not both"),
        (("--engine", "vllm", "--model", "m", "--budgets", "64", "--", "--port", "80"), "--port can't stand behind"),
        (("--engine", "vllm", "--model", "m", "--budgets", "64", "--engine-command", "no-such-x"), "can't be started"),
        (("--target", "h:1", "--budgets", "64"), "--budgets is for a server that is started here"),
        (("--target", "h:1", "stray"), "'stray' is for a server"),
    ],
)
def test_what_can_be_typed_wrong(
    typed: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    front, behind = (typed[: typed.index("--")], typed[typed.index("--") :]) if "--" in typed else (typed, ())
    ended = run("verify", "--slo-itl", "50ms", *front, *behind)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err
