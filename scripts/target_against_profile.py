"""What `--target` finds of the built-in server, beside the engine's own step times: same model, threads and machine.

    python -m scripts.target_against_profile --model DIRECTORY [--budget 256] [--threads 2] [--dtype float32]
        [--rounds 3] [--out FOLDER]

Every round starts `sarathi-tune serve --record` with the budget, measures it with `sarathi-tune --target`, stops it,
and times the steps that were seen with `sarathi-tune profile --shapes`. Nothing else should run meanwhile. A few steps
are timed before the server as well: where their times behind it differ by more than 5 %, the machine has changed in
between and the round says little of the method.

Prints a table per round: the engine's time of each step, alone and as it served, what was seen from outside, and the
step model that was fitted to that; then how many lie within 10 % of either time, and of the profile's steps how many
the engine itself computed within 10 % of it as it served, which is what a machine that is faster for one process than
for the next leaves to be found. At the end the same for the medians over all rounds, and over those in which the
machine was the same. Writes the last round's documents to `--out`.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_tune.cli.ui import make_ui
from sarathi_tune.machine.cpu import describe_cpu
from sarathi_tune.measure.profile import Profile, Sample, load_profile
from sarathi_tune.measure.shapes import Shape
from sarathi_tune.stepmodel.fit import fit_step_model
from sarathi_tune.tune.launching.server import Launch, free_port, running

NEAR = 0.10
#: Timed before a server and behind it: decodes, decodes beside a chunk, and a prompt.
CONTROLS = ("16x512", "16x512+224@0", "256@0")
#: The machine is the same while their medians differ by this at most.
STEADY = 0.05
#: A step that the server computed is the one that was seen when contexts, chunks and prefixes differ by this at most.
_SAME = 0.05


@dataclass(frozen=True)
class Row:
    """One step in milliseconds: by the engine's own clock, alone and as it served; as seen from outside, `count` times;
    and as fitted to that."""

    name: str
    own_ms: float
    served_ms: float
    seen_ms: float
    fitted_ms: float
    count: int


#: What is compared: the name of the time that counts, and the one that is set against it.
Pair = tuple[Callable[[Row], float], Callable[[Row], float]]
SEEN_OWN: Pair = (lambda row: row.own_ms, lambda row: row.seen_ms)
FITTED_OWN: Pair = (lambda row: row.own_ms, lambda row: row.fitted_ms)
SEEN_SERVED: Pair = (lambda row: row.served_ms, lambda row: row.seen_ms)
FITTED_SERVED: Pair = (lambda row: row.served_ms, lambda row: row.fitted_ms)
SERVED_OWN: Pair = (lambda row: row.own_ms, lambda row: row.served_ms)


def error(row: Row, pair: Pair) -> float:
    """How much too long a step came out, as a share."""
    return pair[1](row) / pair[0](row) - 1


@contextmanager
def server(options: argparse.Namespace, record: Path) -> Iterator[str]:
    """The built-in server, ready; its address. Its steps are in `record` behind that."""
    port = free_port()
    flags = ["--max-num-batched-tokens", str(options.budget), "--max-num-seqs", "32", *_engine(options)]
    flags += ["--record", str(record), "--port", str(port)]
    command = (sys.executable, "-m", "sarathi_tune", "serve", *flags)
    launch = Launch(command, f"http://127.0.0.1:{port}", record.with_suffix(".log"))
    with running(launch, make_ui(quiet=True), "The built-in server"):
        yield launch.url


def compare(seen: Path, own: Path, served: Path) -> list[Row]:
    """A row per step of the profile `seen` that the server computed, in its order; `own` has the same steps, `served`
    those of the server."""
    profile, record = load_profile(seen), load_profile(served)
    model = fit_step_model(profile)
    own_ms = {str(sample.shape): sample.median_ms for sample in load_profile(own).samples}
    rows = []
    for name, samples in _by_shape(profile.samples).items():
        shape = samples[0].shape
        served_ms = served_time(shape, record)
        if served_ms is not None:
            times = [ms for sample in samples for ms in sample.times_ms]
            fitted = model.predict_ms(shape.step_shape)
            rows.append(Row(name, own_ms[name], served_ms, statistics.median(times), fitted, len(times)))
    return rows


def served_time(shape: Shape, record: Profile) -> float | None:
    """The median of the steps that are the most like this one, in milliseconds; None without any."""
    alike = {sample: _distance(sample.shape, shape) for sample in record.samples if sample.times_ms}
    nearest = min(alike.values(), default=math.inf)
    if nearest > _SAME:
        return None
    return statistics.median(ms for sample, far in alike.items() if far == nearest for ms in sample.times_ms)


def _distance(one: Shape, other: Shape) -> float:
    """The largest relative difference of two steps with as many decodes; a prefix counts beside its chunk."""
    if one.decodes != other.decodes or bool(one.chunk) != bool(other.chunk):
        return math.inf
    pairs = [(one.context, other.context), (one.chunk, other.chunk)]
    pairs.append((one.prefix + one.chunk, other.prefix + other.chunk))
    return max(abs(a - b) / max(a, b, 1) for a, b in pairs)


def _by_shape(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    shapes: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.times_ms:
            shapes.setdefault(str(sample.shape), []).append(sample)
    return shapes


def as_table(rows: Sequence[Row]) -> str:
    """Milliseconds, and how far they lie from the engine's, alone and as it served."""
    heads = ("step", "own ms", "served ms", "/ own", "seen ms", "/ own", "/ served", "fitted ms", "/ own", "/ served")
    lines = [f"| {' | '.join(heads)} | times seen |", "|---" * (len(heads) + 1) + "|"]
    for row in rows:
        cells = [row.name, f"{row.own_ms:.1f}", f"{row.served_ms:.1f}", _percent(row, SERVED_OWN)]
        cells += [f"{row.seen_ms:.1f}", _percent(row, SEEN_OWN), _percent(row, SEEN_SERVED)]
        cells += [f"{row.fitted_ms:.1f}", _percent(row, FITTED_OWN), _percent(row, FITTED_SERVED), str(row.count)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(row: Row, pair: Pair) -> str:
    return f"{error(row, pair) * 100:+.0f} %"


def counts(rows: Sequence[Row]) -> str:
    """How many steps are near the engine's."""

    def near(pair: Pair) -> int:
        return sum(abs(error(row, pair)) <= NEAR for row in rows)

    return (
        f"of {len(rows)} within {NEAR * 100:.0f} % of the steps as they were served: {near(SEEN_SERVED)} as seen, "
        f"{near(FITTED_SERVED)} as fitted; of the profile: {near(SEEN_OWN)} as seen, {near(FITTED_OWN)} as fitted, "
        f"and {near(SERVED_OWN)} as the engine itself served them"
    )


def medians(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """A row per step that more than half of the rounds have: median errors, over the median of its own time."""
    by_name: dict[str, list[Row]] = {}
    for row in (row for rows in rounds for row in rows):
        by_name.setdefault(row.name, []).append(row)
    found = []
    for name, rows in by_name.items():
        if 2 * len(rows) > len(rounds):
            own_ms = statistics.median(row.own_ms for row in rows)
            served, seen, fitted = (
                own_ms * (1 + statistics.median(error(row, pair) for row in rows))
                for pair in (SERVED_OWN, SEEN_OWN, FITTED_OWN)
            )
            found.append(Row(name, own_ms, served, seen, fitted, sum(row.count for row in rows)))
    return found


def clocks(scenes: Sequence[dict[str, Any]]) -> str:
    """The mean gap of each scene by the server's clock and from outside: where they agree and the profile doesn't, it
    is the machine that changed."""
    pairs = (f"{scene['name']} {scene['own_ms']:.1f}, {scene['seen_ms']:.1f}" for scene in scenes if scene["own_ms"])
    return "mean gap by the server's clock and from outside, ms: " + "; ".join(pairs)


def change(before: Path, behind: Path) -> float:
    """The largest relative difference of the steps that both profiles have."""
    first, second = (
        {str(sample.shape): sample.median_ms for sample in load_profile(path).samples} for path in (before, behind)
    )
    return max(abs(second[name] / first[name] - 1) for name in first)


def run_round(options: argparse.Namespace, out: Path) -> tuple[dict[str, Any], list[Row], float]:
    """One server, measured from outside and then by itself: the result, a row per step, and how much the machine had
    changed behind it."""
    result_path, own, served = out / "result.json", out / "own.profile.json", out / "served.profile.json"
    before = out / "before.profile.json"
    _profile(options, CONTROLS, before)
    with server(options, served) as url:
        flags = ("--slo-itl", options.slo_itl, "--out", str(out), "--json", str(result_path), "--quiet")
        _tune("--target", url, *flags, may_end_with=(0, 1, 3, 4))
    result = json.loads(result_path.read_text(encoding="utf-8"))
    seen = out / Path(result["folder"]).name / result["profile"]
    _profile(options, dict.fromkeys([*_by_shape(load_profile(seen).samples), *CONTROLS]), own)
    return result, compare(seen, own, served), change(before, own)


def _engine(options: argparse.Namespace) -> tuple[str, ...]:
    """What the server and the profile have in common."""
    dtype = ("--dtype", options.dtype) if options.dtype else ()
    return ("--model", options.model, "--threads", str(options.threads), *dtype)


def _profile(options: argparse.Namespace, shapes: Iterable[str], path: Path) -> None:
    timing = ("--repeats", "11", "--quiet", "--out", str(path))
    _tune("profile", *_engine(options), "--shapes", ",".join(shapes), *timing)


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
    parser.add_argument("--dtype")
    parser.add_argument("--slo-itl", default="120ms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds, steady = [], []
    for number in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            out = options.out or Path(folder)
            out.mkdir(parents=True, exist_ok=True)
            result, rows, changed = run_round(options, out)
        rounds.append(rows)
        if changed <= STEADY:
            steady.append(rows)
        facts = result["server"]
        low, high = facts["interval_tokens"] or (None, None)
        print(f"Round {number}: started with {options.budget}, inferred {facts['budget_tokens']} ({low} to {high})\n")
        print(f"{as_table(rows)}\n\n{counts(rows)}\n{clocks(facts['scenes'])}")
        print(f"the machine behind the server beside before it: {changed * 100:.1f} % at most\n", flush=True)
    if len(rounds) > 1:
        rows = medians(rounds)
        print(f"Medians over {len(rounds)} rounds\n\n{as_table(rows)}\n\n{counts(rows)}\n")
    if 1 < len(steady) < len(rounds):
        rows = medians(steady)
        print(f"Medians over the {len(steady)} rounds in which the machine was the same\n\n{counts(rows)}")


if __name__ == "__main__":
    main()
