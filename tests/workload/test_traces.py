"""Public trace formats: small files as their publishers write them, and what is said about broken ones."""

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from sarathi_tune.errors import DocumentError, UsageError
from sarathi_tune.workload.load import load_workload
from sarathi_tune.workload.spec import Workload
from sarathi_tune.workload.trace import Trace
from sarathi_tune.workload.traces.texts import estimate_tokens

# 2023: seven digits, CRLF and no newline at the end; 2024: a zone
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2225670,879,55"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 02:00:00.509930+02:00,2399,6\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
    "46,GPT-4,900,0,900,API log\n"
    "118,ChatGPT,417,276,693,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 1300, "output_length": 20, "hash_ids": [0, 1, 3]}\n'
    '{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, 4]}\n'
)
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "one two three"},
            {"from": "gpt", "value": "four five"},
            {"from": "human", "value": "six"},
        ],
    },
    {"id": "b", "conversations": [{"from": "human", "value": "nobody answers"}]},
    {"id": "c", "conversations": [{"from": "system", "value": "x"}, {"from": "user", "value": "one"}]},
    {"id": "d", "conversations": [{"from": "user", "value": "one"}, {"from": "chatgpt", "value": "two three"}]},
]


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_bytes(text.encode())
    return str(path)


def trace_of(workload: Workload) -> Trace:
    assert workload.trace is not None
    return workload.trace


def rows(workload: Workload) -> list[tuple[float | None, int, int]]:
    return [(row.at_s, row.prompt_tokens, row.output_tokens) for row in trace_of(workload).rows]


def codes(workload: Workload) -> set[str]:
    return {notice.code for notice in trace_of(workload).notices}


def test_azure(tmp_path: Path) -> None:
    old = load_workload(write(tmp_path, "old.csv", AZURE_2023))
    assert rows(old) == [(0.0, 374, 44), (pytest.approx(4.314579), 396, 109), (pytest.approx(4.541977), 879, 55)]
    new = load_workload(write(tmp_path, "new.csv", AZURE_2024))
    assert rows(new) == [(0.0, 2162, 5), (pytest.approx(0.5), 2399, 6)]
    assert (trace_of(new).format, codes(new)) == ("azure", set())


def test_burstgpt_without_the_requests_that_failed(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path, "burst.csv", BURSTGPT))
    assert rows(workload) == [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]
    (notice,) = trace_of(workload).notices
    assert (notice.code, notice.cause[:6]) == ("trace-rows-dropped", "1 of 4")


def test_mooncakes_hashes_are_shared_beginnings(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path, "moon.jsonl", MOONCAKE))
    assert [at_s for at_s, _, _ in rows(workload)] == [0.0, 3.0, 3.0]
    assert workload.shares_prompts
    first, second, third = (r.prompt for r in workload.draw_rows(0, 1, 3, 1000).requests)
    assert [len(first), len(second), len(third)] == [1100, 1300, 700]
    assert list(first[:1024]) == list(second[:1024])
    assert list(first[1024:]) != list(second[1024:1100])
    assert list(first[:512]) == list(third[:512])
    assert list(first[512:700]) != list(third[512:])


def test_another_run_and_another_lap_share_nothing_with_the_first(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path, "moon.jsonl", MOONCAKE))
    laps = workload.draw_rows(0, 1, 6, 1000).requests
    other = workload.draw_rows(0, 2, 1, 1000).requests
    starts = {tuple(r.prompt[:16]) for r in (laps[0], laps[3], other[0])}
    assert len(starts) == 3
    assert workload.draw_rows(0, 1, 6, 1000).requests == laps


