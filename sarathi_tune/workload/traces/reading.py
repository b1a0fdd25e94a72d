"""Which format a file has, and the trace that comes out of it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.notices import (
    Notice,
    trace_cut,
    trace_lengths_estimated,
    trace_rows_dropped,
    trace_sorted,
)
from sarathi_tune.workload.trace import Trace, TraceRow
from sarathi_tune.workload.traces.lines import block_tokens_of, read_mooncake
from sarathi_tune.workload.traces.source import HELP, numbered_lines
from sarathi_tune.workload.traces.tables import AZURE, BURSTGPT, columns_of, read_azure, read_burstgpt
from sarathi_tune.workload.traces.texts import counter, read_custom, read_sharegpt

FORMATS = ("azure", "burstgpt", "mooncake", "sharegpt", "custom")
#: What a file name ends with when it is a trace.
SUFFIXES = (".csv", ".jsonl", ".json", ".csv.gz", ".jsonl.gz", ".json.gz")
#: A trace of a week has tens of millions of requests, and no run sends that many.
MAX_ROWS = 200_000


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a trace is read. `format` None is told from the file. It begins `start_s` seconds behind its first request,
    and runs `speed` times as fast as it was recorded. `tokenizer` and `output_tokens` are for texts."""

    format: str | None = None
    start_s: float = 0.0
    speed: float = 1.0
    max_requests: int | None = None
    block_tokens: int | None = None
    tokenizer: Path | None = None
    output_tokens: int | None = None


def is_trace(name: str) -> bool:
    """Whether a name is that of a trace file."""
    return name.lower().endswith(SUFFIXES)


def read_trace(path: Path, options: TraceOptions) -> Trace:
    """Read a trace: sorted by time, without empty requests, from `start_s` on. Raises DocumentError with file, line and
    field, and UsageError when nothing is left."""
    name = options.format or detect_format(path)
    limit = min(options.max_requests or MAX_ROWS, MAX_ROWS)
    reader = _Reader(path, options)
    rows = list(islice(reader.kept(_READERS[name](path, options)), limit + 1))
    notices: list[Notice] = []
    if len(rows) > limit and options.max_requests is None:
        notices.append(trace_cut(path.name, limit))
    del rows[limit:]
    if not rows:
        why = f"none comes {options.start_s:g} s or more behind the first" if reader.num_early else "each is empty"
        raise UsageError(f"Trace {path} holds no request that can be sent: {why}.")
    if reader.num_empty:
        notices.append(trace_rows_dropped(reader.num_empty, reader.num_empty + len(rows)))
    with_times = [row for row in rows if row.at_s is not None]
    if 0 < len(with_times) < len(rows):
        raise DocumentError(f"Trace {path}: some requests have a time and some have none; {HELP}.")
    ordered = sorted(with_times, key=lambda row: row.at_s or 0.0) or rows
    if ordered != rows:
        notices.append(trace_sorted(path.name))
    if name in ("sharegpt", "custom") and options.tokenizer is None:
        notices.append(trace_lengths_estimated(path.name))
    return Trace(
        format=name,
        file_name=path.name,
        rows=tuple(_scaled(ordered, options.speed)),
        block_tokens=options.block_tokens or block_tokens_of(ordered),
        notices=tuple(notices),
    )


def detect_format(path: Path) -> str:
    """The format of a file, from its first line. Raises DocumentError when it is none of those that are known."""
    _, first = next(numbered_lines(path), (1, ""))
    if first.startswith("["):
        return "sharegpt"
    if first.startswith("{"):
        try:
            fields = json.loads(first)
        except (ValueError, RecursionError):
            fields = {}
        for name, field in (
            ("mooncake", "input_length"),
            ("custom", "prompt"),
            ("sharegpt", "conversations"),
            ("sharegpt", "messages"),
        ):
            if field in fields:
                return name
    else:
        columns = set(columns_of(first)) if first else set()
        for name, needed in (("azure", AZURE), ("burstgpt", BURSTGPT)):
            if columns.issuperset(needed):
                return name
    raise DocumentError(
        f"Trace {path} is in no format that is known, by its first line; the formats are {', '.join(FORMATS)}, and "
        "docs/workloads.md describes them."
    )


class _Reader:
    """Counts what is left out."""

    def __init__(self, path: Path, options: TraceOptions) -> None:
        self.path, self.options = path, options
        self.num_empty = self.num_early = 0

    def kept(self, rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
        first_s: float | None = None
        for row in rows:
            if first_s is None:
                first_s = row.at_s
            if self.options.start_s and row.at_s is not None and row.at_s - (first_s or 0.0) < self.options.start_s:
                self.num_early += 1
            elif not row.prompt_tokens or not row.output_tokens:
                self.num_empty += 1
            else:
                yield row


def _scaled(rows: list[TraceRow], speed: float) -> Iterator[TraceRow]:
    """The rows with times from the first of them."""
    first_s = rows[0].at_s
    for row in rows:
        at_s = None if row.at_s is None else (row.at_s - (first_s or 0.0)) / speed
        yield TraceRow(at_s, row.prompt_tokens, row.output_tokens, row.blocks)


_READERS: dict[str, Callable[[Path, TraceOptions], Iterator[TraceRow]]] = {
    "azure": lambda path, _: read_azure(path),
    "burstgpt": lambda path, _: read_burstgpt(path),
    "mooncake": lambda path, _: read_mooncake(path),
    "sharegpt": lambda path, options: read_sharegpt(path, counter(options.tokenizer)),
    "custom": lambda path, options: read_custom(path, counter(options.tokenizer), options.output_tokens),
}
