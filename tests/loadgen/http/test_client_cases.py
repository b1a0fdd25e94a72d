"""The faults that other load generators had, each against a server that provokes it. The names in the comments are the
public threads in which they were seen."""

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import pytest

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.http_validity import check_http_run
from sarathi_tune.goodput.objective import shortfalls
from sarathi_tune.goodput.validity import Validity
from sarathi_tune.loadgen.http.client import HttpSettings
from sarathi_tune.loadgen.http.reading import Reading, read_stream
from sarathi_tune.loadgen.http.wire import Timeouts
from sarathi_tune.loadgen.http.worker import run_http_load
from sarathi_tune.loadgen.latency import event_views, failure_of, judge, summarise, tpot_ms, ttft_ms
from sarathi_tune.loadgen.record import LoadResult
from sarathi_tune.workload.arrivals import constant
from sarathi_tune.workload.load import load_workload
from tests.loadgen.http.servers import (
    DIALECT,
    DONE,
    STREAM_HEAD,
    Line,
    Seen,
    chunk,
    fails,
    free_port,
    noted_arrivals,
    requests_at,
    serving,
    target,
    text_event,
    tokens,
    usage_event,
    whole,
)

SLO = Slo(50.0)
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
QUICK = Timeouts(connect_s=2.0, first_byte_s=0.3, between_reads_s=0.3, request_s=2.0)


def read(*packets: tuple[float, bytes]) -> Reading:
    return read_stream(packets)


def load(
    answer: object, times_s: Sequence[float | None], settings: HttpSettings | None = None, output_tokens: int = 3
) -> LoadResult:
    with serving(answer) as (url, _):  # type: ignore[arg-type]
        return run_http_load(target(url), DIALECT, requests_at(*times_s, output_tokens=output_tokens), settings)


def test_the_role_is_no_token() -> None:
    # vllm #15106
    reading = read((0.2, ROLE), (1.5, text_event("a")), (1.52, text_event("b", finish="length")), (1.53, DONE))
    assert reading.token_s == (1.5, 1.52)


def test_several_tokens_in_one_event() -> None:
    # vllm #27485: T(a)@1 T(bcde)@1.4 U(5); the share of the text tells the first event's tokens
    reading = read(
        (1.0, text_event("a")), (1.4, text_event("bcde", finish="length")), (1.5, usage_event(5)), (1.5, DONE)
    )
    assert reading.token_s == (1.0, 1.4)
    assert reading.first_tokens == 1
    assert reading.event_tokens is None, "which event had how many isn't known"
    counted = read(
        (1.0, text_event("a", 1)), (1.4, text_event("bcde", 5, "length")), (1.5, usage_event(5)), (1.5, DONE)
    )
    assert counted.event_tokens == (1, 4)


def test_tokens_bundled_in_the_first_event() -> None:
    # aiperf PR #1279: T(abc)@1 T(d)@2 U(4)
    reading = read(
        (1.0, text_event("abc")), (2.0, text_event("d", finish="length")), (2.1, usage_event(4)), (2.1, DONE)
    )
    assert reading.first_tokens == 3


def test_events_without_text_that_carry_tokens() -> None:
    # vllm #27485: half a character gives no text; with continuous usage the count says that a token came
    reading = read((1.0, text_event("a", 1)), (2.0, text_event("", 2)), (3.0, text_event("é", 3, "stop")), (3.0, DONE))
    assert reading.token_s == (1.0, 2.0, 3.0)
    without = read((1.0, text_event("a")), (2.0, text_event("")), (3.0, text_event("é", finish="stop")), (3.0, DONE))
    assert without.token_s == (1.0, 3.0)


def test_usage_lengthens_no_request() -> None:
    # vllm PR #55508
    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(STREAM_HEAD)
        await line.at(0.02, chunk(text_event("a", 1)))
        await line.at(0.06, chunk(text_event("b", 2, "length")))
        await line.at(1.06, chunk(usage_event(2) + DONE) + b"0\r\n\r\n")

    record = load(answer, [0.0], output_tokens=2).records[0]
    first_s, last_s = record.token_s
    assert tpot_ms(record) == pytest.approx((last_s - first_s) * 1e3)
    assert record.end_s is not None
    assert record.end_s - last_s > 0.5


def test_an_answer_without_tokens_fails() -> None:
    # vllm PR #5895, sglang PR #40555: R@1 [DONE]
    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(STREAM_HEAD + chunk(ROLE) + chunk(DONE) + b"0\r\n\r\n")

    record = load(answer, [0.0]).records[0]
    assert failure_of(record) == "no_tokens"
    assert ttft_ms(record) is None, "guidellm #216: missing, and not 0"


