"""`sarathi-tune verify` as a whole, against servers that behave and servers that don't."""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.cli.running import ROOT, Ended, run
from tests.loadgen.http.openai_server import always, first_then, healthy, only_completions, openai_server, silent
from tests.loadgen.http.servers import STREAM_HEAD, Answer, Line, Seen, chunk, fails, free_port, text_event, whole

QUICK = ("--workload", "fixed:32:12", "--workers", "1", "--stall-timeout", "15s", "--timeout", "30s")


def verify(url: str, *arguments: str | Path) -> Ended:
    # a wide objective: on a busy machine the client's own lateness must stay below 5 % of it
    return run("verify", "--target", url, "--slo-itl", "4s", *QUICK, *arguments)


def document_of(ended: Ended) -> dict[str, Any]:
    found = json.loads(ended.out)
    assert isinstance(found, dict)
    return found


def test_an_objective_that_is_met(tmp_path: Path) -> None:
    with openai_server(healthy()) as (url, log):
        ended = verify(url, "--rate", "40", "--seconds", "1s", "--json", "-", "--save-vllm", tmp_path / "v.json")
    assert ended.code == 0, ended
    found = document_of(ended)
    assert (found["schema"], found["verdict"], found["complete"]) == ("sarathi-tune/verification", "met", True)
    point = found["points"][0]
    assert len(point["requests"]) == 40
    assert point["latency"]["requests"]["good"] == 40
    assert {row["verdict"] for row in point["requests"]} == {"good"}
    assert point["events"]["tokens_per_event_max"] == 1
    prompts = [tuple(seen.body["prompt"]) for seen in log.requests if seen.path == "/v1/completions"]
    assert len(set(prompts)) == len(prompts), "no prompt is sent twice"
    saved = json.loads((tmp_path / "v.json").read_text())
    assert saved["completed"] == 40
    assert saved["total_output_tokens"] == 40 * 12


def test_an_objective_that_is_missed() -> None:
    with openai_server(healthy(gap_of=lambda number: 0.005 if number < 4 else 4.1)) as (url, _):
        ended = verify(url, "--workload", "fixed:32:2", "--rate", "40", "--seconds", "1s")
    assert ended.code == 1, ended
    assert ended.out.splitlines()[0] == "p99 ITL 4000 ms is missed at 40 req/s."
    assert "p99 ITL" in ended.out.splitlines()[1]


def test_too_few_gaps_are_inconclusive() -> None:
    with openai_server() as (url, _):
        ended = verify(url, "--rate", "5", "--seconds", "1s")
    assert ended.code == 4, ended
    assert "a bound on the SLO's percentile needs at least" in " ".join(ended.out.split())


def test_a_ttft_that_is_missed() -> None:
    with openai_server(healthy(first_s=0.1)) as (url, _):
        ended = verify(url, "--slo-ttft", "20ms", "--rate", "40", "--seconds", "1s", "--quiet")
    assert ended.code == 1, ended
    assert "p99 TTFT 20.0 ms" in ended.out


def test_a_server_behind_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    with openai_server(healthy(), tls) as (url, _):
        refused = verify(url, "--rate", "40", "--seconds", "1s")
        plain = verify(url.replace("https", "http"), "--rate", "40", "--seconds", "1s")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
        unread = verify(url, "--rate", "40", "--seconds", "1s")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        misnamed = verify(url.replace("127.0.0.1", "localhost"), "--rate", "40", "--seconds", "1s")
        ended = verify(url, "--rate", "40", "--seconds", "1s", "--json", "-")
    assert refused.code == plain.code == unread.code == misnamed.code == 6
    said = {ended: " ".join(ended.err.split()) for ended in (refused, plain, unread, misnamed)}
    assert "isn't trusted (unable to get local issuer certificate); name the file" in said[refused]
    assert "doesn't speak HTTP" in said[plain] or "closes them without" in said[plain]
    assert "SSL_CERT_FILE or SSL_CERT_DIR names (No such file or directory)" in said[unread]
    assert "isn't trusted (Hostname mismatch, certificate is not valid for 'localhost')" in said[misnamed]
    assert ended.code == 0, ended
    assert document_of(ended)["points"][0]["latency"]["requests"]["good"] == 40


