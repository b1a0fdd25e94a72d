"""Dataclasses to JSON values and back, checked on the way in.

Only what documents are made of: dataclasses, numbers, strings, booleans, None, tuples, mappings, literals. NaN and
infinity, which JSON lacks, become null on the way out.
"""

import dataclasses
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sarathi_tune.errors import DocumentError

T = TypeVar("T")

_KIND = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def to_json(value: Any) -> Any:
    """The value as json.dumps takes it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, bool | int | float | str), f"{type(value)} has no place in a document"
    return value


def from_json(kind: type[T], value: object, where: str) -> T:
    """`value` as an instance of the dataclass `kind`. Unknown keys are ignored: a newer minor version may add some.

    Raises DocumentError that names the field, as in `result.runs[1].budget_tokens`.
    """
    return _dataclass(kind, value, where)  # type: ignore[no-any-return]


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _dataclass(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise DocumentError(f"{where} must be an object.")
    arguments = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            arguments[field.name] = _decode(_hints(kind)[field.name], value[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DocumentError(f"{where}.{field.name} is missing.")
    return kind(**arguments)


def _decode(kind: Any, value: object, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _decode(_not_none(arguments), value, where)
    if origin is Literal:
        if value not in arguments:
            raise DocumentError(f"{where} must be one of {', '.join(map(str, arguments))}, not {value!r}.")
        return value
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise DocumentError(f"{where} must be an object.")
        return {str(key): _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    return _scalar(kind, value, where)


def _not_none(arguments: tuple[Any, ...]) -> Any:
    rest = [argument for argument in arguments if argument is not type(None)]
    assert len(rest) == 1, "a document field is one type, or that type or null"
    return rest[0]


def _tuple(arguments: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise DocumentError(f"{where} must be a list.")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if len(value) != len(arguments):
        raise DocumentError(f"{where} must have {len(arguments)} items, not {len(value)}.")
    items = zip(arguments, value, strict=True)
    return tuple(_decode(argument, item, f"{where}[{index}]") for index, (argument, item) in enumerate(items))


def _scalar(kind: type, value: object, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise DocumentError(f"{where} must be {_KIND[kind]}, not {value!r}.")