def test_nothing_behind_a_200_fails() -> None:
    # inference-perf #189
    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(STREAM_HEAD + b"0\r\n\r\n")

    record = load(answer, [0.0]).records[0]
    assert (record.failure, record.detail) == ("no_tokens", "the stream was empty")


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"engine dead","code":500}}\n\n',
        b'data: {"object":"error","message":"engine dead","code":500}\n\n',
        b'event: error\ndata: {"message":"engine dead"}\n\n',
        b"event: error\ndata: engine dead\n\n",
        b'data: {"error":"engine dead"}\n\n',
    ],
)
def test_an_error_within_the_stream_fails(event: bytes) -> None:
    # vllm PR #57519, tokenomics PR #16
    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(STREAM_HEAD + chunk(text_event("a", 1)) + chunk(event) + chunk(DONE) + b"0\r\n\r\n")

    record = load(answer, [0.0]).records[0]
    assert record.failure == "mid_stream_error"
    assert "engine dead" in record.detail
    assert len(record.token_s) == 1, "what had come is kept"


def test_the_stamp_is_taken_at_arrival() -> None:
    # tokenomics PR #16: many large events must not be stamped when they are parsed
    large = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}],"padding":"' + b"x" * 200_000 + b'"}\n\n'

    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(STREAM_HEAD)
        for number in range(5):
            await line.at(0.2 * number, chunk(large))
        await line.send(chunk(text_event("b", finish="length")) + chunk(DONE) + b"0\r\n\r\n")

    record = load(answer, [0.0], output_tokens=6).records[0]
    assert len(record.token_s) == 6
    assert record.token_s[4] - record.token_s[0] == pytest.approx(0.8, abs=0.4)


def test_one_token_has_no_tpot_and_its_ttft_is_judged() -> None:
    # vllm-omni #6693
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.05])

    record = load(answer, [0.0], output_tokens=1).records[0]
    assert tpot_ms(record) is None
    assert judge(record, Slo(50, ttft_ms=20)) == "slo_miss"
    assert judge(record, Slo(50, ttft_ms=2000)) == "good"


def test_counts_come_from_usage_or_not_at_all() -> None:
    # flexible-inference-bench PR #66, sglang #24254
    without = read((1.0, text_event("many words in here", finish="stop")), (1.0, DONE))
    assert without.output_tokens is None
    assert read((1.0, text_event("a", finish="stop")), (1.1, usage_event(7, prompt=9)), (1.1, DONE)).prompt_tokens == 9


def test_a_short_answer_is_flagged() -> None:
    # tenstorrent/vllm #344: ignore_eos not honoured
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.01, 0.02])

    record = load(answer, [0.0], output_tokens=64).records[0]
    assert failure_of(record) == "short_output"
    assert (record.output_asked, record.output_got) == (64, 2)


def test_a_dead_stream_ends_with_its_timeout() -> None:
    # vllm PR #51030
    async def answer(seen: Seen, line: Line) -> None:
        if seen.number == 0:
            await line.send(STREAM_HEAD + chunk(text_event("a", 1)))
            await asyncio.sleep(30)
        await tokens(line, [0.01, 0.02, 0.03])

    dead, healthy = load(answer, [0.0, 0.05], HttpSettings(timeouts=QUICK)).records
    assert (dead.failure, len(dead.token_s)) == ("timeout", 1)
    assert "stood still" in dead.detail
    assert failure_of(healthy) is None


def test_a_stream_that_dies_is_not_given_the_time_of_a_first_byte() -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(STREAM_HEAD + chunk(text_event("a", 1)))
        await asyncio.sleep(300)

    patient = Timeouts(first_byte_s=120.0, between_reads_s=0.3, request_s=120.0)
    record = load(answer, [0.0], HttpSettings(timeouts=patient, drain_s=60.0)).records[0]
    assert (record.failure, record.detail) == ("timeout", "The stream stood still for 0.3 s.")


def test_no_first_byte_and_a_trickle_end_too() -> None:
    async def answer(seen: Seen, line: Line) -> None:
        if seen.number == 0:
            await asyncio.sleep(30)  # not even a head
        await line.send(STREAM_HEAD)
        for number in range(100):  # never still, never done
            await line.at(0.1 * number, chunk(b": ping\n\n"))

    mute, trickle = load(answer, [0.0, 0.02], HttpSettings(timeouts=QUICK)).records
    assert (mute.failure, mute.detail) == ("timeout", "No answer came within 0.3 s.")
    assert trickle.failure == "timeout"
    assert "longer than 2 s" in trickle.detail


