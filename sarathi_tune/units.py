"""Durations, token counts and byte sizes: how people write them, and how we print them."""

import math
import re

from sarathi_tune.errors import UsageError

_MS_PER_UNIT = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4, "m": 6e4, "h": 3.6e6}
_DURATION = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-zµ]*)", re.IGNORECASE)
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)
#: No step, context or cache of a real engine comes near; larger numbers are typing errors.
MAX_TOKENS = 1 << 30
#: From a microsecond to a thousand hours: what lies outside is a typing error too.
_SHORTEST_MS, _LONGEST_MS = 1e-3, 3.6e9
_TOKEN_SUFFIX = {"": 1, "k": 1024, "m": 1024 * 1024}


def parse_duration_ms(text: str, what: str = "duration") -> float:
    """`20ms`, `0.02s`, `20000us` -> milliseconds.

    Raises UsageError for a bare number, an unknown unit, zero, a negative number, NaN or infinity, and for less than a
    microsecond or more than 1000 hours.
    """
    example = "write it with a unit, for example 20ms, 0.5s or 800us"
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{what} {text!r} is not a duration: {example}.")
    number, unit = float(match[1]), match[2].lower()
    if not unit:
        raise UsageError(f"{what} {text!r} has no unit: {example}.")
    if unit not in _MS_PER_UNIT:
        raise UsageError(f"{what} {text!r} has the unknown unit {match[2]!r}: {example}.")
    value_ms = number * _MS_PER_UNIT[unit]
    if not math.isfinite(value_ms) or value_ms <= 0:
        raise UsageError(f"{what} {text!r} must be greater than zero and finite: {example}.")
    if not _SHORTEST_MS <= value_ms <= _LONGEST_MS:
        raise UsageError(f"{what} {text!r} must be from 1us to 1000h: {example}.")
    return value_ms


def parse_tokens(text: str, what: str = "token count") -> int:
    """`512`, `8k` (= 8192), `0.5k` (= 512) -> tokens. Raises UsageError for anything else, zero included, and for
    more than MAX_TOKENS."""
    example = "write a whole number of tokens, for example 512 or 8k (= 8192)"
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{what} {text!r} is not a token count: {example}.")
    value = float(match[1]) * _TOKEN_SUFFIX[match[2].lower()]
    if value > MAX_TOKENS:
        raise UsageError(f"{what} {text!r} is more than {MAX_TOKENS:,} tokens: {example}.")
    if value != int(value) or value < 1:
        raise UsageError(f"{what} {text!r} is not a positive whole number of tokens: {example}.")
    return int(value)


def parse_share(text: str, what: str = "share") -> float:
    """`5%`, `0.05` -> 0.05. Raises UsageError for anything else, and for less than 0 or more than 1."""
    example = "write a percentage or a fraction, for example 5% or 0.05"
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100.0 if number != text.strip() else 1.0)
    except ValueError:
        raise UsageError(f"{what} {text!r} is not a share: {example}.") from None
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"{what} {text!r} must be from 0% to 100%: {example}.")
    return value


def format_ms(value_ms: float) -> str:
    """Milliseconds for a reader: three significant figures, seconds from 10 s on."""
    if not math.isfinite(value_ms):
        return "-"
    if value_ms >= 10_000:
        return f"{value_ms / 1e3:.1f} s"
    if value_ms >= 100:
        return f"{value_ms:.0f} ms"
    if value_ms >= 10:
        return f"{value_ms:.1f} ms"
    return f"{value_ms:.2f} ms"


def format_tokens(count: int) -> str:
    """Token counts with thousands separators: 2,048."""
    return f"{count:,}"


def format_bytes(count: float) -> str:
    """Bytes in binary units: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
