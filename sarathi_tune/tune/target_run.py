"""`sarathi-tune verify`: load on a live server at one rate, or the search for the largest rate that meets the SLO."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sarathi_tune.config.verify import VerifyConfig
from sarathi_tune.errors import TargetError
from sarathi_tune.goodput.http_validity import check_http_run
from sarathi_tune.goodput.objective import shortfalls
from sarathi_tune.goodput.passing import pass_probability, queue_growth_ms
from sarathi_tune.goodput.search import search_capacity
from sarathi_tune.goodput.server_account import ServerAccount
from sarathi_tune.goodput.verified import FoundCapacity, Point, Verification, VerifiedVerdict, common_detail
from sarathi_tune.loadgen.inprocess import LoadProgress, TimedRequest
from sarathi_tune.loadgen.latency import event_views, failure_of, summarise
from sarathi_tune.loadgen.overlap import estimate_stalls
from sarathi_tune.loadgen.record import LoadResult, RequestRecord
from sarathi_tune.notices import Notice, answers_outlast_the_run, close_call
from sarathi_tune.report.progress import Phase, Ui
from sarathi_tune.tune.outside.evidence import Exposition, account, read_exposition
from sarathi_tune.tune.target_load import MIN_REQUESTS, LoadSource, Schedule, settle_arrivals
from sarathi_tune.units import format_ms
from sarathi_tune.workload.load import load_workload

if TYPE_CHECKING:
    from sarathi_tune.loadgen.http.client import HttpSettings
    from sarathi_tune.loadgen.http.probe import ServerFacts
    from sarathi_tune.loadgen.http.target import Target

#: Outside of these a point of the search counts as decided; within, it is run again with fresh arrivals.
DECIDED = (0.1, 0.9)
_MAX_RUNS_PER_POINT = 3
#: A queue that grew by this much within a run only grows.
_MAX_GROWTH_MS = 2000.0
#: What a search follows behind the end of a point's sending; what isn't done then is missed.
_DRAIN_S = 60.0
#: How long the server may take to free what was given up: before a run, and behind it, when only counts are wanted.
_IDLE_WAIT_S, _SETTLED_S = 15.0, 2.0
#: How often a server that broke requests off is looked at before it counts as gone.
_LOOKS_BEHIND = 3
#: The context length that is assumed where the server names none.
_ANY_LENGTH = 1 << 20


def run_verification(config: VerifyConfig, ui: Ui, environment: Mapping[str, str] | None = None) -> Verification:
    """Probe the server, run, judge.

    Raises TargetError when the server can't be used at all; one that fails under load is a verdict ("failed"). After
    Ctrl-C the verification holds the points until then and says that it isn't complete.
    """
    from sarathi_tune.loadgen.http.probe import probe
    from sarathi_tune.loadgen.http.target import parse_target
    from sarathi_tune.loadgen.http.wire import Timeouts

    target = parse_target(config.target, os.environ if environment is None else environment)
    workload = load_workload(config.workload, config.trace_overrides)
    config = settle_arrivals(config, workload)
    timeouts = Timeouts(
        first_byte_s=config.request_timeout_s,
        between_reads_s=config.stall_timeout_s,
        request_s=config.request_timeout_s,
    )
    with ui.phase("Looking at the server"):
        facts = probe(
            target,
            model=config.model,
            endpoint=None if config.endpoint == "auto" else config.endpoint,
            timeouts=replace(timeouts, first_byte_s=min(60.0, config.request_timeout_s)),
        )
    max_model_len = facts.max_model_len or _ANY_LENGTH
    source = LoadSource(config, workload.fit_to_context(max_model_len), max_model_len)
    return _Verifier(config, target, facts, source, timeouts, ui, notices=source.notices).run()


class _TimeUpError(Exception):
    """The search has no time for another point."""


@dataclass(slots=True, eq=False)
class _Verifier:
    config: VerifyConfig
    target: "Target"
    facts: "ServerFacts"
    source: LoadSource
    timeouts: Any
    ui: Ui
    notices: list[Notice]
    points: list[Point] = field(default_factory=list)
    #: Seconds that one request takes alone; the rate to start from and the number of streams follow from it.
    alone_s: float = 1.0
    workers: int = 1

    def run(self) -> Verification:
        from sarathi_tune.loadgen.http.worker import LoadInterrupted, WorkerLostError

        try:
            self._measure_alone()
            if self.config.concurrency is not None:
                return self._judge_one(self._closed_loop(self.config.concurrency))
            if self.config.rate_per_s is not None:
                return self._judge_one(self._open_loop(self.config.rate_per_s, drain_s=self.config.request_timeout_s))
            if self.source.has_own_rate:
                return self._judge_one(self._at_own_rate())
            return self._search()
        except LoadInterrupted as interrupted:
            self._keep(interrupted.result)
            return self._verification("inconclusive", "The run was interrupted.", is_complete=False)
        except WorkerLostError as error:
            self._keep(error.result)
            return self._verification("inconclusive", str(error))
        except KeyboardInterrupt:
            return self._verification("inconclusive", "The run was interrupted.", is_complete=False)

    def _keep(self, result: LoadResult) -> None:
        """What had come of a run until it was ended."""
        if any(record.sent_s is not None for record in result.records):
            self.points.append(self._point(self.config.rate_per_s, result))

    def _measure_alone(self) -> None:
        """One request by itself: warms the server up with a prompt of its own, and says how long one takes."""
        settings = self._settings(drain_s=self.config.request_timeout_s, workers=0)
        with self.ui.phase("One request alone"):
            result = self._load(self.source.requests(self.source.alone()), settings, None)
        record = result.records[0]
        if failure_of(record) not in (None, "short_output"):
            raise TargetError(
                f"{self.target.base_url} failed on a single request of the workload "
                f"({record.prompt_tokens:,} prompt tokens, {failure_of(record)}): {record.detail or 'no token came'}."
            )
        self.alone_s = max(1e-3, (record.end_s or record.token_s[-1]) - (record.sent_s or 0.0))

    def _judge_one(self, point: Point) -> Verification:
        counts = point.report.counts
        if counts.good + counts.slo_miss == 0:
            return self._failed(f"No request was answered: {common_detail(point.result.records)}.", 0)
        gone = self._gone(point)
        if gone is not None:
            return self._failed(f"The server stopped answering during the run. {gone}", 0)
        # a miss that the client may have caused is no miss; one with few gaps is one
        if point.validity.is_client_limited or not point.result.is_complete:
            return self._verification("inconclusive", _causes(point), 0)
        if point.misses:
            return self._verification("missed", "; ".join(point.misses), 0)
        if not point.validity.is_valid:
            return self._verification("inconclusive", _causes(point), 0)
        if point.probability < DECIDED[1]:
            self.notices.append(close_call(point.probability))
        return self._verification("met", _within(point), 0)

    def _search(self) -> Verification:
        config = self.config
        end_s = time.monotonic() + config.time_limit_s

        def ask(rate_per_s: float, _attempt: int) -> bool:
            expected_s = max(config.seconds, MIN_REQUESTS / rate_per_s) + self.alone_s
            if self.points and time.monotonic() + expected_s > end_s:
                raise _TimeUpError
            return self._decide(rate_per_s, end_s)

        try:
            capacity = search_capacity(ask, 1.0 / self.alone_s, tolerance=config.tolerance)
            found = FoundCapacity(capacity.rate_per_s, capacity.upper_per_s, capacity.is_confirmed)
        except _TimeUpError:
            found = self._bracket()
        except TargetError as error:
            return self._failed(str(error), len(self.points) - 1)
        return self._conclude(found)

    def _conclude(self, found: FoundCapacity) -> Verification:
        at = found.rate_per_s if found.rate_per_s is not None else found.upper_per_s
        decisive = max(index for index, point in enumerate(self.points) if point.rate_per_s == at)
        edges = [point for point in self.points if point.rate_per_s in (at, found.upper_per_s)]
        is_believed = found.rate_per_s is None or self.points[decisive].validity.is_valid
        if not is_believed or any(point.validity.is_client_limited for point in edges):
            worst = next((point for point in edges if point.validity.is_client_limited), self.points[decisive])
            return self._verification("inconclusive", _causes(worst), decisive, found)
        if found.rate_per_s is None:
            misses = "; ".join(self.points[decisive].misses)
            return self._verification("missed", f"No rate down to {at:.3g} req/s meets it: {misses}", decisive, found)
        why = f"{found.rate_per_s:.3g} req/s meet it"
        if found.upper_per_s is not None:
            missed = [point for point in self.points if point.rate_per_s == found.upper_per_s and point.misses]
            why += f", {found.upper_per_s:.3g} don't"
            why += f" ({missed[-1].misses[0]})" if missed else ""
        if not found.is_confirmed:
            why += "; the time ran out before both were confirmed with fresh requests"
        return self._verification("met", why, decisive, found)

    def _bracket(self) -> FoundCapacity:
        """What the points so far say: the last answer of each rate."""
        believed = {point.rate_per_s: point.is_met for point in self.points if point.rate_per_s is not None}
        upper = min((rate for rate, met in believed.items() if not met), default=None)
        lower = max((rate for rate, met in believed.items() if met and (upper is None or rate < upper)), default=None)
        return FoundCapacity(lower, upper, is_confirmed=False)

    def _decide(self, rate_per_s: float, end_s: float) -> bool:
        """One point of the search: run until its probability is decided, the runs are enough, or the time is up."""
        point = self._open_loop(rate_per_s, drain_s=_DRAIN_S)
        for _ in range(1, _MAX_RUNS_PER_POINT):
            counts = point.report.counts
            if counts.good + counts.slo_miss == 0:
                raise TargetError(f"No request was answered: {common_detail(point.result.records)}.")
            gone = self._gone(point)
            if gone is not None:
                raise TargetError(f"The server stopped answering during the search. {gone}")
            is_decided = not DECIDED[0] < point.probability < DECIDED[1]
            if is_decided or time.monotonic() + point.result.elapsed_s > end_s:
                break
            again = self._open_loop(rate_per_s, drain_s=_DRAIN_S)
            self.points.pop()
            merged = _joined(point.result, again.result)
            counted = None if point.server is None or again.server is None else point.server + again.server
            point = self._point(rate_per_s, merged, counted)
            self.points[-1] = point
        return point.is_met

    def _open_loop(self, rate_per_s: float, *, drain_s: float) -> Point:
        schedule = self.source.open_loop(rate_per_s)
        return self._run(schedule, self._settings(drain_s=drain_s, stop_after_s=schedule.window_s))

    def _at_own_rate(self) -> Point:
        schedule = self.source.own()
        settings = self._settings(drain_s=self.config.request_timeout_s, stop_after_s=schedule.window_s)
        return self._run(schedule, settings)

    def _closed_loop(self, concurrency: int) -> Point:
        # more than can be answered: each stream at the pace of a request alone, and two to fill the slots
        schedule = self.source.closed_loop(concurrency * (3 + int(self.config.seconds / self.alone_s)))
        settings = self._settings(drain_s=self.config.request_timeout_s, stop_after_s=schedule.window_s)
        point = self._run(schedule, replace(settings, in_flight=concurrency))
        records = point.result.records
        if len(records) <= concurrency:
            from sarathi_tune.loadgen.http.client import LONGEST_FILLING

            longest_s = max((record.end_s or 0.0) - (record.sent_s or 0.0) for record in records)
            self.notices.append(answers_outlast_the_run(LONGEST_FILLING * self.config.seconds, longest_s))
        return point

    def _run(self, schedule: Schedule, settings: "HttpSettings") -> Point:
        """Run once, and once more with more processes if this one was the client's fault and there are cores left."""
        from sarathi_tune.loadgen.http.worker import workers_for

        rate_per_s = schedule.rate_per_s
        streams = self.config.concurrency or 2.0 * (rate_per_s or 1.0) * self.alone_s
        most = workers_for(float("inf"))
        self.workers = self.config.workers or max(self.workers, workers_for(streams))
        while True:
            before = self._metrics_when_idle(_IDLE_WAIT_S)
            name = "Closed loop" if rate_per_s is None else f"{rate_per_s:.3g} req/s"
            in_flight = settings.in_flight
            with self.ui.phase(name, len(schedule.times_s) if in_flight is None else 2 * in_flight) as phase:
                result = self._load(self.source.requests(schedule), replace(settings, workers=self.workers), phase)
            after = None if before is None else self._metrics_when_idle(_SETTLED_S)
            counted = None if before is None or after is None else account(before, after, result.records)
            point = self._point(rate_per_s, result, counted)
            is_client = point.validity.is_client_limited and self.config.workers is None
            if not is_client or self.workers >= most:
                self.points.append(point)
                return point
            self.workers = min(most, 2 * self.workers)
            self.ui.note(f"The client was too slow; once more with {self.workers} worker processes.")

    def _load(self, requests: Sequence[TimedRequest], settings: "HttpSettings", phase: Phase | None) -> LoadResult:
        from sarathi_tune.loadgen.http.worker import run_http_load

        done, filled_s = 0, 0.0

        def show(progress: LoadProgress) -> None:
            nonlocal done, filled_s
            if phase is not None:
                if settings.in_flight is not None and progress.num_finished >= settings.in_flight:
                    filled_s = filled_s or progress.elapsed_s
                    end_s = filled_s + (settings.stop_after_s or 0.0)
                    per_s = progress.num_finished / progress.elapsed_s
                    phase.expect(max(progress.num_finished, round(per_s * end_s) + settings.in_flight))
                phase.advance(progress.num_finished - done)
                phase.describe(f"{progress.num_running} under way")
                done = progress.num_finished

        return run_http_load(self.target, self.facts.dialect, requests, settings, on_progress=show)

    def _point(self, rate_per_s: float | None, result: LoadResult, server: ServerAccount | None = None) -> Point:
        if any(record.stalled is None for record in result.records):
            result = replace(result, records=estimate_stalls(result.records))
        slo, criterion = self.config.slo, self.config.criterion
        report = summarise(result, slo)
        views = event_views(result.counted, slo)
        misses = shortfalls(report, criterion)
        # a closed loop's first requests all come at once: its TTFT says nothing of a queue that grows
        growth_ms = queue_growth_ms(result.counted) if rate_per_s is not None else 0.0
        if growth_ms > _MAX_GROWTH_MS:
            misses += (f"the queue only grew: TTFT rose by {format_ms(growth_ms)} within the run",)
        probability = 0.0 if growth_ms > _MAX_GROWTH_MS else pass_probability(result.counted, slo, criterion)
        shares = self.source.workload.shares_prompts
        validity = check_http_run(result, report, views, server=server, allow_prefix_hits=shares)
        return Point(rate_per_s, self.source.num_runs, result, report, views, validity, misses, probability, server)

    def _settings(
        self, *, drain_s: float, stop_after_s: float | None = None, workers: int | None = None
    ) -> "HttpSettings":
        from sarathi_tune.loadgen.http.client import HttpSettings

        workers = self.workers if workers is None else workers
        return HttpSettings(timeouts=self.timeouts, drain_s=drain_s, stop_after_s=stop_after_s, workers=workers)

    def _metrics_when_idle(self, within_s: float) -> Exposition | None:
        """The server's metrics once it is idle, or as they are after so many seconds; None where there are none.
        Requests of the point before, aborted ones too, must not weigh on the next one."""
        from sarathi_tune.loadgen.http.probe import read_metrics

        end_s = time.monotonic() + within_s
        while True:
            text = read_metrics(self.target)
            if text is None:
                return None
            reading = read_exposition(text)
            if not reading.under_way or time.monotonic() > end_s:
                return reading
            time.sleep(0.25)

    def _gone(self, point: Point) -> str | None:
        """Why the server can't be used any more, if it can't: asked only when requests broke off, and more than once,
        because a server that fails now and then isn't gone."""
        from sarathi_tune.loadgen.http.probe import probe
        from sarathi_tune.loadgen.http.wire import Timeouts

        broken = {"connect", "truncated", "timeout", "http_5xx"} & set(point.report.counts.failures)
        if not broken:
            return None
        stall_s, request_s = min(10.0, self.config.stall_timeout_s), min(30.0, self.config.request_timeout_s)
        limits = Timeouts(connect_s=5.0, first_byte_s=request_s, between_reads_s=stall_s, request_s=request_s)
        dialect = self.facts.dialect
        why = None
        with self.ui.phase("Looking at the server again"):
            for _ in range(_LOOKS_BEHIND):
                try:
                    probe(self.target, model=dialect.model, endpoint=dialect.endpoint, timeouts=limits)
                except TargetError as error:
                    why = str(error)
                else:
                    return None
        return why

    def _failed(self, why: str, decisive: int) -> Verification:
        return self._verification("failed", why, decisive)

    def _verification(
        self,
        verdict: VerifiedVerdict,
        why: str,
        decisive: int | None = None,
        capacity: FoundCapacity | None = None,
        *,
        is_complete: bool = True,
    ) -> Verification:
        return Verification(
            target=self.target.base_url,
            slo=self.config.slo,
            verdict=verdict,
            why=why,
            points=tuple(self.points),
            decisive=decisive if decisive is not None or not self.points else len(self.points) - 1,
            capacity=capacity,
            server=self.facts.as_dict(),
            workload=self.source.workload.as_dict(),
            settings=self.config.as_dict(),
            notices=tuple(self.notices),
            is_complete=is_complete,
        )


