"""Before the load: is the server there, which model does it serve, and what does it accept? Each failure is one
sentence that says what to do."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from sarathi_tune.errors import TargetError
from sarathi_tune.loadgen.http.failures import describe_unstreamed, message_in
from sarathi_tune.loadgen.http.openai import Dialect, Endpoint
from sarathi_tune.loadgen.http.reading import Reading, read_stream
from sarathi_tune.loadgen.http.target import KEY_VARIABLES, Target
from sarathi_tune.loadgen.http.wire import WIRE, StampingTransport, Timeouts
from sarathi_tune.workload.spec import RequestSpec

#: The probes' own prompts: no request of a run begins like them.
_PROBE_IDS = (7, 11, 13, 17, 19, 23, 29, 31)
_PROBE_OUTPUT = 4
#: What engines call themselves in their list of models; anything else there is an organisation or a gateway.
_ENGINES = ("vllm", "sglang", "llamacpp", "lmdeploy", "tensorrt_llm", "sarathi-tune")
#: Lengths whose difference tells how many tokens a word is.
_CALIBRATION_WORDS = (32, 160)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the probe found. `max_model_len` is None where the server doesn't say; `server` is the engine if it says
    which, else the web server, and `version` the engine's."""

    dialect: Dialect
    models: tuple[str, ...]
    max_model_len: int | None
    server: str
    version: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The facts as they stand in a result document."""
        version = {"server_version": self.version} if self.version else {}
        return {**self.dialect.as_dict(), "max_model_len": self.max_model_len, "server": self.server, **version}


def probe(
    target: Target,
    *,
    model: str | None = None,
    endpoint: Endpoint | None = None,
    timeouts: Timeouts | None = None,
) -> ServerFacts:
    """Ask for the models, then send one tiny request, with fewer and fewer extensions until the server takes it.

    Raises TargetError with the sentence for the user.
    """
    return asyncio.run(_Probe(target, timeouts or Timeouts(first_byte_s=60.0)).run(model, endpoint))


def read_metrics(target: Target, timeouts: Timeouts | None = None) -> str | None:
    """The text of the server's `/metrics`; None where there is none."""

    async def fetch() -> str | None:
        async with _client(
            timeouts or Timeouts(connect_s=5, first_byte_s=5, between_reads_s=5, request_s=10)
        ) as client:
            try:
                response = await client.get(f"{target.root_url}/metrics", headers=target.headers)
            except httpx.HTTPError:
                return None
        kind = response.headers.get("content-type", "")
        return response.text if response.status_code == 200 and "html" not in kind else None

    return asyncio.run(fetch())


def sentence_of(error: Exception, target: Target) -> str:
    """One sentence about a connection that failed."""
    url = target.base_url
    said = target.redact(str(error)).rstrip(".")
    if isinstance(error, httpx.ConnectTimeout):
        return f"{url} can't be reached: {said[0].lower()}{said[1:]}; check host, port and firewall."
    if isinstance(error, httpx.ConnectError):
        if "refused" in said.lower():
            return f"Nothing listens at {url} (connection refused): start the server there, or check host and port."
        if "not known" in said:
            return f"The host of {url} is unknown: check the name, or give an address. ({said})"
        if "isn't trusted" in said:
            return (
                f"{url} can't be reached: {said[0].lower()}{said[1:]}; name the file of its authority in "
                "SSL_CERT_FILE, and the host as the certificate does."
            )
        if "TLS" in said:
            return f"{url} can't be reached over TLS ({said}): check http against https, and the port."
        return f"{url} can't be reached: {said}."
    if isinstance(error, httpx.TimeoutException):
        return f"{url} accepts connections and does not answer ({said}): is it still starting, or stuck?"
    if "closed the connection" in said:
        return f"{url} accepts connections and closes them without an answer: has the server died behind a proxy?"
    return f"What listens at {url} doesn't speak HTTP ({said}): check the port, and http against https."


def _client(timeouts: Timeouts) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=StampingTransport(timeouts), trust_env=False, timeout=None)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: httpx.Headers
    body: bytes
    reading: Reading | None


