"""What is asked before the load, and the sentence for each way in which a server can't be used."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sarathi_tune.errors import TargetError
from sarathi_tune.loadgen.http.probe import ServerFacts, probe
from sarathi_tune.loadgen.http.wire import Timeouts
from tests.loadgen.http.openai_server import MODELS, always, healthy, only_completions, openai_server, silent
from tests.loadgen.http.servers import Answer, Line, Seen, fails, free_port, target, whole

QUICK = Timeouts(connect_s=1.0, first_byte_s=0.3, between_reads_s=0.3, request_s=1.0)


@contextmanager
def refused(words: str) -> Iterator[None]:
    """One sentence with these words, and without the key."""
    with pytest.raises(TargetError) as refusal:
        yield
    text = str(refusal.value)
    assert words in text
    assert "\n" not in text
    assert "sk-secret" not in text


def facts_of(answer: Answer, model: str | None = None) -> ServerFacts:
    with openai_server(answer) as (url, _):
        return probe(target(url, SARATHI_TUNE_API_KEY="sk-secret"), model=model, timeouts=QUICK)


def test_a_full_server() -> None:
    facts = facts_of(healthy())
    assert facts.dialect.model == "tiny"
    assert facts.dialect.token_prompts
    assert facts.dialect.continuous_usage
    assert facts.max_model_len == 4096


@pytest.mark.parametrize(
    ("owner", "version", "server", "told"),
    [
        ("vllm", whole("200 OK", b'{"version":"0.32.0"}'), "vllm", "0.32.0"),
        ("sglang", fails("404 Not Found", "Not Found"), "sglang", ""),
        ("vllm", whole("200 OK", b'["0.32.0"]'), "vllm", ""),
        ("vllm", whole("200 OK", b'{"version":32}'), "vllm", ""),
        ("vllm", b"", "vllm", ""),  # closes the connection
        ("some-company", whole("200 OK", b'{"version":"9"}'), "", ""),  # an organisation, no engine
        (["vllm"], whole("200 OK", b'{"version":"9"}'), "", ""),
    ],
)
def test_which_engine_it_is(owner: object, version: bytes, server: str, told: str) -> None:
    models = {"data": [MODELS["data"][0] | {"owned_by": owner}]}

    async def answer(seen: Seen, line: Line) -> None:
        if seen.path == "/v1/models":
            await line.send(whole("200 OK", json.dumps(models).encode()))
        elif seen.path == "/version":
            await line.send(version)
            if not version:
                line.reset()
        else:
            await healthy()(seen, line)

    facts = facts_of(answer)
    assert (facts.server, facts.version) == (server, told)
    assert facts.as_dict()["server"] == server
    assert facts.dialect.model == "tiny"


def test_the_prefix_of_the_url_is_kept() -> None:
    async def answer(seen: Seen, line: Line) -> None:
        assert seen.path.startswith("/gate/way/v1/")
        inner = Seen(seen.method, seen.path.removeprefix("/gate/way"), seen.headers, seen.body, seen.number, 1)
        await healthy()(inner, line)

    with openai_server(answer) as (url, log):
        probe(target(f"{url}/gate/way/"))
    assert [seen.path for seen in log.requests] == ["/gate/way/v1/models", "/gate/way/v1/completions"]


@pytest.mark.parametrize(
    ("field", "left_out"),
    [
        (lambda body: "continuous_usage_stats" in body.get("stream_options", {}), {"continuous_usage"}),
        (lambda body: "ignore_eos" in body, {"continuous_usage", "ignore_eos"}),
        (lambda body: isinstance(body.get("prompt"), list), {"continuous_usage", "ignore_eos", "token_prompts"}),
        (lambda body: "stream_options" in body, {"continuous_usage", "ignore_eos", "token_prompts", "usage"}),
    ],
)
def test_extensions_that_a_server_refuses_are_left_out(field: object, left_out: set[str]) -> None:
    assert callable(field)

    async def answer(seen: Seen, line: Line) -> None:
        if seen.body is not None and field(seen.body):
            await line.send(fails("400 Bad Request", "Unrecognized request argument supplied"))
        else:
            if isinstance((seen.body or {}).get("prompt"), str):
                seen.body["prompt"] = seen.body["prompt"].split()
            await healthy()(seen, line)

    dialect = facts_of(answer).dialect
    assert {
        name for name in ("continuous_usage", "ignore_eos", "token_prompts", "usage") if not getattr(dialect, name)
    } == (left_out)


def test_a_server_with_chat_alone() -> None:
    async def answer(seen: Seen, line: Line) -> None:
        if seen.path == "/v1/completions":
            await line.send(fails("404 Not Found", "Not Found"))
        else:
            await healthy()(seen, line)

    dialect = facts_of(answer).dialect
    assert dialect.endpoint == "chat"
    assert not dialect.token_prompts
    # the test server counts one token per word and five of its own
    assert dialect.tokens_per_word == pytest.approx(1.0)
    assert dialect.template_tokens == pytest.approx(5.0)


def test_nobody_listens() -> None:
    with refused("connection refused"):
        probe(target(f"http://127.0.0.1:{free_port()}"), timeouts=QUICK)


def test_a_name_that_nobody_knows() -> None:
    with refused("unknown"):
        probe(target("http://no-such-host.invalid:8000"), timeouts=Timeouts(connect_s=10.0))


def test_a_server_that_says_nothing() -> None:
    with refused("does not answer"):
        facts_of(silent)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (always(fails("401 Unauthorized", "Incorrect API key provided: sk-secret")), "SARATHI_TUNE_API_KEY"),
        (always(fails("403 Forbidden", "not you")), "(403: not you)"),
        (always(whole("404 Not Found", b"<html>", "text/html")), "no OpenAI-compatible API"),
        (always(whole("200 OK", b"<html>Grafana</html>", "text/html")), "HTML instead of a list of models"),
        (always(whole("200 OK", b"[]")), "instead of a list of models"),
        (always(whole("307 Moved", b"", extra="location: https://other/v1/models\r\n")), "redirects to https://other"),
        (always(fails("429 Too Many Requests", "slow", "retry-after: 17\r\n")), "come back in 17 s"),
        (always(fails("500 Internal Server Error", "boom")), "(500: boom)"),
        (always(b"* OK IMAP4rev1 ready\r\n\r\n"), "doesn't speak HTTP"),
        (only_completions(fails("422 Unprocessable Entity", "max_tokens too small")), "422: max_tokens too small"),
        (only_completions(fails("404 Not Found", "no such thing")), "no such thing"),
        (only_completions(fails("503 Service Unavailable", "loading")), "(503: loading)"),
        (only_completions(whole("200 OK", b"<html>hi</html>", "text/html")), "text/html"),
        (only_completions(whole("200 OK", b"", "text/event-stream")), "empty stream"),
        (only_completions(whole("200 OK", b'data: {"error":{"message":"oom"}}\n\n', "text/event-stream")), "oom"),
    ],
)
def test_servers_that_cannot_be_used(answer: Answer, words: str) -> None:
    with refused(words):
        facts_of(answer)


def test_models_that_are_not_there() -> None:
    with refused("has no model 'other'; it serves tiny"):
        facts_of(healthy(), model="other")
    with refused("name it with --model"):
        facts_of(always(whole("200 OK", b'{"data": []}')))
    two = {"data": [*MODELS["data"], {"id": "large"}]}
    with refused("serves tiny, large: name one with --model"):
        facts_of(always(whole("200 OK", str(two).replace("'", '"').encode())))


def test_the_names_of_one_model() -> None:
    # vLLM's --served-model-name takes several; an adapter has a root of its own
    def lists(*entries: dict[str, object]) -> Answer:
        document = whole("200 OK", json.dumps({"data": entries}).encode())

        async def answer(seen: Seen, line: Line) -> None:
            if seen.path == "/v1/models":
                await line.send(document)
            else:
                await healthy()(seen, line)

        return answer

    one: dict[str, object] = {"id": "small", "root": "/models/tiny"}
    assert facts_of(lists(one, {"id": "alias", "root": "/models/tiny"})).dialect.model == "small"
    with refused("serves small, odd: name one with --model"):
        facts_of(lists(one, {"id": "odd", "root": ["/models/tiny"]}))
    with refused("serves small, adapter: name one with --model"):
        facts_of(lists(one, {"id": "adapter", "root": "/models/adapter"}))


def test_a_gateway_without_a_list_of_models() -> None:
    async def answer(seen: Seen, line: Line) -> None:
        if seen.path == "/v1/models":
            await line.send(fails("404 Not Found", "Not Found"))
        else:
            await healthy()(seen, line)

    assert facts_of(answer, model="mine").dialect.model == "mine"
