"""The routes: what comes in over HTTP, and what goes out."""

import asyncio
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sarathi_tune import __version__
from sarathi_tune.server import refusals
from sarathi_tune.server.calls import Call, Kind, parse_call
from sarathi_tune.server.desk import Desk, Piece, Ticket
from sarathi_tune.server.fields import read_object
from sarathi_tune.server.metrics import CONTENT_TYPE, ServerMetrics
from sarathi_tune.server.refusals import ApiError
from sarathi_tune.server.replies import Reply, event
from sarathi_tune.server.text import Text

#: More than the longest context has as text; what is longer isn't read.
MAX_BODY_BYTES = 16 << 20
#: A longer prompt is turned into tokens beside the event loop, which would stand still for milliseconds.
_LONG_TEXT = 2_000
_MAX_ID = 100


@dataclass(frozen=True, slots=True)
class Service:
    """All that the routes need. `names`: what clients may call the model, the one it is listed under first."""

    desk: Desk
    text: Text
    metrics: ServerMetrics
    names: tuple[str, ...]
    vocab_size: int
    started: int
    api_key: str | None = None


def make_app(service: Service) -> ASGIApp:
    """The ASGI application."""
    routes = _Routes(service)
    app = Starlette(
        routes=[
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/health", routes.health),
            Route("/ping", routes.health),
            Route("/version", routes.version),
            Route("/metrics", routes.metrics),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _defect},
    )
    return _Guard(app, service.api_key)


class _Guard:
    """Lets nobody without the key to /v1, and turns what is left unhandled into an error object."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and not self._knows(scope):
            await _refuse(refusals.no_key())(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        if self._expected is None:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


class _Routes:
    """One method per route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        return await self._answer("completion", request)

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        return await self._answer("chat", request)

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model_card())

    async def health(self, _: Request) -> Response:
        """GET /health: 200 while requests are taken, else 503."""
        state = self._service.desk.state
        return JSONResponse({"status": state}, status_code=200 if state == "serving" else 503)

    async def version(self, _: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__, "server": "sarathi-tune"})

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        return Response(self._service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _answer(self, kind: Kind, request: Request) -> ASGIApp:
        arrival_s = time.perf_counter()
        service = self._service
        service.desk.check_open()
        try:
            call = parse_call(kind, read_object(await _body(request)), service.vocab_size)
        except ClientDisconnect:
            return Response(status_code=499)
        self._check_model(call.model)
        prompt = await self._encode(call)
        ticket = service.desk.open(call, prompt, arrival_s)
        reply = Reply(call, ticket, _reply_id(kind, request), call.model or service.names[0], int(time.time()))
        return _Stream(service.desk, reply) if call.stream else _Whole(service.desk, reply)

    async def _encode(self, call: Call) -> tuple[int, ...]:
        text = self._service.text
        if call.kind == "completion" and not isinstance(call.prompt, str):
            return call.prompt  # type: ignore[return-value]
        encode: Callable[[Any], list[int]] = text.encode if call.kind == "completion" else text.encode_chat
        if _size(call.prompt) > _LONG_TEXT:
            return tuple(await asyncio.to_thread(encode, call.prompt))
        return tuple(encode(call.prompt))

    def _check_model(self, name: str | None) -> None:
        """Without a name the only model is meant."""
        if name is not None and name not in self._service.names:
            raise refusals.unknown_model(name, self._service.names[0])

    def _model_card(self) -> dict[str, Any]:
        name = self._service.names[0]
        return {
            "id": name,
            "object": "model",
            "created": self._service.started,
            "owned_by": "sarathi-tune",
            "root": name,
            "parent": None,
            "max_model_len": self._service.desk.config.max_model_len,
        }


class _Answer:
    """Answers one request, and takes it out of the engine when its client goes away first."""

    def __init__(self, desk: Desk, reply: Reply) -> None:
        self._desk = desk
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ticket = self._reply.ticket
        watch = asyncio.create_task(self._watch(receive, ticket))
        try:
            await self._send(scope, receive, send)
        finally:
            watch.cancel()
            self._desk.cancel(ticket)

    async def _watch(self, receive: Receive, ticket: Ticket) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._desk.cancel(ticket)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class _Whole(_Answer):
    """The answer in one document."""

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[Piece] = []
        try:
            while not pieces or pieces[-1].finish_reason is None:
                more = await self._reply.ticket.take()
                if not more:
                    return
                pieces += more
        except ApiError as error:
            await _refuse(error)(scope, receive, send)
            return
        await JSONResponse(self._reply.document(pieces))(scope, receive, send)


class _Stream(_Answer):
    """The answer as server-sent events. What fails behind the first byte ends the stream with an error event and
    without [DONE]."""

    _HEADERS = (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    )

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": 200, "headers": self._HEADERS})
        try:
            while pieces := await self._reply.ticket.take():
                is_end = pieces[-1].finish_reason is not None
                await _body_part(send, self._reply.events(pieces), more=not is_end)
                if is_end:
                    return
        except ApiError as error:
            await _body_part(send, event(error.as_dict()), more=False)


async def _body_part(send: Callable[[Any], Awaitable[None]], body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _body(request: Request) -> bytes:
    """The body, as long as it isn't too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise refusals.body_too_large(MAX_BODY_BYTES)
        parts.append(part)
    return b"".join(parts)


def _size(prompt: Any) -> int:
    """Characters of a text or of all messages."""
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


def _reply_id(kind: Kind, request: Request) -> str:
    """With the client's own id in it, if it sent one that can be shown."""
    given = request.headers.get("x-request-id", "")
    own = given if given.isascii() and given.isprintable() and 0 < len(given) <= _MAX_ID else uuid.uuid4().hex
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{own}"


def _refuse(error: ApiError) -> Response:
    return JSONResponse(error.as_dict(), status_code=error.status, headers=dict(error.headers))


def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _refuse(error)


def _http_error(request: Request, error: Exception) -> Response:
    """What starlette refuses by itself: no such route, or another method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        return _refuse(refusals.wrong_method(request.method, path, (error.headers or {}).get("Allow", "another")))
    return _refuse(refusals.unknown_path(path))


def _defect(_: Request, error: Exception) -> Response:
    return _refuse(refusals.defect(error))
