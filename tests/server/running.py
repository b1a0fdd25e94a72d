"""Servers for tests: real ones on a real socket, in a thread of this process, over a tiny model or a scripted one."""

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.config.presets import PRESETS
from sarathi_tune.config.source import ModelSource
from sarathi_tune.engine.loop import Engine
from sarathi_tune.engine.plan import StepPlan
from sarathi_tune.errors import ExitCode
from sarathi_tune.loadgen.clock import SystemClock
from sarathi_tune.server import run
from sarathi_tune.server.engine_thread import Built
from sarathi_tune.server.settings import ServeConfig
from sarathi_tune.server.text import Text, WordText

DESCRIPTION = {"dtype": "none", "device": "cpu", "threads": 0, "attention": "none"}


@dataclass
class ScriptedExecutor:
    """Token `n` of an answer is `100 + n`. A step takes `step_s`, and waits while `gate` is closed."""

    step_s: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    fails_with: Exception | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def execute(self, plan: StepPlan) -> list[int]:
        assert self.gate.wait(20), "a test left the gate closed"
        time.sleep(self.step_s)
        if self.fails_with is not None:
            raise self.fails_with
        return [100 + len(piece.request.output) for piece in plan if piece.samples]


@dataclass
class Running:
    """A server that runs. `engine` may only be touched while it is idle; `lines` is what it said."""

    url: str
    client: httpx.Client
    engine: Engine
    lines: list[str]
    signals: run.Signals
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    ended: list[ExitCode | Exception]

    def post(self, path: str, **body: Any) -> httpx.Response:
        """JSON in ASCII, so that half a surrogate pair can be sent."""
        return self.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The documents of a stream that ends well."""
        return events_of(self.post(path, stream=True, **body).text)

    def metrics(self) -> dict[str, float]:
        """Every sample without its labels' engine and model: {"vllm:request_success_total{stop}": 2.0}."""
        return parse_metrics(self.client.get("/metrics").text)

    def send_signal(self, number: signal.Signals) -> None:
        """As if the process had got it."""
        self.loop.call_soon_threadsafe(self.signals.came, number)

    def join(self) -> ExitCode | Exception:
        """How the server ended."""
        self.thread.join(20)
        assert self.ended, "the server still runs"
        return self.ended[0]

    def wait_idle(self) -> None:
        """Return once nothing is in flight, and assert that the pool is whole."""
        wait_for(lambda: self.metrics()["vllm:num_requests_running"] == 0 and not self.engine.has_work)
        self.engine.check_idle()
        wait_for(lambda: self.metrics()["vllm:kv_cache_usage_perc"] == 0)


@contextmanager
def serving(
    config: ServeConfig, source: ModelSource, text: Text, build: Callable[[], Built] | None = None
) -> Iterator[Running]:
    """Run a server until the block ends."""
    built: list[Built] = []
    lines: list[str] = []
    ended: list[ExitCode | Exception] = []
    loops: list[tuple[asyncio.AbstractEventLoop, run.Signals]] = []
    started = threading.Event()

    def make() -> Built:
        built.append(build() if build else run.build_engine(config, source))
        return built[0]

    def say(line: str) -> None:
        lines.append(line)
        started.set()

    async def main(session: run.Session) -> ExitCode:
        signals = run.Signals()
        loops.append((asyncio.get_running_loop(), signals))
        return await run.run_session(session, make, signals)

    def in_thread(session: run.Session) -> None:
        try:
            ended.append(asyncio.run(main(session)))
        except Exception as error:
            ended.append(error)
        started.set()

    with run.bind(config.host, config.port) as listener:
        port = listener.getsockname()[1]
        session = run.Session(config, source, text, listener, say)
        thread = threading.Thread(target=in_thread, args=(session,))
        thread.start()
        assert started.wait(60), "the server didn't start"
        assert not ended, ended
        loop, signals = loops[0]
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
            running = Running(url, client, built[0].engine, lines, signals, loop, thread, ended)
            try:
                yield running
            finally:
                if thread.is_alive():
                    running.send_signal(signal.SIGTERM)
                    running.send_signal(signal.SIGTERM)
                thread.join(20)
        assert not thread.is_alive(), "the server doesn't end"


@contextmanager
def serving_script(
    executor: ScriptedExecutor, *, max_num_seqs: int = 4, num_pages: int = 64, **options: Any
) -> Iterator[Running]:
    """A server whose answers are scripted, over words."""
    source = ModelSource(PRESETS["smollm2-135m"])
    config = ServeConfig(port=0, token_budget=64, max_num_seqs=max_num_seqs, **options)
    engine = EngineConfig(64, max_num_seqs, num_pages, max_model_len=1024, prefix_cache=True)
    text = WordText(source.config.vocab_size, frozenset({2}))
    with serving(config, source, text, lambda: Built(Engine(engine, executor, SystemClock()), DESCRIPTION)) as running:
        yield running


def events_of(body: str) -> list[dict[str, Any]]:
    """The documents of a stream, which must end with [DONE]."""
    parts = body.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], parts[-2:]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def parse_metrics(text: str) -> dict[str, float]:
    """Samples by name; labels but engine and model are kept by value."""
    samples = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        name, _, labels = name.partition("{")
        pairs = dict(label.split("=", 1) for label in labels.rstrip("}").split(",") if label)
        kept = [pairs[key].strip('"') for key in sorted(pairs) if key not in ("engine", "model_name")]
        samples[f"{name}{{{','.join(kept)}}}" if kept else name] = float(value)
    return samples


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Return as soon as it is true."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.01)
