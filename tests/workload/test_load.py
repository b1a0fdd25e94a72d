"""Named workloads, files, and what is said about bad ones."""

from pathlib import Path

import pytest

import sarathi_tune.workload.load as load
from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.workload.lengths import Empirical, Uniform
from sarathi_tune.workload.load import load_workload, workload_names

GOOD = "name: mine\nprompt: {kind: fixed, tokens: 100}\noutput: {kind: uniform, low: 2, high: 4}\n"


def test_the_named_workloads_are_the_files_of_the_top_level_directory() -> None:
    top_level = Path(load.__file__).parents[2] / "workloads"
    assert {path.stem for path in top_level.glob("*.yaml")} == set(workload_names())
    assert {"chat", "chat-small", "arxiv", "code"} <= set(workload_names())


@pytest.mark.parametrize("name", workload_names())
def test_every_named_workload_says_where_it_comes_from(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == name
    assert workload.description
    assert workload.provenance


@pytest.mark.parametrize(
    ("name", "prompt", "output", "cap"),
    [("chat", (1730, 5696), (415, 834), 8192), ("arxiv", (7059, 12985), (208, 371), 16384)],
)
def test_the_papers_workloads_have_the_papers_lengths(
    name: str, prompt: tuple[int, int], output: tuple[int, int], cap: int
) -> None:
    # Sarathi-Serve, OSDI 2024: median and P90 of openchat_sharegpt4 and arxiv_summarization
    workload = load_workload(name)
    assert (workload.quantile_prompt(0.5), workload.quantile_prompt(0.9)) == pytest.approx(prompt, rel=0.01)
    assert (workload.quantile_output(0.5), workload.quantile_output(0.9)) == pytest.approx(output, rel=0.01)
    assert workload.quantile_total(0.9999) <= cap


@pytest.mark.parametrize(
    ("name", "prompt_mean", "prompt_median", "output_mean", "output_median"),
    [("code", 2048, 1469, 27.9, 13), ("conversation", 1155, 1020, 211, 129)],
)
def test_the_azure_workloads_have_the_traces_lengths(
    name: str, prompt_mean: float, prompt_median: float, output_mean: float, output_median: float
) -> None:
    workload = load_workload(name)
    assert workload.mean_prompt_tokens == pytest.approx(prompt_mean, rel=0.03)  # the cap takes up to 3 %
    assert workload.quantile_prompt(0.5) == pytest.approx(prompt_median, rel=0.01)
    assert workload.mean_output_tokens == pytest.approx(output_mean, rel=0.02)
    assert workload.quantile_output(0.5) == pytest.approx(output_median, rel=0.01)


def test_a_fixed_workload_needs_no_file() -> None:
    workload = load_workload("fixed:768:64")
    assert workload.lengths_at(0.01, 0.99) == (768, 64)


@pytest.mark.parametrize("text", ["fixed:768", "fixed:0:64", "fixed:768:-1", "fixed:a:b", "fixed:1:2:3", "fixed:8²:1"])
def test_a_bad_fixed_workload_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="fixed:768:64"):
        load_workload(text)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"chat-small.*YAML file"):
        load_workload("chatt")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nprompt: {kind: uniform, low: 10, high: 20, max: 15}\n"
        "output: {kind: empirical, quantiles: {1.0: 30, 0: 10}}\ntotal_cap: 40\n"
    )
    workload = load_workload(str(path))
    assert workload.prompt == Uniform(low=10, high=20, max_tokens=15)
    assert workload.output == Empirical(points=((0.0, 10.0), (1.0, 30.0)))
    assert workload.total_cap == 40


def test_a_missing_file_and_a_directory_are_said(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"nowhere\.yaml can't be read: No such file"):
        load_workload(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(DocumentError, match="can't be read: Is a directory"):
        load_workload(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be a mapping of fields, and is empty"),
        ("- a", "must be a mapping of fields, and is list"),
        ("name: [", "not valid YAML"),
        (GOOD.replace("name: mine\n", ""), "'name' is missing"),
        (GOOD.replace("mine", "''"), "'name' must be text"),
        (GOOD + "promt: 3\n", "'promt' is unknown"),
        (GOOD.replace("fixed", "zipf"), "'prompt.kind' must be one of"),
        (GOOD.replace("tokens: 100", "tokens: 0"), "'prompt.tokens' must be a whole number"),
        (GOOD.replace("tokens: 100", "tokens: true"), "'prompt.tokens' must be a whole number"),
        (GOOD.replace("tokens: 100", "token: 100"), "'prompt' of kind fixed needs tokens, and has token"),
        (GOOD.replace("tokens: 100", "tokens: 100, min: 9, max: 8"), "'prompt.max' is 8, below min"),
        (GOOD.replace("low: 2", "low: 5"), "'output.high' is 4, below low"),
        (
            GOOD.replace("kind: fixed, tokens: 100", "kind: lognormal, median: 9, p90: 8"),
            "'prompt.p90' is 8, below the",
        ),
        (
            GOOD.replace("kind: fixed, tokens: 100", "kind: lognormal, median: .nan, p90: 8"),
            "must be a positive number",
        ),
        (GOOD.replace("kind: fixed, tokens: 100", "kind: lognormal, median: 9"), "needs median and p90 or mean and"),
        (GOOD.replace("kind: fixed, tokens: 100", "kind: empirical, quantiles: {0.5: 9}"), "at least two levels"),
        (GOOD.replace("kind: fixed, tokens: 100", "kind: empirical, quantiles: {0: 9, 2: 9}"), "not between 0 and 1"),
        (GOOD.replace("kind: fixed, tokens: 100", "kind: empirical, quantiles: {0: 9, 1: 8}"), "must not fall"),
        (GOOD + "total_cap: 101\n", "'total_cap' is 101, and the shortest request has 102"),
        ("a: &a [*a]\n!!python/object/apply:os.system ['true']: 1\n", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_by_file_and_field(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(DocumentError) as caught:
        load_workload(str(path))
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DocumentError, match="no UTF-8"):
        load_workload(str(path))
