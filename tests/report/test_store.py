"""Results on disk: what is written comes back, and what isn't a result is refused by name."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.report.result import Latency, Result
from sarathi_tune.report.store import check_writable, result_as_dict, save_result
from sarathi_tune.report.stored import load_stored, stored_from_dict
from tests.report import examples

EVERY = [
    examples.recommended,
    examples.infeasible,
    examples.not_binding,
    examples.not_the_budget,
    examples.inconclusive,
]


@pytest.mark.parametrize("example", EVERY)
def test_a_result_comes_back_as_it_was_written(example, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "result.json"
    save_result(example(), path)
    assert load_stored(path)[0] == example()


def test_the_document_says_what_it_is_and_keeps_units_in_its_names() -> None:
    document = json.loads(json.dumps(result_as_dict(examples.recommended())))
    assert (document["schema"], document["version"]) == ("sarathi-tune/result", 1)
    assert document["advice"]["budget_tokens"] == 352
    assert document["advice"]["interval_tokens"] == [336, 368]
    objective = {"itl_ms": 100.0, "ttft_ms": None, "percentile": 0.99, "overhead_ms": 0.0, "headroom": 0.0}
    assert document["objective"] == objective
    assert document["runs"][0]["measured"]["itl_p99_ms"] == 98.3


def test_nan_and_infinity_become_null() -> None:
    run = replace(examples.recommended().runs[0], measured=Latency(3, 0, itl_p99_ms=math.nan, itl_max_ms=math.inf))
    document = result_as_dict(replace(examples.recommended(), runs=(run,)))
    assert document["runs"][0]["measured"]["itl_p99_ms"] is None
    assert document["runs"][0]["measured"]["itl_max_ms"] is None
    json.dumps(document, allow_nan=False)


def test_unknown_fields_of_a_later_writer_are_ignored() -> None:
    document = result_as_dict(examples.recommended())
    document["advice"]["added_later"] = 1
    assert stored_from_dict(document) == examples.recommended()


def broken(**changes: object) -> dict[str, object]:
    return {**result_as_dict(examples.recommended()), **changes}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "this is no result"),
        ({"schema": "sarathi-tune/profile", "version": 1}, "this is no result"),
        (broken(version=2), "reads up to version 1"),
        (broken(version="1"), "version must be a whole number"),
        (broken(version=True), "version must be a whole number"),
        (broken(objective=3), "result.objective must be an object"),
        (broken(objective={}), "result.objective.itl_ms is missing"),
        (broken(objective={"itl_ms": "fast"}), "result.objective.itl_ms must be a number, not 'fast'"),
        (broken(objective={"itl_ms": True}), "result.objective.itl_ms must be a number"),
        (broken(advice={"verdict": "maybe", "why": "", "max_num_seqs": 1}), "result.advice.verdict must be one of"),
        (broken(seed=0.5), "result.seed must be a whole number"),
        (broken(runs={}), "result.runs must be a list"),
        (broken(runs=[{"role": "sweep", "budget_tokens": "x", "rate_per_s": 1}]), "result.runs[0].budget_tokens"),
        (broken(versions=[]), "result.versions must be an object"),
    ],
)
def test_what_is_no_result_is_refused_with_the_field(document: object, words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        stored_from_dict(document)
    assert words in str(caught.value)


def test_an_interval_has_two_ends() -> None:
    document = result_as_dict(examples.recommended())
    document["advice"]["interval_tokens"] = [1, 2, 3]
    with pytest.raises(DocumentError, match="interval_tokens must have 2 items, not 3"):
        stored_from_dict(document)


def test_errors_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for content in ("", "{", "[]", '{"schema": "sarathi-tune/result"}'):
        path.write_text(content)
        with pytest.raises(DocumentError, match=r"result\.json"):
            load_stored(path)


def test_a_place_that_cannot_be_written_is_known_before_the_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "runs")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="Can't write into"):
        check_writable(file / "runs")
    with pytest.raises(UsageError, match="Can't write"):
        save_result(examples.infeasible(), file / "result.json")


def test_the_run_of_a_role_is_the_one_at_the_highest_rate() -> None:
    result = examples.recommended()
    lower = replace(result.runs[0], rate_per_s=0.1)
    assert replace(result, runs=(lower, *result.runs)).run("recommended") == result.runs[0]
    assert Result(result.objective, result.advice).run("recommended") is None
