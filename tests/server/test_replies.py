"""Events of a stream, which aren't dumped one by one: each is the document that OpenAI's API has for a chunk."""

import json
from typing import Any

import pytest

from sarathi_tune.engine.request import Request
from sarathi_tune.server.calls import parse_call
from sarathi_tune.server.desk import Piece, Ticket
from sarathi_tune.server.detokenise import AnswerText
from sarathi_tune.server.replies import Reply

TEXTS = ["", " a", '"', '""', "\\", "\n", "\x00", "\u2028", "漢", "\ud7ff", '","usage":{}}']


def reply(kind: str, model: str, **options: Any) -> Reply:
    prompt: dict[str, Any] = {"prompt": [1, 2, 3]}
    if kind == "chat":
        prompt = {"messages": [{"role": "user", "content": "a"}]}
    call = parse_call(kind, {"model": model, "stream": True, "stream_options": options, **prompt}, 100)  # type: ignore[arg-type]
    request = Request(1, [1, 2, 3], max_output_tokens=9)
    ticket = Ticket(request, AnswerText(lambda _: ""), 0.0)
    ticket.num_cached = 2
    return Reply(call, ticket, f"cmpl-{model}", model, 7)


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("model", ["tiny", '"text":"",""'])
def test_an_event_is_its_document(kind: str, counts: bool, model: str) -> None:
    one = reply(kind, model, continuous_usage_stats=counts)
    for number, text in enumerate(TEXTS, start=2):
        (line, end, rest) = one.events([Piece(text, number, None)]).split(b"\n")
        assert line.startswith(b"data: ")
        assert end == rest == b""
        expected: dict[str, Any] = {
            "id": f"cmpl-{model}",
            "object": "chat.completion.chunk" if kind == "chat" else "text_completion",
            "created": 7,
            "model": model,
            "choices": [
                {"index": 0}
                | ({"delta": {"content": text}} if kind == "chat" else {"text": text})
                | {"logprobs": None, "finish_reason": None}
            ],
        }
        if counts:
            expected["usage"] = {
                "prompt_tokens": 3,
                "completion_tokens": number,
                "total_tokens": 3 + number,
                "prompt_tokens_details": {"cached_tokens": 2},
            }
        assert json.loads(line[6:]) == expected