class _Probe:
    def __init__(self, target: Target, timeouts: Timeouts) -> None:
        self.target = target
        self.http = _client(timeouts)

    async def run(self, model: str | None, endpoint: Endpoint | None) -> ServerFacts:
        try:
            async with self.http:
                models, server = await self._models(is_needed=model is None)
                name = _choose(model, models, self.target)
                entry: Mapping[str, Any] = next((entry for entry in models if entry.get("id") == name), {})
                engine = entry.get("owned_by")
                is_known = engine in _ENGINES
                version = await self._version() if is_known else ""
                dialect = await self._agree(name, endpoint)
        except httpx.HTTPError as error:
            raise TargetError(sentence_of(error, self.target)) from error
        length = entry.get("max_model_len")
        return ServerFacts(
            dialect=dialect,
            models=tuple(str(entry.get("id")) for entry in models),
            max_model_len=length if isinstance(length, int) and length > 0 else None,
            server=str(engine) if is_known else server,
            version=version,
        )

    async def _models(self, *, is_needed: bool) -> tuple[list[Mapping[str, Any]], str]:
        response = await self.http.get(f"{self.target.base_url}/models", headers=self.target.headers)
        answer = _Answer(response.status_code, response.headers, response.content, None)
        server = response.headers.get("server", "")
        if answer.status == 404 and not is_needed and "html" not in answer.headers.get("content-type", ""):
            return [], server  # a gateway with completions alone
        if answer.status != 200:
            raise self._refused(answer, "its list of models")
        try:
            document = json.loads(answer.body)
            entries = [entry for entry in document["data"] if isinstance(entry, Mapping)]
        except (ValueError, KeyError, TypeError):
            raise self._no_api(answer) from None
        return entries, server

    async def _version(self) -> str:
        """As vLLM and those that follow it tell it; empty where a server doesn't."""
        try:
            response = await self.http.get(f"{self.target.root_url}/version", headers=self.target.headers)
            found = json.loads(response.content)["version"] if response.status_code == 200 else ""
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""
        return found if isinstance(found, str) else ""

    async def _agree(self, model: str, endpoint: Endpoint | None) -> Dialect:
        """The fullest dialect that the server takes."""
        refusal: _Answer | None = None
        for dialect in _ladder(model, endpoint):
            answer = await self._ask(dialect, RequestSpec(0, _PROBE_IDS, _PROBE_OUTPUT))
            if answer.status == 200:
                return await self._calibrated(self._adapted(dialect, answer))
            if answer.status not in (400, 404, 405, 422, 501):
                raise self._refused(answer, "a request")
            if refusal is None or refusal.status == 404:
                refusal = answer
        assert refusal is not None, "the ladder has steps"
        raise self._refused(refusal, "a request", model)

    def _adapted(self, dialect: Dialect, answer: _Answer) -> Dialect:
        """The dialect without what the server ignored. Raises TargetError for an answer without tokens."""
        unstreamed = describe_unstreamed(answer.headers, answer.body)
        reading = answer.reading
        if unstreamed is not None:
            raise TargetError(f"{self.target.base_url} answers a streaming request in an unusable way: {unstreamed}.")
        assert reading is not None, "a 200 was read"
        if reading.status == "error":
            raise TargetError(f"{self.target.base_url} failed on a tiny request: {self.target.redact(reading.error)}.")
        if not reading.token_s:
            raise TargetError(
                f"{self.target.base_url} answered a tiny request with an empty stream: no token came, although "
                f"{_PROBE_OUTPUT} were asked for."
            )
        return replace(dialect, usage=dialect.usage and reading.output_tokens is not None)

    async def _calibrated(self, dialect: Dialect) -> Dialect:
        """How many tokens a word is, for prompts as text."""
        if dialect.endpoint == "completions" and dialect.token_prompts:
            return dialect
        seen: list[int] = []
        for words in _CALIBRATION_WORDS:
            answer = await self._ask(dialect, RequestSpec(0, range(words, 2 * words), 1))
            tokens = answer.reading.prompt_tokens if answer.reading is not None else None
            if tokens is None:
                return dialect
            seen.append(tokens)
        slope = (seen[1] - seen[0]) / (_CALIBRATION_WORDS[1] - _CALIBRATION_WORDS[0])
        if slope <= 0:
            return dialect
        return replace(dialect, tokens_per_word=slope, template_tokens=seen[0] - slope * _CALIBRATION_WORDS[0])

    async def _ask(self, dialect: Dialect, spec: RequestSpec) -> _Answer:
        request = httpx.Request(
            "POST",
            self.target.base_url + dialect.path,
            headers={**self.target.headers, "content-type": "application/json"},
            content=dialect.content(spec),
        )
        response = await self.http.send(request, stream=True)
        wire = response.extensions[WIRE]
        await wire.ended
        await response.aclose()
        if wire.error is not None:
            raise wire.error
        reading = read_stream(wire.reads) if response.status_code == 200 else None
        return _Answer(response.status_code, response.headers, wire.body, reading)

    def _refused(self, answer: _Answer, what: str, model: str = "") -> TargetError:
        url, status = self.target.base_url, answer.status
        said = self.target.redact(message_in(answer.headers, answer.body)).rstrip(".")
        because = f": {said}" if said else ""
        if 300 <= status < 400:
            place = answer.headers.get("location", "another place")
            return TargetError(f"{url} redirects to {place} ({status}): give that URL as the target.")
        if status in (401, 403):
            key = "the API key was not accepted" if self.target.api_key else "it wants an API key"
            return TargetError(f"{url} refuses {what} ({status}{because}): {key}; set {' or '.join(KEY_VARIABLES)}.")
        if status == 404 and model:
            return TargetError(f"{url} has no model {model!r}, or no completions ({status}{because}).")
        if status == 404:
            return TargetError(f"{url} has no OpenAI-compatible API ({status} for {what}): check port and path.")
        if status == 429:
            when = answer.headers.get("retry-after")
            wait = f"; it asks to come back in {when} s" if when else ""
            return TargetError(f"{url} is overloaded or limits its rate (429{because}){wait}.")
        if status >= 500:
            return TargetError(f"{url} failed on {what} ({status}{because}): look into the server's log.")
        return TargetError(f"{url} doesn't accept {what} ({status}{because}).")

    def _no_api(self, answer: _Answer) -> TargetError:
        kind = answer.headers.get("content-type", "").split(";")[0] or "something else"
        what = "HTML" if "html" in kind or answer.body.lstrip()[:1] == b"<" else kind
        return TargetError(
            f"{self.target.base_url}/models answers with {what} instead of a list of models: this is no "
            "OpenAI-compatible API; check port and path."
        )


