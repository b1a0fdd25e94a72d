"""Data sets of texts: ShareGPT's conversations and vLLM's custom prompts. Only their lengths are used.

With a tokenizer the lengths are the model's own. Without one they are estimated from the letters, and that is said.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sarathi_tune.errors import DocumentError
from sarathi_tune.workload.trace import TraceRow
from sarathi_tune.workload.traces.lines import json_lines
from sarathi_tune.workload.traces.source import HELP, Line, numbered_lines

Count = Callable[[str], int]

#: Bytes of UTF-8 per token, about what the tokenizers of current models make of English text.
_BYTES_PER_TOKEN = 4.2
#: Whose words a prompt is, and whose an answer, by the names that ShareGPT's copies use.
_ASKERS, _ANSWERERS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bard", "bing")
#: What a conversation's parts are called: ShareGPT's names first, OpenAI's second.
_LISTS, _WHO, _WHAT = ("conversations", "messages"), ("from", "role"), ("value", "content")


def read_sharegpt(path: Path, count: Count) -> Iterator[TraceRow]:
    """A list of `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}`, as one JSON
    document or one object per line. The first question and its answer are the request, as in `vllm bench serve`; a
    conversation without both counts as an empty row."""
    for line in _conversations(path):
        yield _first_exchange(line, count)


def read_custom(path: Path, count: Count, output_tokens: int | None) -> Iterator[TraceRow]:
    """`{"prompt": text, "output_tokens": n}` on each line; `output_tokens` is for lines that don't say."""
    for line in json_lines(path):
        prompt = line.fields.get("prompt")
        if not isinstance(prompt, str):
            raise line.error("prompt", f"must be text, not {line.shown('prompt')}")
        if output_tokens is not None and line.fields.get("output_tokens") is None:
            yield TraceRow(None, count(prompt), output_tokens)
        else:
            yield TraceRow(None, count(prompt), line.tokens("output_tokens"))


def estimate_tokens(text: str) -> int:
    """Tokens of a text, from its bytes."""
    return round(len(text.encode("utf-8", "replace")) / _BYTES_PER_TOKEN) or int(bool(text))


def counter(tokenizer: Path | None) -> Count:
    """What counts the tokens of a text: `tokenizer.json` (or the directory with it), else an estimate.

    Raises DocumentError for a tokenizer that can't be read.
    """
    if tokenizer is None:
        return estimate_tokens
    from tokenizers import Tokenizer  # here, because nothing else of a workload needs it

    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        loaded = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise DocumentError(f"Tokenizer {file} can't be read: {reason}.") from error
    except Exception as error:  # the library raises nothing more special
        raise DocumentError(f"Tokenizer {file} can't be read: {error}.") from error

    def count(text: str) -> int:
        return len(loaded.encode(text, add_special_tokens=False).ids)

    return count


def _conversations(path: Path) -> Iterator[Line]:
    first = next(numbered_lines(path), (1, ""))[1]
    if first.startswith("{"):
        yield from json_lines(path)
        return
    text = "\n".join(line for _, line in numbered_lines(path))
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"Trace {path} is no JSON: {error}; {HELP}.") from None
    if not isinstance(document, list):
        raise DocumentError(f"Trace {path} must be a list of conversations; {HELP}.")
    for index, entry in enumerate(document, 1):
        if not isinstance(entry, dict):
            raise DocumentError(f"Trace {path}, conversation {index}: this is no JSON object; {HELP}.")
        yield Line(path, f"conversation {index}", entry)


def _first_exchange(line: Line, count: Count) -> TraceRow:
    name = next((name for name in _LISTS if name in line.fields), _LISTS[0])
    parts = line.fields.get(name)
    if not isinstance(parts, list):
        raise line.error(name, "must be a list" if name in line.fields else "is missing")
    said = [_said(line, f"{name}[{index}]", part) for index, part in enumerate(parts)]
    start = next((index for index, (who, _) in enumerate(said) if who in _ASKERS), None)
    if start is None or start + 1 >= len(said) or said[start + 1][0] not in _ANSWERERS:
        return TraceRow(None, 0, 0)
    return TraceRow(None, count(said[start][1]), count(said[start + 1][1]))


def _said(line: Line, where: str, part: Any) -> tuple[str, str]:
    """(who, what) of one part of a conversation."""
    if not isinstance(part, dict):
        raise line.error(where, "is no JSON object")
    who = next((part[name] for name in _WHO if name in part), None)
    what = next((part[name] for name in _WHAT if name in part), None)
    if not isinstance(who, str):
        raise line.error(f"{where}.from", "is missing" if who is None else "must be text")
    if not isinstance(what, str):
        raise line.error(f"{where}.value", "is missing" if what is None else "must be text")
    return who.lower(), what
