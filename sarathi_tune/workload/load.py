"""Reading a workload: a name from workloads/, a YAML file, a recorded trace, or `fixed:PROMPT:OUTPUT`."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from reprlib import repr  # bounded: a few lines of YAML can mean gigabytes
from typing import Any

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.units import MAX_TOKENS, parse_duration_ms
from sarathi_tune.workload.lengths import Empirical, Fixed, Lengths, Lognormal, Uniform
from sarathi_tune.workload.sharing import Sharing
from sarathi_tune.workload.spec import Workload, mixed, of_trace
from sarathi_tune.workload.traces.reading import FORMATS, TraceOptions, is_trace, read_trace

#: The top-level workloads/ directory, which is packaged as this package's data.
_DIRECTORY = Path(__file__).parent / "data"

_ABOUT = {"name", "description", "provenance"}
_TOP_FIELDS = _ABOUT | {"prompt", "output", "total_cap", "prefix", "turns"}
_TRACE_FIELDS = {"file", "format", "start", "speed", "max_requests", "block_tokens", "tokenizer", "output_tokens"}
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


def load_workload(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> Workload:
    """The workload called `chat`, in the file `mine.yaml`, of the shape `fixed:768:64`, or the trace `azure.csv`, with
    its format before it where that can't be told (`azure:requests.txt`).

    `overrides` are fields of TraceOptions that the command line gives. Raises UsageError for an unknown name, and for
    overrides where there is no trace, DocumentError (with file and field) for a file that can't be used.
    """
    wanted = dict(overrides or {})
    format_name, colon, rest = name_or_path.partition(":")
    if colon and format_name in FORMATS:
        return _trace(Path(rest), TraceOptions(**{"format": format_name, **wanted}))
    if is_trace(name_or_path) or (wanted.get("format") and not name_or_path.endswith((".yaml", ".yml"))):
        return _trace(Path(name_or_path), TraceOptions(**wanted))
    workload = _load_described(name_or_path, wanted)
    if wanted and workload.trace is None:
        raise UsageError(f"Workload {name_or_path!r} is no trace, so it has no format, speed or start of its own.")
    return workload


def _load_described(name_or_path: str, overrides: Mapping[str, Any]) -> Workload:
    if name_or_path.startswith("fixed:"):
        return _fixed(name_or_path)
    if name_or_path in workload_names():
        return read_workload(_DIRECTORY / f"{name_or_path}.yaml")
    path = Path(name_or_path)
    if name_or_path.strip() and (path.suffix in (".yaml", ".yml") or _is_there(path)):
        return read_workload(path, overrides)
    raise UsageError(
        f"There is no workload {name_or_path!r}: name one of {', '.join(workload_names())}, a YAML file, a trace "
        "(.csv, .jsonl or .json), or fixed:PROMPT:OUTPUT in tokens, for example fixed:768:64."
    )


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the file system is no path
        return False


def read_workload(path: Path, overrides: Mapping[str, Any] | None = None) -> Workload:
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
    return parse_workload(document, str(path), overrides)


def parse_workload(document: object, source: str, overrides: Mapping[str, Any] | None = None) -> Workload:
    """The workload in a parsed document; `source` is the file's name for messages. Raises DocumentError."""
    fields = _mapping(document, source, "")
    if "trace" in fields:
        return _recorded(fields, source, overrides or {})
    if "mix" in fields:
        return _mixture(fields, source)
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


def _recorded(fields: Mapping[str, Any], source: str, overrides: Mapping[str, Any]) -> Workload:
    """`trace: {file: azure.csv, speed: 2}`; the file is looked for beside the one that names it."""
    _refuse_unknown(fields, _ABOUT | {"trace"}, source, "")
    given = _mapping(fields["trace"], source, "trace")
    _refuse_unknown(given, _TRACE_FIELDS, source, "trace.")
    for name in ("file", "format", "start", "tokenizer"):
        if name in given and not isinstance(given[name], str):
            raise _error(source, f"trace.{name}", f"must be text, not {repr(given[name])}")
    if "file" not in given:
        raise _error(source, "trace.file", "is missing")
    options: dict[str, Any] = {
        name: _tokens(given[name], source, f"trace.{name}", "requests" if name == "max_requests" else "tokens")
        for name in ("max_requests", "block_tokens", "output_tokens")
        if name in given
    }
    if "format" in given:
        if given["format"] not in FORMATS:
            what = f"must be one of {', '.join(FORMATS)}, not {repr(given['format'])}"
            raise _error(source, "trace.format", what)
        options["format"] = given["format"]
    if "start" in given:
        options["start_s"] = parse_duration_ms(given["start"], f"Workload file {source}: field 'trace.start'") / 1e3
    if "speed" in given:
        options["speed"] = _number(given["speed"], source, "trace.speed")
    directory = Path(source).parent
    if "tokenizer" in given:
        options["tokenizer"] = directory / given["tokenizer"]
    workload = _trace(directory / given["file"], TraceOptions(**{**options, **overrides}))
    about: dict[str, Any] = {name: _text(fields, name, source) for name in sorted(_ABOUT & set(fields))}
    return replace(workload, **about)


def _trace(path: Path, options: TraceOptions) -> Workload:
    trace = read_trace(path, options)
    return of_trace(trace, path.name, f"The requests of a recorded trace, in format {trace.format}.", str(path.name))


def _mixture(fields: Mapping[str, Any], source: str) -> Workload:
    """`mix: {chat: 0.6, code: 0.4}`: workloads by their names, each with its share of the requests."""
    _refuse_unknown(fields, _ABOUT | {"mix"}, source, "")
    shares = _mapping(fields["mix"], source, "mix")
    parts = []
    for name, share in shares.items():
        if name not in workload_names() and not str(name).startswith("fixed:"):
            known = ", ".join(workload_names())
            raise _error(source, f"mix.{name}", f"is no workload; name one of {known}, or fixed:PROMPT:OUTPUT")
        part = load_workload(str(name))
        if part.shares_prompts or part.parts:
            raise _error(source, f"mix.{name}", "can't be mixed: its prompts share tokens, or it is a mixture itself")
        parts.append((_number(share, source, f"mix.{name}"), part))
    if len(parts) < 2:
        raise _error(source, "mix", "must name at least two workloads")
    about = {name: _text(fields, name, source) for name in sorted(_ABOUT)}
    return mixed(parts=tuple(parts), **about)


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
