"""What the server says when it doesn't answer: OpenAI's error object, with the HTTP code that belongs to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """An error for one client. `param` is the field of the request, `code` a stable word for programs."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def as_dict(self) -> dict[str, Any]:
        """The body of the response, and the event in a stream that has begun."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can't be served as it is."""
    return ApiError(400, "invalid_request_error", message, param, code)


def too_long(message: str, param: str) -> ApiError:
    """More tokens than the context holds."""
    return bad_request(message, param, "context_length_exceeded")


def body_too_large(limit_bytes: int) -> ApiError:
    """A body that isn't even read to its end."""
    return ApiError(413, "invalid_request_error", f"The body is larger than {limit_bytes} bytes: send a shorter one.")


def no_key() -> ApiError:
    """The key is missing or wrong; which of the two isn't told."""
    message = "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'."
    return ApiError(
        401, "authentication_error", message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
    )


def unknown_model(name: str, served: str) -> ApiError:
    """The request names another model."""
    return ApiError(
        404,
        "not_found_error",
        f"The model {name!r} isn't served here: ask for {served!r}.",
        param="model",
        code="model_not_found",
    )


def unknown_path(path: str) -> ApiError:
    """No such route."""
    return ApiError(404, "not_found_error", f"There is nothing at {path}: try /v1/completions or /v1/chat/completions.")


def wrong_method(method: str, path: str, allowed: str) -> ApiError:
    """The route has other methods."""
    return ApiError(
        405, "invalid_request_error", f"{path} doesn't take {method}: use {allowed}.", headers={"Allow": allowed}
    )


def queue_full(limit: int) -> ApiError:
    """As many requests in flight as the server takes."""
    return ApiError(
        429,
        "rate_limit_error",
        f"The server has {limit} requests in flight and takes no more: try again in a moment.",
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def stopping() -> ApiError:
    """The server has been told to stop."""
    return ApiError(
        503,
        "service_unavailable_error",
        "The server is stopping: send the request to another one.",
        code="stopping",
        headers={"Retry-After": "5"},
    )


def engine_failed(reason: str) -> ApiError:
    """The engine raised: every request in flight ends with this."""
    return ApiError(500, "server_error", f"The engine failed: {reason}", code="engine_failed")


def engine_gone() -> ApiError:
    """The engine raised before this request came."""
    return ApiError(
        503, "service_unavailable_error", "The engine has failed and the server is ending.", code="engine_failed"
    )


def defect(error: Exception) -> ApiError:
    """A bug of the server's."""
    return ApiError(500, "server_error", f"The server made a mistake ({type(error).__name__}).", code="defect")
