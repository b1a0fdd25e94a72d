"""What the server says about itself in its Prometheus metrics, beside what was seen from outside."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sarathi_tune import notices
from sarathi_tune.goodput.server_account import Mean, ServerAccount
from sarathi_tune.loadgen.record import RequestRecord
from sarathi_tune.notices import Notice
from sarathi_tune.tune.outside.running import RunningBudget

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_STEP_TOKENS = "vllm:iteration_tokens_total"
_PROMPT_TOKENS = "vllm:prompt_tokens_total"
#: The histogram of gaps between tokens, and its older name.
_GAPS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
_TTFT = ("vllm:time_to_first_token_seconds",)
_QUEUE = ("vllm:request_queue_time_seconds",)
#: The mean gap by the server's clock and by ours: a larger difference is told.
_GAPS_DIFFER = 0.05
#: Prompt tokens of others that are more than rounding, and those that spoil a measurement.
TOLD_SHARE, SPOILING_SHARE = 0.01, 0.05


@dataclass(frozen=True, slots=True)
class Exposition:
    """One reading of `/metrics`: values summed over engines and models, the step histogram's cumulated buckets by upper
    edge, and the labels of the cache's description."""

    values: Mapping[str, float] = field(default_factory=dict)
    step_buckets: Mapping[float, float] = field(default_factory=dict)
    cache: Mapping[str, str] = field(default_factory=dict)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the KV cache holds, where the server says so."""
        blocks, size = self.cache.get("num_gpu_blocks", ""), self.cache.get("block_size", "")
        return int(blocks) * int(size) if blocks.isdecimal() and size.isdecimal() and int(blocks) else None

    def value(self, name: str) -> float | None:
        """A counter or gauge; None where the server has none of that name."""
        return self.values.get(name)

    @property
    def under_way(self) -> float:
        """Requests running and waiting; 0 where the server doesn't say."""
        return sum(self.value(f"vllm:num_requests_{kind}") or 0.0 for kind in ("running", "waiting"))

    @property
    def speculates(self) -> bool:
        """Whether the server drafts tokens ahead."""
        return any(name.startswith("vllm:spec_decode_") for name in self.values)


@dataclass(frozen=True, slots=True)
class Sent:
    """What we sent between two readings. `prompts`: the most prompt tokens that one step can have ended, one entry for
    each time that we sent prompts."""

    prompt_tokens: int
    prompts: tuple[int, ...] = ()


def read_exposition(text: str) -> Exposition:
    """The parts of a Prometheus text that matter here; whatever can't be read is skipped."""
    values: dict[str, float] = {}
    buckets: dict[float, float] = {}
    cache: dict[str, str] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or not match[1].startswith("vllm:"):
            continue
        name, labels = match[1], dict(_LABEL.findall(match[2] or ""))
        try:
            value = float(match[3])
        except ValueError:
            continue
        if name == f"{_STEP_TOKENS}_bucket":
            edge = float(labels.get("le", "nan").replace("+Inf", "inf"))
            buckets[edge] = buckets.get(edge, 0.0) + value
        elif name == "vllm:cache_config_info":
            cache = labels
        else:
            values[name] = values.get(name, 0.0) + value
    return Exposition(values, buckets, cache)


def others_share(before: Exposition, after: Exposition, sent: Sent) -> float | None:
    """The share of prompt tokens that weren't ours; None where the server doesn't count them."""
    counts = [reading.value(_PROMPT_TOKENS) for reading in (before, after)]
    if counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
        return None
    return max(0.0, 1.0 - sent.prompt_tokens / (counts[1] - counts[0]))


def own_gap_ms(before: Exposition, after: Exposition) -> float | None:
    """The mean gap between tokens by the server's own clock, in ms; None where the server doesn't say."""
    return _mean(before, after, _GAPS).mean_ms


def account(before: Exposition, after: Exposition, records: Sequence[RequestRecord]) -> ServerAccount | None:
    """What the server counted between two readings, beside the requests of the run between them; None where it counts
    neither first tokens nor gaps."""
    ttft, gap = _mean(before, after, _TTFT), _mean(before, after, _GAPS)
    if not ttft.n and not gap.n:
        return None
    preempted = round(_rise(before, after, "vllm:num_preemptions_total"))
    return ServerAccount.of(ttft, gap, _mean(before, after, _QUEUE), preempted, records)


def evidence(
    before: Exposition, after: Exposition, sent: Sent, running: RunningBudget | None, seen_gap_ms: float | None = None
) -> tuple[Notice, ...]:
    """Where the server's own counts speak against what was inferred, or say what spoiled it. `seen_gap_ms`: the mean
    gap between tokens from outside."""
    found: list[Notice] = []
    busy = before.under_way
    share = others_share(before, after, sent)
    if busy or (share is not None and share > TOLD_SHARE):
        found.append(notices.server_has_others(round(busy), share))
    preempted = _rise(before, after, "vllm:num_preemptions_total")
    if preempted:
        found.append(notices.server_preempted(round(preempted)))
    hits = _rise(before, after, "vllm:prefix_cache_hits_total")
    if hits:
        found.append(notices.prefix_cache_hits(round(hits)))
    if running is not None and not running.is_bound:
        too_large = _unexplained_steps(before, after, sent, running)
        if too_large is not None:
            found.append(notices.steps_above_budget(running.budget, *too_large))
    own_ms = own_gap_ms(before, after)
    is_ours = not busy and (share is None or share <= TOLD_SHARE)
    if is_ours and own_ms and seen_gap_ms and abs(seen_gap_ms / own_ms - 1.0) > _GAPS_DIFFER:
        found.append(notices.gaps_differ(own_ms, seen_gap_ms))
    return tuple(found)


def _unexplained_steps(
    before: Exposition, after: Exposition, sent: Sent, running: RunningBudget
) -> tuple[int, int] | None:
    """(steps, edge) when the server counted more steps above a bucket's edge, itself above the budget, than can be.

    vLLM books the whole prompt on the step that ends it (0.32.0, `v1/metrics/stats.py`), so every prompt longer than
    the edge explains one such step; a server that books the tokens computed in a step has none at all.
    """
    high = running.interval[1] or running.budget
    edges = sorted(edge for edge in after.step_buckets if high <= edge < math.inf)
    if not edges:
        return None
    edge = edges[0]
    explained = sum(tokens > edge for tokens in sent.prompts)
    unexplained = round(_above(after, edge) - _above(before, edge)) - explained
    return (unexplained, round(edge)) if unexplained > 0 else None


def _above(reading: Exposition, edge: float) -> float:
    """Steps of more than `edge` tokens."""
    return reading.step_buckets.get(math.inf, 0.0) - reading.step_buckets.get(edge, 0.0)


def _mean(before: Exposition, after: Exposition, names: tuple[str, ...]) -> Mean:
    """The mean of what a histogram of seconds took in, under the first of its names that the server has."""
    for name in names:
        count = _rise(before, after, f"{name}_count")
        if count:
            return Mean(round(count), 1e3 * _rise(before, after, f"{name}_sum") / count)
    return Mean()


def _rise(before: Exposition, after: Exposition, name: str) -> float:
    return max(0.0, (after.value(name) or 0.0) - (before.value(name) or 0.0))
