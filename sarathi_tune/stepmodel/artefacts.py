"""Rows that can't be right: slower than a row that contains them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sarathi_tune import notices
from sarathi_tune.notices import Notice, Pair
from sarathi_tune.stepmodel.features import Load, Observation, candidate_terms, find_stairs
from sarathi_tune.stepmodel.solve import fit_terms

#: A row this much slower than one that contains it is an artefact, not a kernel's whim (those reach 6 % at tile edges).
NON_MONOTONE = 0.10


def without_artefacts(rows: Sequence[Observation]) -> tuple[list[Observation], list[str], list[Notice]]:
    """The rows without those that can't be right, their labels, and what to tell of them.

    A row slower than one that contains it (more of everything) by more than `NON_MONOTONE` breaks physics: one of the
    two is wrong, the one without which the others fit better. At most one row in eight goes, and never more than five.
    """
    kept = list(rows)
    rejected: list[Pair] = []
    remaining: list[Pair] = []
    limit = min(5, max(1, len(rows) // 8)) if len(rows) >= 4 else 0
    while pairs := _violations(kept):
        if len(rejected) >= limit:
            worst: dict[str, Pair] = {}
            for low, high in pairs:
                worst.setdefault(low.label, (_told(low), _told(high)))
            remaining = list(worst.values())
            break
        suspects = {id(row): row for pair in pairs for row in pair}
        culprit = min(suspects.values(), key=lambda row: _loss_without(row, kept))
        other = next(high if low is culprit else low for low, high in pairs if culprit in (low, high))
        kept = [row for row in kept if row is not culprit]
        rejected.append((_told(culprit), _told(other)))
    found = [notices.profile_rows_rejected(rejected)] if rejected else []
    found += [notices.profile_not_monotone(remaining)] if remaining else []
    return kept, [label for (label, _), _ in rejected], found


def _told(row: Observation) -> tuple[str, float]:
    return row.label, row.centre_ms


def _loss_without(culprit: Observation, rows: Sequence[Observation]) -> tuple[int, float]:
    """Violations that remain, then the misfit, when this row goes."""
    rest = [row for row in rows if row is not culprit]
    terms = candidate_terms(rest, stairs=find_stairs(rest))
    return len(_violations(rest)), fit_terms(terms, rest).score(rest)


def _violations(rows: Sequence[Observation]) -> list[tuple[Observation, Observation]]:
    """Pairs (low, high) in which `high` contains `low` and is nevertheless faster, the worst first."""
    found = []
    for low in rows:
        for high in rows:
            noise = 3.0 * math.hypot(low.pooled_error, high.pooled_error)
            if low.centre_ms > high.centre_ms * (1.0 + NON_MONOTONE + noise) and _contains(high.load, low.load):
                found.append((low, high))
    return sorted(found, key=lambda pair: pair[1].centre_ms / pair[0].centre_ms)


def _contains(high: Load, low: Load) -> bool:
    """Whether `high` does everything that `low` does, and more."""
    if high.decodes < low.decodes or high.context_sum < low.context_sum or len(high.chunks) < len(low.chunks):
        return False
    return all(big[0] >= small[0] and big[1] >= small[1] for big, small in zip(high.chunks, low.chunks, strict=False))
