"""The requests of every run on a live server, with their times: drawn from a workload, or replayed from a trace."""

import random
from array import array
from dataclasses import dataclass, field, replace

from sarathi_tune.config.verify import VerifyConfig
from sarathi_tune.errors import UsageError
from sarathi_tune.loadgen.inprocess import TimedRequest, timed
from sarathi_tune.notices import Notice, short_verification
from sarathi_tune.workload.arrivals import closed_loop, constant, gamma, poisson_exactly, ramp
from sarathi_tune.workload.spec import RequestSpec, Workload
from sarathi_tune.workload.trace import Trace

#: Fewer requests than this say little.
MIN_REQUESTS = 12
#: And fewer than this say nothing: the run is made longer.
_FEWEST_REQUESTS = 3


@dataclass(frozen=True, slots=True)
class Schedule:
    """When requests are sent: seconds from the start of the run, None in a closed loop. The run's window is `window_s`
    long. `is_recorded`: the times are the trace's, and so are the requests from its first one on."""

    rate_per_s: float | None
    times_s: tuple[float | None, ...]
    window_s: float
    is_recorded: bool = False


@dataclass(slots=True, eq=False)
class LoadSource:
    """Makes schedules, and fresh requests for them. `workload` has been fitted to the server's context."""

    config: VerifyConfig
    workload: Workload
    max_model_len: int
    notices: list[Notice] = field(default_factory=list)
    num_runs: int = 0
    salt: random.Random = field(default_factory=random.SystemRandom)

    @property
    def has_own_rate(self) -> bool:
        """Whether the arrivals say at which rate requests come: a trace at the times of its recording, and a ramp."""
        config = self.config
        is_free = config.rate_per_s is None and config.concurrency is None
        return is_free and config.arrivals in ("trace", "ramp")

    def own(self) -> Schedule:
        """The schedule of arrivals with a rate of their own."""
        return self.ramp() if self.config.ramp_per_s is not None else self.replay()

    def ramp(self) -> Schedule:
        """A rate that rises or falls within the run."""
        assert self.config.ramp_per_s is not None, "a ramp has two ends"
        seconds = self.config.seconds
        times_s = ramp(*self.config.ramp_per_s, self.config.seed + 104_729 * self.num_runs, seconds)
        if len(times_s) < MIN_REQUESTS:
            self.notices.append(short_verification(len(times_s), MIN_REQUESTS, seconds))
        return Schedule(len(times_s) / seconds, times_s, seconds)

    def alone(self) -> Schedule:
        """One request by itself."""
        return Schedule(None, (0.0,), 0.0)

    def open_loop(self, rate_per_s: float) -> Schedule:
        """The configured arrivals at this rate."""
        count = max(1, round(rate_per_s * max(self.config.seconds, _FEWEST_REQUESTS / rate_per_s)))
        if count < MIN_REQUESTS and self.num_runs == 1:
            self.notices.append(short_verification(count, MIN_REQUESTS, count / rate_per_s))
        times_s = self._arrivals(rate_per_s, count)
        return Schedule(rate_per_s, times_s, count / rate_per_s, is_recorded=self.config.arrivals == "trace")

    def closed_loop(self, count: int) -> Schedule:
        """`count` requests that are sent as slots become free, as long as the run lasts."""
        return Schedule(None, closed_loop(count), self.config.seconds)

    def replay(self) -> Schedule:
        """The trace's requests at its times, for as long as the run lasts."""
        trace = self._trace()
        count = trace.until(self.config.seconds)
        window_s = min(self.config.seconds, trace.lap_s) or self.config.seconds
        if count < MIN_REQUESTS:
            self.notices.append(short_verification(count, MIN_REQUESTS, window_s))
        return Schedule(count / window_s, trace.times(count), window_s, is_recorded=True)

    def requests(self, schedule: Schedule) -> tuple[TimedRequest, ...]:
        """Fresh requests for a schedule. Lengths follow the seed; prompts are new in every run, so that no cache knows
        them, and what they share among each other they still share."""
        self.num_runs += 1
        vocab_size, count = self.config.vocab_size, len(schedule.times_s)
        seed = self.config.seed + 7919 * self.num_runs
        if schedule.is_recorded:
            draw = self.workload.draw_rows(0, seed, count, vocab_size)
        else:
            draw = self.workload.draw(seed, count, vocab_size=vocab_size, max_model_len=self.max_model_len)
        for notice in draw.notices:
            if notice.code not in {known.code for known in self.notices}:
                self.notices.append(notice)
        shift = self.salt.randrange(vocab_size)
        return timed([_shifted(spec, shift, vocab_size) for spec in draw.requests], schedule.times_s)

    def _arrivals(self, rate_per_s: float, count: int) -> tuple[float, ...]:
        seed = self.config.seed + 104_729 * self.num_runs
        if self.config.arrivals == "trace":
            return self._trace().times_at(rate_per_s, count)
        if self.config.arrivals == "constant":
            return constant(rate_per_s, n=count)
        if self.config.arrivals == "gamma":
            return gamma(rate_per_s, self.config.burstiness_cv, seed, n=count)
        return poisson_exactly(rate_per_s, seed, count)

    def _trace(self) -> Trace:
        assert self.workload.trace is not None, "the arrivals of a trace need one"
        return self.workload.trace


def settle_arrivals(config: VerifyConfig, workload: Workload) -> VerifyConfig:
    """The configuration with its arrivals settled: those of the trace where it has times and nothing else is asked for.

    Raises UsageError for a replay of what has no times, and for a speed without a replay.
    """
    has_times = workload.trace is not None and workload.trace.has_times
    is_free = config.rate_per_s is None and config.concurrency is None
    arrivals = config.arrivals or ("trace" if has_times and is_free else "poisson")
    if (arrivals == "trace" or config.trace_speed is not None) and not has_times:
        raise UsageError(f"A replay needs a trace with times, and workload {workload.name!r} has none.")
    if config.trace_speed is not None and not (arrivals == "trace" and is_free):
        raise UsageError(
            "--trace-speed is for a replay at a trace's own times: leave out --rate, --concurrency and --arrivals."
        )
    return replace(config, arrivals=arrivals)


def _shifted(spec: RequestSpec, shift: int, vocab_size: int) -> RequestSpec:
    return replace(spec, prompt=array("i", [(token + shift) % vocab_size for token in spec.prompt]))
