"""What each load generator makes of the same streams: events per second, and per second of its CPU time.

    python scripts/compare_clients.py --tokenizer MODEL_DIR --vllm VENV/bin/vllm --guidellm VENV/bin/guidellm

A server that does nothing but emit events runs in a process of its own. Each client takes `--streams` answers at once,
of `--events` events each, twice: with few events and with many. The difference of the two runs leaves the client's
start, its imports and its requests out; what remains is what an event costs it, in CPU time of all its processes.
The clients take turns, `--rounds` times, and each figure is the median of the rounds.

    paced   every stream gets 20 events a second
    flood   events as fast as the client takes them: events per second is what it takes with the server beside it,
            which writes 16 at once, so that it isn't the slower one

The kernel's buffers hold seconds of events, so that when the server has written its last says nothing; the time is
that of the client's whole process, from the difference of the two runs as well.

Prints a table in Markdown, and one line of JSON at the end.
"""

import argparse
import asyncio
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
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

PACE_PER_S = 20.0
FLOOD_BATCH = 16
#: No client takes less than this for an event, in microseconds: a smaller difference is noise.
LEAST_EVENT_US = 0.1


# -- the server


class Answers(Protocol):
    """What answers the requests of all connections."""

    def begin(self, stream: "Stream") -> None: ...

    def stats(self) -> bytes: ...


class Emitter:
    """All streams under way, and what was written to them."""

    def __init__(self, pace_per_s: float | None) -> None:
        self.pace_per_s = pace_per_s
        self.streams: list[Stream] = []
        self.events = 0

    async def run(self) -> None:
        due_s = time.perf_counter()
        while True:
            if self.pace_per_s is None:
                await asyncio.sleep(0 if self.streams else 0.002)
            else:
                due_s += 1 / self.pace_per_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            for stream in self.streams:
                self.emit(stream)
            self.streams = [stream for stream in self.streams if stream.left]

    def begin(self, stream: "Stream") -> None:
        self.streams.append(stream)

    def emit(self, stream: "Stream") -> None:
        if stream.is_full:
            return
        events: list[bytes] = []
        while stream.left and len(events) < (1 if self.pace_per_s else FLOOD_BATCH):
            stream.left -= 1
            events.append(stream.event(is_last=not stream.left))
        self.events += len(events)
        stream.transport.write(b"".join(events))

    def stats(self) -> bytes:
        report = {"events": self.events}
        self.events = 0
        return json.dumps(report).encode()


class Stream:
    """One answer."""

    def __init__(self, transport: asyncio.Transport, body: dict[str, Any], is_chat: bool) -> None:
        self.transport, self.is_full = transport, False
        self.total = self.left = int(body.get("max_tokens") or body.get("max_completion_tokens") or 1)
        self.has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.is_continuous = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
        self.content = b'"delta":{"content":" a"}' if is_chat else b'"text":" a"'
        self.kind = b"chat.completion.chunk" if is_chat else b"text_completion"

    def event(self, *, is_last: bool) -> bytes:
        finish = b'"length"' if is_last else b"null"
        usage = self.usage(self.total - self.left) if self.is_continuous else b""
        head = b'data: {"id":"c-1","object":"%b","created":1,"model":"m",' % self.kind
        data = head + b'"choices":[{"index":0,%b,"finish_reason":%b}]' % (self.content, finish)
        events = data + usage + b"}\n\n"
        if is_last:
            if self.has_usage:
                events += head + b'"choices":[]' + self.usage(self.total) + b"}\n\n"
            events += b"data: [DONE]\n\n"
        return b"%x\r\n%b\r\n" % (len(events), events) + (b"0\r\n\r\n" if is_last else b"")

    def usage(self, count: int) -> bytes:
        return b',"usage":{"prompt_tokens":8,"completion_tokens":%d,"total_tokens":%d}' % (count, count + 8)


class Peer(asyncio.Protocol):
    """A client's connection."""

    def __init__(self, emitter: Answers) -> None:
        self.emitter, self.received = emitter, b""
        self.stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self.stream is not None:
            self.stream.left = 0

    def pause_writing(self) -> None:
        if self.stream is not None:
            self.stream.is_full = True

    def resume_writing(self) -> None:
        if self.stream is not None:
            self.stream.is_full = False

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, rest = self.received.partition(b"\r\n\r\n")
        if not found:
            return
        first, *rows = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
        size = int(headers.get("content-length", "0"))
        if len(rest) < size:
            return
        self.received = rest[size:]
        path = first.split(" ")[1]
        if path.startswith("/v1/") and path.endswith("completions"):
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            self.stream = Stream(self.transport, json.loads(rest[:size]), "chat" in path)
            self.emitter.begin(self.stream)
            return
        models = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 1 << 20}]}
        body = self.emitter.stats() if path == "/stats" else json.dumps(models if path == "/v1/models" else {}).encode()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )


async def serve(pace_per_s: float | None) -> None:
    emitter = Emitter(pace_per_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Peer(emitter), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await emitter.run()


# -- the clients


@dataclass(frozen=True)
class Load:
    """So many answers at once, of so many events each."""

    url: str
    streams: int
    events: int
    options: argparse.Namespace
    scratch: Path


def ours(load: Load) -> list[str]:
    return [sys.executable, __file__, "--drive", load.url, str(load.streams), str(load.events)]


def drive(url: str, streams: int, events: int) -> None:
    """sarathi-tune's client, in one worker process."""
    from sarathi_tune.loadgen.http.client import HttpSettings
    from sarathi_tune.loadgen.http.openai import Dialect
    from sarathi_tune.loadgen.http.target import parse_target
    from sarathi_tune.loadgen.http.worker import run_http_load
    from sarathi_tune.loadgen.inprocess import TimedRequest
    from sarathi_tune.loadgen.latency import failure_of
    from sarathi_tune.workload.spec import RequestSpec

    requests = [TimedRequest(RequestSpec(index, range(8), events), 0.0) for index in range(streams)]
    settings = HttpSettings(workers=1, stop_after_s=1.0, drain_s=500.0)
    result = run_http_load(parse_target(url), Dialect("m"), requests, settings)
    assert not any(failure_of(record) for record in result.records), "every stream ends well"
    assert sum(len(record.token_s) for record in result.records) == streams * events


def vllm(load: Load) -> list[str]:
    return [
        *(load.options.vllm, "bench", "serve", "--backend", "openai", "--base-url", load.url),
        *("--endpoint", "/v1/completions", "--model", "m", "--tokenizer", load.options.tokenizer),
        *("--dataset-name", "random", "--random-input-len", "8", "--random-output-len", str(load.events)),
        *("--num-prompts", str(load.streams), "--request-rate", "inf", "--ignore-eos", "--disable-tqdm"),
        *("--ready-check-timeout-sec", "0"),
    ]


def guidellm(load: Load) -> list[str]:
    return [
        *(load.options.guidellm, "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={load.url},model=m,request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={load.streams}"),
        *("--constraint", f"kind=max_requests,count={load.streams}"),
        *("--tokenizer", f"kind=huggingface_auto,model={load.options.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=8,output_tokens={load.events}"),
        *("--output", f"kind=json,path={load.scratch / 'guidellm.json'}"),
    ]


CLIENTS = {"sarathi-tune": ours, "vllm bench serve": vllm, "guidellm": guidellm}


@dataclass(frozen=True)
class Run:
    """What one run of a client took."""

    events: int
    wall_s: float
    cpu_s: float


def run_client(name: str, command: Sequence[str]) -> None:
    """Run a client to its end. Raises RuntimeError, with the last of what it printed, when it fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def run(name: str, load: Load) -> Run:
    """Run a client. Raises RuntimeError when it fails, or leaves events that nobody wanted."""
    urllib.request.urlopen(f"{load.url}/stats").read()
    before, started_s = os.times(), time.perf_counter()
    run_client(name, CLIENTS[name](load))
    after, wall_s = os.times(), time.perf_counter() - started_s
    stats = json.load(urllib.request.urlopen(f"{load.url}/stats"))
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Run(stats["events"], wall_s, cpu_s)


def measure(mode: str, options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """The clients in turns against a server in one mode: a row for each, the median of the rounds."""
    server = subprocess.Popen([sys.executable, __file__, "--serve", mode], stdout=subprocess.PIPE, text=True)
    names = options.clients.split(",")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        for turn in range(options.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                found[name].append(row(name, mode, url, options, scratch))
    finally:
        server.terminate()
        server.wait()
    return [middle(rows) for rows in found.values()]


def row(name: str, mode: str, url: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    few, many = (options.events, 6 * options.events) if mode == "flood" else (options.events // 5, options.events)
    short = run(name, Load(url, options.streams, few, options, scratch))
    long = run(name, Load(url, options.streams, many, options, scratch))
    more = long.events - short.events
    return {
        "client": name,
        "mode": mode,
        "events": long.events,
        "asked": options.streams * many,
        "events_per_s": more / (long.wall_s - short.wall_s),
        "us_per_event": (long.cpu_s - short.cpu_s) / more * 1e6,
    }


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row for several rounds, and how far they lay apart. Where the two runs of a round differ by less CPU time
    than a client's start does from one time to the next, an event's share is unknown (None): more events tell it."""
    times = sorted(row["us_per_event"] for row in rows)
    middle_us = statistics.median(times)
    time_us = middle_us if middle_us > LEAST_EVENT_US else None
    return rows[0] | {
        "events": min(row["events"] for row in rows),
        "events_per_s": statistics.median(row["events_per_s"] for row in rows),
        "events_per_cpu_s": 1e6 / time_us if time_us else None,
        "us_per_event": time_us,
        "us_per_event_range": [times[0], times[-1]],
    }


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--serve"]:
        asyncio.run(serve(None if arguments[1] == "flood" else PACE_PER_S))
        return
    if arguments[:1] == ["--drive"]:
        drive(arguments[1], int(arguments[2]), int(arguments[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--vllm", default="vllm")
    parser.add_argument("--guidellm", default="guidellm")
    parser.add_argument("--clients", default=",".join(CLIENTS))
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--modes", default="paced,flood")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    print("| mode | client | events (asked) | events/s | events per CPU second | CPU per event | rounds |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for found in chain.from_iterable(measure(mode, options, Path(folder)) for mode in options.modes.split(",")):
            rows.append(found)
            lowest, highest = found["us_per_event_range"]
            time_us = found["us_per_event"]
            cost = "? | ?" if time_us is None else f"{found['events_per_cpu_s']:,.0f} | {time_us:.1f} µs"
            print(
                f"| {found['mode']} | {found['client']} | {found['events']:,} ({found['asked']:,}) | "
                f"{found['events_per_s']:,.0f} | {cost} | "
                f"{lowest:.1f} to {highest:.1f} |",
                flush=True,
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
