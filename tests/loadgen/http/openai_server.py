"""A small OpenAI-compatible server for whole commands: models, completions, chat, and a way to misbehave."""

import asyncio
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.loadgen.http.servers import DONE, STREAM_HEAD, Answer, Line, Log, Seen, chunk, fails, serving, whole

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 4096}]}


def healthy(first_s: float = 0.005, gap_s: float = 0.005, *, gap_of: Callable[[int], float] | None = None) -> Answer:
    """As many tokens and as much usage as asked for. `gap_of(number of the request)` replaces the gap."""

    async def answer(seen: Seen, line: Line) -> None:
        if seen.path == "/v1/models":
            await line.send(whole("200 OK", json.dumps(MODELS).encode()))
        elif seen.path in ("/v1/completions", "/v1/chat/completions"):
            await stream(seen, line, first_s, gap_s if gap_of is None else gap_of(seen.number))
        else:
            await line.send(fails("404 Not Found", "Not Found"))

    return answer


async def stream(seen: Seen, line: Line, first_s: float, gap_s: float) -> None:
    body, is_chat = seen.body, "chat" in seen.path
    prompt = len(body["messages"][0]["content"].split()) + 5 if is_chat else len(body["prompt"])
    wanted, options = int(body["max_tokens"]), body.get("stream_options", {})
    await line.send(STREAM_HEAD)
    for number in range(1, wanted + 1):
        finish = "length" if number == wanted else None
        content: dict[str, Any] = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
        event: dict[str, Any] = {"choices": [{"index": 0, **content, "finish_reason": finish}]}
        if options.get("continuous_usage_stats"):
            event["usage"] = {"prompt_tokens": prompt, "completion_tokens": number}
        await line.at(first_s + (number - 1) * gap_s, chunk(f"data: {json.dumps(event)}\n\n".encode()))
    usage = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": wanted}}
    tail = chunk(f"data: {json.dumps(usage)}\n\n".encode()) if options.get("include_usage") else b""
    await line.send(tail + chunk(DONE) + b"0\r\n\r\n")


@contextmanager
def openai_server(answer: Answer | None = None, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, Log]]:
    with serving(answer or healthy(), tls) as (url, log):
        yield url, log


def first_then(count: int, then: Answer, first: Answer | None = None) -> Answer:
    """Healthy for the first `count` requests, `then` for the others."""
    well = first or healthy()

    async def answer(seen: Seen, line: Line) -> None:
        await (well if seen.number < count else then)(seen, line)

    return answer


def always(response: bytes) -> Answer:
    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(response)

    return answer


def only_completions(response: bytes) -> Answer:
    """Lists its models and answers everything else with `response`."""
    well = healthy()

    async def answer(seen: Seen, line: Line) -> None:
        if seen.path == "/v1/models":
            await well(seen, line)
        else:
            await line.send(response)

    return answer


async def silent(_seen: Seen, _line: Line) -> None:
    await asyncio.sleep(60)
