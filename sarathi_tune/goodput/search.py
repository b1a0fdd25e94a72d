"""The largest rate that still meets the SLO: bracket, bisect on a log scale, confirm with a fresh seed.

Nothing here knows requests or seconds: a probe answers whether a rate was met, and rates of 0.01 per second are as good
as 1000. A noisy probe may contradict itself, so both ends of the final bracket are asked again before they are
believed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from sarathi_tune.errors import UsageError

#: probe(rate_per_s, attempt): was the SLO met? Every attempt number is new and stands for fresh prompts and arrivals.
Ask = Callable[[float, int], bool]


@dataclass(frozen=True, slots=True)
class Probe:
    """One question and its answer."""

    rate_per_s: float
    attempt: int
    met: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """`rate_per_s` is the largest rate that was met, None when no rate in reach was; `upper_per_s` the smallest one
    that was missed, None when none was. `is_confirmed` is false when the probes ran out before both were confirmed."""

    rate_per_s: float | None
    upper_per_s: float | None
    is_confirmed: bool
    probes: tuple[Probe, ...]


def search_capacity(
    ask: Ask, first_per_s: float, *, tolerance: float = 0.05, max_probes: int = 40, reach: float = 1024.0
) -> Capacity:
    """Search from `first_per_s` (a prediction) up and down, within a factor `reach`, until the bracket is narrower than
    `tolerance`; then both its ends are asked again, and each must get the same answer in two attempts out of three."""
    if not 0 < first_per_s < math.inf:
        raise UsageError(f"The rate to start from must be a positive number of requests per second, not {first_per_s}.")
    return _Search(ask, first_per_s, tolerance, max_probes, reach).run()


@dataclass(slots=True)
class _Search:
    ask: Ask
    first_per_s: float
    tolerance: float
    max_probes: int
    reach: float
    probes: list[Probe] = field(default_factory=list)
    #: What we believe of each rate asked: its last answer, or the majority once it was asked again.
    believed: dict[float, bool] = field(default_factory=dict)

    def run(self) -> Capacity:
        settled = False
        while not settled and len(self.probes) < self.max_probes:
            rate_per_s = self._next_rate()
            if rate_per_s is None:
                settled = self._settle()
            else:
                self.believed[rate_per_s] = self._probe(rate_per_s)
        return Capacity(self._low, self._high, settled, tuple(self.probes))

    @property
    def _high(self) -> float | None:
        """The smallest rate that was missed."""
        return min((rate for rate, met in self.believed.items() if not met), default=None)

    @property
    def _low(self) -> float | None:
        """The largest rate that was met below it."""
        high = self._high
        return max((rate for rate, met in self.believed.items() if met and (high is None or rate < high)), default=None)

    def _next_rate(self) -> float | None:
        """What to ask next; None when the bracket is narrow enough or its missing end is out of reach."""
        low, high, first = self._low, self._high, self.first_per_s
        if low is None and high is None:
            return first
        if low is not None and high is not None:
            return math.sqrt(low * high) if high > low * (1 + self.tolerance) else None
        # the first steps are small, because a good prediction is near; the next ones grow
        if low is not None:
            rate = low * (1.25 if low < first * 1.5 else 2.0)
            return rate if rate <= first * self.reach else None
        assert high is not None, "one end is known"
        rate = high / (1.25 if high > first / 1.5 else 2.0)
        return rate if rate >= first / self.reach else None

    def _settle(self) -> bool:
        """Ask both ends again; False when an end turns out to be the opposite of what was believed."""
        for rate_per_s in (self._low, self._high):
            if rate_per_s is not None and self._majority(rate_per_s) != self.believed[rate_per_s]:
                self.believed[rate_per_s] = not self.believed[rate_per_s]
                return False
        return True

    def _majority(self, rate_per_s: float) -> bool:
        """What two attempts at the rate agree on."""
        answers = [probe.met for probe in self.probes if probe.rate_per_s == rate_per_s]
        while max(answers.count(True), answers.count(False)) < 2:
            answers.append(self._probe(rate_per_s))
        return answers.count(True) > answers.count(False)

    def _probe(self, rate_per_s: float) -> bool:
        attempt = len(self.probes)
        met = self.ask(rate_per_s, attempt)
        self.probes.append(Probe(rate_per_s, attempt, met))
        return met
