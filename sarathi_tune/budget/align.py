"""Aligning a budget to what was measured to pay off, and to nothing else.

Total tokens (decodes + chunk) meet the GEMM's tile, so budgets are aligned, not chunks. Roundness is no reason: a
budget is moved down only where the profile shows a stair: two neighbouring token counts with a jump between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sarathi_tune.measure.profile import Profile
from sarathi_tune.stepmodel.model import StepModel

#: One stair at 1,024 doesn't prove tiles of 1,024; no GEMM's tile is wider than this.
WIDEST_TILE = 256


@dataclass(frozen=True, slots=True)
class Alignment:
    """`tile_tokens` is the proven spacing of stairs (None: no stair was measured); `anchors` are token counts known to
    lie on a lower tread: measured ones, and captured graph sizes where one of them was proven a stair."""

    tile_tokens: int | None
    anchors: tuple[int, ...]

    @classmethod
    def of(cls, profile: Profile, model: StepModel) -> Alignment:
        """What this profile's measurements prove."""
        if not model.stairs:
            return cls(None, ())
        graph_stair = any(stair in profile.graph_sizes for stair in model.stairs)
        sizes = tuple(profile.graph_sizes) if graph_stair else ()
        common = math.gcd(*model.stairs)
        tile = min(WIDEST_TILE, common & -common)
        measured = tuple(count for count in model.measured_tokens if not _behind_stair(count, model.stairs))
        return cls(max(tile, 1), tuple(sorted({*measured, *model.stairs, *sizes})))

    def down(self, budget: int) -> int:
        """The largest aligned budget up to this one; the budget itself where nothing proves an alignment."""
        if self.tile_tokens is None:
            return budget
        below = [anchor for anchor in self.anchors if anchor <= budget]
        return max([budget // self.tile_tokens * self.tile_tokens, *below]) or budget

    def up(self, budget: int) -> int:
        """The smallest aligned budget above this one."""
        unit = self.tile_tokens or 1
        above = [anchor for anchor in self.anchors if anchor > budget]
        return min([(budget // unit + 1) * unit, *above])


def _behind_stair(count: int, stairs: tuple[int, ...]) -> bool:
    """Whether the count was measured only to show the stair just below it: the worst place for a budget."""
    from sarathi_tune.stepmodel.features import NEIGHBOUR_RATIO

    return any(stair < count <= stair * NEIGHBOUR_RATIO for stair in stairs)
