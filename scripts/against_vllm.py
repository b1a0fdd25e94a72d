"""Step times of the built-in engine beside vLLM's on the same machine: same shapes, weights and threads, in turns.

    python -m scripts.against_vllm --vllm-python PYTHON --model DIRECTORY [--threads 2] [--rounds 3] [--out DIRECTORY]

PYTHON is the interpreter of an environment that has vLLM; DIRECTORY holds a Hugging Face model. Writes
step-times.json and step-times.md. Nothing else should run meanwhile: every round times vLLM first and then
`sarathi-tune profile`, so that what slows the machine for minutes slows both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

Times = list[list[float]]

#: Decodes, context, chunk.
SHAPES = (
    *((decodes, context, 0) for decodes, context in ((1, 128), (1, 1024), (8, 1024), (32, 1024), (32, 128))),
    *((0, 0, chunk) for chunk in (16, 64, 128, 256, 512, 1024, 2048)),
    *((8, 512, chunk) for chunk in (248, 504, 1016, 2040)),
)


def name_of(decodes: int, context: int, chunk: int) -> str:
    """As `sarathi-tune profile --shapes` takes it."""
    return "+".join(part for part in (f"{decodes}x{context}" if decodes else "", f"{chunk}@0" if chunk else "") if part)


def time_vllm(python: str, model: str, threads: int, repeats: int) -> Times:
    """Milliseconds of every repeat, a list per shape."""
    script = Path(__file__).with_name("vllm_step_times.py")
    command = [python, str(script), model, str(threads), str(repeats), json.dumps(SHAPES)]
    return json.loads(_output(command).splitlines()[-1])  # type: ignore[no-any-return]


def time_ours(model: str, threads: int, repeats: int) -> Times:
    """Milliseconds of every repeat, a list per shape."""
    shapes = ",".join(name_of(*shape) for shape in SHAPES)
    command = [sys.executable, "-m", "sarathi_tune", "profile", "--model", model, "--threads", str(threads)]
    profile = json.loads(_output([*command, "--shapes", shapes, "--repeats", str(repeats), "--quiet", "--json", "-"]))
    times: dict[tuple[int, int, int], list[float]] = {}
    for sample in profile["samples"]:
        key = (sample.get("decodes", 0), sample.get("context", 0), sample.get("chunk", 0))
        times.setdefault(key, []).extend(sample["ms"])
    return [times[shape] for shape in SHAPES]


def as_table(vllm: Sequence[Times], ours: Sequence[Times]) -> str:
    """Medians per round, and the ratio of the rounds' medians; below 1 the built-in engine is faster."""
    lines = ["| step | vLLM ms | sarathi-tune ms | ratio | by round |", "|---|---|---|---|---|"]
    for index, shape in enumerate(SHAPES):
        theirs = [statistics.median(times[index]) for times in vllm]
        mine = [statistics.median(times[index]) for times in ours]
        ratios = [own / other for own, other in zip(mine, theirs, strict=True)]
        cells = (
            name_of(*shape),
            f"{statistics.median(theirs):.1f}",
            f"{statistics.median(mine):.1f}",
            f"{statistics.median(ratios):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Take turns, then write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vllm-python", required=True, help="the interpreter of an environment that has vLLM")
    parser.add_argument("--model", required=True, help="a Hugging Face model directory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results/runs/against-vllm"))
    options = parser.parse_args()
    vllm: list[Times] = []
    ours: list[Times] = []
    for turn in range(options.rounds):
        print(f"round {turn + 1} of {options.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        vllm.append(time_vllm(options.vllm_python, options.model, options.threads, options.repeats))
        ours.append(time_ours(options.model, options.threads, options.repeats))
        write(options.out, options.threads, vllm, ours)
    print(as_table(vllm, ours))


def write(out: Path, threads: int, vllm: Sequence[Times], ours: Sequence[Times]) -> None:
    """Both files, with the rounds so far."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": name_of(*shape), "vllm_ms": [times[i] for times in vllm], "ours_ms": [times[i] for times in ours]}
        for i, shape in enumerate(SHAPES)
    ]
    (out / "step-times.json").write_text(json.dumps({"threads": threads, "steps": rows}) + "\n")
    (out / "step-times.md").write_text(as_table(vllm, ours) + "\n")


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