def test_every_intended_request_is_counted() -> None:
    # vllm #13082, InferenceX #357: 10 requests, 9 of them 503
    async def answer(seen: Seen, line: Line) -> None:
        if seen.number:
            await line.send(fails("503 Service Unavailable", "overloaded"))
        else:
            await tokens(line, [0.01, 0.02, 0.03])

    result = load(answer, constant(100.0, n=10))
    report = summarise(result, SLO, intervals=False)
    assert report.counts.intended == 10
    assert (report.counts.good, report.counts.failures) == (1, {"http_5xx": 9})
    assert report.goodput_per_s == pytest.approx(1 / 0.1)
    assert report.counts.failed_share == 0.9
    assert "9 of 10 requests failed" in shortfalls(report)[0], "guidellm #979: no goodput over the survivors"
    assert "overloaded" in result.records[5].detail


def test_the_schedule_is_absolute() -> None:
    # vllm #21104, evalscope PR #1367: relative sleeps made 183 of 200 requests per second
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.0])

    result = load(answer, constant(200.0, n=400), output_tokens=1)
    sent = [record.sent_s for record in result.records if record.sent_s is not None]
    assert len(sent) == 400
    assert sent[-1] - sent[0] == pytest.approx(399 / 200, abs=0.12), "at 183 per second it would be 0.18 s more"
    assert all(record.lag_s == pytest.approx(record.sent_s - record.intended_s) for record in result.records)


def test_a_cap_on_concurrency_hides_no_queue() -> None:
    # vllm #54101: service 1 s, one slot, arrivals each 0.5 s: 1, 1.5, ... 5.5 from the intended time (here in 1/20)
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.05])

    result = load(answer, constant(40.0, n=10), HttpSettings(in_flight=1), output_tokens=1)
    waits = [(record.token_s[0] - record.intended_s) * 20 for record in result.records]
    assert waits[0] >= 0.99
    assert all(after > before for before, after in pairwise(waits))
    assert waits[-1] >= 5.5
    assert median(record.lag_s for record in result.records) < 0.02, "held back by the cap, and not by the client"


def test_no_pool_limit_holds_requests_back() -> None:
    # guidellm #487: 101 requests at t = 0 over 100 connections. Here none is answered before all of them have come.
    have_all_come = asyncio.Event()

    async def answer(seen: Seen, line: Line) -> None:
        if seen.number == 139:
            have_all_come.set()
        await have_all_come.wait()
        await tokens(line, [0.0])

    result = load(answer, [0.0] * 140, HttpSettings(drain_s=60.0), output_tokens=1)
    assert [failure_of(record) for record in result.records] == [None] * 140


def starved(gap_s: float, events: int) -> Validity:
    """A run of one stream whose client stands still for 60 ms again and again."""

    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [gap_s * number for number in range(1, events + 1)])

    blocked = []

    def block(_progress: object) -> None:  # runs on the client's loop
        blocked.append(time.sleep(0.06))

    with serving(answer) as (url, _):
        result = run_http_load(target(url), DIALECT, requests_at(0.0, output_tokens=events), on_progress=block)
    assert blocked
    report = summarise(result, SLO, intervals=False)
    return check_http_run(result, report, event_views(result.counted, SLO))


def test_a_starved_event_loop_is_seen() -> None:
    # inference-perf #188
    validity = starved(0.01, 40)
    assert validity.is_client_limited
    assert "client-starved" in {notice.code for notice in validity.problems}


def test_a_late_reader_spoils_no_stamp_of_the_kernel() -> None:
    with noted_arrivals() as are_told:
        validity = starved(0.3, 6)
    if not are_told:
        pytest.skip("this kernel doesn't tell when bytes arrived")
    assert validity.more_facts["loop_lag_p99_ms"] > 2.5  # 5 % of the objective
    assert validity.more_facts["stamped_on_arrival"]
    assert not {"client-starved", "heap-collected"} & {
        notice.code for notice in (*validity.problems, *validity.remarks)
    }


def test_rates_below_one_per_second() -> None:
    # vllm #47651
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.01])

    result = load(answer, constant(0.8, n=2), output_tokens=1)
    assert result.window_s == (0.0, 2.5)
    assert summarise(result, SLO, intervals=False).offered_per_s == pytest.approx(0.8)


