"""How single steps scatter around their typical time: within rows, pooled over them."""

from __future__ import annotations

from collections.abc import Sequence

from sarathi_tune import notices
from sarathi_tune.notices import Notice
from sarathi_tune.stats import quantile_sorted
from sarathi_tune.stepmodel.features import Observation
from sarathi_tune.stepmodel.model import Spread

#: Fewer repeats than this per kind of step are pooled over all kinds.
MIN_REPEATS_PER_KIND = 100
#: How finely the spread is kept: order statistics of the ratio of single times to the row's median.
SPREAD_POINTS = 512


def pooled_spread(rows: Sequence[Observation]) -> Spread:
    """Within-row spread, pooled: each time over its own row's median, so that a row the model misses widens nothing."""
    pools: dict[bool, list[float]] = {False: [], True: []}
    for row in rows:
        pools[bool(row.load.chunks)] += row.ratios()
    pooled = pools[False] + pools[True]
    chosen = {kind: pools[kind] if len(pools[kind]) >= MIN_REPEATS_PER_KIND else pooled for kind in (False, True)}
    return Spread(
        decode=_order_statistics(chosen[False]),
        chunk=_order_statistics(chosen[True]),
        n_decode=len(chosen[False]),
        n_chunk=len(chosen[True]),
    )


def _order_statistics(values: Sequence[float]) -> tuple[float, ...]:
    """The values sorted, thinned to `SPREAD_POINTS` quantiles; (1.0,) when there are none. None below a tenth of the
    centre: a correction for few repeats must not make time run backwards."""
    ordered = sorted(max(0.1, value) for value in values)
    if not ordered:
        return (1.0,)
    if len(ordered) <= SPREAD_POINTS:
        return tuple(ordered)
    return tuple(quantile_sorted(ordered, index / (SPREAD_POINTS - 1)) for index in range(SPREAD_POINTS))


def spread_notices(spread: Spread) -> tuple[Notice, ...]:
    if not spread.n_chunk:
        return (notices.profile_without_repeats(),)
    return (notices.few_repeats(spread.n_chunk),) if spread.n_chunk < 299 else ()
