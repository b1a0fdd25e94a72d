"""Reading a workload: a name from workloads/, a YAML file, or `fixed:PROMPT:OUTPUT`."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from reprlib import repr  # bounded: a few lines of YAML can mean gigabytes
from typing import Any

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.units import MAX_TOKENS
from sarathi_tune.workload.lengths import Empirical, Fixed, Lengths, Lognormal, Uniform
from sarathi_tune.workload.sharing import Sharing
from sarathi_tune.workload.spec import Workload

#: The top-level workloads/ directory, which is packaged as this package's data.
_DIRECTORY = Path(__file__).parent / "data"

_TOP_FIELDS = {"name", "description", "provenance", "prompt", "output", "total_cap", "prefix", "turns"}
_CLAMPS = {"min", "max"}
#: What each kind of distribution may be given by, beside the clamps.
_PARAMETERS: dict[str, tuple[frozenset[str], ...]] = {
    "fixed": (frozenset({"tokens"}),),
    "uniform": (frozenset({"low", "high"}),),
    "lognormal": (frozenset({"median", "p90"}), frozenset({"median", "mean"}), frozenset({"mean", "sd"})),
    "empirical": (frozenset({"quantiles"}),),
}


def workload_names() -> tuple[str, ...]:
    """The names that `load_workload` knows."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.yaml")))


def load_workload(name_or_path: str) -> Workload:
    """The workload called `chat`, in the file `mine.yaml`, or of the shape `fixed:768:64`.

    Raises UsageError for an unknown name, DocumentError (with file and field) for a file that can't be used.
    """
    if name_or_path.startswith("fixed:"):
        return _fixed(name_or_path)
    if name_or_path in workload_names():
        return read_workload(_DIRECTORY / f"{name_or_path}.yaml")
    path = Path(name_or_path)
    if name_or_path.strip() and (path.suffix in (".yaml", ".yml") or _is_there(path)):
        return read_workload(path)
    raise UsageError(
        f"There is no workload {name_or_path!r}: name one of {', '.join(workload_names())}, a YAML file, "
        "or fixed:PROMPT:OUTPUT in tokens, for example fixed:768:64."
    )


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the file system is no path
        return False


def read_workload(path: Path) -> Workload:
    """The workload in a YAML file. Raises DocumentError, naming the file and the field."""
    import yaml  # here, because the start of the program must not wait for it

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DocumentError(f"Workload file {path} can't be read: {reason}.") from error
    except yaml.YAMLError as error:
        raise DocumentError(f"Workload file {path} is not valid YAML: {' '.join(str(error).split())}.") from error
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits, dates that aren't, and lists nested thousands deep.
        raise DocumentError(f"Workload file {path} can't be read: {error}.") from error
    return parse_workload(document, str(path))


def parse_workload(document: object, source: str) -> Workload:
    """The workload in a parsed document; `source` is the file's name for messages. Raises DocumentError."""
    fields = _mapping(document, source, "")
    _refuse_unknown(fields, _TOP_FIELDS, source, "")
    for required in ("name", "prompt", "output"):
        if required not in fields:
            raise _error(source, required, "is missing")
    workload = Workload(
        name=_text(fields, "name", source),
        description=_text(fields, "description", source),
        provenance=_text(fields, "provenance", source),
        prompt=_lengths(fields["prompt"], source, "prompt"),
        output=_lengths(fields["output"], source, "output"),
        total_cap=None if fields.get("total_cap") is None else _tokens(fields["total_cap"], source, "total_cap"),
        sharing=_sharing(fields, source),
    )
    smallest = workload.sharing.prefix_tokens + workload.prompt.shortest + workload.output.shortest
    if workload.total_cap is not None and smallest > workload.total_cap:
        raise _error(source, "total_cap", f"is {workload.total_cap}, and the shortest request has {smallest} tokens")
    return workload


def _sharing(fields: Mapping[str, Any], source: str) -> Sharing:
    """`prefix: {tokens: 2000, distinct: 4}` and `turns: 5`, both optional."""
    turns = _tokens(fields["turns"], source, "turns", "turns") if "turns" in fields else 1
    if fields.get("prefix") is None:
        return Sharing(turns=turns)
    prefix = _mapping(fields["prefix"], source, "prefix")
    _refuse_unknown(prefix, {"tokens", "distinct"}, source, "prefix.")
    if "tokens" not in prefix:
        raise _error(source, "prefix.tokens", "is missing")
    return Sharing(
        prefix_tokens=_tokens(prefix["tokens"], source, "prefix.tokens"),
        num_prefixes=_tokens(prefix["distinct"], source, "prefix.distinct", "prefixes") if "distinct" in prefix else 1,
        turns=turns,
    )


