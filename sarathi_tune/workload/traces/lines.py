"""JSON lines with lengths: Mooncake's traces, and others of its form."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sarathi_tune.errors import DocumentError
from sarathi_tune.workload.trace import TraceRow
from sarathi_tune.workload.traces.source import HELP, Line, numbered_lines

#: Tokens of a block: Mooncake's own, and those of other traces in its form.
BLOCK_TOKENS = (512, 64, 16)


def read_mooncake(path: Path) -> Iterator[TraceRow]:
    """`{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}` on each line. Without `hash_ids`
    a prompt shares nothing; either every request has a time or none has."""
    for line in json_lines(path):
        at_s = line.number("timestamp") / 1e3 if line.fields.get("timestamp") is not None else None
        yield TraceRow(at_s, line.tokens("input_length"), line.tokens("output_length"), _blocks(line))


def block_tokens_of(rows: Sequence[TraceRow]) -> int:
    """The block size with which most prompts have as many blocks as they say."""

    def fits(size: int) -> int:
        return sum(len(row.blocks) == -(-row.prompt_tokens // size) for row in rows if row.blocks)

    return max(BLOCK_TOKENS, key=fits)


def json_lines(path: Path) -> Iterator[Line]:
    """The objects of a JSON lines file. Raises DocumentError."""
    for number, text in numbered_lines(path):
        yield Line(path, f"line {number}", _object(path, number, text))


def _object(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise DocumentError(f"Trace {path}, line {number}: this is no JSON; {HELP}.") from None
    if not isinstance(document, dict):
        raise DocumentError(f"Trace {path}, line {number}: this is no JSON object; {HELP}.")
    return document


def _blocks(line: Line) -> tuple[int, ...]:
    blocks = line.fields.get("hash_ids")
    if blocks is None:
        return ()
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise line.error("hash_ids", f"must be a list of whole numbers, not {line.shown('hash_ids')}")
    return tuple(blocks)
