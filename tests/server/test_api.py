"""Every endpoint over a real socket, with a tiny model whose greedy answers transformers gives."""

from typing import Any

import pytest

from tests.hf_models import hf_greedy
from tests.server.conftest import TinyModel
from tests.server.running import Running, events_of

PROMPT = "then in the end another"
MESSAGES = [{"role": "user", "content": PROMPT}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = {COMPLETIONS: {"prompt": PROMPT}, CHAT: {"messages": MESSAGES}}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def expected_text(tiny: TinyModel, prompt: list[int], n: int) -> str:
    return tiny.tokenizer.decode(hf_greedy(tiny.reference.hf_model, prompt, n), skip_special_tokens=True)


def prompt_of(tiny: TinyModel, path: str) -> list[int]:
    if path == COMPLETIONS:
        return tiny.tokenizer(PROMPT)["input_ids"]
    return tiny.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]


def text_of(choice: dict[str, Any]) -> str:
    return choice.get("text") or choice.get("message", choice.get("delta", {})).get("content", "")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2, 60])
def test_greedy_answers_are_those_of_transformers_streamed_or_not(
    server: Running, tiny: TinyModel, path: str, n: int
) -> None:
    prompt = prompt_of(tiny, path)
    whole = server.post(path, **PATHS[path], **GREEDY, max_tokens=n).json()
    events = server.events(path, **PATHS[path], **GREEDY, max_tokens=n)
    choice = whole["choices"][0]
    assert text_of(choice) == expected_text(tiny, prompt, n)
    assert "".join(text_of(event["choices"][0]) for event in events) == text_of(choice)
    assert choice["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    assert whole["usage"]["completion_tokens"] == n
    assert whole["usage"]["total_tokens"] == len(prompt) + n


def test_a_completion_looks_as_openai_documents_it(server: Running) -> None:
    answer = server.post(COMPLETIONS, prompt=PROMPT, max_tokens=3, temperature=0).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == server.client.get("/v1/models").json()["data"][0]["id"]
    assert {"index", "text", "logprobs", "finish_reason"} == set(answer["choices"][0])


def test_a_chat_looks_as_openai_documents_it(server: Running) -> None:
    answer = server.post(CHAT, messages=MESSAGES, max_completion_tokens=3).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 3


def test_a_chat_stream_begins_with_the_role_and_has_one_event_per_token(server: Running) -> None:
    events = server.events(CHAT, messages=MESSAGES, max_tokens=5, **GREEDY)
    assert [event["object"] for event in events] == ["chat.completion.chunk"] * 6
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({event["id"] for event in events}) == 1
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 5 + ["length"]
    assert not any("usage" in event for event in events)


def test_usage_comes_once_at_the_end_when_asked_for(server: Running) -> None:
    events = server.events(COMPLETIONS, prompt=[5] * 9, max_tokens=4, **GREEDY, stream_options={"include_usage": True})
    assert [len(event["choices"]) for event in events] == [1, 1, 1, 1, 0]
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (9, 4, 13)


def test_continuous_usage_counts_up_with_every_event(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(CHAT, messages=MESSAGES, max_tokens=4, **GREEDY, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 4, 4]


def test_streams_say_that_they_are_streams(server: Running) -> None:
    response = server.post(COMPLETIONS, prompt=PROMPT, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert len(events_of(response.text)) >= 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_token_ids_are_a_prompt(server: Running, tiny: TinyModel, wrapped: bool) -> None:
    prompt = [7, 200, 31, 5]
    answer = server.post(COMPLETIONS, prompt=[prompt] if wrapped else prompt, max_tokens=20, **GREEDY).json()
    assert answer["choices"][0]["text"] == expected_text(tiny, prompt, 20)
    assert answer["usage"]["prompt_tokens"] == 4


def test_a_list_of_one_text_is_that_text(server: Running) -> None:
    one, listed = (server.post(COMPLETIONS, prompt=p, max_tokens=8, **GREEDY).json() for p in (PROMPT, [PROMPT]))
    assert one["choices"] == listed["choices"]


def test_a_long_prompt_is_turned_into_tokens_beside_the_loop(server: Running) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "x" * 3000}]}]
    error = server.post(CHAT, messages=messages).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "3019 tokens" in error["message"], "[us-er] 5, the 1, space 1, lines 2, x 3000, [assist-an-t] 10"


def test_the_default_length_of_a_completion_is_sixteen_tokens(server: Running) -> None:
    assert server.post(COMPLETIONS, prompt=PROMPT, ignore_eos=True).json()["usage"]["completion_tokens"] == 16


def test_a_chat_fills_the_context_when_nothing_is_said(server: Running) -> None:
    assert server.post(CHAT, messages=MESSAGES, **GREEDY).json()["usage"]["total_tokens"] == 256


def test_the_token_that_ends_an_answer_is_counted_and_has_no_text(server: Running, tiny: TinyModel) -> None:
    """Whatever greedy gives as third token is made the stop token."""
    prompt = [7, 200, 31, 5]
    tokens = hf_greedy(tiny.reference.hf_model, prompt, 30)
    place = next(index for index in range(2, 30) if tokens[index] not in tokens[:index])
    answer = server.post(COMPLETIONS, prompt=prompt, max_tokens=30, stop_token_ids=[tokens[place]], **GREEDY).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == place + 1
    assert answer["choices"][0]["text"] == tiny.tokenizer.decode(tokens[:place], skip_special_tokens=True)


