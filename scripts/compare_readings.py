"""Whether two clients read the same server alike: TTFT and ITL beside what the server itself wrote.

    python -m scripts.compare_readings --tokenizer MODEL_DIR --vllm VENV/bin/vllm

A real server answers the same load differently each time, so that two clients on it differ by what the server did.
Here the n-th request of a run is always answered by the same schedule: a first token after about 150 ms (some need
400), then a token about every 20 ms, of which 3 % stall for 200. The server notes when it had each request and when it
wrote each event; the first request of a run is either client's warm-up, and isn't noted. `vllm bench serve` and
`sarathi-tune verify` take turns with the same requests at the same constant rate, and each client's own p50 and p99, of
the file that it saves, stand beside those of the server's notes for the same run.

The server's notes begin with the request's last byte and end with the write, so that both clients' figures hold a
round trip on the same machine more.

Prints a table in Markdown.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from scripts.compare_clients import Peer, Stream, run_client

TOKENS = 64
PROMPT_TOKENS = 8
FIRST_MEDIAN_S, FIRST_SIGMA = 0.15, 0.4
GAP_MEDIAN_S, GAP_SIGMA = 0.02, 0.1
STALL_S, STALL_SHARE = 0.2, 0.03
FIGURES = ("median_itl_ms", "p99_itl_ms", "median_ttft_ms", "p99_ttft_ms")


def schedule(index: int) -> list[float]:
    """When the request's events are due, in seconds since it came."""
    rng = random.Random(index)
    first_s = FIRST_MEDIAN_S * rng.lognormvariate(0, FIRST_SIGMA)
    due_s = [first_s]
    for _ in range(TOKENS - 1):
        gap_s = STALL_S if rng.random() < STALL_SHARE else GAP_MEDIAN_S * rng.lognormvariate(0, GAP_SIGMA)
        due_s.append(due_s[-1] + gap_s)
    return due_s


@dataclass
class Notes:
    """What the server wrote, and when: of the requests that ask for `TOKENS` tokens, but for the first of a run. The
    others are no load."""

    requests: int = -1
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    under_way: set[asyncio.Task[None]] = field(default_factory=set)

    def begin(self, stream: Stream) -> None:
        came_s = time.perf_counter()
        has_schedule = stream.total == TOKENS
        is_load = has_schedule and self.requests >= 0
        due_s = schedule(self.requests) if has_schedule else [0.0] * stream.total
        self.requests += has_schedule
        task = asyncio.get_running_loop().create_task(self.answer(stream, came_s, due_s, is_load=is_load))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    async def answer(self, stream: Stream, came_s: float, due_s: list[float], *, is_load: bool) -> None:
        written_s: list[float] = []
        for after_s in due_s:
            await asyncio.sleep(max(0.0, came_s + after_s - time.perf_counter()))
            if not stream.left:
                return
            stream.left -= 1
            written_s.append(time.perf_counter())
            stream.transport.write(stream.event(is_last=not stream.left))
        if is_load:
            self.first_s.append(written_s[0] - came_s)
            self.gaps_s.extend(later - earlier for earlier, later in pairwise(written_s))

    def stats(self) -> bytes:
        """The percentiles of what was written since the last call."""
        read = {"completed": len(self.first_s), "gaps": len(self.gaps_s)}
        figures = dict(zip(FIGURES, (*middle_and_tail(self.gaps_s), *middle_and_tail(self.first_s)), strict=True))
        self.requests, self.first_s, self.gaps_s = -1, [], []
        return json.dumps(read | figures).encode()


def middle_and_tail(values_s: list[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds, interpolated as numpy does by default; zeros of fewer than two values."""
    if len(values_s) < 2:
        return 0.0, 0.0
    cuts = statistics.quantiles(values_s, n=100, method="inclusive")
    return cuts[49] * 1e3, cuts[98] * 1e3


async def serve() -> None:
    notes = Notes()
    server = await asyncio.get_running_loop().create_server(lambda: Peer(notes), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def vllm(url: str, options: argparse.Namespace, saved: Path) -> list[str]:
    return [
        *(options.vllm, "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--endpoint", "/v1/completions", "--model", "m", "--tokenizer", options.tokenizer),
        *("--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(TOKENS)),
        *("--num-prompts", str(options.requests), "--request-rate", str(options.rate), "--burstiness", "1000000"),
        *("--ignore-eos", "--disable-tqdm", "--num-warmups", "1", "--ready-check-timeout-sec", "0"),
        *("--save-result", "--result-dir", str(saved.parent), "--result-filename", saved.name),
    ]


def ours(url: str, options: argparse.Namespace, saved: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "sarathi_tune", "verify", "--target", url, "--slo-itl", "2s"),
        *("--workload", f"fixed:{PROMPT_TOKENS}:{TOKENS}", "--rate", str(options.rate), "--arrivals", "constant"),
        *("--seconds", f"{options.requests / options.rate:.6g}s", "--save-vllm", str(saved)),
    ]


CLIENTS = {"vllm bench serve": vllm, "sarathi-tune": ours}


def read_by(name: str, url: str, options: argparse.Namespace, scratch: Path) -> tuple[dict, dict]:
    """What the client saved of a run, and what the server noted. Raises RuntimeError when the client fails."""
    saved = scratch / "saved.json"
    saved.unlink(missing_ok=True)
    urllib.request.urlopen(f"{url}/stats").read()
    run_client(name, CLIENTS[name](url, options, saved))
    return json.loads(saved.read_text()), json.load(urllib.request.urlopen(f"{url}/stats"))


def beside(read_ms: float, written_ms: float) -> str:
    return f"{read_ms:.2f} ({(read_ms / written_ms - 1) * 100:+.1f} %)"


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--serve"]:
        asyncio.run(serve())
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--vllm", default="vllm")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    server = subprocess.Popen([sys.executable, "-m", "scripts.compare_readings", "--serve"], stdout=subprocess.PIPE)
    print("| round | client | requests | answered tokens | gaps | ITL p50, ms | ITL p99 | TTFT p50 | TTFT p99 |")
    print("|---|---|---|---|---|---|---|---|---|")
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(options.rounds):
                for name in CLIENTS:
                    read, written = read_by(name, url, options, Path(folder))
                    cells = " | ".join(beside(read[figure], written[figure]) for figure in FIGURES)
                    print(
                        f"| {turn + 1} | {name} | {read['completed']} of {written['completed']} "
                        f"| {read['total_output_tokens']:,} | {written['gaps']:,} | {cells} |",
                        flush=True,
                    )
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
