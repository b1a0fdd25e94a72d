"""What a user can get wrong: one clear sentence on stderr, the right exit code, nothing on stdout, no traceback."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sarathi_tune.config.presets import resolve_model
from tests.cli.running import H100, run
from tests.tune.tiny import tiny_model


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


def test_budgets_of_a_sweep_below_the_number_of_sequences() -> None:
    sentence = refused("sweep", "--slo-itl", "20ms", "--budgets", "256,8", "--max-num-seqs", "16")
    assert "--budgets 8 is below --max-num-seqs 16" in sentence


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


TORCHLESS = ("--slo-itl", "20ms", "--dry-run")


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--max-num-seqs", "1" + "0" * 30, "at most 1048576"),
        ("--max-num-seqs", "9" * 5000, "whole number"),
        ("--threads", "1000000000000", "at most 1024"),
        ("--seed", "1" + "0" * 30, "at most 9223372036854775807"),
        ("--context", "9" * 400, "more than 1,073,741,824 tokens"),
        ("--prefix", "9" * 5000, "more than 1,073,741,824 tokens"),
        ("--budget", "9" * 30, "more than 1,073,741,824 tokens"),
        ("--budget", "infk", "not a token count"),
        ("--rate", "1e400", "positive"),
        ("--slo-ttft", "1e300h", "from 1us to 1000h"),
        ("--overhead", "1e-30ms", "from 1us to 1000h"),
        ("--headroom", "5", "from 0% to 100%"),
        ("--headroom", "nan%", "from 0% to 100%"),
        ("--headroom", "five", "not a share"),
        ("--workload", "", "no workload ''"),
        ("--workload", "x" * 5000, "no workload"),
        ("--workload", "fixed:" + "9" * 5000 + ":1", "fixed:PROMPT:OUTPUT"),
        ("--workload", "fixed:\u0967:1", "fixed:PROMPT:OUTPUT"),
        ("--workload", "a\nb\x1b[31mred", r"a\nb\x1b[31mred"),
        ("--model", "", "Unknown model ''"),
        ("--model", "x" * 5000, "Unknown model"),
        ("--model", "\u202egnp", r"\u202egnp"),
        ("--model", str(H100), "is a file, not a model directory"),
        ("--out", "", "--out is empty"),
        ("--scheduler", "fifo", "one of"),
        ("--preemption", "never", "one of"),
    ],
)
def test_numbers_and_names_beyond_reason(flag: str, value: str, words: str) -> None:
    sentence = refused(*TORCHLESS, f"{flag}={value}")
    assert words in sentence
    assert len(sentence) < 1000, "what was typed is not repeated at length"
    assert all(letter.isprintable() for letter in sentence.removesuffix("\n"))


@pytest.mark.parametrize("target", ["", "x" * 5000, "none/" * 2000])
def test_a_json_target_that_is_no_name(target: str) -> None:
    refused("derive", H100, "--slo-itl", "20ms", f"--json={target}")


FIXED = "name: x\nprompt: {kind: fixed, tokens: 10}\noutput: {kind: fixed, tokens: 5}\n"
#: Each list holds the one before nine times: a few hundred letters that mean 9 ** 8 elements.
BOMB = ", ".join(
    f"&{name} [{', '.join(['x' if not index else '*' + 'abcdefgh'[index - 1]] * 9)}]"
    for index, name in enumerate("abcdefgh")
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("- a", "is list"),
        ("hello", "is str"),
        (FIXED.replace("10", "1" + "0" * 5000), "can't be read"),
        (FIXED.replace("10", "1" + "0" * 400), "'prompt.tokens' must be at most"),
        (FIXED.replace("10", "ten"), "'prompt.tokens'"),
        (FIXED.replace("10", "-1"), "'prompt.tokens'"),
        (FIXED.replace("fixed, tokens: 10", "lognormal, median: .nan, p90: 10"), "'prompt.median'"),
        (FIXED.replace("fixed, tokens: 10", "lognormal, mean: 1.0e+300, sd: 1.0e+300"), "at most"),
        (FIXED.replace("fixed, tokens: 10", f"[{BOMB}]"), "'prompt.kind' must be one of"),
        (FIXED.replace("name: x", f"name: [{BOMB}]"), "'name' must be text"),
        (FIXED + "turns: 2020-01-01\n", "'turns'"),
        (FIXED + "turns: 1000000000\n", "doesn't fit the model's context"),
        (FIXED + "prefix: 5\n", "'prefix'"),
        (FIXED + "total_cap: ten\n", "'total_cap'"),
        (FIXED + "3: 4\n", "'3' is unknown"),
        ("name: 2020-13-45", "can't be read"),
        ("[" * 20_000, "can't be read"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("{[1]: 2}", "not valid YAML"),
        ("name: \x00", "not valid YAML"),
    ],
)
def test_a_workload_file_that_cannot_be_used(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    sentence = refused(*TORCHLESS, "--workload", path)
    assert words in sentence
    assert len(sentence) < 1000


def test_workload_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "directory.yaml").mkdir()
    for name, words in (("binary.yaml", "UTF-8"), ("directory.yaml", "Is a directory"), ("none.yaml", "No such file")):
        assert words in refused(*TORCHLESS, "--workload", tmp_path / name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("[]", "lists no shape"),
        ("null", "no list"),
        ("{}", "no list"),
        ("[1,", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[5]", "shapes[0] is neither"),
        ('["8x16", null]', "shapes[1] is neither"),
        ('["8x"]', "shapes[0]"),
        ('["0x0"]', "neither decodes nor a chunk"),
        ('[{"decode": 1}]', "unknown field 'decode'"),
        ('[{"decodes": -1, "context": 5}]', "shapes[0].decodes"),
        ('[{"decodes": "1", "context": 5}]', "shapes[0].decodes"),
        ('[{"decodes": true, "context": 5}]', "shapes[0].decodes"),
        ('[{"decodes": 1}]', "no context"),
        ("[{}]", "neither decodes nor a chunk"),
        ('[{"chunk": NaN}]', "shapes[0].chunk"),
        ('[{"chunk": Infinity}]', "shapes[0].chunk"),
        ('[{"chunk": 1e15}]', "shapes[0].chunk"),
        ('["1x9000"]', "needs 9,000 tokens of context"),
    ],
)
def test_a_shapes_file_that_cannot_be_used(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(content)
    sentence = refused("profile", "--shapes", path)
    assert words in sentence
    assert len(sentence) < 1000


@pytest.mark.parametrize("shapes", ["", ",,", "8x", "0x0", "9" * 5000 + "x1", "8x" + "9" * 11, "9" * 400 + "k@0", "."])
def test_shapes_on_the_command_line_that_are_none(shapes: str) -> None:
    refused("profile", f"--shapes={shapes}")


def after_loading(*arguments: str | Path, code: int) -> str:
    """The sentence of a command that had begun to load a model: the last line, behind the phases."""
    ended = run(*arguments)
    assert ended.code == code, ended
    assert ended.out == ""
    assert "Traceback" not in ended.err
    *before, sentence = ended.err.splitlines()
    assert sentence.startswith("error: ")
    assert before in ([], ["prepare: begins"])
    return sentence


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


@pytest.mark.parametrize("command", ["main", "profile"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[: len(data) // 2], "is truncated"),
        (lambda data: data[:4], "is truncated or isn't a safetensors file"),
        (lambda data: data[:0], "is truncated or isn't a safetensors file"),
        (lambda data: b"\x00\x00\x00\x00\x00\x00\x00\x40" + data[8:], "is truncated or isn't a safetensors file"),
        (lambda data: data[:8] + b"?" * (len(data) - 8), "has a damaged header"),
    ],
    ids=["half", "four-bytes", "empty", "huge-header", "junk"],
)
def test_weights_that_are_damaged(
    damage: Callable[[bytes], bytes], words: str, command: str, model: Path, tmp_path: Path
) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    arguments = {
        "main": ["--slo-itl", "20ms", "--out", tmp_path / "runs"],
        "profile": ["profile", "--shapes", "1x8"],
    }[command]
    sentence = after_loading(*arguments, "--model", model, code=2)
    assert words in sentence
    assert str(weights) in sentence
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_weights_of_another_model(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    for changes, words in (({"intermediate_size": 97}, "[96, 64]"), ({"num_hidden_layers": 3}, "lacks 9 of the 30")):
        (model / "config.json").write_text(json.dumps(config | changes))
        assert words in after_loading("--slo-itl", "20ms", "--out", tmp_path, "--model", model, code=2)


def test_more_cache_or_weights_than_memory(tmp_path: Path) -> None:
    out = ["--slo-itl", "20ms", "--out", tmp_path / "runs"]
    assert "KV cache" in after_loading(*out, "--max-num-seqs", "100000", "--context", "8k", code=5)
    assert "smaller model" in after_loading(*out, "--model", "llama-3-70b", code=5)
    assert "KV cache" in after_loading("profile", "--shapes", "100000x8192", code=5)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_json_on_stdout_is_alone_with_quiet_and_without(model: Path) -> None:
    for more in ([], ["--quiet"]):
        ended = run(
            *("profile", "--model", model, "--shapes", "2x8,4@0", "--repeats", "2", "--threads", "1"),
            *("--seed", str((1 << 63) - 1), "--json", "-", *more),
        )
        assert ended.code == 0, ended.err
        assert len(json.loads(ended.out)["summary"]) == 2
        assert bool(ended.err) == (not more)
