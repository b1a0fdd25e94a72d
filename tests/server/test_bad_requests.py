"""What can't be served is refused in one sentence, as OpenAI's error object, with the right code."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.running import Running, ScriptedExecutor, serving_script

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_GOOD = {COMPLETIONS: {"prompt": "the"}, CHAT: {"messages": [{"role": "user", "content": "the"}]}}


def refused(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The error, which must be well-formed."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith("."), error
    assert "Traceback" not in response.text
    if param is not None:
        assert error["param"] == param
    return error


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        (COMPLETIONS, "prompt", None, "prompt"),
        (COMPLETIONS, "prompt", "", "prompt"),
        (COMPLETIONS, "prompt", [], "prompt"),
        (COMPLETIONS, "prompt", 7, "prompt"),
        (COMPLETIONS, "prompt", {"text": "x"}, "prompt"),
        (COMPLETIONS, "prompt", ["a", "b"], "prompt"),
        (COMPLETIONS, "prompt", [[1], [2]], "prompt"),
        (COMPLETIONS, "prompt", [1, "a"], "prompt"),
        (COMPLETIONS, "prompt", [1, 264], "prompt"),
        (COMPLETIONS, "prompt", [-1], "prompt"),
        (COMPLETIONS, "prompt", [True], "prompt"),
        (COMPLETIONS, "prompt", [1.5], "prompt"),
        (COMPLETIONS, "prompt", "half \ud83d", "prompt"),
        (COMPLETIONS, "max_tokens", 0, "max_tokens"),
        (COMPLETIONS, "max_tokens", -3, "max_tokens"),
        (COMPLETIONS, "max_tokens", "8", "max_tokens"),
        (COMPLETIONS, "max_tokens", 1.5, "max_tokens"),
        (COMPLETIONS, "max_tokens", True, "max_tokens"),
        (COMPLETIONS, "temperature", -0.1, "temperature"),
        (COMPLETIONS, "temperature", 2.5, "temperature"),
        (COMPLETIONS, "temperature", "hot", "temperature"),
        (COMPLETIONS, "seed", "x", "seed"),
        (COMPLETIONS, "seed", 1 << 64, "seed"),
        (COMPLETIONS, "stream", "yes", "stream"),
        (COMPLETIONS, "stream_options", {"include_usage": True}, "stream_options"),
        (COMPLETIONS, "stop", "", "stop"),
        (COMPLETIONS, "stop", ["a", 3], "stop"),
        (COMPLETIONS, "stop", ["a", "b", "c", "d", "e"], "stop"),
        (COMPLETIONS, "stop_token_ids", [9999], "stop_token_ids"),
        (COMPLETIONS, "stop_token_ids", 3, "stop_token_ids"),
        (COMPLETIONS, "ignore_eos", 1, "ignore_eos"),
        (COMPLETIONS, "model", 3, "model"),
        (COMPLETIONS, "n", 2, "n"),
        (COMPLETIONS, "best_of", 3, "best_of"),
        (COMPLETIONS, "logprobs", 1, "logprobs"),
        (COMPLETIONS, "echo", True, "echo"),
        (COMPLETIONS, "suffix", "end", "suffix"),
        (COMPLETIONS, "top_p", 0.9, "top_p"),
        (COMPLETIONS, "top_k", 40, "top_k"),
        (COMPLETIONS, "repetition_penalty", 1.1, "repetition_penalty"),
        (COMPLETIONS, "logit_bias", {"3": 5}, "logit_bias"),
        (COMPLETIONS, "min_tokens", 4, "min_tokens"),
        (CHAT, "messages", None, "messages"),
        (CHAT, "messages", [], "messages"),
        (CHAT, "messages", "hello", "messages"),
        (CHAT, "messages", ["hello"], "messages[0]"),
        (CHAT, "messages", [{"content": "x"}], "messages[0].role"),
        (CHAT, "messages", [{"role": "user"}], "messages[0].content"),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        (CHAT, "messages", [{"role": "user", "content": "\udc00"}], "messages[0].content"),
        (CHAT, "messages", [{"role": "oracle", "content": "x"}], "messages"),
        (CHAT, "logprobs", True, "logprobs"),
        (CHAT, "top_logprobs", 2, "top_logprobs"),
        (CHAT, "tools", [{"type": "function"}], "tools"),
        (CHAT, "response_format", {"type": "json_object"}, "response_format"),
        (CHAT, "max_completion_tokens", 0, "max_completion_tokens"),
    ],
)
def test_a_field_that_can_not_be_served_is_refused_by_name(
    server: Running, path: str, field: str, value: Any, param: str
) -> None:
    error = refused(server.post(path, **(_GOOD[path] | {field: value})), 400, param)
    assert error["type"] == "invalid_request_error"


def test_options_of_a_stream_are_refused_by_name(server: Running) -> None:
    for options, param in (([], "stream_options"), ({"include_usage": 1}, "stream_options.include_usage")):
        refused(server.post(COMPLETIONS, prompt="a", stream=True, stream_options=options), 400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b'"text"', b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(server: Running, body: bytes) -> None:
    refused(server.client.post(COMPLETIONS, content=body), 400)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
def test_numbers_that_are_none_are_refused(server: Running, number: bytes) -> None:
    refused(server.client.post(COMPLETIONS, content=b'{"prompt": "a", "temperature": %s}' % number), 400, "temperature")


def test_more_than_the_context_is_refused_with_the_numbers(server: Running) -> None:
    error = refused(server.post(COMPLETIONS, prompt=[5] * 256), 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens and the context is 256" in error["message"]
    error = refused(server.post(COMPLETIONS, prompt=[5] * 250, max_tokens=7), 400, "max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert "ask for at most 6" in error["message"]
    assert server.post(COMPLETIONS, prompt=[5] * 250, max_tokens=6).status_code == 200
    refused(server.post(CHAT, messages=[{"role": "user", "content": "x" * 300}]), 400, "messages")


def test_a_body_without_end_is_not_read_to_its_end(server: Running) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * (1 << 20)

    try:
        response = server.client.post(COMPLETIONS, content=parts())
    except httpx.WriteError:
        return  # it was told so while it still sent
    refused(response, 413)


def test_another_model_is_not_found(server: Running) -> None:
    error = refused(server.post(COMPLETIONS, prompt="a", model="gpt-4"), 404, "model")
    assert error["code"] == "model_not_found"
    refused(server.client.get("/v1/models/gpt-4"), 404, "model")


def test_other_paths_and_methods_are_refused_alike(server: Running) -> None:
    refused(server.client.get("/v2/completions"), 404)
    refused(server.client.get("/"), 404)
    response = server.client.get(COMPLETIONS)
    refused(response, 405)
    assert "POST" in response.headers["allow"]


def test_after_all_that_it_still_answers(server: Running) -> None:
    assert server.post(COMPLETIONS, prompt="the").status_code == 200
    server.wait_idle()


def test_a_key_that_is_asked_for_must_be_sent() -> None:
    with serving_script(ScriptedExecutor(), api_key="sesame-1") as server:
        body = {"prompt": "a", "max_tokens": 1}
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "sesame-1"},
        ):
            response = server.client.post(COMPLETIONS, json=body, headers=headers)
            assert refused(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        refused(server.client.get("/v1/models"), 401)
        key = {"Authorization": "Bearer sesame-1"}
        assert server.client.post(COMPLETIONS, json=body, headers=key).status_code == 200
        assert server.client.get("/health").status_code == server.client.get("/metrics").status_code == 200
        assert not any("sesame" in line for line in server.lines)
