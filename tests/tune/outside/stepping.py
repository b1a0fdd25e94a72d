"""A server on a real socket whose steps follow a known schedule: one token budget, a price per step and per token."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tests.loadgen.http.servers import (
    DONE,
    STREAM_HEAD,
    Line,
    Log,
    Seen,
    chunk,
    serving,
    text_event,
    usage_event,
    whole,
)


@dataclass(eq=False)
class Running:
    """A request in the engine. `events` gets the number of tokens so far after each step that brought one."""

    prompt: int
    asked: int
    computed: int = 0
    output: int = 0
    last_s: float = 0.0
    is_gone: bool = False
    events: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


@dataclass(eq=False)
class SteppingServer:
    """The schedule: decodes first, then prompts, first come first served, never more than `budget` tokens in a step,
    `max_num_seqs` requests, and answers of `most_tokens`. `others` prompt tokens for each of ours are booked for
    somebody else. Its clock books each gap `clock` times."""

    budget: int
    step_s: float = 0.004
    token_s: float = 0.00005
    max_num_seqs: int = 64
    max_model_len: int = 2048
    has_metrics: bool = True
    others: float = 0.0
    clock: float = 1.0
    gaps: int = 0
    gaps_s: float = 0.0
    tokens_per_event: int = 1
    most_tokens: int = 1 << 20
    running: list[Running] = field(default_factory=list)
    waiting: deque[Running] = field(default_factory=deque)
    prompt_tokens: float = 0.0
    largest_step: int = 0
    loop: asyncio.Task[None] | None = None

    async def answer(self, seen: Seen, line: Line) -> None:
        if seen.path == "/v1/models":
            model = {"id": "m", "object": "model", "max_model_len": self.max_model_len}
            await line.send(whole("200 OK", json.dumps({"object": "list", "data": [model]}).encode()))
        elif seen.path == "/metrics" and self.has_metrics:
            await line.send(whole("200 OK", self.metrics().encode(), kind="text/plain"))
        elif seen.path == "/v1/completions":
            await self.complete(seen, line)
        else:
            await line.send(whole("404 Not Found", b"{}"))

    async def complete(self, seen: Seen, line: Line) -> None:
        request = Running(len(seen.body["prompt"]), min(seen.body["max_tokens"], self.most_tokens))
        self.waiting.append(request)
        if self.loop is None or self.loop.done():
            self.loop = asyncio.create_task(self.run())
        try:
            await line.send(STREAM_HEAD)
            while request.output < request.asked or not request.events.empty():
                count = await request.events.get()
                is_last = count >= request.asked
                await line.send(chunk(text_event("a", count, "length" if is_last else None)))
                if is_last:
                    break
            await line.send(chunk(usage_event(request.asked, request.prompt)) + chunk(DONE) + b"0\r\n\r\n")
        finally:
            request.is_gone = True

    async def run(self) -> None:
        while self.running or self.waiting:
            self.running = [request for request in self.running if not request.is_gone]
            while self.waiting and len(self.running) < self.max_num_seqs:
                self.running.append(self.waiting.popleft())
            left = self.budget
            plan: list[tuple[Running, int]] = []
            decodes = [request for request in self.running if request.computed >= request.prompt]
            prompts = [request for request in self.running if request.computed < request.prompt]
            for request in (*decodes, *prompts):
                count = min(left, max(1, request.prompt - request.computed))
                if count:
                    plan.append((request, count))
                    left -= count
            tokens = self.budget - left
            self.largest_step = max(self.largest_step, tokens)
            await asyncio.sleep(self.step_s + tokens * self.token_s)
            for request, count in plan:
                self.advance(request, count)

    def advance(self, request: Running, count: int) -> None:
        was_prompt = request.computed < request.prompt
        request.computed += count
        if request.computed < request.prompt:
            return
        if was_prompt:
            self.prompt_tokens += request.prompt * (1 + self.others)
        now_s = time.perf_counter()
        if request.output:
            self.gaps += 1
            self.gaps_s += self.clock * (now_s - request.last_s)
        request.last_s = now_s
        request.output += self.tokens_per_event
        request.events.put_nowait(min(request.output, request.asked))
        if request.output >= request.asked:
            request.is_gone = True

    def metrics(self) -> str:
        alive = sum(not request.is_gone for request in (*self.running, *self.waiting))
        return (
            f'vllm:num_requests_running{{engine="0"}} {float(alive)}\n'
            f'vllm:prompt_tokens_total{{engine="0"}} {self.prompt_tokens}\n'
            f'vllm:inter_token_latency_seconds_sum{{engine="0"}} {self.gaps_s}\n'
            f'vllm:inter_token_latency_seconds_count{{engine="0"}} {float(self.gaps)}\n'
        )


@contextmanager
def stepping(server: SteppingServer) -> Iterator[tuple[str, Log]]:
    """The server for as long as this is open; yields its URL and its log."""

    async def answer(seen: Seen, line: Line) -> None:
        with suppress(ConnectionError):
            await server.answer(seen, line)

    with serving(answer) as (url, log):
        yield url, log
