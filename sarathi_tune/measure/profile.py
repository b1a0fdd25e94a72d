"""The profile document: every step that was timed, on what, and under which conditions.

It is the border between measuring and advising: `derive` needs nothing else, and a person can write one by hand from
published numbers (docs/profile.md). Reading it is checked by hand rather than with the JSON Schema beside this file
(profile.schema.json, for editors and other programs): the sentences are better, and `derive` starts faster.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sarathi_tune.config.source import ModelSource
from sarathi_tune.errors import DocumentError
from sarathi_tune.measure.documents import check_version, read_json, write_json
from sarathi_tune.measure.shapes import Shape, make_shape

SCHEMA = "sarathi-tune/profile"
SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("profile.schema.json")


@dataclass(frozen=True, slots=True)
class Sample:
    """One shape and its step times in milliseconds: every timed step, or one published median. A shape that could not
    be timed has no times but a `missing` reason."""

    shape: Shape
    times_ms: tuple[float, ...] = ()
    missing: str | None = None
    #: Held out of the fit: used only to state the model's error.
    held_out: bool = False

    @property
    def median_ms(self) -> float:
        """Median of the times, NaN when there are none."""
        ordered = sorted(self.times_ms)
        if not ordered:
            return float("nan")
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured. `machine`, `model` and `engine` are descriptions for the reader and the report; only
    `samples`, `tile_tokens`, `graph_sizes` and `max_model_len` enter the advice."""

    samples: tuple[Sample, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    conditions: tuple[Mapping[str, Any], ...] = ()
    notices: tuple[Mapping[str, str], ...] = ()
    #: Relative spread between two measurements of the same thing (A/A), or None when it wasn't measured.
    noise: float | None = None
    tile_tokens: int = 16
    graph_sizes: tuple[int, ...] = ()
    max_model_len: int | None = None
    source: str = ""
    created: str = ""


def describe_model(source: ModelSource, description: Mapping[str, Any]) -> dict[str, Any]:
    """The model of a profile. `description`: of the runner that has it loaded."""
    config = source.config
    return {
        "name": config.name,
        "serve_name": source.serve_name,
        "dtype": description["dtype"],
        "weights": description["weights"],
        "parameters": config.num_parameters,
    }


def load_profile(path: Path) -> Profile:
    """Read a profile document. Raises DocumentError that names the file, and the row where one is at fault."""
    document = read_json(path, "profile")
    try:
        return profile_from_dict(document)
    except DocumentError as error:
        raise DocumentError(f"{path}: {error}") from error


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile document, whole or not at all. Raises UsageError when the place can't be written."""
    write_json(path, profile_as_dict(profile), "profile")


def profile_as_dict(profile: Profile) -> dict[str, Any]:
    """The document of a profile; parts that say nothing are left out."""
    document: dict[str, Any] = {"schema": SCHEMA, "version": SCHEMA_VERSION}
    optional = {
        "source": profile.source,
        "created": profile.created,
        "machine": dict(profile.machine),
        "model": dict(profile.model),
        "engine": dict(profile.engine),
        "max_model_len": profile.max_model_len,
        "tile_tokens": profile.tile_tokens,
        "graph_sizes": list(profile.graph_sizes),
        "noise": profile.noise,
        "samples": [_row(sample) for sample in profile.samples],
        "conditions": [dict(entry) for entry in profile.conditions],
        "notices": [dict(entry) for entry in profile.notices],
    }
    return document | {name: value for name, value in optional.items() if value not in (None, "", [], {})}


def profile_from_dict(document: object) -> Profile:
    """A profile from its parsed document; rows of the same shape are merged, unknown fields are ignored.

    Raises DocumentError for another schema, a newer version, a missing or wrongly typed field, times that aren't
    positive and finite, and a document without a usable sample.
    """
    if not isinstance(document, dict):
        raise DocumentError(
            f'a profile is a JSON object with "schema", "version" and "samples", not {_kind(document)}.'
        )
    _check_schema(document)
    rows = _typed(document, "samples", list, required=True)
    samples = _merged([_sample(row, f"samples[{index}]") for index, row in enumerate(rows)])
    if not any(sample.times_ms for sample in samples):
        raise DocumentError("samples holds no row with a time (ms): nothing can be derived from it.")
    return Profile(
        samples=samples,
        machine=_typed(document, "machine", dict),
        model=_typed(document, "model", dict),
        engine=_typed(document, "engine", dict),
        conditions=_objects(document, "conditions"),
        notices=_objects(document, "notices"),
        noise=_noise(document),
        tile_tokens=_positive(document, "tile_tokens") or 16,
        graph_sizes=_sizes(document),
        max_model_len=_positive(document, "max_model_len"),
        source=_typed(document, "source", str),
        created=_typed(document, "created", str),
    )


def _row(sample: Sample) -> dict[str, Any]:
    # Six significant digits: finer than any clock, and the file stays readable.
    times = [float(f"{time:.6g}") for time in sample.times_ms]
    row: dict[str, Any] = dict(sample.shape.as_dict())
    if times:
        row["ms"] = times[0] if len(times) == 1 else times
    if sample.missing is not None:
        row["missing"] = sample.missing
    if sample.held_out:
        row["held_out"] = True
    return row


def _check_schema(document: Mapping[str, Any]) -> None:
    if "schema" not in document:
        raise DocumentError(f'the field schema is missing: write "schema": "{SCHEMA}".')
    if document["schema"] != SCHEMA:
        raise DocumentError(
            f'the schema is {document["schema"]!r}: this is no profile, which has "schema": "{SCHEMA}".'
        )
    if "version" not in document:
        raise DocumentError(f'the field version is missing: write "version": {SCHEMA_VERSION}.')
    check_version(document["version"], SCHEMA_VERSION, "profile")


def _sample(row: object, where: str) -> Sample:
    if not isinstance(row, dict):
        raise DocumentError(f"{where} must be an object, not {_kind(row)}.")
    shape = make_shape(row, where)
    missing = row.get("missing")
    if missing is not None and not isinstance(missing, str):
        raise DocumentError(f"{where}.missing must be the reason as text, not {_kind(missing)}.")
    held_out = row.get("held_out", False)
    if not isinstance(held_out, bool):
        raise DocumentError(f"{where}.held_out must be true or false, not {held_out!r}.")
    times = _times(row.get("ms"), f"{where}.ms")
    if not times and missing is None:
        raise DocumentError(f"{where}.ms is missing: give the step's time in milliseconds, or a missing reason.")
    return Sample(shape, times, None if times else missing, held_out)


def _times(value: object, where: str) -> tuple[float, ...]:
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(_time(entry, f"{where}[{index}]") for index, entry in enumerate(value))
    return (_time(value, where),)


def _time(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DocumentError(f"{where} must be a time in milliseconds, a number, not {_kind(value)}.")
    try:
        time_ms = float(value)
    except OverflowError:
        time_ms = math.inf
    if not math.isfinite(time_ms) or time_ms <= 0:
        raise DocumentError(f"{where} must be greater than zero and finite, not {time_ms}.")
    return time_ms


def _merged(samples: list[Sample]) -> tuple[Sample, ...]:
    """One sample per shape, in order of first appearance. A shape that is in the fit somewhere is not held out."""
    merged: dict[Shape, Sample] = {}
    for sample in samples:
        known = merged.get(sample.shape)
        if known is None:
            merged[sample.shape] = sample
            continue
        times = known.times_ms + sample.times_ms
        # A row without times says nothing about the fit.
        timed = [row for row in (known, sample) if row.times_ms] or [known, sample]
        held_out = all(row.held_out for row in timed)
        merged[sample.shape] = Sample(sample.shape, times, None if times else known.missing, held_out)
    return tuple(merged.values())


def _typed(document: Mapping[str, Any], name: str, kind: type, required: bool = False) -> Any:
    value = document.get(name)
    if value is None:
        if required:
            raise DocumentError(f"the field {name} is missing.")
        return kind()
    if not isinstance(value, kind):
        raise DocumentError(f"{name} must be {_KINDS[kind]}, not {_kind(value)}.")
    return value


def _objects(document: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], ...]:
    entries = _typed(document, name, list)
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DocumentError(f"{name}[{index}] must be an object, not {_kind(entry)}.")
    return tuple(entries)


def _positive(document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    return None if value is None else _whole(value, name)


def _whole(value: object, where: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DocumentError(f"{where} must be a whole number of tokens from 1, not {value!r}.")
    return value


def _sizes(document: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = _typed(document, "graph_sizes", list)
    return tuple(sorted({_whole(size, f"graph_sizes[{index}]") for index, size in enumerate(sizes)}))


def _noise(document: Mapping[str, Any]) -> float | None:
    noise = document.get("noise")
    if noise is None:
        return None
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < math.inf:
        raise DocumentError(f"noise must be a fraction from 0, not {noise!r}.")
    return float(noise)


_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)
