"""Base URLs as people write them, and keys that must not leak."""

import pytest

from sarathi_tune.errors import UsageError
from sarathi_tune.loadgen.http.target import is_loopback, parse_target


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://h:1/v1", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://h.example/llm/openai", "https://h.example/llm/openai/v1"),
        ("https://h.example/llm/openai/v1/", "https://h.example/llm/openai/v1"),
        ("http://h:1/v1/chat/completions", "http://h:1/v1"),
        ("http://h:1/v1/completions", "http://h:1/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
        ("  http://h:1/v1  ", "http://h:1/v1"),
    ],
)
def test_with_or_without_v1_and_with_prefixes(text: str, base: str) -> None:
    # several clients ask for /v1/v1/...
    target = parse_target(text)
    assert target.base_url == base
    assert target.root_url + "/v1" == base


@pytest.mark.parametrize("text", ["", "ftp://h/v1", "http://", "http://h:99999/", "http://h/v1?x=1", "http://h/#a"])
def test_what_is_no_base_url(text: str) -> None:
    with pytest.raises(UsageError, match="http"):
        parse_target(text)


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    for text in ("http://me:hunter2@h/v1", "ftp://me:hunter2@h/v1"):
        with pytest.raises(UsageError) as refusal:
            parse_target(text)
        assert "hunter2" not in str(refusal.value)


def test_the_key_comes_from_the_environment() -> None:
    assert parse_target("h:1", {"OPENAI_API_KEY": "b"}).api_key == "b"
    assert parse_target("h:1", {"OPENAI_API_KEY": "b", "SARATHI_TUNE_API_KEY": " a\n"}).api_key == "a"
    assert parse_target("h:1", {"OPENAI_API_KEY": ""}).api_key is None
    assert "authorization" not in parse_target("h:1").headers


def test_the_key_shows_nowhere() -> None:
    target = parse_target("h:1", {"SARATHI_TUNE_API_KEY": "sk-secret"})
    assert "sk-secret" not in repr(target)
    assert "sk-secret" not in target.redact("Incorrect API key provided: sk-secret.")
    with pytest.raises(UsageError) as refusal:
        parse_target("h:1", {"SARATHI_TUNE_API_KEY": "sk-sécret"})
    assert "sk-s" not in str(refusal.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]", "a.localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["example.com", "10.0.0.1", "localhost.example.com"])
def test_elsewhere(host: str) -> None:
    assert not is_loopback(host)
