"""The bodies that go to the client: OpenAI's documents, whole or as a stream of server-sent events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sarathi_tune.server.calls import Call
from sarathi_tune.server.desk import Piece, Ticket

DONE = b"data: [DONE]\n\n"
_TEXT = json.JSONEncoder(ensure_ascii=False)


def event(document: dict[str, Any]) -> bytes:
    """A document as one server-sent event."""
    return f"data: {_compact(document)}\n\n".encode()


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
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
        events = [self._token_event(piece) for piece in pieces]
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

    def _token_event(self, piece: Piece) -> bytes:
        """The event of a token. All but the last differ in text and usage alone, and are put together around them: the
        engine's thread waits for the interpreter meanwhile."""
        if piece.finish_reason is not None:
            return event(self._chunk(piece))
        before, behind = self._around_text
        return f"{before}{_TEXT.encode(piece.text)}{behind}{self._usage_part(piece.num_tokens)}}}\n\n".encode()

    def _usage_part(self, output_tokens: int) -> str:
        """`_usage` as it stands in an event, where clients want it in each."""
        if not self.call.continuous_usage:
            return ""
        prompt_tokens = len(self.ticket.request.prompt)
        return (
            f',"usage":{{"prompt_tokens":{prompt_tokens},"completion_tokens":{output_tokens},'
            f'"total_tokens":{prompt_tokens + output_tokens},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.ticket.num_cached}}}}}'
        )

    @cached_property
    def _around_text(self) -> tuple[str, str]:
        """An event without usage up to its text, and from there to its last brace: what clients name stands before."""
        document = self._document(self._chunk_object, [self._choice("delta", "", None)], usage=None)
        before, _, behind = f"data: {_compact(document)}".rpartition('""')
        return before, behind.removesuffix("}")

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
