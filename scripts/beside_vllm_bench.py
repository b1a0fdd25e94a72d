"""What `vllm bench serve` and `sarathi-tune verify` say of the same load on a real vLLM.

    python -m scripts.beside_vllm_bench --vllm VENV/bin/vllm --model DIRECTORY [--rounds 3] -- --max-num-seqs 32

Starts one vLLM, with the arguments behind the `--`, and puts the same load on it (the same lengths, at the same
constant rate) by one client and the other: in turns first, then by both at once.

In turns each run stands beside the means by the server's own clock over that run: two runs differ by what the server
did in them, and a client by what it says of its own run. With both at once (ours at 0.97 of the rate, so that neither
always comes right behind the other) the same server serves both in the same seconds; what was sent while only one of
them ran is left out.

Prints tables in Markdown. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_tune.cli.ui import make_ui
from sarathi_tune.goodput.server_account import Mean, ServerAccount
from sarathi_tune.tune.launching.server import Launch, free_port, running
from sarathi_tune.tune.launching.vllm import serve_command
from sarathi_tune.tune.outside.evidence import Exposition, account, read_exposition

THEIRS, OURS = "vllm bench serve", "sarathi-tune"
#: What theirs prints when its warm-up is over.
_BEGUN = "Starting main benchmark run"
#: Our share of the rate when both run at once, and how much of the time together is left out at its start.
_TOGETHER_SHARE, _SETTLING_S = 0.97, 2.0
_HEADS = ("client", "requests", "prompt tokens", "answered", "gaps", "ITL p50, ms", "p99", "TTFT p50", "p99")
_CLOCKS = ("gap, server's clock", "client's", "TTFT, server's clock", "client's")


@dataclass(frozen=True)
class Seen:
    """Requests as a client saved them: when each was sent (s, of a clock that processes share), its TTFT and gaps (s).
    `own`: the means by the server's clock in the same time, where no one else was served."""

    sent_s: tuple[float, ...]
    ttfts_s: tuple[float, ...]
    gaps_s: tuple[tuple[float, ...], ...]
    prompt_tokens: int = 0
    output_tokens: int = 0
    own: tuple[Mean, Mean] | None = None

    def figures(self) -> tuple[float, float, float, float]:
        """p50 and p99 of the gaps and of TTFT, in ms, interpolated as numpy does by default."""
        return (*middle_and_tail(self.all_gaps_s), *middle_and_tail(self.ttfts_s))

    @property
    def all_gaps_s(self) -> list[float]:
        return [gap for gaps in self.gaps_s for gap in gaps]

    def between(self, start_s: float, end_s: float) -> "Seen":
        """What was sent from one time to another. The tokens stay those of all."""
        kept = [index for index, sent_s in enumerate(self.sent_s) if start_s <= sent_s <= end_s]
        rows = ([column[index] for index in kept] for column in (self.sent_s, self.ttfts_s, self.gaps_s))
        sent, ttfts, gaps = map(tuple, rows)
        return Seen(sent, ttfts, gaps, self.prompt_tokens, self.output_tokens)


def middle_and_tail(values_s: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values_s, n=100, method="inclusive")
    return cuts[49] * 1e3, cuts[98] * 1e3


def pooled(runs: Sequence[Seen]) -> Seen:
    """The requests of several runs as one."""
    return Seen(
        tuple(value for run in runs for value in run.sent_s),
        tuple(value for run in runs for value in run.ttfts_s),
        tuple(value for run in runs for value in run.gaps_s),
        sum(run.prompt_tokens for run in runs),
        sum(run.output_tokens for run in runs),
    )


def together(theirs: Seen, ours: Seen) -> tuple[Seen, Seen]:
    """The requests of both that were sent while both ran."""
    start_s = max(theirs.sent_s[0], ours.sent_s[0]) + _SETTLING_S
    end_s = min(theirs.sent_s[-1], ours.sent_s[-1])
    return theirs.between(start_s, end_s), ours.between(start_s, end_s)


def read_saved(document: dict[str, Any], own: tuple[Mean, Mean] | None = None) -> Seen:
    """The file of either client. Raises RuntimeError when requests failed."""
    if document["completed"] != document["num_prompts"]:
        raise RuntimeError(f"{document['completed']} of {document['num_prompts']} requests were answered.")
    return Seen(
        tuple(document["start_times"]),
        tuple(document["ttfts"]),
        tuple(map(tuple, document["itls"])),
        document["total_input_tokens"],
        document["total_output_tokens"],
        own,
    )


def own_means(found: ServerAccount | None) -> tuple[Mean, Mean] | None:
    return None if found is None else (found.gap.own, found.ttft.own)


# -- the two clients


