"""What `--target` finds of a real vLLM that is started with one token budget after the other.

    python -m scripts.target_against_vllm --vllm VLLM --model DIRECTORY [--budgets 128,256,512,2048] [--out FOLDER]

VLLM is the executable. Every budget has a server of its own, which is measured with `sarathi-tune --target` and stopped
again. Nothing else should run meanwhile. Prints what was inferred and advised, and the mean gap between tokens of each
number of streams by the server's own histogram and from outside. The environment goes to the server: on a CPU
`VLLM_CPU_OMP_THREADS_BIND=0-1 VLLM_CPU_NUM_OF_RESERVED_CPU=0` gives it both of two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sarathi_tune.cli.ui import make_ui
from sarathi_tune.tune.launching.server import Launch, free_port, running
from sarathi_tune.tune.launching.vllm import serve_command

#: Scenes of a result in the order of the table, and what their streams do.
_SCENES = {
    "one": "1 stream",
    "half": "half",
    "short": "all, short",
    "full": "all but one and prompts",
    "few": "4 and prompts",
}
_HEADS = ("started with", "inferred", "interval", "took", "advice (90 % interval)")


def measured(options: argparse.Namespace, budget: int, out: Path) -> dict[str, Any]:
    """The result of `--target` on a vLLM with that budget."""
    port, path = free_port(), out / f"result-{budget}.json"
    seqs = str(options.max_num_seqs)
    command = serve_command((options.vllm, "serve"), options.model, port, budget, ("--max-num-seqs", seqs))
    launch = Launch(command, f"http://127.0.0.1:{port}", out / f"vllm-{budget}.log")
    with running(launch, make_ui(quiet=True), f"vllm with {budget}"):
        flags = ("--slo-itl", options.slo_itl, "--max-num-seqs", seqs, "--workload", options.workload)
        tune = (sys.executable, "-m", "sarathi_tune", "--target", launch.url, *flags)
        ended = subprocess.run(
            [*tune, "--out", str(out), "--json", str(path), "--quiet"], capture_output=True, text=True
        )
    if ended.returncode not in (0, 1, 3, 4):
        raise SystemExit(f"sarathi-tune ended with {ended.returncode}: {ended.stderr.strip()}")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def budget_row(budget: int, result: dict[str, Any]) -> str:
    """What was inferred and advised."""
    server, advice = result["server"], result["advice"]
    seconds = sum(phase["seconds"] for phase in result["phases"])
    advised = advice["verdict"] if advice["budget_tokens"] is None else f"{advice['budget_tokens']:,}"
    cells = [f"{budget:,}", _count(server["budget_tokens"]), _span(server["interval_tokens"]), f"{seconds:.0f} s"]
    interval = f" ({_span(advice['interval_tokens'])})" if advice["interval_tokens"] else ""
    return f"| {' | '.join([*cells, advised + interval])} |"


def scene_row(budget: int, result: dict[str, Any]) -> str:
    """Both clocks for each kind of scene, in milliseconds."""
    server = result["server"]
    scenes = {scene["name"]: scene for scene in reversed(server["scenes"])}  # of two, the first
    pairs = [(scene["own_ms"], scene["seen_ms"]) if (scene := scenes.get(name)) else None for name in _SCENES]
    pairs.append((server["own_gap_ms"], server["seen_gap_ms"]))
    return f"| {budget:,} | {' | '.join(map(_pair, pairs))} |"


def _pair(pair: tuple[float | None, float] | None) -> str:
    return "" if pair is None or pair[0] is None else f"{pair[0]:.2f}, {pair[1]:.2f}"


def _count(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _span(interval: Sequence[int | None] | None) -> str:
    return "none" if interval is None else " to ".join(_count(end) for end in interval)


def main() -> None:
    """Measure a server per budget and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--budgets", default="128,256,512,2048")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--slo-itl", default="120ms")
    parser.add_argument("--workload", default="fixed:768:64")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        print(f"| {' | '.join(_HEADS)} |\n{'|---' * len(_HEADS)}|", flush=True)
        for budget in map(int, options.budgets.split(",")):
            results[budget] = measured(options, budget, out)
            print(budget_row(budget, results[budget]), flush=True)
    heads = ("started with", *_SCENES.values(), "all gaps")
    print(f"\nMean gap by the server's own histogram and from outside, ms\n\n| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for budget, result in results.items():
        print(scene_row(budget, result))


if __name__ == "__main__":
    main()
