"""`derive` and `report`: the same answer for a person, for a program and for a shell."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import H100, ROOT, run, spawn

QUESTION = ["derive", H100, "--slo-itl", "20ms", "--max-num-seqs", "32", "--context", "1k"]
INFEASIBLE = ["derive", H100, "--slo-itl", "5ms", "--max-num-seqs", "32", "--context", "1k"]


def test_published_h100_numbers_give_a_budget_between_700_and_950() -> None:
    """AIConfigurator's own tables bound it: a 1,024-token prefill takes 22.1 ms, a 512-token one 12.0 ms."""
    ended = run(*QUESTION, "--json", "-")
    assert ended.code == 0
    document = json.loads(ended.out)
    assert document["schema"] == "sarathi-tune/result"
    assert document["advice"]["verdict"] == "recommended"
    assert 700 <= document["advice"]["budget_tokens"] <= 950
    assert document["advice"]["rule_of_thumb"]["budget_tokens"] == pytest.approx(8.34 / (43.51 / 2048), abs=1)
    assert document["profile"] == str(H100)


def test_json_on_stdout_is_json_alone() -> None:
    ended = spawn(*QUESTION, "--json", "-")
    assert json.loads(ended.out)["advice"]["verdict"] == "recommended"
    assert ended.err == ""


def test_json_in_a_file_leaves_stdout_to_the_person(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    ended = run(*QUESTION, "--json", path)
    assert ended.out.startswith("Token budget ")
    assert json.loads(path.read_text())["advice"]["budget_tokens"] == int(ended.out.split()[2])


def test_report_shows_a_stored_result_again_with_its_exit_code(tmp_path: Path) -> None:
    for question, code in ((QUESTION, 0), (INFEASIBLE, 3)):
        path = tmp_path / "result.json"
        first = run(*question, "--json", path)
        again = run("report", path)
        assert (first.code, again.code) == (code, code)
        assert again.out == first.out


def test_quiet_is_the_line_to_paste_and_nothing_else() -> None:
    ended = run(*QUESTION, "--quiet")
    line = r"vllm serve meta-llama/Llama-3\.1-8B --max-num-batched-tokens \d+ --max-num-seqs 32\n"
    assert re.fullmatch(line, ended.out)
    assert ended.err == ""


def test_an_infeasible_objective_ends_with_3_and_says_what_is_in_reach() -> None:
    ended = run(*INFEASIBLE)
    assert ended.code == 3
    assert ended.out.startswith("Infeasible: p99 ITL 5.00 ms, and 32 decodes alone take 8.34 ms.")
    assert "an SLO of " in ended.out
    assert "vllm serve" not in ended.out
    assert run(*INFEASIBLE, "--quiet").out == ""


def test_an_objective_that_every_step_meets_ends_with_0() -> None:
    ended = run("derive", H100, "--slo-itl", "1h")
    assert ended.code == 0
    assert ended.out.startswith("Not binding: ")


def test_other_engines_on_request() -> None:
    assert "sglang" not in run(*QUESTION).out
    engines = run(*QUESTION, "--engines").out
    assert "--chunked-prefill-size" in engines
    assert "--max_num_tokens" in engines


def test_what_is_not_given_comes_from_the_profile() -> None:
    given = json.loads(run(*QUESTION, "--json", "-").out)["advice"]
    taken = json.loads(run("derive", H100, "--slo-itl", "20ms", "--json", "-").out)["advice"]
    assert taken == given


def test_overhead_comes_off_the_objective() -> None:
    plain = json.loads(run(*QUESTION, "--json", "-").out)["advice"]["budget_tokens"]
    less = json.loads(run(*QUESTION, "--overhead", "5ms", "--json", "-").out)["advice"]["budget_tokens"]
    at_15_ms = [*QUESTION[:3], "15ms", *QUESTION[4:], "--json", "-"]
    assert less < plain
    assert less == json.loads(run(*at_15_ms).out)["advice"]["budget_tokens"]


def test_a_measured_profile_leaves_headroom_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(H100.read_text()) | {"noise": 0.01}))

    def objective(source: Path, *more: str) -> dict[str, float]:
        document = json.loads(run("derive", source, "--slo-itl", "20ms", *more, "--json", "-").out)
        return document["objective"] | {"budget_tokens": document["advice"]["budget_tokens"]}

    assert objective(H100)["headroom"] == 0.0
    assert objective(path)["headroom"] == 0.05
    assert objective(path)["budget_tokens"] == objective(H100, "--headroom", "5%")["budget_tokens"]
    assert objective(path, "--headroom", "0")["budget_tokens"] == objective(H100)["budget_tokens"]
    assert objective(path)["budget_tokens"] < objective(H100)["budget_tokens"]


def test_a_profile_without_decodes_takes_a_usual_batch_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    document = json.loads(H100.read_text())
    document["samples"] = [row for row in document["samples"] if "decodes" not in row]
    path.write_text(json.dumps(document))
    ended = run("derive", path, "--slo-itl", "20ms", "--json", "-")
    assert ended.code == 0
    assumed = json.loads(ended.out)
    # OSDI'24 states its objectives for a batch of 32.
    limiting = assumed["advice"]["limiting"]
    assert (limiting["decodes"], limiting["context_tokens"]) == (32, 1024)
    assert "decodes-assumed" in [notice["code"] for notice in assumed["notices"]]
    told = json.loads(
        run("derive", path, "--slo-itl", "20ms", "--max-num-seqs", "16", "--context", "2k", "--json", "-").out
    )
    assert "decodes-assumed" not in [notice["code"] for notice in told["notices"]]
    # A decode is priced like a prompt token, so that their number hardly matters.
    assert told["advice"]["budget_tokens"] == pytest.approx(assumed["advice"]["budget_tokens"], rel=0.01)


def test_a_pipe_gets_plain_text() -> None:
    ended = spawn(*QUESTION)
    assert ended.code == 0
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", ended.out) is None
    assert max(len(line) for line in ended.out.splitlines() if not line.startswith("vllm")) <= 80


def test_an_encoding_without_blocks_is_enough() -> None:
    ended = spawn(*QUESTION, environment={"PYTHONIOENCODING": "ascii"})
    assert ended.code == 0
    assert "?" not in ended.out


def test_a_reader_that_went_away_is_no_defect() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "sarathi_tune", *map(str, QUESTION)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, cwd=ROOT, timeout=60, check=False)
    os.close(write_end)
    assert done.returncode == 141
    assert done.stderr == b""
