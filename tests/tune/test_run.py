"""The main job and the sweep from end to end: a tiny model that really runs, and steps whose times are known.

The times of the profile are scripted, so that the verdict doesn't depend on the machine that runs the tests; loading,
journal, fit, derivation, prediction and the verifying runs on the real engine are what they always are.
"""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from sarathi_tune import tune
from sarathi_tune.cli.output import exit_code_of
from sarathi_tune.config.run import DeviceConfig, SweepConfig, TuneConfig
from sarathi_tune.config.slo import Slo
from sarathi_tune.measure import profile as profile_module
from sarathi_tune.measure.bench import Bench
from sarathi_tune.measure.profile import load_profile
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.report.progress import SilentUi
from sarathi_tune.report.result import Result
from sarathi_tune.report.stored import load_stored
from tests.tune.tiny import CONTEXT, tiny_model

SCHEMA = json.loads((Path(profile_module.__file__).parent / "profile.schema.json").read_text())
#: Every step of the scripted machine costs this, and this more for each token. No key costs anything.
BASE_MS, TOKEN_MS = 4.0, 0.05


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "SHORTEST_WINDOW_S", 1.0)
    monkeypatch.setattr(tune, "LONGEST_WINDOW_S", 1.0)
    monkeypatch.setattr(tune, "SWEEP_WINDOW_S", 1.0)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times that are known, with a tenth of a percent of spread."""
    calls = 0

    def time_shape(_bench: Bench, shape: Shape) -> float:
        nonlocal calls
        calls += 1
        return (BASE_MS + TOKEN_MS * shape.num_tokens) * (1.0 + 1e-3 * (calls % 3 - 1))

    monkeypatch.setattr(Bench, "time_shape", time_shape)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def config(model: str, tmp_path: Path) -> TuneConfig:
    return TuneConfig(
        Slo(itl_ms=30.0),
        model=model,
        workload="fixed:200:20",
        device=DeviceConfig(device="cpu", threads=1),
        rate_per_s=20.0,
        out_dir=tmp_path / "runs",
        time_limit_s=12.0,
        command="sarathi-tune --slo-itl 30ms",
    )


def written(result: Result, out: Path) -> Path:
    """The run's folder, whose documents are what they should be."""
    (folder,) = out.iterdir()
    assert result.folder == str(folder)
    document = json.loads((folder / "profile.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    profile = load_profile(folder / "profile.json")
    assert profile.max_model_len == CONTEXT
    assert (profile.model["name"], profile.model["dtype"]) == ("tiny", "float32")
    assert result.profile == "profile.json"
    assert load_stored(folder / "result.json")[0] == result
    lines = (folder / "journal.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"complete": True}
    return folder


@pytest.mark.usefixtures("scripted")
def test_the_main_job_recommends_verifies_and_keeps_everything(config: TuneConfig) -> None:
    """30 ms hold 4 + 0.05 n for n <= 520, less a little for the loop and the spread, down to a multiple of a tile."""
    result = tune.run_tune(config, SilentUi())
    folder = written(result, config.out_dir)
    assert result.advice.verdict == "recommended"
    budget = result.advice.budget_tokens
    assert budget is not None
    assert 480 <= budget <= 520
    runs = {run.role: run for run in result.runs}
    assert runs["recommended"].budget_tokens == budget
    assert runs["control"].budget_tokens == 2048
    assert {runs["recommended"].rate_per_s, runs["control"].rate_per_s} == {20.0}
    for run in result.runs:
        assert run.measured is not None
        assert run.predicted is not None
        assert (run.drift_decode, run.drift_chunk) == (pytest.approx(1.0, abs=0.01), pytest.approx(1.0, abs=0.01))
        assert (folder / f"verify-{run.role}-{run.budget_tokens}-{run.rate_per_s:.4g}.json").exists()
    assert {phase.name for phase in result.phases} >= {"prepare", "measure", "derive", "predict", "verify"}
    assert result.command == config.command
    assert result.settings["origins"]["max_num_seqs"] == "default on cpu"
    assert exit_code_of(result) in (0, 1, 4)


@pytest.mark.usefixtures("scripted")
def test_no_verify_stops_after_the_prediction(config: TuneConfig) -> None:
    result = tune.run_tune(replace(config, verify=False), SilentUi())
    folder = written(result, config.out_dir)
    assert result.advice.verdict == "recommended"
    assert result.runs == ()
    assert result.surface
    assert not list(folder.glob("verify-*"))
    assert exit_code_of(result) == 0


@pytest.mark.usefixtures("scripted")
def test_an_objective_below_the_decode_step_is_infeasible_and_runs_nothing(config: TuneConfig) -> None:
    """Already a single decode takes 4.05 ms."""
    result = tune.run_tune(replace(config, slo=Slo(itl_ms=3.0)), SilentUi())
    written(result, config.out_dir)
    assert result.advice.verdict == "infeasible"
    assert result.advice.budget_tokens is None
    assert result.runs == ()
    assert exit_code_of(result) == 3


@pytest.mark.usefixtures("scripted")
def test_an_objective_that_no_step_reaches_does_not_bind(config: TuneConfig) -> None:
    """The longest step of the model, 4096 tokens, takes 209 ms."""
    result = tune.run_tune(replace(config, slo=Slo(itl_ms=1000.0), verify=False), SilentUi())
    written(result, config.out_dir)
    assert result.advice.verdict == "not-binding"
    assert exit_code_of(result) == 0


@pytest.mark.usefixtures("scripted")
def test_a_budget_is_verified_even_when_nothing_follows_from_the_objective(config: TuneConfig) -> None:
    result = tune.run_tune(replace(config, slo=Slo(itl_ms=1000.0), budget_tokens=128), SilentUi())
    assert result.advice.verdict == "not-binding"
    assert {(run.role, run.budget_tokens) for run in result.runs} >= {("recommended", 128), ("control", 2048)}


@pytest.mark.usefixtures("scripted")
def test_a_sweep_runs_every_budget_at_every_rate(config: TuneConfig) -> None:
    sweep = SweepConfig(replace(config, rate_per_s=None), budgets_tokens=(64, 512), rates_per_s=(25.0,))
    result = tune.run_sweep(sweep, SilentUi())
    written(result, config.out_dir)
    cells = [(run.role, run.budget_tokens, run.rate_per_s) for run in result.runs]
    assert cells == [("sweep", 64, 25.0), ("sweep", 512, 25.0)]


def test_with_the_machines_own_times_there_is_a_verdict(config: TuneConfig) -> None:
    """Nothing scripted: whichever verdict this machine gives, its documents are whole and its exit code is known."""
    result = tune.run_tune(replace(config, verify=False, time_limit_s=8.0), SilentUi())
    folder = written(result, config.out_dir)
    profile = load_profile(folder / "profile.json")
    assert profile.engine["threads"] == 1
    assert all(time_ms > 0 for sample in profile.samples for time_ms in sample.times_ms)
    assert exit_code_of(result) in (0, 1, 3, 4)


def test_the_plan_touches_nothing(config: TuneConfig) -> None:
    plan = tune.plan_tune(config)
    assert not config.out_dir.exists()
    assert [phase.name for phase in plan.phases] == ["prepare", "measure", "derive", "predict", "verify"]
    assert sum(phase.seconds for phase in plan.phases if phase.name == "measure") == pytest.approx(0.28 * 12.0)
    assert [phase.name for phase in tune.plan_tune(replace(config, verify=False)).phases][-1] == "predict"
    assert "8x" in " ".join(plan.shapes)
    # Two layers of 64 x (64 + 32 + 32 + 64 + 3 * 96) and two norms, a last norm, embedding and head of 256 x 64.
    assert plan.weight_bytes == 4 * (2 * (64 * (64 + 32 + 32 + 64 + 3 * 96) + 128) + 64 + 2 * 256 * 64)
    # Keys and values, two layers, two heads of 16, float32.
    pages = int(str(plan.settings["kv_pages"]).replace(",", ""))
    assert plan.kv_bytes == pages * 16 * 2 * 2 * 2 * 16 * 4
    assert all(str(config.out_dir) in path for path in plan.writes)
