"""Every published case, over a real socket, in the packets and at the times given (one second becomes 30 ms)."""

import json
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from sarathi_tune.loadgen.http.reading import Reading, read_stream
from sarathi_tune.loadgen.http.worker import run_http_load
from sarathi_tune.loadgen.record import RequestRecord
from tests.loadgen.http.servers import DIALECT, STREAM_HEAD, Line, Seen, chunk, requests_at, serving, target

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "data" / "sse_cases.json").read_text())["cases"]
SCALE = 0.03
#: How late a packet may be stamped on a busy machine, in seconds.
LATE_S = 0.025


def packets(case: dict[str, Any]) -> list[tuple[float, bytes]]:
    """(seconds, bytes); a packet with an earlier time than the one before it is sent with it."""
    found: list[tuple[float, bytes]] = []
    for time_s, text in case["packets"]:
        is_hex = text.startswith("<bytes>")
        data = bytes.fromhex(text.removeprefix("<bytes>")) if is_hex else text.encode()
        found.append((max(time_s, found[-1][0] if found else 0.0), data))
    return found


def by_id(case: dict[str, Any]) -> str:
    return str(case["id"])


def over_a_socket(case: dict[str, Any]) -> tuple[RequestRecord, dict[float, float]]:
    """The record, and when each of the case's times really was: seconds from the start of the client's run."""
    sent_s: dict[float, float] = {}

    async def answer(_seen: Seen, line: Line) -> None:
        await line.send(STREAM_HEAD)
        for time_s, data in packets(case):
            await line.wait_until(time_s * SCALE)
            sent_s.setdefault(time_s, time.perf_counter())
            await line.send(chunk(data))
        await line.send(b"0\r\n\r\n")

    with serving(answer) as (url, _):
        result = run_http_load(target(url), DIALECT, requests_at(0.0, output_tokens=1))
    assert result.client is not None
    return result.records[0], {nominal: stamp - result.client.origin_s for nominal, stamp in sent_s.items()}


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_the_case_over_a_socket(case: dict[str, Any]) -> None:
    (record, sent_s), expect = over_a_socket(case), case["expect"]
    if expect["status"] == "error":
        assert record.failure == "mid_stream_error"
        assert expect["error_contains"] in record.detail
        assert len(record.token_s) == 1, "the tokens before the failure are kept"
        return
    if expect["status"] == "truncated":
        assert record.failure == "truncated"
        assert len(record.token_s) == 2
        return
    assert record.failure is None
    times_s = list(accumulate([expect["ttft_s"], *expect["gaps_s"]]))
    assert times_s[-1] == expect["last_token_s"]
    assert len(record.token_s) == len(times_s)
    for stamp, nominal_s in zip(record.token_s, times_s, strict=True):
        late_s = stamp - sent_s[nominal_s]
        assert 0 <= late_s < LATE_S, "never before the packet that completes the event, and soon after it"
    assert record.output_got == expect["output_tokens"]
    if "tokens_per_event_max" in expect:
        assert record.event_tokens is not None
        assert max(record.event_tokens) == expect["tokens_per_event_max"]


def check_exactly(reading: Reading, expect: dict[str, Any]) -> None:
    """Against the expectation, stamps to the digit."""
    assert reading.status == expect["status"]
    if reading.status == "error":
        assert expect["error_contains"] in reading.error
    if reading.status != "ok":
        return
    assert reading.token_s[0] == expect["ttft_s"]
    assert [after - before for before, after in zip(reading.token_s, reading.token_s[1:], strict=False)] == (
        expect["gaps_s"]
    )
    assert reading.token_s[-1] == expect["last_token_s"]
    assert reading.output_tokens == expect["output_tokens"]
    assert reading.text == expect["text"]


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_the_case_with_its_own_stamps(case: dict[str, Any]) -> None:
    check_exactly(read_stream(packets(case)), case["expect"])


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_cut_at_every_byte_it_reads_the_same(case: dict[str, Any]) -> None:
    pieces = packets(case)
    for index, (time_s, data) in enumerate(pieces):
        for cut in range(1, len(data)):
            halves = [(time_s, data[:cut]), (time_s, data[cut:])]
            check_exactly(read_stream(pieces[:index] + halves + pieces[index + 1 :]), case["expect"])


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_byte_by_byte_it_reads_the_same(case: dict[str, Any]) -> None:
    pieces = [(time_s, data[at : at + 1]) for time_s, data in packets(case) for at in range(len(data))]
    check_exactly(read_stream(pieces), case["expect"])


def test_cut_at_every_byte_within_http_too() -> None:
    """The same reading wherever the socket cuts the chunked body, through the client's own framing."""
    from sarathi_tune.loadgen.http.framing import ChunkedBody

    case = next(case for case in CASES if case["id"] == "utf8-cut")
    body = b"".join(chunk(data) for _, data in packets(case)) + b"0\r\n\r\n"
    plain = b"".join(data for _, data in packets(case))
    for cut in range(1, len(body)):
        framing = ChunkedBody()
        read = [framing.feed(body[:cut]), framing.feed(body[cut:])]
        assert framing.is_complete
        assert b"".join(read) == plain
        assert read_stream([(1.0, piece) for piece in read]).text == case["expect"]["text"]