def test_prompts_are_unlike_each_other() -> None:
    # vllm #54227, inference-perf PR #340, sglang PR #13934
    requests = load_workload("fixed:64:2").draw(3, 40, vocab_size=30_000, max_model_len=4096).requests
    others = load_workload("fixed:64:2").draw(4, 40, vocab_size=30_000, max_model_len=4096).requests
    pages = {tuple(spec.prompt[:16]) for spec in (*requests, *others)}
    assert len(pages) == 80


def test_cached_tokens_are_read_back() -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.001 * number for number in range(1, 4)], cached=6)

    result = load(answer, [0.0, 0.0])
    assert [record.cached_tokens for record in result.records] == [6, 6]
    validity = check_http_run(result, summarise(result, SLO, intervals=False), event_views(result.counted, SLO))
    assert "prefix-cache-hits" in {notice.code for notice in validity.problems}


def test_a_closed_loop_counts_its_steady_window_only() -> None:
    # evalscope #1627, guidellm #93
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.02, 0.04])

    result = load(answer, [None] * 100, HttpSettings(in_flight=4, stop_after_s=0.3), output_tokens=2)
    first_answers = sorted(record.token_s[0] for record in result.records)[:4]
    first_ends = sorted(record.end_s for record in result.records if record.end_s is not None)[:4]
    assert result.window_s == (first_answers[3], pytest.approx(first_ends[3] + 0.3, abs=0.02))
    assert {record.outcome for record in result.records} == {"finished"}
    for record in result.records:
        others = [o for o in result.records if o is not record and o.sent_s is not None and o.end_s is not None]
        assert record.sent_s is not None
        assert sum(o.sent_s <= record.sent_s < o.end_s for o in others) <= 3


def test_token_ids_are_sent_and_lengths_compared() -> None:
    # vllm #10847, sglang PR #15732
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.001 * number for number in range(1, 4)], prompt=9)

    with serving(answer) as (url, log):
        result = run_http_load(target(url), DIALECT, requests_at(0.0))
    assert log.requests[0].body["prompt"] == list(range(8))
    assert (result.records[0].prompt_tokens, result.records[0].prompt_got) == (8, 9)
    validity = check_http_run(result, summarise(result, SLO, intervals=False), event_views(result.counted, SLO))
    assert "prompt-length-differs" in {notice.code for notice in validity.remarks}


def test_the_heap_is_frozen_in_the_run() -> None:
    # dynamo #12020, sglang PR #9241
    import gc

    seen: list[bool] = []

    async def answer(_seen: Seen, line: Line) -> None:
        seen.append(gc.isenabled())
        await tokens(line, [0.01, 0.02, 0.03])

    result = load(answer, [0.0])
    assert seen == [False]
    assert gc.isenabled()
    assert result.client is not None
    assert result.client.gc_pauses_ms == ()


def test_pauses_of_the_heap_are_recorded() -> None:
    import gc

    async def answer(_seen: Seen, line: Line) -> None:
        gc.collect()  # somebody insists
        await tokens(line, [0.01, 0.02, 0.03])

    result = load(answer, [0.0])
    assert result.client is not None
    assert len(result.client.gc_pauses_ms) == 1


def test_events_of_one_read_are_counted() -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(STREAM_HEAD)
        await line.at(0.02, chunk(text_event("a", 1) + text_event("b", 2) + text_event("c", 3, "length")))
        await line.send(chunk(DONE) + b"0\r\n\r\n")

    result = load(answer, [0.0])
    assert result.records[0].num_coalesced == 2
    views = event_views(result.counted, SLO)
    assert views.coalesced_share == 1.0
    validity = check_http_run(result, summarise(result, SLO, intervals=False), views)
    assert "events-coalesced" in {notice.code for notice in validity.remarks}


def test_truncated_by_the_death_of_the_server() -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(STREAM_HEAD + chunk(text_event("a", 1)))
        await line.at(0.05, chunk(text_event("b", 2)))
        line.reset()

    record = load(answer, [0.0]).records[0]
    assert record.failure == "truncated"
    assert len(record.token_s) == 2


@pytest.mark.parametrize("sends_done", [True, False])
def test_a_tail_without_a_blank_line(sends_done: bool) -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        tail = b"data: [DONE]" if sends_done else text_event("b", 2)[:-20]
        await line.send(STREAM_HEAD + chunk(text_event("a", 1)) + chunk(tail) + b"0\r\n\r\n")

    record = load(answer, [0.0], output_tokens=1).records[0]
    assert failure_of(record) == (None if sends_done else "truncated")


def test_a_body_that_ends_with_its_connection() -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        await line.send(text_event("a", 1) + text_event("b", 2, "length") + DONE)
        line.writer.close()

    record = load(answer, [0.0], output_tokens=2).records[0]
    assert failure_of(record) is None
    assert record.output_got == 2


