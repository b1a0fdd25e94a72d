"""What `--target` finds of the built-in server, beside the engine's own step times: same model, threads and machine.

    python -m scripts.target_against_profile --model DIRECTORY [--budget 256] [--threads 2] [--rounds 3] [--out FOLDER]

Every round starts `sarathi-tune serve` with the budget, measures it with `sarathi-tune --target`, stops it, and times
the steps that were seen with `sarathi-tune profile --shapes`. Nothing else should run meanwhile. Prints a table per
round: the engine's own time, what was seen from outside, and the step model that was fitted to it; then how many lie
within 10 %, and at the end the same for the medians over all rounds, because a machine may be faster for one process
than for the next. Writes the last round's documents to `--out`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_tune.machine.cpu import describe_cpu
from sarathi_tune.measure.profile import Sample, load_profile
from sarathi_tune.stepmodel.fit import fit_step_model

NEAR = 0.10
_START_S = 120.0


@dataclass(frozen=True)
class Row:
    """One step: milliseconds by the engine's own clock, as seen from outside, and as fitted to that."""

    name: str
    own_ms: float
    seen_ms: float
    fitted_ms: float
    count: int

    @property
    def seen_error(self) -> float:
        """How much too long it came out, as a share."""
        return self.seen_ms / self.own_ms - 1

    @property
    def fitted_error(self) -> float:
        """How much too long the model has it, as a share."""
        return self.fitted_ms / self.own_ms - 1


@contextmanager
def server(model: str, budget: int, threads: int, port: int) -> Iterator[str]:
    """The built-in server, ready; its address."""
    flags = ("--max-num-batched-tokens", str(budget), "--max-num-seqs", "32", "--threads", str(threads))
    command = [sys.executable, "-m", "sarathi_tune", "serve", "--model", model, *flags, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_ready(process, url)
            yield url
        finally:
            process.terminate()


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:  # refused, or not answered yet
            time.sleep(0.2)
    raise SystemExit(f"The server at {url} did not start.")


def compare(seen: Path, own: Path) -> list[Row]:
    """A row per step of the profile `seen`, in its order; `own` has the same steps."""
    profile = load_profile(seen)
    model = fit_step_model(profile)
    own_ms = {str(sample.shape): sample.median_ms for sample in load_profile(own).samples}
    rows = []
    for name, samples in _by_shape(profile.samples).items():
        times = [ms for sample in samples for ms in sample.times_ms]
        fitted = model.predict_ms(samples[0].shape.step_shape)
        rows.append(Row(name, own_ms[name], statistics.median(times), fitted, len(times)))
    return rows


def _by_shape(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    shapes: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.times_ms:
            shapes.setdefault(str(sample.shape), []).append(sample)
    return shapes


def as_table(rows: Sequence[Row]) -> str:
    """Milliseconds, and what lies beside the engine's own."""
    lines = ["| step | own ms | seen ms | | fitted ms | | times seen |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        seen = f"{row.seen_ms:.1f} | {row.seen_error * 100:+.0f} %"
        fitted = f"{row.fitted_ms:.1f} | {row.fitted_error * 100:+.0f} %"
        lines.append(f"| {row.name} | {row.own_ms:.1f} | {seen} | {fitted} | {row.count} |")
    return "\n".join(lines)


def counts(rows: Sequence[Row]) -> str:
    """How many steps are near the engine's own."""
    seen = sum(abs(row.seen_error) <= NEAR for row in rows)
    fitted = sum(abs(row.fitted_error) <= NEAR for row in rows)
    return f"within {NEAR * 100:.0f} %: {seen} of {len(rows)} as seen, {fitted} of {len(rows)} as fitted"


def medians(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """A row per step that more than half of the rounds have: median errors, over the median of its own time."""
    by_name: dict[str, list[Row]] = {}
    for row in (row for rows in rounds for row in rows):
        by_name.setdefault(row.name, []).append(row)
    found = []
    for name, rows in by_name.items():
        if 2 * len(rows) > len(rounds):
            own_ms = statistics.median(row.own_ms for row in rows)
            seen = 1 + statistics.median(row.seen_error for row in rows)
            fitted = 1 + statistics.median(row.fitted_error for row in rows)
            found.append(Row(name, own_ms, own_ms * seen, own_ms * fitted, sum(row.count for row in rows)))
    return found


def clocks(scenes: Sequence[dict[str, Any]]) -> str:
    """The mean gap of each scene by the server's clock and from outside: where they agree and the profile doesn't, it
    is the machine that changed."""
    pairs = (f"{scene['name']} {scene['own_ms']:.1f}, {scene['seen_ms']:.1f}" for scene in scenes if scene["own_ms"])
    return "mean gap by the server's clock and from outside, ms: " + "; ".join(pairs)


def run_round(options: argparse.Namespace, out: Path) -> tuple[dict[str, Any], list[Row]]:
    """One server, measured from outside and then by itself: the result, and a row per step."""
    result_path, own = out / "result.json", out / "own.profile.json"
    with server(options.model, options.budget, options.threads, options.port) as url:
        flags = ("--slo-itl", options.slo_itl, "--out", str(out), "--json", str(result_path), "--quiet")
        _tune("--target", url, *flags, may_end_with=(0, 1, 3, 4))
    result = json.loads(result_path.read_text(encoding="utf-8"))
    seen = out / Path(result["folder"]).name / result["profile"]
    shapes = ",".join(_by_shape(load_profile(seen).samples))
    timing = ("--threads", str(options.threads), "--repeats", "11", "--quiet", "--out", str(own))
    _tune("profile", "--model", options.model, "--shapes", shapes, *timing)
    return result, compare(seen, own)


def _tune(*arguments: str, may_end_with: Sequence[int] = (0,)) -> None:
    ended = subprocess.run([sys.executable, "-m", "sarathi_tune", *arguments], capture_output=True, text=True)
    if ended.returncode not in may_end_with:
        raise SystemExit(f"sarathi-tune {arguments[0]} ended with {ended.returncode}: {ended.stderr.strip()}")


def main() -> None:
    """Run the rounds and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--threads", type=int, default=describe_cpu().threads)
    parser.add_argument("--slo-itl", default="120ms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8771)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds = []
    for number in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            out = options.out or Path(folder)
            out.mkdir(parents=True, exist_ok=True)
            result, rows = run_round(options, out)
        rounds.append(rows)
        facts = result["server"]
        low, high = facts["interval_tokens"] or (None, None)
        print(f"Round {number}: started with {options.budget}, inferred {facts['budget_tokens']} ({low} to {high})\n")
        print(f"{as_table(rows)}\n\n{counts(rows)}\n{clocks(facts['scenes'])}\n", flush=True)
    if len(rounds) > 1:
        rows = medians(rounds)
        print(f"Medians over {len(rounds)} rounds\n\n{as_table(rows)}\n\n{counts(rows)}")


if __name__ == "__main__":
    main()