@dataclass(frozen=True)
class Bench:
    """Where the server is, and what load to put on it."""

    url: str
    options: argparse.Namespace
    scratch: Path

    def theirs(self, seed: int) -> list[str]:
        options = self.options
        return [
            *(options.vllm, "bench", "serve", "--backend", "openai", "--base-url", self.url),
            *("--endpoint", "/v1/completions", "--model", options.model, "--dataset-name", "random"),
            *("--random-input-len", str(options.prompt_tokens), "--random-output-len", str(options.output_tokens)),
            *("--num-prompts", str(options.requests), "--request-rate", str(options.rate)),
            *("--burstiness", "1000000", "--save-result", "--save-detailed"),
            *("--ignore-eos", "--temperature", "0", "--disable-tqdm", "--num-warmups", "1", "--seed", str(seed)),
            *(
                "--save-result",
                "--save-detailed",
                "--result-dir",
                str(self.scratch),
                "--result-filename",
                "theirs.json",
            ),
        ]

    def ours(self, seed: int, share: float) -> list[str]:
        options, rate = self.options, share * self.options.rate
        return [
            *(sys.executable, "-m", "sarathi_tune", "verify", "--target", self.url, "--slo-itl", "10s"),
            *("--workload", f"fixed:{options.prompt_tokens}:{options.output_tokens}", "--rate", f"{rate:.6g}"),
            *("--arrivals", "constant", "--seconds", f"{options.requests / rate:.6g}s", "--seed", str(seed)),
            *("--workers", "1", "--save-vllm", str(self.scratch / "ours.json"), "--quiet"),
            *("--json", str(self.scratch / "document.json")),
        ]

    def in_turns(self, name: str, seed: int) -> Seen:
        """One client alone."""
        if name == OURS:
            self._end(self._begin(OURS, self.ours(seed, 1.0)))
            return self._our_run()
        client = self._begin(THEIRS, self.theirs(seed))
        self._await_begin(client)
        before = self._metrics()
        self._end(client)
        return self._their_run(own_means(account(before, self._metrics(), ())))

    def at_once(self, seed: int) -> tuple[Seen, Seen]:
        """Both clients at the same time."""
        client = self._begin(THEIRS, self.theirs(seed))
        self._await_begin(client)
        ours = self._begin(OURS, self.ours(seed, _TOGETHER_SHARE))
        self._end(ours)
        self._end(client)
        # the server's own means are those of both
        return together(self._their_run(None), read_saved(self._read("ours.json")))

    def _their_run(self, own: tuple[Mean, Mean] | None) -> Seen:
        return read_saved(self._read("theirs.json"), own)

    def _our_run(self) -> Seen:
        server = self._read("document.json")["points"][0]["server"]
        own = (Mean(**server["gap"]["own"]), Mean(**server["ttft"]["own"])) if server else None
        return read_saved(self._read("ours.json"), own)

    def _read(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.scratch / name).read_text(encoding="utf-8")))

    def _metrics(self) -> Exposition:
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            return read_exposition(response.read().decode())

    def _log(self, name: str) -> Path:
        return self.scratch / f"{name.split()[0]}.log"

    def _begin(self, name: str, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with self._log(name).open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def _await_begin(self, client: "subprocess.Popen[bytes]") -> None:
        while client.poll() is None and _BEGUN not in self._log(THEIRS).read_text(errors="replace"):
            time.sleep(0.1)

    def _end(self, client: "subprocess.Popen[bytes]") -> None:
        """Raises RuntimeError, with the last of what it printed, when the client failed."""
        if client.wait():
            name = OURS if "sarathi_tune" in client.args else THEIRS  # type: ignore[operator]
            raise RuntimeError(f"{name} ended with {client.returncode}:\n{self._log(name).read_text()[-2000:]}")


# -- the tables


def row(name: str, seen: Seen) -> str:
    """A client's run, and where it was alone the means of both clocks."""
    gaps = seen.all_gaps_s
    cells = [name, f"{len(seen.sent_s):,}", f"{seen.prompt_tokens:,}", f"{seen.output_tokens:,}", f"{len(gaps):,}"]
    cells += [f"{value:.1f}" for value in seen.figures()]
    for own, times_s in zip(seen.own or (), (gaps, seen.ttfts_s), strict=False):
        mean_ms = 1e3 * statistics.fmean(times_s)
        beside = f" ({mean_ms / own.mean_ms - 1:+.1%})" if own.mean_ms else ""
        cells += [f"{own.mean_ms or 0.0:.1f}", f"{mean_ms:.1f}{beside}"]
    return f"| {' | '.join(cells)} |"


def differences(theirs: Seen, ours: Seen) -> str:
    """Ours over theirs in percent."""
    cells = [f"{our / their - 1:+.1%}" for their, our in zip(theirs.figures(), ours.figures(), strict=True)]
    return f"| {OURS} to {THEIRS} |  |  |  |  | {' | '.join(cells)} |"


def print_head(title: str, heads: Sequence[str]) -> None:
    print(f"\n{title}\n\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)


def compare(bench: Bench, rounds: int) -> None:
    """All runs, printed as they come."""
    print_head("In turns, beside the means by the server's own clock", (*_HEADS, *_CLOCKS))
    runs: dict[str, list[Seen]] = {THEIRS: [], OURS: []}
    for turn in range(rounds):
        for name in (THEIRS, OURS) if turn % 2 == 0 else (OURS, THEIRS):
            runs[name].append(bench.in_turns(name, seed=turn))
            print(row(name, runs[name][-1]), flush=True)
    print(differences(pooled(runs[THEIRS]), pooled(runs[OURS])))
    print_head("Both at once, what was sent while both ran", _HEADS)
    pairs = []
    for turn in range(rounds):
        pairs.append(bench.at_once(seed=rounds + turn))
        print(row(THEIRS, pairs[-1][0]), row(OURS, pairs[-1][1]), sep="\n", flush=True)
    print(differences(*(pooled(side) for side in zip(*pairs, strict=True))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--budget", type=int, default=2048, help="--max-num-batched-tokens of the server")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1.5)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("extra", nargs="*", help="behind --: arguments of vllm serve")
    options = parser.parse_args()
    if options.requests / options.rate < 5 * _SETTLING_S:
        parser.error(f"--requests at --rate must take {5 * _SETTLING_S:.0f} s at least")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = serve_command((options.vllm, "serve"), options.model, port, options.budget, options.extra)
        launch = Launch(command, f"http://127.0.0.1:{port}", Path(folder) / "server.log")
        with running(launch, make_ui(quiet=True), "vllm"):
            compare(Bench(launch.url, options, Path(folder)), options.rounds)


if __name__ == "__main__":
    main()
