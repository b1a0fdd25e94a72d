"""The command as a process: its exit codes, its signals, and its one sentence when something is wrong."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.cli.running import ROOT, run
from tests.server.conftest import TinyModel

_FLAGS = ("--port", "0", "--dtype", "float32", "--threads", "1", "--kv-tokens", "4096", "--max-num-seqs", "8")


@contextmanager
def started(tiny: TinyModel, *flags: str, code: str | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server's process and its address, once it listens."""
    program = ["-c", code] if code else ["-m", "sarathi_tune"]
    command = [sys.executable, *program, "serve", "--model", str(tiny.directory), *_FLAGS, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            found = re.search(r"on (http://[\d.]+:\d+)$", line)
            assert found, line + (server.stderr.read() if not found else "")
            yield server, found[1]
        finally:
            server.kill()


def test_sigterm_lets_a_stream_end_and_exits_0_and_sigint_exits_130(tiny: TinyModel) -> None:
    body = {"prompt": [5], "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with started(tiny) as (server, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20, trust_env=False) as response:
            parts = response.iter_text()
            next(parts)
            server.send_signal(signal.SIGTERM)
            text = "".join(parts)
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"finish_reason":"length"') == 1
        out, err = server.communicate(timeout=20)
        assert server.returncode == 0, err
        assert out == ""
        assert "Stopping: 1 requests" in err
    with started(tiny) as (server, url):
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=20)
        assert server.returncode == 130, err
        assert "Traceback" not in err


def test_an_engine_that_fails_ends_the_process_with_one_sentence(tiny: TinyModel) -> None:
    code = (
        "from sarathi_tune.runtime.runner import Runner\n"
        "from sarathi_tune.cli import main\n"
        "execute = Runner.execute\n"
        "def broken(self, plan):\n"
        "    if len(plan.slices[0].request.output) == 3: raise RuntimeError('the device fell off')\n"
        "    return execute(self, plan)\n"
        "Runner.execute = broken\n"
        "main()"
    )
    with started(tiny, code=code) as (server, url):
        response = httpx.post(f"{url}/v1/completions", json={"prompt": [5], "ignore_eos": True}, trust_env=False)
        assert response.status_code == 500
        assert "the device fell off" in response.json()["error"]["message"]
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 503
        _, err = server.communicate(timeout=20)
        assert server.returncode == 70
        last = err.strip().splitlines()[-1]
        assert last.startswith("error: This is a defect of sarathi-tune")
        assert "the device fell off" in last
        assert "Traceback" not in err


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = run("serve", "--port", str(port))
    assert ended.code == 2
    assert f"127.0.0.1:{port} can't be served (Address already in use)" in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_bad_flags_are_usage_errors() -> None:
    for flags, words in (
        (("--port", "99999"), "--port must be between"),
        (("--max-num-batched-tokens", "8", "--max-num-seqs", "9"), "below --max-num-seqs 9"),
        (("--scheduler", "fifo"), "--scheduler must be one of"),
        (("--max-queue", "-1"), "--max-queue must be at least 0"),
        (("--stop-timeout", "5"), "--stop-timeout"),
        (("--model", "no-such-model"), "Unknown model"),
        (("--host", "no.such.host.invalid", "--port", "0"), "is no address of this machine"),
    ):
        ended = run("serve", *flags)
        assert ended.code == 2, ended.err
        assert words in ended.err
