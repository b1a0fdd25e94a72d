"""A JSON body, read field by field with its types; what doesn't fit is refused by name."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from sarathi_tune.server.refusals import bad_request

_LARGEST_SEED = (1 << 63) - 1


def read_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object in a body. Raises ApiError."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body isn't valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise bad_request(f"The body must be a JSON object, not {shown(value)}.")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a request. A field that is null counts as absent, as clients mean it."""

    values: Mapping[str, Any]
    prefix: str = ""

    def has(self, name: str) -> bool:
        """Whether the field is there and isn't null."""
        return self.values.get(name) is not None

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Refuse the request because of this field."""
        raise bad_request(f"{self.prefix}{name} {problem}", f"{self.prefix}{name}")

    def flag(self, name: str) -> bool:
        """true or false; absent is false."""
        value = self.values.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.refuse(name, f"must be true or false, not {shown(value)}.")
        return value

    def count(self, name: str) -> int | None:
        """A whole number, at least 1."""
        value = self.integer(name)
        if value is not None and value < 1:
            self.refuse(name, f"must be at least 1, not {value}.")
        return value

    def integer(self, name: str) -> int | None:
        """A whole number of 64 bits."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST_SEED:
            self.refuse(name, f"must be a whole number, not {shown(value)}.")
        return value

    def number(self, name: str, absent: float, smallest: float, largest: float) -> float:
        """A number between `smallest` and `largest`."""
        value = self.values.get(name)
        if value is None:
            return absent
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(name, f"must be a number, not {shown(value)}.")
        if not smallest <= value <= largest:
            self.refuse(name, f"must be between {smallest:g} and {largest:g}, not {value:g}.")
        return float(value)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, f"must be a string, not {shown(value)}.")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """One string or up to `most`, none of them empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            self.refuse(name, f"must be a string or a list of strings, none empty, not {shown(value)}.")
        if len(texts) > most:
            self.refuse(name, f"may hold {most} strings, not {len(texts)}.")
        return tuple(texts)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A list of token ids; absent is empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            self.refuse(name, f"must be a list of token ids, not {shown(value)}.")
        check_token_ids(value, name, vocab_size)
        return tuple(value)

    def object(self, name: str) -> "Fields":
        """A nested object; empty when absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, f"must be an object, not {shown(value)}.")
        return Fields(value or {}, f"{self.prefix}{name}.")


def check_token_ids(values: list[Any], name: str, vocab_size: int) -> None:
    """Refuse a list in which something is no token id."""
    for value in values:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise bad_request(
                f"{name} must hold token ids from 0 to {vocab_size - 1}, and it holds {shown(value)}.", name
            )


def shown(value: Any) -> str:
    """A value as it looks in JSON, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