def test_a_closed_loop() -> None:
    with openai_server() as (url, log):
        ended = verify(url, "--concurrency", "4", "--seconds", "1s", "--json", "-")
    assert ended.code == 0, ended
    assert document_of(ended)["points"][0]["rate_per_s"] is None
    # the probe, the request alone and the look at the metrics have one each
    assert log.connections == 4 + 3


def test_a_closed_loop_whose_answers_outlast_the_run_counts_those_that_filled_it() -> None:
    with openai_server(healthy(gap_s=0.02)) as (url, _):
        ended = verify(url, "--workload", "fixed:32:150", "--concurrency", "4", "--seconds", "0.5s", "--json", "-")
    # 149 gaps of 20 ms each take three seconds, and filling 1.5 at most
    assert ended.code == 0, ended
    document = document_of(ended)
    requests = document["points"][0]["latency"]["requests"]
    assert (requests["intended"], requests["good"]) == (4, 4)
    assert "answers-outlast-the-run" in {notice["code"] for notice in document["notices"]}


def test_a_closed_loop_runs_for_its_length_from_when_it_is_filled() -> None:
    with openai_server(healthy(gap_s=0.02)) as (url, _):
        ended = verify(url, "--workload", "fixed:32:50", "--concurrency", "8", "--seconds", "0.7s", "--json", "-")
    # 49 gaps of 20 ms: the first eight end after a second, and a run of 0.7 s would have had no second round
    assert ended.code == 0, ended
    (point,) = document_of(ended)["points"]
    begin_s, end_s = point["window_s"]
    filled_s = sorted(request["end_s"] for request in point["requests"])[7]
    assert begin_s < filled_s
    assert end_s == pytest.approx(filled_s + 0.7, abs=0.05)
    requests = point["latency"]["requests"]
    assert (requests["intended"], requests["good"]) == (8, 8)
    assert len(point["requests"]) == 16


def test_a_closed_loop_has_no_queue_that_grows() -> None:
    """The first tokens of its later requests come later, which no objective forbids: a repetition would meet it too."""
    asked = 0

    async def answer(seen: Seen, line: Line) -> None:
        nonlocal asked
        asked += seen.path == "/v1/completions"
        # the probe, the request alone, four that fill the loop and five rounds of four behind them
        await healthy(first_s=0.005 if asked <= 26 else 2.3, gap_s=0.002)(seen, line)

    with openai_server(answer) as (url, _):
        ended = verify(url, "--workload", "fixed:32:48", "--concurrency", "4", "--seconds", "1s", "--json", "-")
    assert ended.code == 0, ended
    document = document_of(ended)
    (point,) = document["points"]
    assert max(request["ttft_ms"] for request in point["requests"]) > 2300, "the loop came to the slow ones"
    assert point["pass_probability"] == 1.0
    assert "close-call" not in {notice["code"] for notice in document["notices"]}


def test_the_search_finds_what_the_server_can_do() -> None:
    # one slot of 50 ms: 20 requests per second, and a queue beyond
    busy = {"until_s": 0.0}

    async def answer(seen: Seen, line: Line) -> None:
        if seen.path == "/v1/models":
            await healthy()(seen, line)
            return
        now_s = time.monotonic()
        start_s = max(now_s, busy["until_s"])
        busy["until_s"] = start_s + 0.05
        queue_s = start_s - now_s
        await healthy(first_s=0.002 + queue_s, gap_s=0.002)(seen, line)

    with openai_server(answer) as (url, _):
        ended = verify(
            url,
            "--workload",
            "fixed:32:24",
            "--slo-ttft",
            "300ms",
            "--seconds",
            "1s",
            "--time-limit",
            "20s",
            "--arrivals",
            "constant",
            "--json",
            "-",
        )
    assert ended.code == 0, ended
    found = document_of(ended)
    assert found["capacity"]["rate_per_s"] == pytest.approx(20, rel=0.35)
    assert len(found["points"]) >= 2
    assert found["decisive"] is not None
    assert found["points"][found["decisive"]]["rate_per_s"] == found["capacity"]["rate_per_s"]


