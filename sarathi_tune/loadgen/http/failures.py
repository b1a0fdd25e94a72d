"""What went wrong, as a kind for the counts and as one sentence for a person."""

import json

import httpx

from sarathi_tune.loadgen.http.reading import error_text
from sarathi_tune.loadgen.record import FailureKind

_MAX_DETAIL = 300


def kind_of(error: Exception) -> FailureKind:
    """What a transport error counts as."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "connect"
    if isinstance(error, httpx.TimeoutException):
        return "timeout"
    if isinstance(error, httpx.RemoteProtocolError):
        return "connect"
    return "truncated"


def kind_of_status(status: int) -> FailureKind:
    """What an HTTP status other than 200 counts as."""
    if 300 <= status < 400:
        return "http_3xx"
    return "http_5xx" if status >= 500 else "http_4xx"


def describe_status(status: int, headers: httpx.Headers, body: bytes) -> str:
    """Status, what the server says about it, and when it may be asked again."""
    parts = [str(status)]
    if "location" in headers and 300 <= status < 400:
        parts.append(f"to {headers['location']}")
    said = message_in(headers, body)
    if said:
        parts.append(said)
    if "retry-after" in headers:
        parts.append(f"Retry-After: {headers['retry-after']}")
    return ", ".join(parts)[:_MAX_DETAIL]


def message_in(headers: httpx.Headers, body: bytes) -> str:
    """The error's text in a body: the message of a JSON error, plain text as it is, nothing of HTML."""
    kind = headers.get("content-type", "")
    if "html" in kind:
        return ""
    try:
        return error_text(json.loads(body)) or ""
    except ValueError:
        text = body[:_MAX_DETAIL].decode("utf-8", "replace")
        return "" if text.lstrip().startswith("<") else " ".join(text.split())


def describe_unstreamed(headers: httpx.Headers, body: bytes) -> str | None:
    """Why a 200 is no event stream; None when it is one (or says nothing about itself)."""
    coding = headers.get("content-encoding", "identity").lower()
    if coding not in ("", "identity"):
        return f"the answer is compressed ({coding}) although identity was asked for, so that events can't be timed"
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    if kind in ("", "text/event-stream", "text/plain", "application/octet-stream"):
        return None
    if kind == "application/json":
        return message_in(headers, body) or "the answer came whole, without streaming"
    return f"the answer is {kind}, not an event stream"