def _joined(first: LoadResult, second: LoadResult) -> LoadResult:
    """Two runs at one rate as one: the second's window follows the first's. Stalls must have been estimated before,
    because the streams of the two overlap once they are shifted."""
    shift_s = first.window_s[1] - second.window_s[0]

    def moved(record: RequestRecord) -> RequestRecord:
        def later(value: float | None) -> float | None:
            return None if value is None else value + shift_s

        return replace(
            record,
            intended_s=record.intended_s + shift_s,
            sent_s=later(record.sent_s),
            token_s=tuple(stamp + shift_s for stamp in record.token_s),
            first_byte_s=later(record.first_byte_s),
            end_s=later(record.end_s),
        )

    return LoadResult(
        records=(*first.records, *map(moved, second.records)),
        steps=(),
        window_s=(first.window_s[0], second.window_s[1] + shift_s),
        elapsed_s=second.elapsed_s + shift_s,
        is_complete=first.is_complete and second.is_complete,
        client=second.client if _is_later(first, second) else first.client,
    )


def _is_later(first: LoadResult, second: LoadResult) -> bool:
    """Whether the second run's client was the later of the two: the worse one speaks for both."""
    assert first.client is not None, "a run over HTTP knows its client"
    assert second.client is not None, "a run over HTTP knows its client"
    return second.client.loop_lag_p99_ms >= first.client.loop_lag_p99_ms


def _causes(point: Point) -> str:
    return " ".join(notice.cause for notice in point.validity.problems) or "The run doesn't count."


def _within(point: Point) -> str:
    report, slo = point.report, point.report.slo
    percent = f"p{slo.percentile * 100:g}"
    seen = [f"{percent} ITL {_ms(report.itl.tail_ms)} of {format_ms(slo.itl_ms)}"]
    if report.itl_stalled.n:
        seen.append(f"of gaps with a prompt beside them {_ms(report.itl_stalled.tail_ms)}")
    if slo.ttft_ms is not None:
        seen.append(f"{percent} TTFT {_ms(report.ttft.tail_ms)} of {format_ms(slo.ttft_ms)}")
    return ", ".join(seen)


def _ms(value: float | None) -> str:
    return "-" if value is None else format_ms(value)
