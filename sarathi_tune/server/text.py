"""Between text and tokens: the model's own tokenizer, or words that stand for token ids where a model has none."""

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from sarathi_tune.config.source import ModelSource
from sarathi_tune.errors import ModelError
from sarathi_tune.server.refusals import bad_request

Message = dict[str, str]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Text(Protocol):
    """What the server needs to know about a model's text. `encode_chat` raises ApiError for messages that the model's
    template refuses."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with those that the tokenizer puts before every text."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where the assistant's answer begins. Messages have role and content."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; special ones have none."""
        ...


class WordText:
    """One word per token, for models without a tokenizer: token 17 is the word `w17`, in both directions.

    Lengths are exact: a prompt of 100 words has 100 tokens, an answer of 100 tokens 100 words. Any other word is some
    token, always the same one. A chat prompt is one token for the role of each message, its words, and one token for
    the answer's role.
    """

    _WORD = re.compile(r"w(\d{1,9})")

    def __init__(self, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._stop_token_ids = stop_token_ids

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self._stop_token_ids

    def encode(self, text: str) -> list[int]:
        return [self._token(word) for word in text.split()]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        words = [word for message in messages for word in (message["role"], *message["content"].split())]
        return [self._token(word) for word in (*words, "assistant")]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([f" w{token_id}" for token_id in token_ids])

    def _token(self, word: str) -> int:
        match = self._WORD.fullmatch(word)
        token = int(match[1]) if match else zlib.crc32(word.encode())
        return token % self._vocab_size


class TokenizerText:
    """The tokenizer in a model's directory, with its chat template."""

    def __init__(self, directory: Path, stop_token_ids: frozenset[int]) -> None:
        """Raises ModelError when the tokenizer can't be read. Runs no code of the directory's."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            self._backend: Any = self._tokenizer.backend_tokenizer
        except Exception as error:  # whatever transformers raises for a broken file
            raise ModelError(
                f"The tokenizer in {directory} can't be read ({_first_line(error)}): copy its files again, or remove "
                "them to serve words that stand for token ids."
            ) from error
        own = self._tokenizer.eos_token_id
        self._stop_token_ids = stop_token_ids if own is None else stop_token_ids | {own}

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self._stop_token_ids

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            raise bad_request("The model has no chat template: use /v1/completions.", "messages")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            reason = _first_line(error)
            raise bad_request(f"The model's chat template refuses these messages: {reason}.", "messages") from error
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))


def load_text(source: ModelSource) -> Text:
    """The tokenizer of a model, or words where its directory has none. Raises ModelError for a broken one."""
    stops = frozenset(source.config.eos_token_ids) | _generation_stops(source.directory)
    if source.directory is None or not any((source.directory / name).exists() for name in _TOKENIZER_FILES):
        return WordText(source.config.vocab_size, stops)
    return TokenizerText(source.directory, stops)


def _generation_stops(directory: Path | None) -> frozenset[int]:
    """Stop tokens in generation_config.json: chat models end a turn with another token than a document."""
    import json

    if directory is None or not (directory / "generation_config.json").exists():
        return frozenset()
    try:
        value = json.loads((directory / "generation_config.json").read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{directory / 'generation_config.json'} can't be read ({_first_line(error)}).") from error
    tokens = value if isinstance(value, list) else [value]
    return frozenset(token for token in tokens if isinstance(token, int))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
