"""The rows of a profile as the fit sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sarathi_tune.errors import DocumentError
from sarathi_tune.measure.profile import Profile, Sample
from sarathi_tune.stats import MAD_TO_SIGMA, mad, median
from sarathi_tune.stepmodel.features import EXACT, Load, Observation, Rows

#: The standard error of a median, in those of a mean of as many normal times.
_MEDIAN_ERROR = 1.2533


def filled_rows(profile: Profile) -> Rows:
    """How the engine of a profile fills its rows up; as many rows as tokens where the profile doesn't say."""
    exact, multiple = (profile.engine.get(name) for name in ("exact_rows", "row_multiple"))
    if not isinstance(exact, int) or not isinstance(multiple, int) or multiple < 1:
        return EXACT
    return Rows(exact, multiple)


def observations(profile: Profile) -> list[tuple[Observation, Sample]]:
    """The rows of a profile that have a time, as the fit sees them. Raises DocumentError when there is none."""
    found = []
    filled = filled_rows(profile)
    for sample in profile.samples:
        times = tuple(time for time in sample.times_ms if math.isfinite(time) and time > 0.0)
        if sample.missing or not times or not sample.shape.num_tokens:
            continue
        centre = median(times)
        load = Load.of(sample.shape.step_shape, filled)
        error = _MEDIAN_ERROR * MAD_TO_SIGMA * mad(times) / math.sqrt(len(times)) / centre
        known = error if _has_spread(times) else 0.0
        found.append((Observation(load, centre, str(sample.shape), times, known), sample))
    if not found:
        raise DocumentError("The profile holds no timed step: measure it again, or write rows with a time in ms.")
    scatter = _scatter([row for row, _ in found])
    return [(replace(row, pooled_error=_pooled_error(row, scatter)), sample) for row, sample in found]


def _has_spread(times_ms: Sequence[float]) -> bool:
    return len(times_ms) > 2


def _scatter(rows: Sequence[Observation]) -> float:
    """Relative standard deviation of a single time around its row's centre, pooled over the rows with enough of them;
    0 without any."""
    deviations = []
    for row in rows:
        n = len(row.times_ms)
        if _has_spread(row.times_ms):
            widen = math.sqrt(n / (n - 1))  # what a median of n times hides of their spread
            deviations += [(time / row.centre_ms - 1.0) * widen for time in row.times_ms]
    return MAD_TO_SIGMA * mad(deviations) if deviations else 0.0


def _pooled_error(row: Observation, scatter: float) -> float:
    return row.relative_error if _has_spread(row.times_ms) else scatter / math.sqrt(len(row.times_ms))
