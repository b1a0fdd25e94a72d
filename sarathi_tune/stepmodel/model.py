"""The fitted step model: what it predicts, how it spreads, how far it is off, and how it is written down."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sarathi_tune.engine.plan import StepShape
from sarathi_tune.errors import DocumentError
from sarathi_tune.notices import Notice
from sarathi_tune.stats import quantile_sorted
from sarathi_tune.stepmodel.features import EXACT, Rows, Term, TermName


class HasRandom(Protocol):
    """`random.Random` or a numpy generator."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class HoldOutError:
    """How far the model is off on shapes it has not seen; all errors relative, `median` and `p95` of absolute ones.

    `method` is "held-out" (shapes set aside while measuring) or "k-fold" (the profile has none; refitted without them),
    or "none". `additive_*` is the error of decode step + prefill step, measured apart and added, on the same kind of
    hybrid shapes; `additive_bias` is signed: +0.31 overstates by 31 %.
    """

    method: str
    median: float
    p95: float
    n: int
    hybrid_median: float
    hybrid_p95: float
    hybrid_n: int
    additive_median: float
    additive_bias: float
    additive_n: int

    def as_dict(self) -> dict[str, Any]:
        """The error as it stands in a document; what is unknown is null."""
        names = ("median", "p95", "n", "hybrid_median", "hybrid_p95", "hybrid_n")
        more = ("additive_median", "additive_bias", "additive_n")
        return {"method": self.method} | {name: _or_null(getattr(self, name)) for name in names + more}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> HoldOutError:
        """The error that `as_dict` wrote."""
        values: dict[str, Any] = {name: math.nan if value is None else value for name, value in document.items()}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Spread:
    """Sorted ratios of single times to their row's median, for steps without and with prefill tokens. (1.0,) is no
    spread: the profile has no repeated times. `n` is how many times stand behind them."""

    decode: tuple[float, ...] = (1.0,)
    chunk: tuple[float, ...] = (1.0,)
    n_decode: int = 0
    n_chunk: int = 0

    def ratio(self, has_chunk: bool, q: float) -> float:
        """The `q` quantile of the ratio."""
        return quantile_sorted(self.chunk if has_chunk else self.decode, q)


