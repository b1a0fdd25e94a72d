"""Request bodies of the OpenAI API, in the dialect that the server at hand understands."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from sarathi_tune.workload.spec import RequestSpec

Endpoint = Literal["completions", "chat"]

#: Words of one token each in the usual vocabularies, for servers that take text only.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city name team minute idea body back parent "
    "face others level office door health person art war history party result change morning reason research girl "
    "guy moment air teacher force education"
)
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the server accepts. `token_prompts`: prompts as token ids, so that their lengths are exact; else words, as
    many as `prompt_tokens` come to at `tokens_per_word` behind `template_tokens` of the server's own."""

    model: str
    endpoint: Endpoint = "completions"
    continuous_usage: bool = True
    usage: bool = True
    ignore_eos: bool = True
    token_prompts: bool = True
    tokens_per_word: float = 1.0
    template_tokens: float = 0.0

    @property
    def path(self) -> str:
        """Of the endpoint, behind the base URL."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def body(self, spec: RequestSpec) -> dict[str, Any]:
        """The request as a JSON object: a stream of exactly `spec.output_tokens` tokens, where that can be asked."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "temperature": 0.0}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": self._text(spec)}]
        else:
            body["prompt"] = list(spec.prompt) if self.token_prompts else self._text(spec)
        body["max_tokens"] = spec.output_tokens
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.usage:
            body["stream_options"] = {"include_usage": True}
            if self.continuous_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        return body

    def content(self, spec: RequestSpec) -> bytes:
        """The body as bytes."""
        return json.dumps(self.body(spec), separators=(",", ":")).encode()

    def as_dict(self) -> dict[str, Any]:
        """The dialect as it stands in a result document."""
        return {
            "model": self.model,
            "endpoint": self.endpoint,
            "usage": self.usage,
            "continuous_usage": self.continuous_usage,
            "ignore_eos": self.ignore_eos,
            "token_prompts": self.token_prompts,
        }

    def _text(self, spec: RequestSpec) -> str:
        """Words in the order of the prompt's ids, so that prompts that differ there differ here."""
        count = max(1, round((spec.prompt_tokens - self.template_tokens) / self.tokens_per_word))
        ids = spec.prompt
        return " ".join(_WORDS[ids[index % len(ids)] % len(_WORDS)] for index in range(count))
