"""What a load run leaves behind: one row per request that was intended, and one per step."""

from dataclasses import dataclass
from typing import Any, Literal

from sarathi_tune.engine.plan import StepShape

Outcome = Literal["finished", "failed", "not_sent"]
FailureKind = Literal[
    "refused",
    "connect",
    "http_3xx",
    "http_4xx",
    "http_5xx",
    "mid_stream_error",
    "truncated",
    "timeout",
    "no_tokens",
    "short_output",
    "unfinished",
    "interrupted",
]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One intended request. Seconds count from the start of the run; None means that it never happened.

    `token_s` has a stamp for every event that carried tokens; the built-in engine's events carry one token each.
    `stalled[i]` says whether prefill tokens of other requests were computed in the gap between stamps i and i + 1
    (recomputing a preempted request counts as one too); it is None where the steps can't be seen, as over HTTP.
    `output_got` counts tokens, None when the server doesn't say; `first_tokens` of them came with the first event.
    `lag_s` is how late the client was in sending, the step that kept the engine busy not included.
    """

    request_id: int
    intended_s: float
    prompt_tokens: int
    output_asked: int
    outcome: Outcome
    sent_s: float | None = None
    scheduled_s: float | None = None
    token_s: tuple[float, ...] = ()
    stalled: tuple[bool, ...] | None = None
    output_got: int | None = None
    first_tokens: int = 1
    failure: FailureKind | None = None
    detail: str = ""
    lag_s: float = 0.0
    cached_tokens: int | None = None
    num_preemptions: int = 0
    #: Over HTTP: the first byte of the answer's body, the end of the answer, the prompt's length as the server counts
    #: it, the tokens of each event (None where they can't be known), and how many events came in one read with the one
    #: before them, so that their gap reads 0.
    first_byte_s: float | None = None
    end_s: float | None = None
    prompt_got: int | None = None
    event_tokens: tuple[int, ...] | None = None
    num_coalesced: int = 0


#: A late event loop didn't make stamps late when at least this share of the reads has the kernel's time of arrival,
#: and at most this share of the gaps reads 0 because events lay unread together.
_MIN_KERNEL_SHARE, MAX_COALESCED_SHARE = 0.99, 0.01


def is_stamped_on_arrival(reads: int, kernel_stamped: int, coalesced_share: float) -> bool:
    """Whether stamps say when events arrived, however late the client read them."""
    return kernel_stamped >= _MIN_KERNEL_SHARE * reads > 0 and coalesced_share <= MAX_COALESCED_SHARE


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """What the load generator over HTTP saw of itself. `loop_lag`: how late its event loop woke up; `gc_pauses_ms`:
    garbage collections within the run; `cpu_s` of all its processes; `reads` of sockets that brought `events`, of
    which the kernel told for `kernel_stamped_reads` when they had arrived; `origin_s`: the start of the run on
    `time.perf_counter`, which all processes of a machine share."""

    workers: int
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    gc_pauses_ms: tuple[float, ...]
    cpu_s: float
    events: int
    reads: int
    origin_s: float = 0.0
    kernel_stamped_reads: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The facts as they stand in a result document."""
        return {
            "workers": self.workers,
            "loop_lag_p99_ms": self.loop_lag_p99_ms,
            "loop_lag_max_ms": self.loop_lag_max_ms,
            "gc_pauses_ms": list(self.gc_pauses_ms),
            "cpu_s": self.cpu_s,
            "events": self.events,
            "reads": self.reads,
            "kernel_stamped_reads": self.kernel_stamped_reads,
        }


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its shape, when it began and when its tokens were stamped (s from the start of the run), and the queue
    behind it."""

    start_s: float
    end_s: float
    shape: StepShape
    num_waiting: int
    num_running: int
    num_preempted: int

    @property
    def duration_ms(self) -> float:
        """Milliseconds from before scheduling to the tokens' stamp."""
        return (self.end_s - self.start_s) * 1e3


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A run. `window_s` is the steady window (start, stop): requests *intended* in it are counted, all of them.

    `is_complete` is false when the run was interrupted; `is_diverged` when it was given up because the queue only grew.
    `client` is there for runs over HTTP, where `steps` is empty.
    """

    records: tuple[RequestRecord, ...]
    steps: tuple[StepRecord, ...]
    window_s: tuple[float, float]
    elapsed_s: float
    is_complete: bool = True
    is_diverged: bool = False
    client: ClientFacts | None = None

    @property
    def counted(self) -> tuple[RequestRecord, ...]:
        """The requests intended in the window."""
        start_s, stop_s = self.window_s
        return tuple(record for record in self.records if start_s <= record.intended_s < stop_s)

    @property
    def duration_s(self) -> float:
        """Length of the window."""
        return self.window_s[1] - self.window_s[0]

    @property
    def window_tokens_per_s(self) -> float:
        """Output tokens per second that were stamped inside the window: filling and draining stay outside."""
        start_s, stop_s = self.window_s
        if stop_s <= start_s:
            return 0.0
        stamped = sum(start_s <= stamp < stop_s for record in self.records for stamp in record.token_s)
        return stamped / (stop_s - start_s)