def test_connections_are_used_again_and_a_stale_one_is_no_failure() -> None:
    async def answer(seen: Seen, line: Line) -> None:
        await tokens(line, [0.005])
        if seen.number == 1:
            await asyncio.sleep(0.02)
            line.reset()  # as a server does with an idle connection

    with serving(answer) as (url, log):
        result = run_http_load(target(url), DIALECT, requests_at(0.0, 0.1, 0.2, output_tokens=1))
    assert [failure_of(record) for record in result.records] == [None] * 3
    assert [seen.connection for seen in log.requests] == [1, 1, 2]


def test_a_connection_that_dies_before_the_answer_is_counted() -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        line.reset()

    result = load(answer, [0.0, 0.05])
    assert [record.failure for record in result.records] == ["connect", "connect"]


def test_nobody_listens() -> None:
    result = run_http_load(target(f"http://127.0.0.1:{free_port()}"), DIALECT, requests_at(0.0, 0.01))
    assert [record.failure for record in result.records] == ["connect", "connect"]
    assert "refused" in result.records[0].detail


@pytest.mark.parametrize(
    ("response", "failure", "words"),
    [
        (fails("401 Unauthorized", "Incorrect API key provided: sk-secret"), "http_4xx", "Incorrect API key"),
        (fails("422 Unprocessable", "bad field"), "http_4xx", "bad field"),
        (fails("429 Too Many Requests", "slow down", "retry-after: 7\r\n"), "http_4xx", "Retry-After: 7"),
        (fails("500 Internal", "boom"), "http_5xx", "boom"),
        (whole("302 Found", b"", extra="location: http://elsewhere/v1\r\n"), "http_3xx", "http://elsewhere/v1"),
        (whole("200 OK", b"<html>hello</html>", "text/html"), "mid_stream_error", "text/html"),
        (whole("200 OK", b'{"error":{"message":"nope"}}'), "mid_stream_error", "nope"),
        (whole("200 OK", b'{"choices":[{"text":"a"}]}'), "mid_stream_error", "without streaming"),
        (
            whole("200 OK", b"\x1f\x8b", "text/event-stream", "content-encoding: gzip\r\n"),
            "mid_stream_error",
            "compressed (gzip)",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "connect", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "connect", "not HTTP"),
    ],
)
def test_other_answers(response: bytes, failure: str, words: str) -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(response)
        if b"SSH" in response:
            line.writer.close()

    with serving(answer) as (url, _):
        result = run_http_load(target(url, OPENAI_API_KEY="sk-secret"), DIALECT, requests_at(0.0))
    record = result.records[0]
    assert record.failure == failure
    assert words in record.detail
    assert "sk-secret" not in repr(result)


def test_what_is_sent() -> None:
    async def answer(_seen: Seen, line: Line) -> None:
        await tokens(line, [0.01])

    with serving(answer) as (url, log):
        run_http_load(target(url, SARATHI_TUNE_API_KEY="sk-1"), DIALECT, requests_at(0.0, output_tokens=1))
    seen = log.requests[0]
    assert (seen.method, seen.path) == ("POST", "/v1/completions")
    assert seen.headers["accept-encoding"] == "identity"
    assert seen.headers["authorization"] == "Bearer sk-1"
    assert seen.body["ignore_eos"] is True
    assert seen.body["max_tokens"] == 1
    assert seen.body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_one_percent_random_failures_are_counted() -> None:
    async def answer(seen: Seen, line: Line) -> None:
        if seen.number % 100 == 37:
            await line.send(fails("500 Internal", "boom"))
        else:
            await tokens(line, [0.002])

    result = load(answer, constant(400.0, n=200), output_tokens=1)
    counts = summarise(result, SLO, intervals=False).counts
    assert (counts.intended, counts.good, counts.failures) == (200, 198, {"http_5xx": 2})


def test_descriptors_are_checked_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    # sglang PR #647
    import resource

    from sarathi_tune.errors import UsageError
    from sarathi_tune.loadgen.http.limits import ensure_descriptors

    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (256, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda _what, limits: raised.append(limits))
    ensure_descriptors(100, is_certain=True)
    assert raised == []
    ensure_descriptors(500, is_certain=True)
    assert raised == [(564, 1000)]
    ensure_descriptors(5000, is_certain=False)
    assert raised[-1] == (1000, 1000)
    with pytest.raises(UsageError, match=r"5064 open files, and the system allows 1000"):
        ensure_descriptors(5000, is_certain=True)