@dataclass(frozen=True, slots=True)
class StepModel:
    """A fitted step model. `coefficients[i]` is milliseconds per unit of `terms[i]`, never negative.

    `stairs` are token counts behind which a jump was measured; `rejected` the rows that the fit left out, by label;
    `rows` says how many rows a number of tokens is computed with.
    """

    terms: tuple[Term, ...]
    coefficients: tuple[float, ...]
    spread: Spread
    error: HoldOutError
    stairs: tuple[int, ...] = ()
    rows: Rows = EXACT
    rejected: tuple[str, ...] = ()
    measured_tokens: tuple[int, ...] = ()
    num_rows: int = 0
    residual_sigma: float = 0.0
    notices: tuple[Notice, ...] = ()
    _edges: list[int] = field(init=False, repr=False, compare=False)
    _bases: list[float] = field(init=False, repr=False, compare=False)
    _slopes: list[float] = field(init=False, repr=False, compare=False)
    _exact_rows: int = field(init=False, repr=False, compare=False)
    _row_multiple: int = field(init=False, repr=False, compare=False)
    _per_context_ms: float = field(init=False, repr=False, compare=False)
    _per_decode_ms: float = field(init=False, repr=False, compare=False)
    _attention_ms: float = field(init=False, repr=False, compare=False)
    _query_block: int = field(init=False, repr=False, compare=False)
    _chunk_fixed: tuple[float, int] = field(init=False, repr=False, compare=False)
    _mix_fixed: tuple[float, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.terms) == len(self.coefficients)
        assert all(value >= 0.0 for value in self.coefficients), self.coefficients
        put = object.__setattr__
        edges, bases, slopes = _curve(self.terms, self.coefficients)
        put(self, "_edges", edges)
        put(self, "_bases", bases)
        put(self, "_slopes", slopes)
        put(self, "_exact_rows", self.rows.exact)
        put(self, "_row_multiple", self.rows.multiple)
        single = {term.name: (value, term.at) for term, value in zip(self.terms, self.coefficients, strict=True)}
        put(self, "_per_context_ms", single.get("context", (0.0, 0))[0])
        put(self, "_per_decode_ms", single.get("decodes", (0.0, 0))[0])
        put(self, "_attention_ms", single.get("attention", (0.0, 0))[0])
        put(self, "_query_block", single.get("attention", (0.0, 0))[1])
        put(self, "_chunk_fixed", single.get("chunk_fixed", (0.0, 0)))
        put(self, "_mix_fixed", single.get("mix_fixed", (0.0, 0)))

    def centre_ms(self, decodes: int, context_sum: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Median time in ms of a step with `decodes` decodes that see `context_sum` keys together, and `chunks` of
        (prefix, tokens). The fast path: plain floats, a microsecond or two."""
        chunk_tokens = 0
        attention = 0.0
        block = self._query_block
        for prefix, count in chunks:
            chunk_tokens += count
            attention += (count if count > block else block) * (prefix + 0.5 * count)
        tokens = decodes + chunk_tokens
        if tokens > self._exact_rows:
            tokens = -(-tokens // self._row_multiple) * self._row_multiple
        index = bisect_left(self._edges, tokens) - 1 if tokens > 0 else 0
        step_ms = self._bases[index] + self._slopes[index] * (tokens - self._edges[index])
        step_ms += self._per_context_ms * context_sum + self._per_decode_ms * decodes + self._attention_ms * attention
        if chunk_tokens:
            fixed_ms, width = self._chunk_fixed
            step_ms += fixed_ms if chunk_tokens >= width else fixed_ms * chunk_tokens / width
            if decodes:
                fixed_ms, width = self._mix_fixed
                step_ms += fixed_ms if chunk_tokens >= width else fixed_ms * chunk_tokens / width
        return step_ms

    def predict_ms(self, shape: StepShape) -> float:
        """Median time of a step of this shape in milliseconds."""
        return self.centre_ms(len(shape.decode_contexts), sum(shape.decode_contexts), shape.chunks)

    def quantile_ms(self, shape: StepShape, q: float) -> float:
        """The `q` quantile (0 to 1) of the time of a step of this shape in milliseconds."""
        return self.predict_ms(shape) * self.spread.ratio(bool(shape.chunks), q)

    def draw_ratio(self, has_chunk: bool, rng: HasRandom) -> float:
        """One random ratio of a step's time to its centre."""
        ratios = self.spread.chunk if has_chunk else self.spread.decode
        return ratios[int(rng.random() * len(ratios))]

    def coefficient(self, name: TermName) -> float:
        """The summed coefficient of the terms with this name; 0 when the profile can't tell it apart."""
        return sum(value for term, value in zip(self.terms, self.coefficients, strict=True) if term.name == name)

    @property
    def prefill_ms_per_token(self) -> float:
        """Slope of the linear part behind the last knot, in ms per token."""
        return self._slopes[-1]

    def as_dict(self) -> dict[str, Any]:
        """The model as a JSON-ready dictionary; `from_dict` reads it back."""
        return {
            "terms": [
                term.as_dict() | {"ms": value} for term, value in zip(self.terms, self.coefficients, strict=True)
            ],
            "spread": {
                "decode": list(self.spread.decode),
                "chunk": list(self.spread.chunk),
                "n_decode": self.spread.n_decode,
                "n_chunk": self.spread.n_chunk,
            },
            "error": self.error.as_dict(),
            "stairs": list(self.stairs),
            "rows": {"exact": self.rows.exact, "multiple": self.rows.multiple},
            "rejected": list(self.rejected),
            "measured_tokens": list(self.measured_tokens),
            "num_rows": self.num_rows,
            "residual_sigma": self.residual_sigma,
            "notices": [notice.as_dict() for notice in self.notices],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> StepModel:
        """The model that `as_dict` wrote. Raises DocumentError when the dictionary isn't one."""
        try:
            spread, error = document["spread"], document["error"]
            return cls(
                terms=tuple(Term(row["name"], int(row["at"]), int(row["to"])) for row in document["terms"]),
                coefficients=tuple(float(row["ms"]) for row in document["terms"]),
                spread=Spread(
                    tuple(map(float, spread["decode"])),
                    tuple(map(float, spread["chunk"])),
                    int(spread["n_decode"]),
                    int(spread["n_chunk"]),
                ),
                error=HoldOutError.from_dict(error),
                stairs=tuple(map(int, document["stairs"])),
                rows=Rows(int(document["rows"]["exact"]), int(document["rows"]["multiple"])),
                rejected=tuple(map(str, document["rejected"])),
                measured_tokens=tuple(map(int, document["measured_tokens"])),
                num_rows=int(document["num_rows"]),
                residual_sigma=float(document["residual_sigma"]),
                notices=tuple(Notice(**row) for row in document["notices"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise DocumentError(f"This is not a fitted step model ({problem!r}); fit the profile again.") from problem


def _or_null(value: float) -> float | None:
    return None if isinstance(value, float) and math.isnan(value) else value


def _curve(terms: Sequence[Term], coefficients: Sequence[float]) -> tuple[list[int], list[float], list[float]]:
    """The terms in tokens alone as a table: on (edges[i], edges[i+1]] it is bases[i] + slopes[i] * (T - edges[i])."""
    kinds = ("host", "tokens", "hinge", "stair", "ramp")
    parts = [(term, value) for term, value in zip(terms, coefficients, strict=True) if term.name in kinds]
    corners = {0} | {term.at for term, _ in parts} | {term.to for term, _ in parts}
    edges = sorted(corners)
    bases, slopes = [], []
    for edge in edges:
        base = slope = 0.0
        for term, value in parts:
            match term.name:
                case "host":
                    base += value
                case "tokens":
                    base += value * edge
                    slope += value
                case "hinge":
                    base += value * max(0, edge - term.at)
                    slope += value if edge >= term.at else 0.0
                case "stair":
                    base += value if edge >= term.at else 0.0
                case _:
                    base += value * min(1.0, max(0.0, (edge - term.at) / (term.to - term.at)))
                    slope += value / (term.to - term.at) if term.at <= edge < term.to else 0.0
        bases.append(base)
        slopes.append(slope)
    return edges, bases, slopes
