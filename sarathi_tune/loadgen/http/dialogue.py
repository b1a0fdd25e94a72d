"""Requests one after the other, each decided upon when the last one's answer is known: for measuring, not for loading.

The socket is the same as in a run under load (`wire`): every read is stamped at its arrival, and events are read from
the stamps afterwards. An answer can be given up in the middle, which tells the server to free its request.
"""

import asyncio
import contextlib
from types import TracebackType

import httpx

from sarathi_tune.errors import TargetError
from sarathi_tune.loadgen.http.failures import describe_status, describe_unstreamed
from sarathi_tune.loadgen.http.openai import Dialect
from sarathi_tune.loadgen.http.reading import Reading, read_stream
from sarathi_tune.loadgen.http.target import Target
from sarathi_tune.loadgen.http.wire import WIRE, StampingTransport, Timeouts, Wire
from sarathi_tune.workload.spec import RequestSpec

_POLL_S = 0.01


class Answer:
    """A request that was sent, and what has come for it. Stamps are seconds of `time.perf_counter`."""

    def __init__(self, spec: RequestSpec, sent_s: float, task: "asyncio.Task[None]") -> None:
        self.spec = spec
        self.sent_s = sent_s
        self.wire: Wire | None = None
        self.refusal: TargetError | None = None
        self._task = task

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._task.done()

    @property
    def num_reads(self) -> int:
        """Reads of the socket so far: about one per event, at no cost."""
        return 0 if self.wire is None else len(self.wire.reads)

    @property
    def num_kernel_stamped(self) -> int:
        """How many of them the kernel told the arrival of."""
        return 0 if self.wire is None else self.wire.kernel_stamped_reads

    def reading(self) -> Reading:
        """The events until now; an answer that still runs, or was given up, reads as truncated."""
        return read_stream(self.wire.reads) if self.wire is not None else Reading("truncated")

    async def ended(self) -> None:
        """Wait for the end. Raises TargetError when the server refused the request or broke off."""
        await asyncio.wait({self._task})
        self.check()

    def check(self) -> None:
        """Raise the TargetError of an answer that failed."""
        if self.refusal is not None:
            raise self.refusal

    async def give_up(self) -> None:
        """Close the connection: the server frees the request. One that has ended stays as it is."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class Dialogue:
    """An open line to a server, as an async context manager; leaving it gives up whatever still runs."""

    def __init__(self, target: Target, dialect: Dialect, timeouts: Timeouts | None = None) -> None:
        self._target, self._dialect = target, dialect
        self._client = httpx.AsyncClient(
            transport=StampingTransport(timeouts or Timeouts()), trust_env=False, timeout=None
        )
        self._answers: set[Answer] = set()

    async def __aenter__(self) -> "Dialogue":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for answer in list(self._answers):
            await answer.give_up()
        await self._client.aclose()

    def send(self, *specs: RequestSpec) -> tuple[Answer, ...]:
        """Send requests, all in the same moment: their bodies are built before the first one goes out."""
        url = self._target.base_url + self._dialect.path
        headers = {**self._target.headers, "content-type": "application/json"}
        requests = [httpx.Request("POST", url, headers=headers, content=self._dialect.content(spec)) for spec in specs]
        return tuple(self._start(spec, request) for spec, request in zip(specs, requests, strict=True))

    async def metrics(self) -> str | None:
        """The text of the server's `/metrics`; None where there is none."""
        try:
            response = await self._client.get(f"{self._target.root_url}/metrics", headers=self._target.headers)
        except httpx.HTTPError:
            return None
        kind = response.headers.get("content-type", "")
        return response.text if response.status_code == 200 and "html" not in kind else None

    def _start(self, spec: RequestSpec, request: httpx.Request) -> Answer:
        loop = asyncio.get_running_loop()
        holder: list[Answer] = []

        async def follow() -> None:
            await self._follow(holder[0], request)

        answer = Answer(spec, 0.0, loop.create_task(follow()))
        holder.append(answer)
        self._answers.add(answer)
        return answer

    async def _follow(self, answer: Answer, request: httpx.Request) -> None:
        url = self._target.base_url
        try:
            response = await self._client.send(request, stream=True)
            wire: Wire = response.extensions[WIRE]
            answer.wire, answer.sent_s = wire, wire.sent_s
            try:
                await wire.ended
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            said = self._target.redact(str(error)).rstrip(".")
            answer.refusal = TargetError(f"{url} failed while it was measured: {said}.")
            return
        finally:
            self._answers.discard(answer)
        if response.status_code != 200:
            said = self._target.redact(describe_status(response.status_code, response.headers, wire.body))
            answer.refusal = TargetError(
                f"{url} refused a prompt of {answer.spec.prompt_tokens:,} tokens while it was measured: {said}."
            )
            return
        unstreamed = describe_unstreamed(response.headers, wire.body)
        if unstreamed is not None or wire.error is not None:
            said = unstreamed or str(wire.error).rstrip(".")
            answer.refusal = TargetError(f"{url} broke off while it was measured: {self._target.redact(said)}.")
