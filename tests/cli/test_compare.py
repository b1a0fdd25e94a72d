"""`sarathi-tune compare` and `kernels` at the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import H100, run, spawn


def test_without_torch_under_the_virtual_clock() -> None:
    ended = spawn("compare", "--virtual", H100, "--json", "-", "--quiet", "--schedulers", "sarathi,prefill-first")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["schema"] == "sarathi-tune/comparison"
    sarathi, prefill_first = document["contenders"]
    assert sarathi["measured"] is None
    assert sarathi["predicted"]["largest_gap_units"] <= 1.05
    assert sarathi["predicted"]["largest_gap_p99_units"] <= 1.05
    assert prefill_first["predicted"]["itl_max_ms"] > 1.5 * sarathi["predicted"]["itl_max_ms"]
    assert ended.err == ""


def test_report_shows_it_again(tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    ended = run("compare", "--virtual", H100, "--json", path, "--quiet", "--schedulers", "sarathi,orca")
    again = run("report", path)
    assert (again.code, again.out) == (0, ended.out)
    assert "--engines is for a budget that was derived" in run("report", path, "--engines").err


def test_loads_no_torch() -> None:
    code = (
        "import sys\nfrom sarathi_tune.cli.app import app\n"
        f"try: app(['compare', '--virtual', {str(H100)!r}, '-q', '--schedulers', 'sarathi'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_piped_it_has_no_control_codes_and_whole_names() -> None:
    ended = spawn("compare", "--virtual", H100, "--quiet")
    assert "\x1b" not in ended.out
    for name in ("sarathi-single", "prefill-first", "decode-first", "orca"):
        assert f"\n{name} " in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80


def test_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ended = spawn("compare", "--virtual", H100, "--quiet", "--plot", tmp_path / "gaps.svg")
    assert (ended.code, ended.err) == (0, "")
    assert "</svg>" in (tmp_path / "gaps.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--schedulers", "vllm"), "--schedulers must be one of sarathi, sarathi-single"),
        (("--workload", "chat", "--steady", "4"), "--workload and --steady are two different loads"),
        (("--rate", "2"), "belong to --workload"),
        (("--profile", "x.json"), "leave --profile away"),
        (("--plot", "gaps.jpg"), "must end in .png or .svg"),
        (("--budget", "8"), "leaves no token for a prompt beside 8 decodes"),
        (("--steady", "0"), "--steady must be at least 1"),
        (("--preemption", "drop"), "--preemption must be one of recompute, swap"),
        (("--every", "2"), "has no unit"),
        (("--plays", "3"), "--plays is for real runs"),
    ],
)
def test_bad_input_is_one_sentence(flags: tuple[str, ...], sentence: str) -> None:
    ended = run("compare", "--virtual", H100, *flags)
    assert ended.code == 2
    assert sentence in ended.err.replace("\n", " ")


def test_kernels_refuses_unknown_groups() -> None:
    ended = run("kernels", "--only", "softmax")
    assert ended.code == 2
    assert "--only must be one of attention, linear, kv-write, sampling, all-reduce" in ended.err


def test_an_unknown_scheduler_is_refused_in_every_command() -> None:
    for command in ((), ("sweep",)):
        ended = run(*command, "--slo-itl", "20ms", "--scheduler", "fifo")
        assert ended.code == 2
        assert "--scheduler must be one of sarathi" in ended.err
