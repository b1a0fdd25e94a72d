"""Length distributions in tokens, each given by its quantile function: a draw is a quantile at a random level."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
_Z90 = _NORMAL.inv_cdf(0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths(ABC):
    """A distribution of token counts, clamped to `min_tokens` .. `max_tokens` (None: no upper limit)."""

    min_tokens: int = 1
    max_tokens: int | None = None

    def quantile(self, level: float) -> int:
        """The length below which a share `level` (0 < level < 1) of the draws lies: whole tokens, clamped."""
        tokens = max(self.min_tokens, round(self.unclamped(level)))
        return tokens if self.max_tokens is None else min(tokens, self.max_tokens)

    @abstractmethod
    def unclamped(self, level: float) -> float:
        """The quantile before rounding and clamping."""

    @property
    @abstractmethod
    def shortest(self) -> int:
        """The smallest length that can be drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Lengths):
    """Always `tokens`."""

    tokens: int

    def unclamped(self, level: float) -> float:  # noqa: ARG002
        return self.tokens

    @property
    def shortest(self) -> int:
        return self.quantile(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(Lengths):
    """Every whole number from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def unclamped(self, level: float) -> float:
        # floor over high - low + 1 cells, so that both ends get a full share
        return min(self.high, self.low + math.floor(level * (self.high - self.low + 1)))

    @property
    def shortest(self) -> int:
        return self.quantile(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal(Lengths):
    """exp(mu + sigma * z): what request lengths in public traces look like (a long right tail)."""

    mu: float
    sigma: float

    @classmethod
    def from_median_p90(cls, median: float, p90: float, min_tokens: int, max_tokens: int | None) -> "Lognormal":
        """The lognormal with this median and 90th percentile."""
        return cls(
            mu=math.log(median), sigma=math.log(p90 / median) / _Z90, min_tokens=min_tokens, max_tokens=max_tokens
        )

    @classmethod
    def from_median_mean(cls, median: float, mean: float, min_tokens: int, max_tokens: int | None) -> "Lognormal":
        """The lognormal with this median and mean (mean / median = exp(sigma^2 / 2))."""
        sigma = math.sqrt(2 * math.log(mean / median))
        return cls(mu=math.log(median), sigma=sigma, min_tokens=min_tokens, max_tokens=max_tokens)

    @classmethod
    def from_mean_sd(cls, mean: float, sd: float, min_tokens: int, max_tokens: int | None) -> "Lognormal":
        """The lognormal with this mean and standard deviation."""
        variance = math.log1p((sd / mean) ** 2)
        return cls(
            mu=math.log(mean) - variance / 2,
            sigma=math.sqrt(variance),
            min_tokens=min_tokens,
            max_tokens=max_tokens,
        )

    def unclamped(self, level: float) -> float:
        return math.exp(self.mu + self.sigma * _NORMAL.inv_cdf(level)) if self.sigma else math.exp(self.mu)

    @property
    def shortest(self) -> int:
        return self.min_tokens if self.sigma else self.quantile(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Empirical(Lengths):
    """Piecewise linear through `points`: (level, tokens), both rising; flat outside the first and last level."""

    points: tuple[tuple[float, float], ...]

    def unclamped(self, level: float) -> float:
        levels = [point[0] for point in self.points]
        right = bisect_right(levels, level)
        if right == 0:
            return self.points[0][1]
        if right == len(levels):
            return self.points[-1][1]
        (low, at_low), (high, at_high) = self.points[right - 1], self.points[right]
        return at_low + (at_high - at_low) * (level - low) / (high - low)

    @property
    def shortest(self) -> int:
        return self.quantile(0.0)
