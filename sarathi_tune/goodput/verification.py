"""How a real run that verifies a prediction is laid out: at which rate, for how long."""

from collections.abc import Sequence
from dataclasses import dataclass

from sarathi_tune.loadgen.inprocess import TimedRequest, timed
from sarathi_tune.notices import Notice, short_verification
from sarathi_tune.workload.arrivals import poisson_exactly
from sarathi_tune.workload.spec import Draw, Workload

#: A share of the capacity at which the batch is busy and the queue still steady: near 1 the outcome of a short run is
#: luck, far below it prompts seldom meet a full batch.
VERIFY_SHARE = 0.8
#: Fewer requests than this say little, whatever the number of their gaps.
MIN_REQUESTS = 12


@dataclass(frozen=True, slots=True)
class VerificationPlan:
    """`num_requests` requests in a window of `window_s` seconds: exactly `rate_per_s`. `expected_gaps` is their number
    of inter-token gaps."""

    rate_per_s: float
    window_s: float
    num_requests: int
    expected_gaps: float
    notices: tuple[Notice, ...] = ()

    def requests(
        self, workload: Workload, seed: int, *, vocab_size: int | None, max_model_len: int
    ) -> tuple[tuple[TimedRequest, ...], Draw]:
        """The plan's requests with their times, and the draw that they come from (for its notices)."""
        draw = workload.draw(seed, self.num_requests, vocab_size=vocab_size, max_model_len=max_model_len)
        return timed(draw.requests, poisson_exactly(self.rate_per_s, seed, self.num_requests)), draw


def plan_verification(
    rate_per_s: float,
    workload: Workload,
    *,
    seconds: float = 20.0,
    max_seconds: float = 40.0,
    min_requests: int = MIN_REQUESTS,
) -> VerificationPlan:
    """A run at this rate, `seconds` long: longer, up to `max_seconds`, when it would hold fewer than `min_requests`; a
    notice when even that is too short."""
    assert rate_per_s > 0, "a run without requests shows nothing"
    window_s = min(max(seconds, min_requests / rate_per_s), max(seconds, max_seconds))
    num_requests = max(1, round(rate_per_s * window_s))
    notices: Sequence[Notice] = ()
    if num_requests < min_requests:
        notices = (short_verification(num_requests, min_requests, window_s),)
    # whole requests: the window follows from them, so that the rate is exact
    return VerificationPlan(
        rate_per_s=rate_per_s,
        window_s=num_requests / rate_per_s,
        num_requests=num_requests,
        expected_gaps=num_requests * (workload.mean_output_tokens - 1),
        notices=tuple(notices),
    )
