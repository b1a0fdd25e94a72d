"""The rows of a profile as the fit sees them."""

from __future__ import annotations

import math

from sarathi_tune.errors import DocumentError
from sarathi_tune.measure.profile import Profile, Sample
from sarathi_tune.stats import MAD_TO_SIGMA, mad, median
from sarathi_tune.stepmodel.features import EXACT, Load, Observation, Rows


def filled_rows(profile: Profile) -> Rows:
    """How the engine of a profile fills its rows up; as many rows as tokens where the profile doesn't say."""
    exact, multiple = (profile.engine.get(name) for name in ("exact_rows", "row_multiple"))
    if not isinstance(exact, int) or not isinstance(multiple, int) or multiple < 1:
        return EXACT
    return Rows(exact, multiple)


def observations(profile: Profile) -> list[tuple[Observation, Sample]]:
    """The rows of a profile that have a time, as the fit sees them. Raises DocumentError when there is none."""
    rows = []
    filled = filled_rows(profile)
    for sample in profile.samples:
        times = tuple(time for time in sample.times_ms if math.isfinite(time) and time > 0.0)
        if sample.missing or not times or not sample.shape.num_tokens:
            continue
        centre = median(times)
        load = Load.of(sample.shape.step_shape, filled)
        error = 1.2533 * MAD_TO_SIGMA * mad(times) / math.sqrt(len(times)) / centre if len(times) > 2 else 0.0
        rows.append((Observation(load, centre, str(sample.shape), times, error), sample))
    if not rows:
        raise DocumentError("The profile holds no timed step: measure it again, or write rows with a time in ms.")
    return rows
