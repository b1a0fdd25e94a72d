"""Many clients: those that go away, those that are too many, and what is told to them when the server ends."""

import asyncio
import json
import random
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from sarathi_tune.errors import ExitCode, OutOfMemoryError
from sarathi_tune.server import run
from sarathi_tune.server.text import load_text
from tests.server.conftest import TinyModel, tiny_config
from tests.server.running import Running, ScriptedExecutor, events_of, serving, serving_script, wait_for

COMPLETIONS = "/v1/completions"


def counted(metrics: dict[str, float]) -> dict[str, float]:
    """Requests that ended, by reason."""
    prefix = "vllm:request_success_total{"
    return {name.removeprefix(prefix)[:-1]: count for name, count in metrics.items() if name.startswith(prefix)}


def ask(server: Running, **body: Any) -> httpx.Response:
    """On a connection of its own."""
    body = {"prompt": "w1 w2 w3", "max_tokens": 10, **body}
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as client:
        return client.post(COMPLETIONS, json=body)


async def leave_early(port: int, body: dict[str, Any], patience: int) -> tuple[int, int | None]:
    """Read at most `patience` bytes of an answer, then drop the connection. Returns the status and, if the answer was
    read to its end, its number of tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    got = b""
    while len(got) < patience:
        data = await reader.read(min(4096, patience - len(got)))
        if not data:
            break
        got += data
    writer.transport.abort()
    status = int(got[9:12]) if len(got) >= 12 else 0
    complete = b"data: [DONE]\n\n" in got
    return status, got.count(b'"finish_reason":') if complete else None


def test_two_hundred_clients_that_leave_at_random_leave_the_pool_whole(tiny: TinyModel) -> None:
    """Before the first token, in the middle, after the end; in the queue and while running; on a real model."""
    rng = random.Random(5)
    calls = []
    for _ in range(200):
        body = {
            "prompt": [rng.randrange(3, 264) for _ in range(rng.choice((1, 15, 16, 17, 80)))],
            "max_tokens": rng.choice((1, 4, 30)),
            "stream": rng.random() < 0.8,
            "ignore_eos": True,
        }
        calls.append((body, rng.choice((0, 1, 40, 600, 3000, 1 << 20))))

    async def all_of_them(port: int) -> list[tuple[int, int | None]]:
        return await asyncio.gather(*(leave_early(port, body, patience) for body, patience in calls))

    source = tiny.reference.source
    config = tiny_config(tiny, kv_tokens=512, token_budget=32, max_num_seqs=8)
    with serving(config, source, load_text(source)) as server:
        answers = asyncio.run(all_of_them(int(server.url.rsplit(":", 1)[1])))
        server.wait_idle()
        ends = counted(server.metrics())
        assert sum(ends.values()) <= 200, "no request ends twice"
        assert ends["abort"] > 20
        assert ends["length"] > 20
        assert ends["error"] == 0
        for (body, patience), (status, tokens) in zip(calls, answers, strict=True):
            assert status in ((200, 0) if patience < 12 else (200,))
            if patience == 1 << 20 and body["stream"]:
                assert tokens == body["max_tokens"]
        assert server.post(COMPLETIONS, prompt="the", max_tokens=2).status_code == 200
        server.wait_idle()


def test_a_client_that_leaves_frees_its_request_at_once() -> None:
    with serving_script(ScriptedExecutor(step_s=0.002)) as server:
        body = {"prompt": "w5 " * 100, "max_tokens": 900, "ignore_eos": True}
        with server.client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
            next(response.iter_bytes())
            assert server.metrics()["vllm:num_requests_running"] == 1
        server.wait_idle()
        with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=0.1) as client:
            client.post(COMPLETIONS, json=body)
        server.wait_idle()
        after = server.metrics()
        assert counted(after) == {"abort": 2, "error": 0, "length": 0, "stop": 0}
        assert after["vllm:generation_tokens_total"] < 900


def test_one_request_too_many_gets_429_and_is_told_when_to_come_back() -> None:
    executor = ScriptedExecutor()
    with serving_script(executor, max_num_seqs=2, max_queue=3) as server, ThreadPoolExecutor(8) as pool:
        executor.gate.clear()
        held = [pool.submit(ask, server) for _ in range(5)]
        wait_for(lambda: not_taken(server))
        refused = ask(server)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert server.client.get("/health").status_code == 200, "full is healthy"
        executor.gate.set()
        assert [future.result().status_code for future in held] == [200] * 5
        assert ask(server).status_code == 200
        server.wait_idle()


def not_taken(server: Running) -> bool:
    """Whether the server is full: a request that can't be served gets 400 until then."""
    return server.post(COMPLETIONS, prompt=7).status_code == 429


def test_what_waits_and_what_runs_is_shown() -> None:
    executor = ScriptedExecutor(step_s=0.001)
    with serving_script(executor, max_num_seqs=2) as server, ThreadPoolExecutor(8) as pool:
        held = [pool.submit(ask, server, max_tokens=400) for _ in range(5)]
        wait_for(lambda: server.metrics()["vllm:num_requests_waiting"] == 3)
        metrics = server.metrics()
        assert metrics["vllm:num_requests_running"] == 2
        assert 0 < metrics["vllm:kv_cache_usage_perc"] <= 1
        executor.step_s = 0.0
        assert {future.result().json()["usage"]["completion_tokens"] for future in held} == {400}
        server.wait_idle()


