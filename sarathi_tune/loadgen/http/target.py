"""Which server is meant: `localhost:8000`, `http://host/prefix`, `https://host/v1` all name one API."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from sarathi_tune.errors import UsageError

#: Where the API key comes from, in this order. It never comes from a flag: flags stand in process lists and logs.
KEY_VARIABLES = ("SARATHI_TUNE_API_KEY", "OPENAI_API_KEY")

_EXAMPLE = "for example http://127.0.0.1:8000 or https://host.example/prefix/v1"
_ENDPOINTS = ("/chat/completions", "/completions", "/models")
_MASK = "[API key]"


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `base_url` ends with `/v1`, prefixes kept, no slash behind it; `api_key` shows up in no output."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)

    @property
    def root_url(self) -> str:
        """What stands before `/v1`: where `/health` and `/metrics` are."""
        return self.base_url.removesuffix("/v1")

    def redact(self, text: str) -> str:
        """`text` without the API key: servers like to quote it in their errors."""
        return text.replace(self.api_key, _MASK) if self.api_key else text

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request: no compression, which would hold events back."""
        headers = {"accept-encoding": "identity", "user-agent": "sarathi-tune"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers


def parse_target(text: str, environment: Mapping[str, str] | None = None) -> Target:
    """The server that `text` names, with the key that `environment` holds.

    Raises UsageError for what is no http(s) URL, and for a URL with a password, a query or a fragment in it.
    """
    import httpx  # here, because the start of the program must not wait for it

    given = text.strip()
    try:
        url = httpx.URL(given if "://" in given else f"http://{given}")
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"--target {_shown(given)!r} is not a URL ({error}): {_EXAMPLE}.") from None
    if url.scheme not in ("http", "https") or not url.host or (url.port is not None and not 0 < url.port < 1 << 16):
        raise UsageError(f"--target {_shown(given)!r} is not an http or https URL: {_EXAMPLE}.")
    if url.userinfo:
        raise UsageError(
            f"--target must not hold a user name or a password; put the key into {KEY_VARIABLES[0]} and give the URL "
            f"alone: {_EXAMPLE}."
        )
    if url.query or url.fragment:
        raise UsageError(f"--target must be a base URL without anything behind ? or #: {_EXAMPLE}.")
    path = url.path.rstrip("/")
    for endpoint in _ENDPOINTS:
        path = path.removesuffix(endpoint)
    path = path.rstrip("/")
    if path.rsplit("/", 1)[-1] != "v1":
        path += "/v1"
    return Target(f"{url.scheme}://{url.netloc.decode('ascii')}{path}", find_api_key(environment or {}))


def find_api_key(environment: Mapping[str, str]) -> str | None:
    """The key in the environment, if there is one. Raises UsageError, without quoting it, when it can't be sent."""
    for variable in KEY_VARIABLES:
        key = environment.get(variable, "").strip()
        if key and (not key.isascii() or not key.isprintable() or " " in key):
            raise UsageError(f"The API key in {variable} holds characters that can't be sent; set it again.")
        if key:
            return key
    return None


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by its name or address."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _shown(text: str) -> str:
    """A URL for a message: what stands before an @ may be a password."""
    head, at, tail = text.rpartition("@")
    return f"{head.split('://')[0]}://...@{tail}" if at else text
