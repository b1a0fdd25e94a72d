"""What a client asks for, read from the body of its request; what this server doesn't do is refused by name.

A field that would change the answer is never ignored: whoever sends `top_p` 0.9 and gets plain sampling would measure
something else than he thinks. Fields that change nothing here (`user`, `store`, ...) are accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sarathi_tune.server.fields import Fields, check_token_ids, shown
from sarathi_tune.server.refusals import bad_request
from sarathi_tune.server.text import Message

Kind = Literal["completion", "chat"]

#: OpenAI's default of /v1/completions. A chat answer may fill the context.
DEFAULT_COMPLETION_TOKENS = 16
#: OpenAI's default temperature and limits.
DEFAULT_TEMPERATURE, MAX_TEMPERATURE = 1.0, 2.0
MAX_STOP_STRINGS = 4

#: Fields that only have the values at which they do nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
}
_NEUTRAL_BY_KIND: Mapping[Kind, Mapping[str, tuple[Any, ...]]] = {
    "completion": {
        "echo": (False,),
        "suffix": ("",),
        "logprobs": (),
        "prompt_embeds": (),
        "add_special_tokens": (True,),
    },
    "chat": {
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
    },
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it was asked. `prompt` is text, token ids, or the messages of a chat; `max_tokens` None means as
    many as the context holds, `seed` None one of the server's choice."""

    kind: Kind
    model: str | None
    prompt: str | tuple[int, ...] | tuple[Message, ...]
    max_tokens: int | None
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def prompt_field(self) -> str:
        """What the prompt is called in the request."""
        return "messages" if self.kind == "chat" else "prompt"


def parse_call(kind: Kind, values: Mapping[str, Any], vocab_size: int) -> Call:
    """Read a request to /v1/completions or /v1/chat/completions. Raises ApiError."""
    fields = Fields(values)
    for neutral in (_NEUTRAL, _NEUTRAL_BY_KIND[kind]):
        _refuse_unsupported(fields, neutral)
    stream = fields.flag("stream")
    if fields.has("stream_options") and not stream:
        fields.refuse("stream_options", "needs stream to be true.")
    options = fields.object("stream_options")
    include_usage, continuous_usage = options.flag("include_usage"), options.flag("continuous_usage_stats")
    max_tokens = fields.count("max_completion_tokens") or fields.count("max_tokens")
    return Call(
        kind=kind,
        model=fields.text("model"),
        prompt=_messages(fields) if kind == "chat" else _prompt(fields, vocab_size),
        max_tokens=max_tokens if kind == "chat" else max_tokens or DEFAULT_COMPLETION_TOKENS,
        temperature=fields.number("temperature", DEFAULT_TEMPERATURE, 0.0, MAX_TEMPERATURE),
        seed=fields.integer("seed"),
        stop=fields.texts("stop", MAX_STOP_STRINGS),
        stop_token_ids=frozenset(fields.token_ids("stop_token_ids", vocab_size)),
        ignore_eos=fields.flag("ignore_eos"),
        stream=stream,
        include_usage=include_usage or continuous_usage,
        continuous_usage=continuous_usage,
    )


def _refuse_unsupported(fields: Fields, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in neutral.items():
        if fields.has(name) and fields.values[name] not in values:
            only = f"leave it out or send {shown(values[0])}" if values else "leave it out"
            fields.refuse(name, f"isn't supported here: {only}.")


def _prompt(fields: Fields, vocab_size: int) -> str | tuple[int, ...]:
    """Text or token ids; a list of one prompt counts as that prompt."""
    value = fields.values.get("prompt")
    if value is None:
        fields.refuse("prompt", "is missing: send text or a list of token ids.")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            fields.refuse("prompt", f"holds {len(value)} prompts: send one per request.")
        value = value[0]
    if isinstance(value, str):
        return _written(value, "prompt")
    if not isinstance(value, list):
        fields.refuse("prompt", f"must be text or a list of token ids, not {shown(value)}.")
    check_token_ids(value, "prompt", vocab_size)
    return tuple(value)


def _messages(fields: Fields) -> tuple[Message, ...]:
    value = fields.values.get("messages")
    if not isinstance(value, list) or not value:
        fields.refuse("messages", "must be a list of at least one message.")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be an object with role and content, not {shown(value)}.", name)
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"{name}.role must be a string, not {shown(role)}.", f"{name}.role")
    return {"role": role, "content": _content(value.get("content"), f"{name}.content")}


def _content(value: Any, name: str) -> str:
    """A string, or a list of text parts, which are put one below the other."""
    if isinstance(value, str):
        return _written(value, name)
    if not isinstance(value, list):
        raise bad_request(f"{name} must be a string or a list of text parts, not {shown(value)}.", name)
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad_request(f"{name} may only hold text parts, and it holds {shown(part)}.", name)
        texts.append(_written(part["text"], name))
    return "\n".join(texts)


def _written(text: str, name: str) -> str:
    """A text, unless it holds half a character: JSON can, UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{name} holds half a surrogate pair, which is no character.", name) from None
    return text