def test_concurrent_streams_get_their_own_answers() -> None:
    """Sixty at once: every one its own length, nothing mixed up, and the server's counts are the clients'."""
    with serving_script(ScriptedExecutor(), max_num_seqs=16) as server, ThreadPoolExecutor(60) as pool:

        def tokens(n: int) -> list[str]:
            events = events_of(ask(server, max_tokens=n, stream=True).text)
            return [event["choices"][0]["text"] for event in events]

        lengths = range(1, 61)
        for n, got in zip(lengths, pool.map(tokens, lengths), strict=True):
            assert got == [f" w{100 + index}" for index in range(n)]
        server.wait_idle()
        after = server.metrics()
        assert after["vllm:generation_tokens_total"] == sum(lengths)
        assert after["vllm:request_success_total{length}"] == 60
        assert after["vllm:prompt_tokens_total"] == 3 * 60


def test_a_graceful_stop_lets_answers_end_and_takes_no_new_ones() -> None:
    executor = ScriptedExecutor()
    with serving_script(executor) as server, ThreadPoolExecutor(4) as pool:
        executor.gate.clear()
        held = pool.submit(ask, server, max_tokens=50, stream=True)
        wait_for(lambda: server.engine.num_running == 1)
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: server.client.get("/health").status_code == 503)
        late = ask(server)
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "stopping"
        executor.gate.set()
        assert len(events_of(held.result().text)) == 50
        assert server.join() is ExitCode.MET
    assert any("Stopping: 1 requests may go on" in line for line in server.lines)


@pytest.mark.parametrize("stream", [False, True])
def test_what_runs_too_long_is_stopped_and_told(stream: bool) -> None:
    with serving_script(ScriptedExecutor(step_s=0.01), stop_timeout_s=0.1) as server, ThreadPoolExecutor(4) as pool:
        held = pool.submit(ask, server, max_tokens=900, stream=stream)
        wait_for(lambda: server.engine.num_running == 1)
        server.send_signal(signal.SIGINT)
        assert_told(held, stream, status=503, code="stopping")
        assert server.join() is ExitCode.INTERRUPTED
    assert "1 requests were stopped." in server.lines


def test_a_second_signal_does_not_wait() -> None:
    with serving_script(ScriptedExecutor(step_s=0.01), stop_timeout_s=60) as server, ThreadPoolExecutor(4) as pool:
        held = pool.submit(ask, server, max_tokens=900)
        wait_for(lambda: server.engine.num_running == 1)
        server.send_signal(signal.SIGINT)
        server.send_signal(signal.SIGINT)
        assert held.result().status_code == 503
        assert server.join() is ExitCode.INTERRUPTED


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_engine_fails_every_request_and_ends_the_server(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "FAILED_LINGER_S", 0.3)
    executor = ScriptedExecutor()
    with serving_script(executor) as server, ThreadPoolExecutor(4) as pool:
        executor.gate.clear()
        held = [pool.submit(ask, server, stream=stream) for _ in range(3)]
        wait_for(lambda: server.engine.num_running >= 1)  # all that came before the first step
        executor.fails_with = RuntimeError("the device fell off")
        executor.gate.set()
        for future in held:
            if future.result().status_code != 503:  # which came behind the failure
                assert_told(future, stream, status=500, code="engine_failed")
        assert server.client.get("/health").status_code == 503
        assert ask(server).json()["error"]["code"] == "engine_failed"
        error = server.join()
        assert isinstance(error, RuntimeError)
        assert str(error) == "the device fell off"


def test_a_step_that_needs_too_much_memory_has_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FAILED_LINGER_S", 0.0)
    with serving_script(ScriptedExecutor(fails_with=RuntimeError("CUDA out of memory. Tried to ..."))) as server:
        assert ask(server).status_code == 500
        error = server.join()
        assert isinstance(error, OutOfMemoryError)
        assert "--max-num-batched-tokens" in str(error)


def test_a_lost_page_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is checked whenever the engine has nothing to do."""
    monkeypatch.setattr(run, "FAILED_LINGER_S", 0.0)
    with serving_script(ScriptedExecutor()) as server:
        executor_pool = server.engine._queue.pool
        assert ask(server).status_code == 200
        server.wait_idle()
        executor_pool.allocate(1)
        with suppress(httpx.HTTPError):  # the pool may be looked at before this request, or behind it
            ask(server)
        assert isinstance(server.join(), AssertionError)


def assert_told(held: Future[httpx.Response], stream: bool, *, status: int, code: str) -> None:
    """The error object, as the response or as the last event of a stream that has no [DONE]."""
    response = held.result()
    if not stream:
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        return
    assert response.status_code == 200
    last = response.text.rstrip("\n").rsplit("\n\n", 1)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert "[DONE]" not in response.text


def test_preempted_requests_answer_as_if_they_had_not_been(tiny: TinyModel) -> None:
    """Eight answers of 100 tokens in a pool that holds two and a half: they wait, are preempted, and are right."""
    source = tiny.reference.source
    body = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}
    prompts = [[3 + index, 50, 60, 70] for index in range(8)]
    with serving(tiny_config(tiny), source, load_text(source)) as roomy:
        alone = [roomy.post(COMPLETIONS, prompt=prompt, **body).json()["choices"] for prompt in prompts]
    cramped = tiny_config(tiny, kv_tokens=256, max_model_len=128)
    with serving(cramped, source, load_text(source)) as server, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt=prompt, **body).json()["choices"], prompts))
        server.wait_idle()
        assert answers == alone
        assert server.metrics()["vllm:num_preemptions_total"] > 0


def test_the_engine_lives_in_one_thread_of_its_own() -> None:
    seen: set[str] = set()

    class Watching(ScriptedExecutor):
        def execute(self, plan: Any) -> list[int]:
            seen.add(threading.current_thread().name)
            return super().execute(plan)

    with serving_script(Watching()) as server, ThreadPoolExecutor(4) as pool:
        assert {future.status_code for future in pool.map(lambda _: ask(server), range(8))} == {200}
    assert seen == {"engine"}
