"""The shapes of steps to be timed: how many decodes at which context, beside which chunk behind which prefix."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sarathi_tune.engine.plan import StepShape
from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.measure.documents import read_json
from sarathi_tune.units import MAX_TOKENS, parse_tokens

Kind = Literal["decode", "prefill", "hybrid"]

_NOTATION = re.compile(
    r"(?:(?P<decodes>\d+)x(?P<context>[\d.]+k?))?"
    r"(?P<plus>\+)?"
    r"(?:(?P<chunk>[\d.]+k?)(?:@(?P<prefix>[\d.]+k?))?)?",
    re.IGNORECASE,
)
_EXAMPLES = "write 8x1024 (8 decodes at 1024 keys), 512@0 (a chunk of 512 behind 0 cached tokens) or 8x1024+504@0"
_FIELDS = ("decodes", "context", "chunk", "prefix")


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A step with `decodes` decodes that each see `context` keys (the new token included) and one prefill chunk of
    `chunk` tokens behind `prefix` tokens that are in the cache. All in tokens; zero means absent."""

    decodes: int = 0
    context: int = 0
    chunk: int = 0
    prefix: int = 0

    @property
    def kind(self) -> Kind:
        """decode, prefill or hybrid."""
        if self.chunk == 0:
            return "decode"
        return "hybrid" if self.decodes else "prefill"

    @property
    def num_tokens(self) -> int:
        """Tokens of the step: what the budget limits."""
        return self.decodes + self.chunk

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of KV cache that the step needs."""
        return self.decodes * self.context + self.prefix + self.chunk

    @property
    def step_shape(self) -> StepShape:
        """The same step as the engine and the step model see it."""
        return StepShape(
            decode_contexts=(self.context,) * self.decodes,
            chunks=((self.prefix, self.chunk),) if self.chunk else (),
        )

    def num_pages(self, page_tokens: int) -> int:
        """Pages of `page_tokens` tokens that the step's requests own; they share none."""
        return self.decodes * -(-self.context // page_tokens) + -(-(self.prefix + self.chunk) // page_tokens)

    def as_dict(self) -> dict[str, int]:
        """The shape as it stands in a JSON document."""
        return {"decodes": self.decodes, "context": self.context, "chunk": self.chunk, "prefix": self.prefix}

    def __str__(self) -> str:
        """`8x1024`, `512@0`, `8x1024+504@0`: the notation of `profile --shapes` and of every table."""
        decode = f"{self.decodes}x{self.context}" if self.decodes else ""
        chunk = f"{self.chunk}@{self.prefix}" if self.chunk else ""
        return "+".join(part for part in (decode, chunk) if part)


def rounded_context(context: float) -> int:
    """Keys rounded to a few per cent, so that steps of about the same context are one row."""
    unit = 1
    while unit * 16 <= context:
        unit *= 2
    return max(1, round(context / unit) * unit)


def parse_shape(text: str) -> Shape:
    """`8x1024`, `512@0`, `512` (= `512@0`), `8x1k+504@16k` -> Shape; the inverse of `str`.

    Raises UsageError for anything else, a step without tokens and decodes without context included.
    """
    match = _NOTATION.fullmatch(text.strip())
    if (
        match is None
        or not text.strip()
        or (match["plus"] is not None) != (None not in match.group("context", "chunk"))
    ):
        raise UsageError(f"{text!r} is not the shape of a step: {_EXAMPLES}.")
    fields = {name: 0 if match[name] is None else _tokens(match[name], text) for name in _FIELDS}
    return make_shape(fields, repr(text))


def make_shape(fields: Mapping[str, object], where: str) -> Shape:
    """A Shape from the fields of a row; absent ones are 0, others than the four are ignored.

    Raises DocumentError that names `where` for a field that is no whole number of tokens, for decodes without context,
    a prefix or a context of nothing, and for a step without tokens.
    """
    decodes, context, chunk, prefix = (_count(fields.get(name, 0), f"{where}.{name}") for name in _FIELDS)
    if decodes and not context:
        raise DocumentError(f"{where} has {decodes} decodes and no context: say how many keys each of them sees.")
    if not decodes and not chunk:
        raise DocumentError(f"{where} has neither decodes nor a chunk: a step computes at least one token.")
    # What is beside nothing means nothing; kept, it would make two shapes of one step.
    return Shape(decodes, context if decodes else 0, chunk, prefix if chunk else 0)


def load_shapes(path: Path) -> tuple[Shape, ...]:
    """The shapes of a JSON file, in its order, repeated ones once: a list of texts (`"8x1024+504@0"`) and objects
    (`{"decodes": 8, "context": 1024, "chunk": 504, "prefix": 0}`), or `{"shapes": [...]}`.

    Raises DocumentError that names the entry.
    """
    document = read_json(path, "shapes file")
    entries = document.get("shapes") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise DocumentError(
            f'The shapes file {path} holds no list: write ["8x1024", "512@0"] or {{"shapes": ["8x1024", "512@0"]}}.'
        )
    if not entries:
        raise DocumentError(f"The shapes file {path} lists no shape: {_EXAMPLES}.")
    return tuple(dict.fromkeys(_entry(entry, f"{path}: shapes[{index}]") for index, entry in enumerate(entries)))


def _entry(entry: object, where: str) -> Shape:
    if isinstance(entry, str):
        try:
            return parse_shape(entry)
        except UsageError as error:
            raise DocumentError(f"{where}: {error}") from error
    if isinstance(entry, dict):
        unknown = sorted(set(entry) - set(_FIELDS))
        if unknown:
            raise DocumentError(f"{where} has the unknown field {unknown[0]!r}: use {', '.join(_FIELDS)}.")
        return make_shape(entry, where)
    raise DocumentError(f"{where} is neither a text nor an object: {_EXAMPLES}.")


def _tokens(text: str, whole: str) -> int:
    if text.isdecimal():
        return int(text[:12])
    return parse_tokens(text, f"{whole!r}: token count")


def _count(value: object, where: str) -> int:
    """A whole number of tokens, 0 allowed; 8.0 is whole as in JSON Schema, true is no number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DocumentError(f"{where} must be a whole number of tokens, not {value!r}.")
    if not 0 <= value <= MAX_TOKENS:
        raise DocumentError(f"{where} must be from 0 to {MAX_TOKENS}, not {value}.")
    return value