def test_chat_with_prompts_as_words() -> None:
    with openai_server() as (url, log):
        ended = verify(url, "--endpoint", "chat", "--rate", "40", "--seconds", "1s", "--json", "-")
    assert ended.code == 0, ended
    rows = document_of(ended)["points"][0]["requests"]
    assert {row["prompt_tokens_got"] for row in rows} == {32}, "words and the template's tokens add up"
    texts = [seen.body["messages"][0]["content"] for seen in log.requests if seen.body]
    assert len(set(texts)) == len(texts)


BROKEN: list[tuple[Answer, str]] = [
    (always(fails("401 Unauthorized", "bad key sk-secret")), "(401: bad key"),
    (always(fails("403 Forbidden", "no")), "(403: no)"),
    (only_completions(fails("422 Unprocessable", "no")), "(422: no)"),
    (always(fails("429 Too Many Requests", "slow", "retry-after: 9\r\n")), "come back in 9 s"),
    (always(fails("500 Internal", "boom")), "(500: boom)"),
    (always(whole("200 OK", b"<html></html>", "text/html")), "HTML instead of a list of models"),
    (always(whole("301 Moved", b"", extra="location: http://other/v1\r\n")), "redirects to http://other/v1"),
    (only_completions(whole("200 OK", b"", "text/event-stream")), "empty stream"),
    (always(b"220 mail.example ESMTP\r\n\r\n"), "doesn't speak HTTP"),
    (silent, "does not answer"),
]


async def _dead(_seen: Seen, line: Line) -> None:
    line.reset()