@pytest.mark.parametrize("size", [16, 64, 512])
def test_the_block_size_follows_from_the_file(tmp_path: Path, size: int) -> None:
    lines = [
        json.dumps({"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": list(range(-(-n // size)))})
        for n in (1000, 1037, 2100)
    ]
    assert trace_of(load_workload(write(tmp_path, "t.jsonl", "\n".join(lines)))).block_tokens == size


def test_sharegpt_with_a_tokenizer_and_without(tmp_path: Path) -> None:
    words = {word: index for index, word in enumerate(["one", "two", "three", "four", "five", "?"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "chats.json", json.dumps(SHAREGPT, indent=1))
    write(tmp_path, "exact.yaml", "name: chats\ntrace: {file: chats.json, tokenizer: .}\n")
    exact = load_workload(str(tmp_path / "exact.yaml"))
    assert rows(exact) == [(None, 3, 2), (None, 1, 2)]
    assert codes(exact) == {"trace-rows-dropped"}
    guessed = load_workload(str(tmp_path / "chats.json"))
    assert rows(guessed) == [(None, 3, 2), (None, 1, 2)]
    assert "trace-lengths-estimated" in codes(guessed)


def test_the_estimate_is_near_what_tokenizers_make_of_english() -> None:
    # 44 characters; GPT-2's and Llama 3's tokenizers both make 10 tokens of this sentence
    assert estimate_tokens("The quick brown fox jumps over the lazy dog.") == pytest.approx(10, abs=2)


def test_conversations_by_lines_and_vllms_custom_prompts(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(entry) for entry in SHAREGPT)
    assert len(rows(load_workload(write(tmp_path, "chats.jsonl", lines)))) == 2
    custom = write(tmp_path, "own.jsonl", '{"prompt": "some words", "output_tokens": 7}\n')
    assert [row[2] for row in rows(load_workload(custom))] == [7]
    write(tmp_path, "silent.jsonl", '{"prompt": "some words"}\n')
    write(tmp_path, "w.yaml", "name: w\ntrace: {file: silent.jsonl, output_tokens: 256}\n")
    assert [row[2] for row in rows(load_workload(str(tmp_path / "w.yaml")))] == [256]
    with pytest.raises(DocumentError, match="line 1: field 'output_tokens' is missing"):
        load_workload(str(tmp_path / "silent.jsonl"))


BROKEN = [
    ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,12,x\n", "line 2: field 'GeneratedTokens'"),
    ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,12,3\n", "line 2: field 'TIMESTAMP' must be a time"),
    ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,12\n", "line 2: there are 2 values for 3"),
    ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-5,3\n", "field 'ContextTokens'"),
    ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1.5,3\n", "a whole number of tokens"),
    ("t.csv", "time,in,out\n1,2,3\n", "no format that is known"),
    ("t.csv", "", "no format that is known"),
    ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    ("t.jsonl", '{"input_length": 5, "output_length": 2, "timestamp": "x"}', "line 1: field 'timestamp'"),
    ("t.jsonl", '{"input_length": 5, "timestamp": 0}', "line 1: field 'output_length' is missing"),
    ("t.jsonl", '{"input_length": 5, "output_length": 2, "hash_ids": 3}', "field 'hash_ids' must be a list"),
    ("t.jsonl", '{"input_length": 5, "output_length": 2}\n\n{broken', "line 3: this is no JSON"),
    ("t.jsonl", '{"input_length": 5, "output_length": 2}\n[1]', "line 2: this is no JSON object"),
    (
        "t.jsonl",
        '{"input_length": 5, "output_length": 2}\n{"timestamp": 3, "input_length": 5, "output_length": 2}',
        "some requests have a time and some have none",
    ),
    ("t.jsonl", '{"prompt": 5, "output_tokens": 2}', "line 1: field 'prompt' must be text"),
    ("t.json", "[1, 2]", "conversation 1: this is no JSON object"),
    ("t.json", '[{"conversations": [{"from": "human"}]}]', "field 'conversations[0].value' is missing"),
    ("t.json", '[{"id": 3}]', "conversation 1: field 'conversations' is missing"),
    ("t.json", '[{"conversations"', "is no JSON"),
]


@pytest.mark.parametrize(("name", "text", "words"), BROKEN)
def test_broken_files_name_line_and_field(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_workload(write(tmp_path, name, text))
    assert words in str(refused.value)
    assert name in str(refused.value)


def test_what_is_no_text_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"TIMESTAMP\xff\xfe")
    with pytest.raises(DocumentError, match=r"no UTF-8 text"):
        load_workload(str(tmp_path / "t.csv"))
    with pytest.raises(DocumentError, match="No such file"):
        load_workload(str(tmp_path / "missing.csv"))


def test_packed_files_and_formats_that_are_named(tmp_path: Path) -> None:
    path = tmp_path / "old.csv.gz"
    path.write_bytes(gzip.compress(AZURE_2023.encode()))
    assert len(rows(load_workload(str(path)))) == 3
    other = write(tmp_path, "requests.txt", AZURE_2023)
    assert len(rows(load_workload(f"azure:{other}"))) == 3
    assert len(rows(load_workload(other, {"format": "azure"}))) == 3
    with pytest.raises(DocumentError, match="line 1: the column 'Timestamp' is missing"):
        load_workload(f"burstgpt:{other}")
    with pytest.raises(UsageError, match="is no trace"):
        load_workload("chat", {"speed": 2.0})


def test_start_speed_and_limit(tmp_path: Path) -> None:
    name = write(tmp_path, "burst.csv", BURSTGPT)
    fast = load_workload(name, {"speed": 2.0, "start_s": 10.0, "max_requests": 2})
    assert rows(fast) == [(0.0, 1087, 230), (36.5, 417, 276)]
    write(tmp_path, "w.yaml", "name: mine\ntrace: {file: burst.csv, start: 10s, speed: 2}\n")
    assert rows(load_workload(str(tmp_path / "w.yaml"), {"max_requests": 1})) == [(0.0, 1087, 230)]
    with pytest.raises(UsageError, match="none comes 1000 s or more behind the first"):
        load_workload(name, {"start_s": 1000.0})


def test_rows_out_of_order_are_sorted_and_that_is_said(tmp_path: Path) -> None:
    head, *lines = AZURE_2024.splitlines()
    workload = load_workload(write(tmp_path, "t.csv", "\n".join([head, *reversed(lines)])))
    assert [prompt for _, prompt, _ in rows(workload)] == [2162, 2399]
    assert codes(workload) == {"trace-sorted"}


def test_requests_that_exceed_the_context_are_skipped_and_counted(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path, "burst.csv", BURSTGPT))
    draw = workload.draw(0, 4, vocab_size=100, max_model_len=700)
    assert {r.prompt_tokens for r in draw.requests} == {472, 417}
    assert any("1 of 3 requests of the trace are longer" in notice.cause for notice in draw.notices)
    with pytest.raises(UsageError, match="2 of its 3 requests are longer"):
        workload.draw(0, 4, vocab_size=100, max_model_len=600)


def test_the_statistics_are_those_of_the_rows(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path, "burst.csv", BURSTGPT))
    assert workload.mean_prompt_tokens == pytest.approx((472 + 1087 + 417) / 3, rel=0.01)
    assert workload.mean_output_tokens == pytest.approx((18 + 230 + 276) / 3, rel=0.01)
    assert workload.quantile_prompt(0.99) == 1087
    assert workload.lengths_at(0.9, 0.1) == (1087, 230), "a request keeps its own answer"
    assert workload.as_dict()["trace"]["requests"] == 3


def test_times_repeat_behind_the_end_and_stretch_to_a_rate(tmp_path: Path) -> None:
    trace = trace_of(load_workload(write(tmp_path, "burst.csv", BURSTGPT)))
    assert trace.lap_s == pytest.approx(113 * 3 / 2)
    assert trace.times(4) == (0.0, 40.0, 113.0, pytest.approx(169.5))
    assert trace.until(100.0) == 2
    stretched = trace.times_at(3.0, 3)
    assert stretched == (0.0, pytest.approx(40 / 169.5), pytest.approx(113 / 169.5)), "three requests in one second"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trace: {format: azure}", "field 'trace.file' is missing"),
        ("trace: {file: burst.csv, format: excel}", "field 'trace.format' must be one of azure"),
        ("trace: {file: burst.csv, speed: 0}", "field 'trace.speed' must be a positive number"),
        ("trace: {file: burst.csv, start: 5}", "field 'trace.start' must be text"),
        ("trace: {file: burst.csv, start: '5'}", "has no unit"),
        ("trace: {file: burst.csv, sped: 2}", "field 'trace.sped' is unknown"),
        ("trace: {file: burst.csv}\nprompt: {kind: fixed, tokens: 3}", "field 'prompt' is unknown"),
        ("mix: {chat: 1}", "field 'mix' must name at least two"),
        ("mix: {chat: 1, agentic: 1}", "field 'mix.agentic' can't be mixed"),
        ("mix: {chat: 1, nothing: 1}", "field 'mix.nothing' is no workload"),
        ("mix: {chat: 1, code: -1}", "field 'mix.code' must be a positive number"),
    ],
)
def test_workload_files_that_are_wrong(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path, "burst.csv", BURSTGPT)
    with pytest.raises(UsageError) as refused:
        load_workload(write(tmp_path, "w.yaml", f"name: w\n{text}\n"))
    assert words in str(refused.value)


def test_a_mixture_has_its_parts_by_their_shares(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path, "w.yaml", "name: w\nmix: {fixed:100:10: 3, fixed:5000:1: 1}\n"))
    pairs = [
        (r.prompt_tokens, r.output_tokens) for r in workload.draw(0, 4000, vocab_size=None, max_model_len=8192).requests
    ]
    assert set(pairs) == {(100, 10), (5000, 1)}
    assert pairs.count((5000, 1)) == pytest.approx(1000, abs=120)
    assert workload.mean_prompt_tokens == pytest.approx(0.75 * 100 + 0.25 * 5000, rel=0.01)
    assert workload.as_dict()["mix"] == {"fixed:100:10": 0.75, "fixed:5000:1": 0.25}