def test_the_end_token_ends_an_answer_unless_ignored(server: Running) -> None:
    """Sampling at the highest temperature meets </s> (1 of 264) within 240 tokens in some of a few seeds."""
    ends = []
    for seed in range(12):
        body = {"prompt": [9], "max_tokens": 240, "temperature": 2, "seed": seed}
        ended = server.post(COMPLETIONS, **body).json()
        ignored = server.post(COMPLETIONS, **body, ignore_eos=True).json()
        assert ignored["choices"][0]["finish_reason"] == "length"
        assert ignored["usage"]["completion_tokens"] == 240
        assert ignored["choices"][0]["text"].startswith(ended["choices"][0]["text"].rstrip("\ufffd"))
        ends.append(ended["choices"][0]["finish_reason"])
    assert "stop" in ends


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_before_it(server: Running, stream: bool) -> None:
    whole = server.post(COMPLETIONS, prompt=PROMPT, max_tokens=100, **GREEDY).json()["choices"][0]["text"]
    place = next(i for i in range(10, len(whole) - 1) if "\ufffd" not in whole[i : i + 2])
    stop = whole[place : place + 2]
    body = {"prompt": PROMPT, "max_tokens": 100, "stop": [stop, "never there"], **GREEDY}
    before = server.metrics()["vllm:generation_tokens_total"]
    if stream:
        events = server.events(COMPLETIONS, **body, stream_options={"include_usage": True})
        text = "".join(text_of(event["choices"][0]) for event in events[:-1])
        reason, used = events[-2]["choices"][0]["finish_reason"], events[-1]["usage"]["completion_tokens"]
    else:
        answer = server.post(COMPLETIONS, **body).json()
        text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        used = answer["usage"]["completion_tokens"]
    assert text == whole.partition(stop)[0]
    assert reason == "stop"
    assert used < 100
    assert server.metrics()["vllm:generation_tokens_total"] - before == used
    server.wait_idle()


def test_a_seed_makes_sampling_repeatable_and_none_does_not(server: Running) -> None:
    def answer(**options: Any) -> str:
        body = server.post(COMPLETIONS, prompt=PROMPT, max_tokens=20, temperature=1.5, **options).json()
        return str(body["choices"][0]["text"])

    assert answer(seed=3) == answer(seed=3)
    assert answer(seed=3) != answer(seed=4)
    assert answer() != answer()
    assert isinstance(answer(seed=-5), str)


def test_a_prompt_seen_before_is_read_from_the_cache_and_said_so(server: Running) -> None:
    prompt = [11, 12, 13, 14] * 20  # five pages
    before = server.metrics()
    first = server.post(COMPLETIONS, prompt=prompt, max_tokens=1).json()["usage"]
    second = server.post(COMPLETIONS, prompt=prompt, max_tokens=1).json()["usage"]
    after = server.metrics()
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 64, "the last token is always computed"
    assert after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"] == 64
    assert after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"] == 160


def test_the_models_are_listed_and_shown(server: Running, tiny: TinyModel) -> None:
    listed = server.client.get("/v1/models").json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert card["id"] == str(tiny.directory)
    assert card["max_model_len"] == 256
    assert server.client.get("/v1/models/tiny").json() == card
    assert server.post(COMPLETIONS, model="tiny", prompt=PROMPT).json()["model"] == "tiny"


def test_health_and_version(server: Running) -> None:
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ping").json() == {"status": "serving"}
    assert server.client.get("/version").json()["server"] == "sarathi-tune"


def test_the_clients_own_request_id_comes_back(server: Running) -> None:
    def answered(request_id: str) -> str:
        headers = {"x-request-id": request_id}
        return str(server.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers).json()["id"])

    assert answered("abc-1") == "cmpl-abc-1"
    assert answered("x" * 101) != "cmpl-" + "x" * 101


def test_fields_that_change_nothing_are_accepted(server: Running) -> None:
    body = {"n": 1, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": None, "stop": None, "user": "me"}
    assert server.post(COMPLETIONS, prompt=PROMPT, max_tokens=1, **body).status_code == 200
    chat = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False, "store": True}
    assert server.post(CHAT, messages=MESSAGES, max_tokens=1, **chat).status_code == 200


def test_the_metrics_have_vllms_names_and_add_up(server: Running) -> None:
    before = server.metrics()
    answers = [server.post(COMPLETIONS, prompt=[3] * n, max_tokens=n + 1, **GREEDY).json() for n in range(1, 5)]
    server.wait_idle()
    after = server.metrics()

    def grown(name: str) -> float:
        return after[f"vllm:{name}"] - before[f"vllm:{name}"]

    assert grown("prompt_tokens_total") == sum(answer["usage"]["prompt_tokens"] for answer in answers) == 10
    assert grown("generation_tokens_total") == sum(answer["usage"]["completion_tokens"] for answer in answers) == 14
    assert grown("request_success_total{length}") == 4
    assert grown("request_success_total{stop}") == grown("request_success_total{abort}") == 0
    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 4
    assert grown("inter_token_latency_seconds_count") == 14 - 4
    assert grown("iteration_tokens_total_count") == 14, "one request at a time: one step per token"
    assert grown("iteration_tokens_total_sum") == 10 + (14 - 4)
    assert grown("num_preemptions_total") == 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:cache_config_info{16,True,128}"] == 1
    assert after["vllm:iteration_tokens_total_bucket{32.0}"] == after["vllm:iteration_tokens_total_count"], "the budget"
    gap_s = grown("inter_token_latency_seconds_sum") / 10
    assert 0 < gap_s < grown("e2e_request_latency_seconds_sum")
