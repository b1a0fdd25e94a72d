"""The event loop's side of the engine: takes requests in, hands their tokens out as text, and counts both.

Everything here runs on the event loop. The engine's thread is reached through its queue, and its messages come in
through `receive`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from sarathi_tune.config.engine import EngineConfig
from sarathi_tune.engine.loop import Emission
from sarathi_tune.engine.request import Request, Sampling
from sarathi_tune.server import refusals
from sarathi_tune.server.calls import Call
from sarathi_tune.server.detokenise import AnswerText, FinishReason
from sarathi_tune.server.engine_thread import Failed, Idle, Message, Ready, Refused, Stepped
from sarathi_tune.server.metrics import EndReason, ServerMetrics
from sarathi_tune.server.record import StepRecord
from sarathi_tune.server.refusals import ApiError
from sarathi_tune.server.text import Text

#: Tokens of the prompt that decide how the first ones of the answer are written.
_TOKENS_BEFORE = 6
_SEED_BITS = 63


class Worker(Protocol):
    """What the desk needs of the engine's thread."""

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def abort(self, request_id: int) -> None:
        """Take a request out; one that is gone is no error."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token gave: its text (empty while a character or a stop string is incomplete), how many tokens the
    answer has with it, and why the answer ends, if it does."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None


class Ticket:
    """One request in flight, as whoever answers the client sees it. `num_cached`: prompt tokens that came from the
    prefix cache, known with the first piece."""

    def __init__(self, request: Request, answer: AnswerText, arrival_s: float) -> None:
        self.request = request
        self.answer = answer
        self.arrival_s = arrival_s
        self.last_s = arrival_s
        self.num_tokens = 0
        self.num_cached = 0
        self.is_open = True
        self._pieces: list[Piece] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Piece]:
        """The pieces since the last call, at least one; the last piece has a finish reason. Empty when the request was
        cancelled. Raises ApiError when it failed."""
        while not self._pieces and self.is_open:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._pieces and self._error is not None:
            raise self._error
        pieces, self._pieces = self._pieces, []
        return pieces

    def put(self, piece: Piece) -> None:
        """Another piece."""
        self._pieces.append(piece)
        self._wake()

    def close(self, error: ApiError | None = None) -> None:
        """Nothing more will come."""
        self.is_open = False
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Desk:
    """The requests in flight. `limit` of them are taken, running and waiting together; what comes then is refused."""

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        text: Text,
        metrics: ServerMetrics,
        *,
        max_queue: int,
        seed: int = 0,
        record: StepRecord | None = None,
    ) -> None:
        self.config = config
        self.limit = config.max_num_seqs + max_queue
        self.state: Literal["serving", "stopping", "failed"] = "serving"
        self.error: Exception | None = None
        self.failed = asyncio.Event()
        self._worker = worker
        self._text = text
        self._metrics = metrics
        self._record = record
        self._seeds = Random(seed)
        self._tickets: dict[int, Ticket] = {}
        self._num_requests = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return len(self._tickets)

    def check_open(self) -> None:
        """Raise ApiError when nothing is taken now: the server stops, has failed, or is full."""
        if self.state == "stopping":
            raise refusals.stopping()
        if self.state == "failed":
            raise refusals.engine_gone()
        if len(self._tickets) >= self.limit:
            raise refusals.queue_full(self.limit)

    def open(self, call: Call, prompt: Sequence[int], arrival_s: float) -> Ticket:
        """Give a request to the engine. Raises ApiError when it isn't taken."""
        self.check_open()
        max_tokens = self._output_tokens(call, len(prompt))
        stops = call.stop_token_ids | (frozenset() if call.ignore_eos else self._text.stop_token_ids)
        seed = self._seeds.getrandbits(_SEED_BITS) if call.seed is None else call.seed
        self._num_requests += 1
        request = Request(
            request_id=self._num_requests,
            prompt=prompt,
            max_output_tokens=max_tokens,
            arrival_s=arrival_s,
            sampling=Sampling(call.temperature, seed),
            stop_token_ids=stops,
        )
        before = prompt[-_TOKENS_BEFORE:] if call.kind == "completion" else ()
        answer = AnswerText(self._text.decode, before=before, stops=call.stop, stop_token_ids=stops)
        ticket = Ticket(request, answer, arrival_s)
        self._tickets[request.request_id] = ticket
        self._empty.clear()
        self._worker.add(request)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """The client is gone: free what the request holds. Nothing happens to one that has ended."""
        if ticket.is_open:
            self._drop(ticket, "abort")

    def cancel_all(self) -> None:
        """Take every request out and tell its client that the server stops."""
        for ticket in list(self._tickets.values()):
            self._drop(ticket, "abort", refusals.stopping())

    def stop_taking(self) -> None:
        """Refuse new requests from now on; those in flight go on."""
        if self.state == "serving":
            self.state = "stopping"

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when that takes longer."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def receive(self, message: Message) -> None:
        """A message of the engine's thread."""
        match message:
            case Stepped():
                self._step(message)
            case Idle(num_free_pages):
                self._metrics.idle(num_free_pages)
            case Refused(request_id, reason):
                ticket = self._tickets.get(request_id)
                if ticket is not None:
                    self._drop(ticket, "error", refusals.bad_request(reason))
            case Failed(error):
                self._fail(error)
            case Ready():
                pass

    def _output_tokens(self, call: Call, prompt_tokens: int) -> int:
        """How long the answer may be, within the context."""
        context, name = self.config.max_model_len, call.prompt_field
        if prompt_tokens == 0:
            raise refusals.bad_request(f"{name} is empty: send at least one token.", name)
        if prompt_tokens >= context:
            raise refusals.too_long(
                f"The prompt has {prompt_tokens} tokens and the context is {context}: send at most {context - 1}.", name
            )
        room = context - prompt_tokens
        if call.max_tokens is not None and call.max_tokens > room:
            raise refusals.too_long(
                f"The request needs {prompt_tokens + call.max_tokens} tokens (prompt {prompt_tokens}, answer "
                f"{call.max_tokens}) and the context is {context}: ask for at most {room}.",
                "max_tokens",
            )
        return call.max_tokens or room

    def _step(self, message: Stepped) -> None:
        result = message.result
        if self._record is not None:
            self._record.add(result)
        self._metrics.step(
            result.shape.num_tokens,
            result.num_running,
            result.num_waiting,
            result.num_preempted,
            message.num_free_pages,
        )
        num_delivered = 0
        for emission in result.emissions:
            ticket = self._tickets.get(emission.request.request_id)
            if ticket is not None:  # else its client went away while the step ran
                self._deliver(ticket, emission, result.end_s)
                num_delivered += 1
        self._metrics.tokens(num_delivered)

    def _deliver(self, ticket: Ticket, emission: Emission, now_s: float) -> None:
        request = ticket.request
        if ticket.num_tokens == 0:
            ticket.num_cached = request.num_cached
            cached = request.num_cached if self.config.prefix_cache else None
            self._metrics.first_token(now_s - ticket.arrival_s, len(request.prompt), cached)
        else:
            self._metrics.next_token(now_s - ticket.last_s)
        ticket.num_tokens += 1
        ticket.last_s = now_s
        try:
            text, reason = ticket.answer.push(emission.token_id, is_last=emission.is_last)
        except Exception as error:  # a tokenizer that can't write a token spoils one answer, not the server
            self._drop(ticket, "error", refusals.defect(error))
            return
        ticket.put(Piece(text, ticket.num_tokens, reason))
        if reason is not None:
            self._metrics.answered(reason, now_s - ticket.arrival_s, len(request.prompt), ticket.num_tokens)
            self._close(ticket)
            if not emission.is_last:  # a stop string, which the engine doesn't know of
                self._worker.abort(request.request_id)

    def _drop(self, ticket: Ticket, reason: EndReason, error: ApiError | None = None) -> None:
        """End a request without its whole answer."""
        self._metrics.ended(reason)
        self._close(ticket, error)
        self._worker.abort(ticket.request.request_id)

    def _close(self, ticket: Ticket, error: ApiError | None = None) -> None:
        del self._tickets[ticket.request.request_id]
        ticket.close(error)
        if not self._tickets:
            self._empty.set()

    def _fail(self, error: Exception) -> None:
        self.state, self.error = "failed", error
        for ticket in list(self._tickets.values()):
            self._metrics.ended("error")
            self._close(ticket, refusals.engine_failed(f"{type(error).__name__}: {error}"))
        self.failed.set()
