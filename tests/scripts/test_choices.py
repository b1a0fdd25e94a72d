"""The alternatives of the CPU's kernels on a tiny model: every one computes, and computes the same."""

import pytest
import torch

from kernels_bench import choices
from sarathi_tune.config.model import ModelConfig
from sarathi_tune.config.source import ModelSource
from sarathi_tune.runtime.kernels.availability import amx_obstacle, has_bfloat16_dot

TINY = ModelConfig(
    name="tiny",
    family="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_model_len=1040,
    dtype="bfloat16",
)
DOT, AMX = has_bfloat16_dot(), amx_obstacle() is None


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


def test_every_alternative_has_a_time() -> None:
    figures = list(choices.measure(ModelSource(TINY), choices.GROUPS, seconds=0.0))
    fitting = ["512@0", "1x1024", "8x1024", "32x1024"]
    assert [figure.name for figure in figures if figure.group == "attention"] == fitting
    names = {group: [list(figure.ms) for figure in figures if figure.group == group] for group in choices.GROUPS}
    assert names["attention"] == [[*["amx"] * AMX, *["dot"] * DOT, "no dot", "torch"]] * len(fitting)
    assert names["linear"] == [[*["amx"] * AMX, *["tiles"] * DOT, "oneDNN", "torch"]] * len(choices.ROWS)
    assert names["rows"] == [["first call", "second call"], ["256 rows", "257 rows", "264 rows"]]
    assert names["last-layer"] == [["all rows", "sampled rows"]] * len(choices.STEPS)
    assert all(time_ms > 0 for figure in figures for time_ms in figure.ms.values())


def test_a_group_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["choices", "--only", "softmax"])
    with pytest.raises(SystemExit) as ended:
        choices.main()
    assert ended.value.code == 2
    assert "--only takes some of attention" in capsys.readouterr().err
