"""What a verification of a live server found: its points, the verdict, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sarathi_tune.config.slo import Slo
from sarathi_tune.goodput.server_account import ServerAccount
from sarathi_tune.goodput.validity import Validity
from sarathi_tune.loadgen.latency import EventViews, LatencyReport, failure_of, judge, ttft_ms
from sarathi_tune.loadgen.record import ClientFacts, LoadResult, RequestRecord
from sarathi_tune.notices import Notice

SCHEMA, SCHEMA_VERSION = "sarathi-tune/verification", 1
VerifiedVerdict = Literal["met", "missed", "inconclusive", "failed"]


@dataclass(frozen=True, slots=True)
class Point:
    """One run at one load. `misses` says what of the objective was missed, `probability` how often a repetition would
    meet it, by resampling its requests. `rate_per_s` is None for a closed loop. `server` is what the server itself
    counted, where it does."""

    rate_per_s: float | None
    attempt: int
    result: LoadResult
    report: LatencyReport
    views: EventViews
    validity: Validity
    misses: tuple[str, ...]
    probability: float
    server: ServerAccount | None = None

    @property
    def is_met(self) -> bool:
        """Whether the objective was met."""
        return not self.misses

    def as_dict(self) -> dict[str, Any]:
        """The point as it stands in a result document, with a row for every request."""
        client: ClientFacts | None = self.result.client
        return {
            "rate_per_s": self.rate_per_s,
            "attempt": self.attempt,
            "meets_slo": self.is_met,
            "misses": list(self.misses),
            "pass_probability": self.probability,
            "window_s": list(self.result.window_s),
            "elapsed_s": self.result.elapsed_s,
            "complete": self.result.is_complete,
            "latency": self.report.as_dict(),
            "events": self.views.as_dict(),
            "stalled_is_estimated": True,
            "validity": self.validity.as_dict(),
            "client": client.as_dict() if client else None,
            "server": self.server.as_dict() if self.server else None,
            "requests": [request_row(record, self.report.slo) for record in self.result.records],
        }


@dataclass(frozen=True, slots=True)
class FoundCapacity:
    """The largest rate that was met and the smallest that was missed; None where there was none.
    `is_confirmed` is false when the time ran out before both were asked again."""

    rate_per_s: float | None
    upper_per_s: float | None
    is_confirmed: bool

    def as_dict(self) -> dict[str, Any]:
        """The capacity as it stands in a result document."""
        return {"rate_per_s": self.rate_per_s, "upper_per_s": self.upper_per_s, "confirmed": self.is_confirmed}


@dataclass(frozen=True, slots=True)
class Verification:
    """A whole verification. `decisive` is the index of the point that the verdict speaks of, None without one."""

    target: str
    slo: Slo
    verdict: VerifiedVerdict
    why: str
    points: tuple[Point, ...] = ()
    decisive: int | None = None
    capacity: FoundCapacity | None = None
    server: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()
    is_complete: bool = True

    @property
    def point(self) -> Point | None:
        """The decisive point."""
        return None if self.decisive is None else self.points[self.decisive]

    def as_dict(self) -> dict[str, Any]:
        """The result document."""
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "target": self.target,
            "objective": {
                "itl_ms": self.slo.itl_ms,
                "ttft_ms": self.slo.ttft_ms,
                "percentile": self.slo.percentile,
            },
            "verdict": self.verdict,
            "why": self.why,
            "complete": self.is_complete,
            "capacity": self.capacity.as_dict() if self.capacity else None,
            "decisive": self.decisive,
            "server": dict(self.server),
            "workload": dict(self.workload),
            "settings": dict(self.settings),
            "notices": [notice.as_dict() for notice in self.notices],
            "points": [point.as_dict() for point in self.points],
        }


def request_row(record: RequestRecord, slo: Slo) -> dict[str, Any]:
    """One request as it stands in a result document; seconds from the start of its run."""
    return {
        "id": record.request_id,
        "verdict": judge(record, slo),
        "failure": failure_of(record),
        "detail": record.detail,
        "intended_s": record.intended_s,
        "sent_s": record.sent_s,
        "first_byte_s": record.first_byte_s,
        "ttft_ms": ttft_ms(record),
        "last_token_s": record.token_s[-1] if record.token_s else None,
        "end_s": record.end_s,
        "events": len(record.token_s),
        "prompt_tokens_asked": record.prompt_tokens,
        "prompt_tokens_got": record.prompt_got,
        "output_tokens_asked": record.output_asked,
        "output_tokens_got": record.output_got,
        "cached_tokens": record.cached_tokens,
    }


def common_detail(records: Sequence[RequestRecord]) -> str:
    """What most of the failed requests say."""
    details = [f"{failure_of(record)}: {record.detail}" for record in records if failure_of(record)]
    return max(set(details), key=details.count) if details else "no request was sent"