def _fixed(text: str) -> Workload:
    parts = text.split(":")
    if len(parts) != 3 or not all(_is_count(part) for part in parts[1:]):
        raise UsageError(
            f"Workload {text!r} is not of the form fixed:PROMPT:OUTPUT with two numbers of tokens, each at least 1, "
            "for example fixed:768:64."
        )
    prompt, output = int(parts[1]), int(parts[2])
    return Workload(
        name=text,
        prompt=Fixed(tokens=prompt),
        output=Fixed(tokens=output),
        description=f"Every prompt has {prompt} tokens, every answer {output}.",
        provenance="Given on the command line.",
    )


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(MAX_TOKENS)) and 0 < int(text) <= MAX_TOKENS


def _lengths(value: object, source: str, where: str) -> Lengths:
    fields = _mapping(value, source, where)
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in _PARAMETERS:
        raise _error(source, f"{where}.kind", f"must be one of {', '.join(_PARAMETERS)}, not {repr(kind)}")
    given = frozenset(fields) - {"kind"} - _CLAMPS
    if given not in _PARAMETERS[kind]:
        choices = " or ".join(" and ".join(sorted(names)) for names in _PARAMETERS[kind])
        raise _error(source, where, f"of kind {kind} needs {choices}, and has {', '.join(sorted(given)) or 'neither'}")
    low = _tokens(fields["min"], source, f"{where}.min") if "min" in fields else 1
    high = _tokens(fields["max"], source, f"{where}.max") if fields.get("max") is not None else None
    if high is not None and high < low:
        raise _error(source, f"{where}.max", f"is {high}, below min ({low})")
    return _build(kind, given, fields, (low, high), source, where)


def _build(
    kind: str,
    given: frozenset[str],
    fields: Mapping[str, Any],
    clamps: tuple[int, int | None],
    source: str,
    where: str,
) -> Lengths:
    low, high = clamps
    if kind == "empirical":
        points = _points(fields["quantiles"], source, f"{where}.quantiles")
        return Empirical(points=points, min_tokens=low, max_tokens=high)
    if kind == "fixed":
        tokens = _tokens(fields["tokens"], source, f"{where}.tokens")
        return Fixed(tokens=tokens, min_tokens=low, max_tokens=high)
    if kind == "uniform":
        first, last = (_tokens(fields[name], source, f"{where}.{name}") for name in ("low", "high"))
        if last < first:
            raise _error(source, f"{where}.high", f"is {last}, below low ({first})")
        return Uniform(low=first, high=last, min_tokens=low, max_tokens=high)
    numbers = {name: _number(fields[name], source, f"{where}.{name}") for name in given}
    if "sd" in numbers:
        return Lognormal.from_mean_sd(numbers["mean"], numbers["sd"], low, high)
    other = "p90" if "p90" in numbers else "mean"
    if numbers[other] < numbers["median"]:
        raise _error(source, f"{where}.{other}", f"is {numbers[other]:g}, below the median ({numbers['median']:g})")
    build = Lognormal.from_median_p90 if other == "p90" else Lognormal.from_median_mean
    return build(numbers["median"], numbers[other], low, high)


def _points(value: object, source: str, where: str) -> tuple[tuple[float, float], ...]:
    """`{0.0: 12, 0.5: 400, 1.0: 2000}` in rising order."""
    fields = value if isinstance(value, Mapping) else {}
    if len(fields) < 2:
        raise _error(source, where, "must map at least two levels between 0 and 1 to tokens, for example {0.5: 400}")
    for level in fields:
        if isinstance(level, bool) or not isinstance(level, int | float) or not 0 <= level <= 1:
            raise _error(source, where, f"has the level {repr(level)}, which is not between 0 and 1")
    points = tuple((float(level), _number(fields[level], source, f"{where}.{level}")) for level in sorted(fields))
    if any(right[1] < left[1] for left, right in pairwise(points)):
        raise _error(source, where, "must not fall from one level to the next")
    return points


def _mapping(value: object, source: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        found = "is empty" if value is None else f"is {type(value).__name__}"
        raise _error(source, where, f"must be a mapping of fields, and {found}")
    return value


def _refuse_unknown(fields: Mapping[str, Any], known: set[str], source: str, where: str) -> None:
    for name in fields:
        if name not in known:
            raise _error(source, f"{where}{name}", f"is unknown; the fields are {', '.join(sorted(known))}")


def _text(fields: Mapping[str, Any], name: str, source: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str) or (name == "name" and not value.strip()):
        raise _error(source, name, f"must be text, not {repr(value)}")
    return " ".join(value.split())


def _tokens(value: object, source: str, where: str, what: str = "tokens") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _error(source, where, f"must be a whole number of {what}, at least 1, not {repr(value)}")
    if value > MAX_TOKENS:
        raise _error(source, where, f"must be at most {MAX_TOKENS}, not {repr(value)}")
    return value


def _number(value: object, source: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TOKENS:
        raise _error(source, where, f"must be a positive number of at most {MAX_TOKENS}, not {repr(value)}")
    return float(value)


def _error(source: str, where: str, what: str) -> DocumentError:
    field = f"field {where!r} " if where else ""
    return DocumentError(f"Workload file {source}: {field}{what}; workloads/README.md describes the format.")
