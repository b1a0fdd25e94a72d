"""Which shapes to time, for the question at hand and the seconds allowed.

A quick probe first tells roughly what tokens, keys and a step itself cost here. Then shapes are chosen around the step
times that matter, 0.3 to 3 times the SLO, beside the default budget as control, in order of worth until the time is
full: pure decodes, pure prefills, hybrid steps, and the neighbours of likely budgets (one token above a GEMM tile can
cost a third more). Some shapes inside the region are held out of the fit, so that its error can be stated.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from sarathi_tune.errors import UsageError
from sarathi_tune.measure.failures import out_of_memory_reason
from sarathi_tune.measure.shapes import Shape, parse_shape

#: Sizes of steps, in tokens, that a curve over tokens is measured at.
LADDER_TOKENS = (
    *(8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
)
#: Step times that matter, as multiples of the SLO.
REGION_OF_SLO = (0.3, 3.0)
#: Rounds that count, beside the first one, which warms up: at least and at most.
MIN_ROUNDS, MAX_ROUNDS = 8, 25
#: A shape that takes more than this many times the median shape's share of the time is not in every round.
_HEAVY = 4.0
_MAX_EVERY = 4
#: The largest part of the time that one shape may take.
_MAX_SHARE = 0.2
#: A chunk that shows the slope of the curve; and the step time from which on larger chunks aren't probed.
_PROBE_TOKENS, _PROBE_LIMIT_MS = 256, 100.0
#: Where shapes are held out: fractions of the region's decodes, context and prefix. All differ, so that no held-out
#: shape is a neighbour of a fitted one in every direction.
_HELD_OUT = ((0.75, 0.6, 1 / 3), (0.5, 0.85, 2 / 3), (0.6, 0.7, 1 / 2), (0.85, 0.5, 1 / 4))

Label = Literal["a", "b"]


@dataclass(frozen=True, slots=True)
class DesignSpace:
    """What the advice will be asked about, and what measuring may cost.

    Tokens: `decodes` running at once with `context` keys each, chunks behind up to `prefix` cached tokens, steps of up
    to `max_budget`, and the `control_budget` that is timed in any case. `slo_ms` None asks about every step time.
    `num_pages` of `page_tokens` tokens is what the KV cache holds; `tile_tokens` the row tile of the device's GEMMs.
    """

    decodes: int
    context: int
    prefix: int
    slo_ms: float | None
    num_pages: int
    page_tokens: int = 16
    tile_tokens: int = 16
    max_budget: int = 8192
    control_budget: int = 2048
    max_model_len: int = 8192
    seconds: float = 45.0

    def __post_init__(self) -> None:
        for name in ("decodes", "context", "num_pages", "page_tokens", "tile_tokens", "max_budget", "max_model_len"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.prefix < 0 or self.control_budget < 0:
            raise UsageError("prefix and control_budget can't be negative.")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"The time for measuring must be a positive number of seconds, not {self.seconds}.")

    def fit(self, shape: Shape) -> Shape | None:
        """The shape, with prefix and then context cut to what the model's context and the KV cache hold; None when
        even that doesn't help."""
        page, decodes = self.page_tokens, shape.decodes
        chunk = min(shape.chunk, self.max_model_len)
        context = min(shape.context, self.max_model_len)
        room = (self.num_pages - decodes * -(-context // page)) * page
        prefix = max(0, min(shape.prefix, self.max_model_len - chunk, room - chunk)) if chunk else 0
        if decodes:
            context = min(context, (self.num_pages - -(-(prefix + chunk) // page)) // decodes * page)
            if context < 1:
                return None
        fitted = Shape(decodes, context, chunk, prefix)
        return fitted if fitted.num_pages(page) <= self.num_pages else None


@dataclass(frozen=True, slots=True)
class RoughCost:
    """What a step costs here, to within some tens of per cent: enough to plan seconds with. `knots` are (tokens, ms) of
    steps with hardly any keys, ascending; the others are ms per decode and key, and per chunk token and prefix key."""

    knots: tuple[tuple[int, float], ...]
    decode_key_ms: float = 0.0
    chunk_key_ms: float = 0.0

    def estimate_ms(self, shape: Shape) -> float:
        """About how long a step of this shape takes."""
        decode_keys, chunk_keys = shape.decodes * shape.context, shape.chunk * shape.prefix
        return self._tokens_ms(shape.num_tokens) + decode_keys * self.decode_key_ms + chunk_keys * self.chunk_key_ms

    def _tokens_ms(self, tokens: int) -> float:
        first, last = self.knots[0], self.knots[-1]
        if tokens <= first[0]:
            return first[1]
        for (low, low_ms), (high, high_ms) in pairwise(self.knots):
            if tokens <= high:
                return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)
        return last[1] * tokens / last[0]


@dataclass(frozen=True, slots=True)
class DesignPoint:
    """One shape to be timed. `label` tells two measurements of the same shape apart (A/A); `every` is 1 for every
    round, 3 for each third one."""

    shape: Shape
    label: Label = "a"
    every: int = 1
    held_out: bool = False
    estimate_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Design:
    """What to time, in how many rounds beside the first, which warms up. `seconds` bounds the rounds between
    `min_rounds` and `max_rounds`; None means all of them."""

    points: tuple[DesignPoint, ...]
    min_rounds: int
    max_rounds: int
    seconds: float | None
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The design as it stands in the journal."""
        points = [asdict(point) | {"shape": str(point.shape)} for point in self.points]
        return {"points": points} | {name: getattr(self, name) for name in _DESIGN_FIELDS}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Design":
        """The inverse of `as_dict`. Raises KeyError, TypeError or UsageError for what isn't one."""
        points = tuple(DesignPoint(**{**row, "shape": parse_shape(row["shape"])}) for row in document["points"])
        return cls(points, **{name: document[name] for name in _DESIGN_FIELDS})


_DESIGN_FIELDS = ("min_rounds", "max_rounds", "seconds", "seed")


def design_for_shapes(shapes: Iterable[Shape], repeats: int, seed: int = 0) -> Design:
    """Exactly these shapes, `repeats` times each after a dropped first."""
    return Design(tuple(DesignPoint(shape) for shape in shapes), repeats, repeats, None, seed)


def probe_cost(space: DesignSpace, time_shape: Callable[[Shape], float]) -> RoughCost:
    """Time a handful of steps twice, keep the second, and return what follows. A chunk that is too large for the device
    is left out; a single decode that is raises what `time_shape` raised."""
    batch = space.fit(Shape(space.decodes, space.context)) or Shape(1, 1)
    knots = [(1, _second_ms(Shape(1, min(space.context, space.page_tokens)), time_shape))]
    limit = min(space.max_budget, space.max_model_len)
    for tokens in (min(_PROBE_TOKENS, limit), min(max(space.control_budget, _PROBE_TOKENS), limit)):
        chunk = space.fit(Shape(chunk=tokens))
        is_too_slow = len(knots) > 1 and knots[-1][1] > _PROBE_LIMIT_MS
        if chunk is None or tokens <= knots[-1][0] or is_too_slow:
            break
        chunk_ms = _fitting_ms(chunk, time_shape)
        if chunk_ms is None:
            break
        # Steps don't get faster with more tokens; where it looks like that, it was noise.
        knots.append((tokens, max(chunk_ms, knots[-1][1])))
    cost = RoughCost(tuple(knots))
    return replace(
        cost,
        decode_key_ms=_key_ms(batch, batch.decodes * batch.context, cost, time_shape),
        chunk_key_ms=_prefix_key_ms(space, cost, time_shape),
    )


def plan_design(space: DesignSpace, cost: RoughCost, seed: int = 0) -> Design:
    """Choose the shapes for the question, as many as the seconds allow, the most telling ones first."""
    limit_ms = space.seconds * 1e3
    ladder = _ladder(space, cost)
    tokens_at_slo = ladder[len(ladder) // 2]
    if space.slo_ms is not None:
        tokens_at_slo = _tokens_within(space, cost, space.slo_ms)
    tiers = _tiers(space, ladder, tokens_at_slo)
    essential = (_weighed(point, space, cost, ladder) for point in _unique(space, tiers[0]))
    # One shape may not eat the time of all others: on a slow device not even the control.
    points = [point for point in essential if point.shape.kind == "decode" or _least_ms(point) <= _MAX_SHARE * limit_ms]
    spent_ms = sum(map(_least_ms, points))
    for candidate in _unique(space, [point for tier in tiers[1:] for point in tier]):
        point = _weighed(candidate, space, cost, ladder)
        if (point.shape, point.label) in {(known.shape, known.label) for known in points}:
            continue
        if spent_ms + _least_ms(point) <= limit_ms:
            points.append(point)
            spent_ms += _least_ms(point)
    rounds = _affordable_rounds(points, space)
    # Twice at least: one step alone shows no spread.
    points = [replace(point, every=min(point.every, rounds - 1)) for point in points]
    return Design(_inner_held_out(points), rounds, MAX_ROUNDS, space.seconds, seed)


def _second_ms(shape: Shape, time_shape: Callable[[Shape], float]) -> float:
    # The first one may hold seconds of warming up.
    time_shape(shape)
    return time_shape(shape)


def _fitting_ms(shape: Shape, time_shape: Callable[[Shape], float]) -> float | None:
    try:
        return _second_ms(shape, time_shape)
    except Exception as error:
        if out_of_memory_reason(error) is None:
            raise
        return None


def _key_ms(shape: Shape, num_keys: int, cost: RoughCost, time_shape: Callable[[Shape], float]) -> float:
    """What a key costs: the shape's time beyond that of its tokens, over its keys."""
    measured_ms = _fitting_ms(shape, time_shape)
    return 0.0 if measured_ms is None else max(0.0, measured_ms - cost.estimate_ms(shape)) / num_keys


def _prefix_key_ms(space: DesignSpace, cost: RoughCost, time_shape: Callable[[Shape], float]) -> float:
    shape = space.fit(Shape(chunk=min(_PROBE_TOKENS // 2, space.max_model_len), prefix=space.prefix))
    if shape is None or shape.prefix == 0:
        return 0.0
    return _key_ms(shape, shape.chunk * shape.prefix, cost, time_shape)


def _worst(space: DesignSpace, tokens: int) -> Shape:
    """The step that a budget of `tokens` allows at worst: all decodes, and a chunk that fills the rest."""
    return Shape(space.decodes, space.context, max(1, tokens - space.decodes), space.prefix)


def _tokens_within(space: DesignSpace, cost: RoughCost, limit_ms: float) -> int:
    """The largest budget whose worst step takes at most about `limit_ms`; one chunk token when none does."""
    low, high = space.decodes + 1, max(space.decodes + 1, space.max_budget)
    while low < high:
        middle = (low + high + 1) // 2
        if cost.estimate_ms(_worst(space, middle)) <= limit_ms:
            low = middle
        else:
            high = middle - 1
    return low


def _ladder(space: DesignSpace, cost: RoughCost) -> list[int]:
    """Sizes of steps in the region that matters, one more on each side, above the decodes."""
    lowest = space.decodes + min(space.tile_tokens, 8)
    sizes = [lowest, *(size for size in LADDER_TOKENS if lowest < size <= space.max_budget)]
    if space.slo_ms is None:
        return sizes
    low, high = (_tokens_within(space, cost, factor * space.slo_ms) for factor in REGION_OF_SLO)
    first = max(0, next((index for index, size in enumerate(sizes) if size >= low), len(sizes) - 1) - 1)
    last = next((index for index, size in enumerate(sizes) if size >= high), len(sizes) - 1)
    # At least three sizes, or nothing can be said about a slope.
    return sizes[first : max(last, first + 2) + 1]


def _tiers(space: DesignSpace, ladder: list[int], tokens_at_slo: int) -> list[list[DesignPoint]]:
    """Candidates in order of worth: what the advice rests on, what makes it precise, what is good to know."""
    B, S, P = space.decodes, space.context, space.prefix
    control = [space.control_budget] if space.control_budget > B else []
    likely = min(ladder, key=lambda size: abs(size - tokens_at_slo))
    worst = [DesignPoint(_worst(space, size)) for size in ladder]
    prefills = [DesignPoint(Shape(chunk=size)) for size in ladder]
    held_out = [DesignPoint(shape, held_out=True) for shape in _held_out_shapes(space, ladder)]
    batches = sorted({max(1, B >> halvings) for halvings in range(1, 8)}, reverse=True)
    essential = [
        DesignPoint(Shape(B, S)),
        DesignPoint(Shape(1, S)),
        DesignPoint(Shape(B, max(1, S // 4))),
        DesignPoint(_worst(space, likely)),
        *(DesignPoint(_worst(space, size)) for size in control),
        *worst,
        *prefills[::2],
        *held_out[:5],
        DesignPoint(Shape(B, S), "b"),
        DesignPoint(_worst(space, likely), "b"),
    ]
    precise = [
        *(DesignPoint(Shape(batch, S)) for batch in batches),
        *(DesignPoint(_worst(space, size)) for size in _tile_neighbours(space, tokens_at_slo)),
        *prefills[1::2],
        *held_out[5:],
        *(DesignPoint(Shape(chunk=size, prefix=P)) for size in ladder[::2] if P),
        *(DesignPoint(Shape(B, S, point.shape.chunk)) for point in worst[::2] if P),
        *(DesignPoint(Shape(max(1, B // 4), S, size)) for size in ladder[1::2]),
        *(DesignPoint(Shape(chunk=size)) for size in control),
    ]
    good = [
        *(DesignPoint(Shape(chunk=size)) for size in LADDER_TOKENS if size < ladder[0]),
        *(DesignPoint(Shape(batch, max(1, S // 4))) for batch in batches),
        *(DesignPoint(_worst(space, size)) for size in _tile_neighbours(space, likely)),
        *(DesignPoint(Shape(B, max(1, S // 4), point.shape.chunk, P // 2)) for point in worst[1::2]),
        *(DesignPoint(Shape(chunk=size, prefix=P // 2)) for size in ladder[1::2] if P > 1),
    ]
    return [essential, precise, good]


def _tile_neighbours(space: DesignSpace, tokens: int) -> Iterator[int]:
    """The last tile edge up to `tokens`, one token below and one above: all tokens of the step meet the tile."""
    tile = space.tile_tokens
    edge = max(tokens // tile, (space.decodes + tile) // tile + 1) * tile
    yield from (edge, edge + 1, edge - 1)


def _held_out_shapes(space: DesignSpace, ladder: list[int]) -> list[Shape]:
    """Shapes between the fitted ones, hybrid steps first: half-way (in ratio) between two sizes of the ladder."""
    middles = [round(math.sqrt(low * high)) for low, high in pairwise(ladder)]
    wanted = min(len(middles), len(_HELD_OUT))
    middles = [middles[(index * len(middles)) // wanted] for index in range(wanted)]
    spread = [
        (
            middle,
            min(max(1, round(part * space.decodes)), max(1, space.decodes - 1)),
            max(1, round(keys * space.context)),
            round(cached * space.prefix),
        )
        for middle, (part, keys, cached) in zip(middles, _HELD_OUT, strict=False)
    ]
    hybrids = [Shape(B, S, max(1, size - B), P) for size, B, S, P in spread]
    decodes = [Shape(B, S) for _, B, S, _ in spread]
    prefills = [Shape(chunk=size, prefix=P) for size, _, _, P in spread]
    return [*hybrids[:3], *decodes[:1], *prefills[-1:], *hybrids[3:], *decodes[1:2], *prefills[:-1][:1]]


def _unique(space: DesignSpace, points: Iterable[DesignPoint]) -> list[DesignPoint]:
    """The points that fit, cut to what fits, each shape and label once; the first one counts."""
    kept: dict[tuple[Shape, Label], DesignPoint] = {}
    for point in points:
        shape = space.fit(point.shape)
        if shape is not None:
            kept.setdefault((shape, point.label), replace(point, shape=shape))
    return list(kept.values())


def _weighed(point: DesignPoint, space: DesignSpace, cost: RoughCost, ladder: list[int]) -> DesignPoint:
    """The point with its estimated time, and how often it is worth that time. The control above the region tells what
    the default costs, which a few steps tell well enough."""
    estimate_ms = cost.estimate_ms(point.shape)
    share_ms = space.seconds * 1e3 / (MIN_ROUNDS + 1) / 40
    every = min(_MAX_EVERY, max(1, math.ceil(estimate_ms / (_HEAVY * share_ms))))
    if point.shape.num_tokens > max(ladder):
        every = max(every, 3)
    return replace(point, estimate_ms=estimate_ms, every=every)


def _least_ms(point: DesignPoint) -> float:
    """What the point costs when only the fewest rounds are run."""
    return point.estimate_ms * (1 + math.ceil(MIN_ROUNDS / point.every))


def _affordable_rounds(points: list[DesignPoint], space: DesignSpace) -> int:
    """Rounds that are run in any case: fewer, but at least 3, when the essential points alone fill the time."""
    round_ms = sum(point.estimate_ms / point.every for point in points)
    warm_up_ms = sum(point.estimate_ms for point in points)
    if round_ms <= 0:
        return MIN_ROUNDS
    return max(3, min(MIN_ROUNDS, int((space.seconds * 1e3 - warm_up_ms) / round_ms)))


def _inner_held_out(points: list[DesignPoint]) -> tuple[DesignPoint, ...]:
    """The points less those held out that lie on the border of the fitted ones or outside: a fit isn't judged by what
    it had to extrapolate to."""
    fitted = [point.shape for point in points if not point.held_out]
    fitted_shapes = frozenset(fitted)
    tokens = [shape.num_tokens for shape in fitted]
    batches = [shape.decodes for shape in fitted if shape.decodes]
    contexts = [shape.context for shape in fitted if shape.decodes]
    prefixes = [shape.prefix for shape in fitted if shape.chunk]

    def is_inner(shape: Shape) -> bool:
        decodes_inside = not shape.decodes or (_inside(shape.decodes, batches) and _inside(shape.context, contexts))
        chunk_inside = not shape.chunk or _inside(shape.prefix, prefixes)
        return _inside(shape.num_tokens, tokens) and decodes_inside and chunk_inside

    return tuple(
        point for point in points if not point.held_out or (point.shape not in fitted_shapes and is_inner(point.shape))
    )


def _inside(value: int, values: list[int]) -> bool:
    """Strictly between the smallest and the largest; where nothing lies between them, one of the two."""
    low, high = min(values), max(values)
    return low <= value <= high if high - low < 2 else low < value < high
