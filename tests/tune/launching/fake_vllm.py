"""Stands in for `vllm serve`: the same flags and endpoints, decode gaps of a tenth of a millisecond per token of the
budget, a child process as vLLM's engine is one, and ways to fail.

    fake_vllm.py serve MODEL --port P [--max-num-batched-tokens N] [--pids FILE] [--fail | --mute | --die-after N |
                                                                    --stubborn]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DEFAULT_BUDGET = 2048


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-batched-tokens", type=int, default=DEFAULT_BUDGET)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--pids", type=Path)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--mute", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--die-after", type=int)
    options = parser.parse_args()
    print("loading", options.model, flush=True)
    if options.fail:
        print("ValueError: max_num_batched_tokens is too small", flush=True)
        sys.exit(3)
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if options.pids:
        with options.pids.open("a") as file:
            file.write(f"{os.getpid()} {engine.pid}\n")
    serve(options)


def serve(options: argparse.Namespace) -> None:
    count = 0
    gap_s = options.max_num_batched_tokens * 1e-4

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(503 if options.mute else 200, {})
            elif self.path == "/v1/models":
                self.reply(200, {"data": [{"id": options.model, "max_model_len": 4096}]})
            else:
                self.reply(404, {})

        def do_POST(self) -> None:
            nonlocal count
            count += 1
            if options.die_after is not None and count > options.die_after:
                print("RuntimeError: engine core died", flush=True)
                os._exit(9)
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for number in range(1, body["max_tokens"] + 1):
                finish = "length" if number == body["max_tokens"] else None
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": number}
                self.event({"choices": [{"index": 0, "text": "a", "finish_reason": finish}], "usage": usage})
                time.sleep(gap_s)
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")

        def reply(self, status: int, document: dict[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def event(self, document: dict[str, Any]) -> None:
            self.chunk(f"data: {json.dumps(document)}\n\n".encode())

        def chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
