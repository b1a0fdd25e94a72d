"""The rows of a profile as the fit sees them."""

from __future__ import annotations

import math
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
        load = Load.of(sample.shape.step_shape, filled)
        found.append((Observation(load, median(times), str(sample.shape), times), sample))
    if not found:
        raise DocumentError("The profile holds no timed step: measure it again, or write rows with a time in ms.")
    ratios = [ratio for row, _ in found for ratio in row.ratios()]
    scatter = MAD_TO_SIGMA * mad(ratios) if ratios else 0.0
    return [(_with_errors(row, scatter), sample) for row, sample in found]


def _with_errors(row: Observation, scatter: float) -> Observation:
    """`scatter`: the relative standard deviation of a single time, pooled over the rows that show one."""
    root = math.sqrt(len(row.times_ms))
    if not row.has_spread:
        return replace(row, pooled_error=scatter / root)
    error = _MEDIAN_ERROR * MAD_TO_SIGMA * mad(row.times_ms) / root / row.centre_ms
    return replace(row, relative_error=error, pooled_error=error)