def _ladder(model: str, endpoint: Endpoint | None) -> list[Dialect]:
    """Dialects from the fullest to the plainest."""
    full = Dialect(model)
    completions = [
        full,
        replace(full, continuous_usage=False),
        replace(full, continuous_usage=False, ignore_eos=False),
        replace(full, continuous_usage=False, ignore_eos=False, token_prompts=False),
        replace(full, continuous_usage=False, ignore_eos=False, token_prompts=False, usage=False),
    ]
    chat = [replace(step, endpoint="chat", token_prompts=False) for step in (*completions[:3], completions[4])]
    if endpoint is not None:
        return chat if endpoint == "chat" else completions
    return [*completions, *chat]


def _choose(model: str | None, entries: Sequence[Mapping[str, Any]], target: Target) -> str:
    names = [str(entry.get("id")) for entry in entries]
    if model is not None:
        if names and model not in names:
            raise TargetError(f"{target.base_url} has no model {model!r}; it serves {_list(names)}.")
        return model
    root = entries[0].get("root") if entries else None
    # names of one model, as vLLM's --served-model-name gives them
    if len(names) == 1 or (root and all(entry.get("root") == root for entry in entries)):
        return names[0]
    if not names:
        raise TargetError(f"{target.base_url} lists no model: name it with --model.")
    raise TargetError(f"{target.base_url} serves {_list(names)}: name one with --model.")


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
