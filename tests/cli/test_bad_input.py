"""What a user can get wrong: one clear sentence on stderr, the right exit code, nothing on stdout, no traceback."""

import json
import os
from pathlib import Path

import pytest

from sarathi_tune.config.presets import resolve_model
from tests.cli.running import H100, run


def refused(*arguments: str | Path, code: int = 2) -> str:
    """The sentence with which the command is refused."""
    ended = run(*arguments)
    assert ended.code == code, ended
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1, "one sentence, on one line"
    return ended.err


@pytest.mark.parametrize("slo", ["20", "-5ms", "0ms", "nan", "nanms", "infs", "20 parsecs", "", "20ms20", "1e999ms"])
@pytest.mark.parametrize("command", [[], ["sweep"], ["derive", H100]], ids=["main", "sweep", "derive"])
def test_an_objective_that_is_no_duration(slo: str, command: list[str | Path]) -> None:
    sentence = refused(*command, f"--slo-itl={slo}")
    assert "--slo-itl" in sentence
    assert "for example 20ms" in sentence


@pytest.mark.parametrize("command", [[], ["sweep"], ["derive", H100]], ids=["main", "sweep", "derive"])
def test_no_objective(command: list[str | Path]) -> None:
    assert "--slo-itl 20ms" in refused(*command)


def test_unknown_model() -> None:
    assert "smolllm2" in refused("--slo-itl", "20ms", "--model", "smolllm2-135m")


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    assert "config.json" in refused("--slo-itl", "20ms", "--model", tmp_path)


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    assert "MambaForCausalLM" in refused("--slo-itl", "20ms", "--model", tmp_path)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--max-num-seqs", "0", "at least 1, not 0"),
        ("--max-num-seqs", "-3", "at least 1, not -3"),
        ("--max-num-seqs", "many", "whole number, not 'many'"),
        ("--threads", "0", "at least 1"),
        ("--seed", "-1", "at least 0"),
        ("--rate", "0", "positive"),
        ("--rate", "nan", "positive"),
        ("--rate", "fast", "not 'fast'"),
        ("--context", "0", "--context"),
        ("--context", "8q", "--context"),
        ("--budget", "1.5", "--budget"),
        ("--device", "tpu", "one of auto, cpu, cuda"),
        ("--dtype", "int4", "one of float32"),
        ("--overhead", "1", "--overhead"),
        ("--slo-ttft", "1", "--slo-ttft"),
        ("--time-limit", "90", "--time-limit"),
        ("--workload", "chatt", "no workload 'chatt'"),
    ],
)
def test_a_flag_that_cannot_be_used(flag: str, value: str, words: str) -> None:
    sentence = refused("--slo-itl", "20ms", flag, value)
    assert flag.removeprefix("--") in sentence
    assert words in sentence


def test_a_budget_below_the_number_of_sequences() -> None:
    sentence = refused("--slo-itl", "20ms", "--budget", "8", "--max-num-seqs", "16")
    assert "at least 16 tokens" in sentence


def test_a_workload_that_does_not_fit_the_model() -> None:
    context = resolve_model("smollm2-135m").config.max_model_len
    sentence = refused("--slo-itl", "20ms", "--model", "smollm2-135m", "--workload", f"fixed:{context}:16")
    assert f"{context} tokens" in sentence


@pytest.mark.parametrize("place", ["file/runs", "/proc/runs"])
@pytest.mark.parametrize("flag", ["--out", "--json"])
def test_a_place_that_cannot_be_written(place: str, flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / place  # an absolute place stays as it is
    value = target / "result.json" if flag == "--json" else target
    extra = ["--out", tmp_path / "runs"] if flag == "--json" else []
    assert str(target) in refused("--slo-itl", "20ms", flag, value, *extra)


def test_json_to_something_that_is_no_file(tmp_path: Path) -> None:
    for target in (os.devnull, tmp_path):
        assert "write - for stdout" in refused("derive", H100, "--slo-itl", "20ms", "--json", target)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("{", "not JSON"),
        ('{"schema": "sarathi-tune/profile", "version": 99, "samples": []}', "version 99"),
        ('{"schema": "sarathi-tune/profile", "version": 1, "samples": []}', "samples"),
        ('{"schema": "sarathi-tune/result", "version": 1}', "no profile"),
        ("\x00\x01", "profile"),
    ],
)
def test_a_profile_that_cannot_be_read(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    sentence = refused("derive", path, "--slo-itl", "20ms")
    assert words in sentence
    assert str(path) in sentence


def test_documents_that_are_not_there(tmp_path: Path) -> None:
    assert "none.json" in refused("derive", tmp_path / "none.json", "--slo-itl", "20ms")
    assert "none.json" in refused("report", tmp_path / "none.json")
    assert "none.json" in refused("profile", "--shapes", tmp_path / "none.json")


def test_a_profile_is_no_result() -> None:
    assert "no result" in refused("report", H100)


def test_flags_of_the_main_job_before_a_command() -> None:
    sentence = refused("--slo-itl", "20ms", "derive", H100)
    assert "sarathi-tune derive" in sentence
    assert "--slo-itl" in sentence


def test_what_typer_refuses_is_usage() -> None:
    for arguments in (["--slo", "20ms"], ["tune"], ["derive"], ["--slo-itl"]):
        ended = run(*arguments)
        assert ended.code == 2
        assert ended.out == ""
        assert "Traceback" not in ended.err


@pytest.mark.parametrize("budgets", ["512,", "512,,1k", "512 1024", "0"])
def test_a_list_that_cannot_be_used(budgets: str) -> None:
    assert "--budgets" in refused("sweep", "--slo-itl", "20ms", "--budgets", budgets)