@pytest.mark.parametrize(("answer", "words"), BROKEN)
def test_a_server_that_cannot_be_used(answer: Answer, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARATHI_TUNE_API_KEY", "sk-secret")
    with openai_server(answer) as (url, _):
        ended = verify(url, "--rate", "10", "--timeout", "2s", "--quiet")
    assert ended.code == 6, ended
    assert ended.out == ""
    assert words in ended.err
    assert ended.err.count("\n") == 1, "one sentence"
    assert "sk-secret" not in ended.err


def test_nobody_listens_and_an_unknown_name() -> None:
    ended = verify(f"127.0.0.1:{free_port()}", "--rate", "10", "-q")
    assert (ended.code, "connection refused" in ended.err) == (6, True)
    ended = verify("http://no-such-host.invalid", "--rate", "10", "-q")
    assert (ended.code, "unknown" in ended.err) == (6, True)


@pytest.mark.parametrize(
    ("answer", "output", "code"),
    [
        (healthy(), 12, 0),
        (healthy(gap_of=lambda number: 0.005 if number < 4 else 4.1), 2, 1),
        (first_then(15, _dead), 12, 6),
    ],
)
def test_report_shows_a_verification_again(answer: Answer, output: int, code: int, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with openai_server(answer) as (url, _):
        ended = verify(url, "--workload", f"fixed:32:{output}", "--rate", "40", "--seconds", "1s", "--json", path)
    again = run("report", path)
    assert (again.code, again.out) == (ended.code, ended.out)
    assert ended.code == code, ended
    assert json.loads(run("report", path, "--json", "-").out) == json.loads(path.read_text())
    assert run("report", path, "--quiet").out == ended.out.splitlines()[0] + "\n"


def test_a_model_that_is_not_there() -> None:
    with openai_server() as (url, _):
        ended = verify(url, "--model", "other", "-q")
    assert (ended.code, "it serves tiny" in ended.err) == (6, True)


def test_a_server_that_dies_in_the_run() -> None:
    with openai_server(first_then(15, _dead)) as (url, _):
        ended = verify(url, "--rate", "40", "--seconds", "1s", "--json", "-")
    assert ended.code == 6, ended
    found = document_of(ended)
    assert found["verdict"] == "failed"
    assert "stopped answering" in found["why"]
    assert "closes them without an answer" in found["why"]
    counts = found["points"][0]["latency"]["requests"]
    assert counts["intended"] == 40
    # of 15 requests one was for the models, one the probe, one ran alone and one asked for metrics
    assert counts["good"] == 11
    assert counts["failures"] == {"connect": 29}


def test_failures_count_as_missed_while_the_server_lives() -> None:
    async def answer(seen: Seen, line: Line) -> None:
        # the first look at the server behind the run meets a stall too: one more failure, and no proof that it is gone
        is_load = seen.number >= 4
        if is_load and seen.number % 10 == 0:
            await line.send(fails("503 Service Unavailable", "overloaded"))
        elif is_load and seen.number % 10 == 5:
            await line.send(STREAM_HEAD + chunk(text_event("a", 1)))
            await silent(seen, line)  # a stream that stalls for good
        else:
            await healthy()(seen, line)

    with openai_server(answer) as (url, _):
        ended = verify(url, "--rate", "40", "--seconds", "1s", "--stall-timeout", "3s", "--json", "-")
    assert ended.code == 1, ended
    found = document_of(ended)
    assert found["verdict"] == "missed"
    failures = found["points"][0]["latency"]["requests"]["failures"]
    assert failures == {"http_5xx": 4, "timeout": 4}
    assert "failed or were not sent" in found["why"]


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 20 + i, "output_length": 12} for i in range(40)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    with openai_server() as (url, _):
        ended = verify(url, "--workload", trace, "--trace-speed", "2", "--max-requests", "30", "--json", "-")
    assert ended.code == 0, ended
    found = document_of(ended)
    assert (found["settings"]["arrivals"], found["workload"]["trace"]["requests"]) == ("trace", 30)
    (point,) = found["points"]
    assert point["rate_per_s"] == pytest.approx(20), "30 requests and as many gaps of 50 ms"
    assert [row["intended_s"] for row in point["requests"]] == pytest.approx([0.05 * i for i in range(30)])
    assert [row["prompt_tokens_asked"] for row in point["requests"]] == [20 + i for i in range(30)]
    assert [row["prompt_tokens_got"] for row in point["requests"]] == [20 + i for i in range(30)]


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ('{"prompt": "words", "output_tokens": 3}', ("--arrivals", "trace"), "A replay needs a trace with times"),
        ('{"prompt": "words", "output_tokens": 3}', ("--trace-speed", "2"), "A replay needs a trace with times"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 3}', ("--trace-speed", "2", "--rate", "3"), "leave out"),
    ],
)
def test_what_cannot_be_replayed(text: str, arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(text)
    ended = run("verify", "--target", "h:1", "--slo-itl", "50ms", "--workload", trace, *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err


def test_the_pattern_of_a_trace_at_another_rate(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(
        "Timestamp,Model,Request tokens,Response tokens\n" + "".join(f"{3600 * i},m,32,12\n" for i in range(30))
    )
    with openai_server() as (url, _):
        arguments = ("--workload", trace, "--arrivals", "trace", "--rate", "40", "--seconds", "1s", "--json", "-")
        ended = verify(url, *arguments)
    assert ended.code == 0, ended
    rows = document_of(ended)["points"][0]["requests"]
    assert [row["intended_s"] for row in rows] == pytest.approx([0.025 * i for i in range(40)]), "and begins again"


def test_a_ramp() -> None:
    with openai_server() as (url, _):
        ended = verify(url, "--arrivals", "ramp:10:70", "--seconds", "1s", "--json", "-")
    assert ended.code == 0, ended
    (point,) = document_of(ended)["points"]
    times = [row["intended_s"] for row in point["requests"]]
    assert len(times) == 40
    assert sum(time_s < 0.5 for time_s in times) < 20, "25 per second in the first half, 55 in the second"


@pytest.mark.parametrize(
    ("number", "is_for_all"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGHUP, True)]
)
def test_a_signal_leaves_what_there_is(number: signal.Signals, is_for_all: bool, tmp_path: Path) -> None:
    """Ctrl-C in a terminal, `timeout` and a closed terminal signal the client's worker processes as well."""
    target_file = tmp_path / "partial.json"
    with openai_server(healthy(gap_s=0.05)) as (url, log):
        command = [sys.executable, "-m", "sarathi_tune", "verify", "--target", url, "--slo-itl", "100ms"]
        command += ["--workload", "fixed:32:40", "--rate", "10", "--seconds", "60s", "--json", str(target_file)]
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests under nohup ignore SIGHUP, and pass it on
        )
        deadline_s = time.monotonic() + 60
        while len(log.requests) < 10 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        (os.killpg if is_for_all else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert b"Traceback" not in err
    found = json.loads(target_file.read_text())
    assert found["complete"] is False
    counts = found["points"][0]["latency"]["requests"]
    assert counts["intended"] == 600
    assert counts["not_sent"] > 500
    assert counts["failures"]["interrupted"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--slo-itl", "50ms"), "--target is missing"),
        (("--target", "h:1"), "An objective is missing"),
        (("--target", "ftp://h", "--slo-itl", "50ms"), "not an http or https URL"),
        (("--target", "h:1", "--slo-itl", "50ms", "--rate", "0"), "--rate"),
        (("--target", "h:1", "--slo-itl", "50ms", "--rate", "1", "--concurrency", "2"), "not both"),
        (("--target", "h:1", "--slo-itl", "50ms", "--arrivals", "gamma"), "gamma:CV"),
        (("--target", "h:1", "--slo-itl", "50ms", "--arrivals", "trace"), "has none"),
        (("--target", "h:1", "--slo-itl", "50ms", "--arrivals", "ramp:1"), "ramp:FROM:TO"),
        (("--target", "h:1", "--slo-itl", "50ms", "--arrivals", "ramp:0:0"), "ramp:FROM:TO"),
        (("--target", "h:1", "--slo-itl", "50ms", "--arrivals", "ramp:1:2", "--rate", "3"), "rates of its own"),
        (("--target", "h:1", "--slo-itl", "50ms", "--trace-speed", "2"), "is no trace"),
        (("--target", "h:1", "--slo-itl", "50ms", "--trace-speed", "-1"), "--trace-speed must be a positive number"),
        (("--target", "h:1", "--slo-itl", "50ms", "--workload-format", "excel"), "--workload-format must be one of"),
        (("--target", "h:1", "--slo-itl", "50ms", "--workload", "no.csv"), "Trace no.csv can't be read: No such file"),
        (("--target", "h:1", "--slo-itl", "50ms", "--endpoint", "embeddings"), "--endpoint must be one of"),
        (("--target", "h:1", "--slo-itl", "50ms", "--seconds", "5"), "--seconds"),
        (("--target", "h:1", "--slo-itl", "50ms", "--vocab", "12"), "--vocab"),
    ],
)
def test_what_can_be_typed_wrong(arguments: tuple[str, ...], words: str) -> None:
    ended = run("verify", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert ended.out == ""


def counting(answer: Answer, text_of: Callable[[int], str]) -> Answer:
    """The same with `/metrics`: `text_of` the number of requests that were sent until then."""
    sent = 0

    async def with_metrics(seen: Seen, line: Line) -> None:
        nonlocal sent
        if seen.path == "/metrics":
            await line.send(whole("200 OK", text_of(sent).encode(), "text/plain; version=0.0.4"))
            return
        sent += seen.path == "/v1/completions"
        await answer(seen, line)

    return with_metrics


def test_the_server_s_own_counts_stand_beside_the_run() -> None:
    def text_of(sent: int) -> str:
        # each answer of 12 tokens: the first after 30 ms, as one of two that the server counts, 11 gaps of 20 ms
        return (
            f"vllm:time_to_first_token_seconds_count {2 * sent}\nvllm:time_to_first_token_seconds_sum {0.06 * sent}\n"
            f"vllm:inter_token_latency_seconds_count {11 * sent}\nvllm:inter_token_latency_seconds_sum {0.22 * sent}\n"
            f"vllm:num_preemptions_total {sent // 10}\nvllm:num_requests_running 0\n"
        )

    with openai_server(counting(healthy(), text_of)) as (url, _):
        ended = verify(url, "--rate", "40", "--seconds", "1s", "--json", "-")
    assert ended.code == 0, ended
    point = document_of(ended)["points"][0]
    own = point["server"]
    assert (own["ttft"]["own"]["n"], own["ttft"]["seen"]["n"]) == (80, 40)
    assert own["ttft"]["own"]["mean_ms"] == pytest.approx(30.0)
    assert (own["gap"]["own"]["n"], own["gap"]["seen"]["n"]) == (440, 440)
    assert own["gap"]["own"]["mean_ms"] == pytest.approx(20.0)
    assert own["preemptions"] == 4
    assert {"server-has-others", "server-preempted"} <= {notice["code"] for notice in point["validity"]["remarks"]}


def test_a_server_without_metrics_has_no_account() -> None:
    with openai_server(healthy()) as (url, _):
        ended = verify(url, "--rate", "40", "--seconds", "1s", "--json", "-")
    assert document_of(ended)["points"][0]["server"] is None
