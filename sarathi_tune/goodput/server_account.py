"""What the server itself counted while a load ran, beside what was seen of the same requests from outside."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from sarathi_tune.loadgen.latency import gaps_ms
from sarathi_tune.loadgen.record import RequestRecord
from sarathi_tune.notices import Notice, gaps_differ, others_answered, server_preempted

#: A larger share of answers that weren't ours is told, and a larger difference between the mean gaps of both clocks.
_OTHERS_SHARE, _GAPS_DIFFER = 0.01, 0.05


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of `n` times, in ms; None of none."""

    n: int = 0
    mean_ms: float | None = None

    def __add__(self, other: "Mean") -> "Mean":
        n = self.n + other.n
        return Mean(n, (self.n * (self.mean_ms or 0.0) + other.n * (other.mean_ms or 0.0)) / n) if n else Mean()

    @classmethod
    def of(cls, times_ms: Iterable[float]) -> Self:
        """The mean of these times."""
        known = list(times_ms)
        return cls(len(known), sum(known) / len(known)) if known else cls()


@dataclass(frozen=True, slots=True)
class Both:
    """One time by the server's own clock, and as it was seen from outside."""

    own: Mean
    seen: Mean

    def __add__(self, other: "Both") -> "Both":
        return Both(self.own + other.own, self.seen + other.seen)


@dataclass(frozen=True, slots=True)
class ServerAccount:
    """The rise of the server's counters over a run. `ttft` from when a request was sent (own: came in), `gap` between
    tokens (seen: events with tokens); `queue` is how long requests that ended had waited for their first step."""

    ttft: Both
    gap: Both
    queue: Mean
    preemptions: int

    def __add__(self, other: "ServerAccount") -> "ServerAccount":
        return ServerAccount(
            self.ttft + other.ttft,
            self.gap + other.gap,
            self.queue + other.queue,
            self.preemptions + other.preemptions,
        )

    @classmethod
    def of(cls, ttft: Mean, gap: Mean, queue: Mean, preemptions: int, records: Sequence[RequestRecord]) -> Self:
        """What the server counted, beside all the requests of the run."""
        begun = [record for record in records if record.token_s]
        seen_ttft = Mean.of((record.token_s[0] - (record.sent_s or 0.0)) * 1e3 for record in begun)
        seen_gap = Mean.of(gap_ms for record in begun for gap_ms in gaps_ms(record))
        return cls(Both(ttft, seen_ttft), Both(gap, seen_gap), queue, preemptions)

    @property
    def others(self) -> int:
        """Answers that the server began and that weren't ours, where they are more than rounding."""
        others = self.ttft.own.n - self.ttft.seen.n
        return others if others > _OTHERS_SHARE * self.ttft.own.n else 0

    def remarks(self) -> list[Notice]:
        """Where the server's counts say that something else was measured than it seems."""
        found = []
        if self.others:
            found.append(others_answered(self.others, self.ttft.own.n))
        if self.preemptions:
            found.append(server_preempted(self.preemptions))
        own, seen = self.gap.own, self.gap.seen
        # where an event holds several tokens, the gaps are other gaps
        are_ours = not self.others and abs(own.n - seen.n) <= _OTHERS_SHARE * seen.n
        if are_ours and own.mean_ms and seen.mean_ms and abs(seen.mean_ms / own.mean_ms - 1.0) > _GAPS_DIFFER:
            found.append(gaps_differ(own.mean_ms, seen.mean_ms))
        return found

    def as_dict(self) -> dict[str, Any]:
        """The account as it stands in a result document."""
        return asdict(self)
