"""The bodies that go to the client: OpenAI's documents, whole or as a stream of server-sent events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sarathi_tune.server.calls import Call
from sarathi_tune.server.desk import Piece, Ticket

DONE = b"data: [DONE]\n\n"


def event(document: dict[str, Any]) -> bytes:
    """A document as one server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """How one request is answered. `reply_id` and `model` as the client will see them, `created` in Unix seconds."""

    call: Call
    ticket: Ticket
    reply_id: str
    model: str
    created: int

    def document(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole answer."""
        text, last = "".join(piece.text for piece in pieces), pieces[-1]
        return self._document(
            "chat.completion" if self.call.kind == "chat" else "text_completion",
            [self._choice("message", text, last.finish_reason)],
            usage=self._usage(last.num_tokens),
        )

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """One event per token, also for a token without text. A chat begins with an event for the role, which leaves
        together with the first token, since a client may take it for one."""
        events = [event(self._chunk(piece)) for piece in pieces]
        if self.call.kind == "chat" and pieces[0].num_tokens == 1:
            events.insert(0, event(self._role_chunk()))
        last = pieces[-1]
        if last.finish_reason is not None:
            if self.call.include_usage:
                events.append(event(self._document(self._chunk_object, [], usage=self._usage(last.num_tokens))))
            events.append(DONE)
        return b"".join(events)

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.call.kind == "chat" else "text_completion"

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        usage = self._usage(piece.num_tokens) if self.call.continuous_usage else None
        return self._document(self._chunk_object, [self._choice("delta", piece.text, piece.finish_reason)], usage=usage)

    def _role_chunk(self) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._document(
            self._chunk_object, [choice], usage=self._usage(0) if self.call.continuous_usage else None
        )

    def _choice(self, kind: str, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if self.call.kind == "completion":
            choice["text"] = text
        elif kind == "message":
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["delta"] = {"content": text}
        return choice | {"logprobs": None, "finish_reason": finish_reason}

    def _document(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        document: dict[str, Any] = {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None:
            document["usage"] = usage
        return document

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        prompt_tokens = len(self.ticket.request.prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.ticket.num_cached},
        }
