"""Prometheus metrics under the names, labels and buckets that vLLM 0.32.0 has, so that dashboards and clients for vLLM
read this server too (`v1/metrics/loggers.py` and `v1/metrics/buckets.py` there).

Counted on the event loop when tokens are handed to clients, so that these numbers and a client's usage can't differ.
"""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from sarathi_tune.config.engine import EngineConfig

EndReason = Literal["stop", "length", "abort", "error"]
END_REASONS: tuple[EndReason, ...] = ("stop", "length", "abort", "error")
CONTENT_TYPE = CONTENT_TYPE_LATEST

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class ServerMetrics:
    """The metrics of one server, in a registry of their own. Times in seconds."""

    def __init__(self, model_name: str, config: EngineConfig) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._num_pages = config.num_pages
        self._running = self._gauge("num_requests_running", "Number of requests in model execution batches.")
        self._waiting = self._gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self._preemptions = self._counter("num_preemptions", "Preemptions since the start.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._output_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens per step.", _STEP_TOKENS)
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token.", _TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Time between tokens of a request.", _ITL_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_S)
        sizes = _one_two_five(config.max_model_len)
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens per request.", sizes)
        self._request_output = self._histogram("request_generation_tokens", "Tokens generated per request.", sizes)
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._ends = {reason: self._success.labels(*self._labels.values(), reason) for reason in END_REASONS}
        self._tell_cache(config)

    def step(self, num_tokens: int, num_running: int, num_waiting: int, num_preempted: int, free_pages: int) -> None:
        """A step is done."""
        self._step_tokens.observe(num_tokens)
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._kv_usage.set(1 - free_pages / self._num_pages)
        if num_preempted:
            self._preemptions.inc(num_preempted)

    def idle(self, free_pages: int) -> None:
        """Nothing is queued any more."""
        self._running.set(0)
        self._waiting.set(0)
        self._kv_usage.set(1 - free_pages / self._num_pages)

    def first_token(self, ttft_s: float, prompt_tokens: int, cached_tokens: int | None) -> None:
        """A request got its first token, which `tokens` counts; `cached_tokens` None: there is no prefix cache."""
        self._ttft.observe(ttft_s)
        self._prompt_tokens.inc(prompt_tokens)
        if cached_tokens is not None:
            self._cache_queries.inc(prompt_tokens)
            self._cache_hits.inc(cached_tokens)

    def next_token(self, gap_s: float) -> None:
        """A request got another token; `tokens` counts it."""
        self._itl.observe(gap_s)

    def tokens(self, count: int) -> None:
        """So many tokens went to clients in a step."""
        self._output_tokens.inc(count)

    def ended(self, reason: EndReason) -> None:
        """A request ended without its whole answer."""
        self._ends[reason].inc()

    def answered(self, reason: EndReason, e2e_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """A request got its whole answer."""
        self._ends[reason].inc()
        self._e2e.observe(e2e_s)
        self._request_prompt.observe(prompt_tokens)
        self._request_output.observe(output_tokens)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, self._labels, registry=self._registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, self._labels, registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, self._labels, registry=self._registry, buckets=buckets)
        return histogram.labels(**self._labels)

    def _tell_cache(self, config: EngineConfig) -> None:
        facts = {
            "block_size": str(config.page_tokens),
            "num_gpu_blocks": str(config.num_pages),
            "enable_prefix_caching": str(config.prefix_cache),
            "engine": "0",
        }
        info = Gauge("vllm:cache_config_info", "The KV cache of the engine.", facts, registry=self._registry)
        info.labels(**facts).set(1)


def _one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `largest`."""
    values = [float(mantissa * 10**exponent) for exponent in range(10) for mantissa in (1, 2, 5)]
    return tuple(value for value in values if value <= largest)
