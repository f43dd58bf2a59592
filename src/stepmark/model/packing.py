"""Sequences that are packed from pieces which do not attend to each other.

Only the mean and the greatest length of pieces are known. The law of their lengths is the one
of greatest entropy on (0, longest] with this mean: density a exp(-a x) / (1 - exp(-a)) of
x = length / longest (E. T. Jaynes, Information Theory and Statistical Mechanics, 1957). It is
uniform where the mean is half of the greatest length; a < 0 above that. With all pieces as
long as the longest there is one length.
"""

import functools
import math
import random
from dataclasses import dataclass
from typing import Annotated

from stepmark.ground.errors import ConfigError
from stepmark.ground.options import Reader

_NEAR_UNIFORM = 0.01  # |a| below which series are exact to 1e-9
_STEEPEST = 1e6  # a mean of a millionth of the greatest length
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Lengths of the pieces of packed sequences, in tokens. Raises ConfigError.

    mean: over pieces, not over tokens. longest: of any piece.
    """

    mean: float
    longest: float

    def __post_init__(self) -> None:
        for value in (self.mean, self.longest):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError("packing", value, "a number of tokens")
        if not 0 < self.mean <= self.longest < math.inf:
            allowed = "a mean length above 0, and a greatest length of at least that"
            raise ConfigError("packing", self.text, allowed)
        if self.mean * _STEEPEST < self.longest:
            raise ConfigError("packing", self.text, "at least a millionth of the longest")

    @property
    def text(self) -> str:
        """MEAN,MAX as the option has it."""
        return f"{self.mean:.15g},{self.longest:.15g}"

    @property
    def note(self) -> str:
        """What is assumed of pieces, and the bounds of a token's keys."""
        return (
            f"packing {self.text}: lengths of pieces are assumed to have the law of greatest"
            f" entropy up to {self.longest:.15g} tokens with the mean {self.mean:.15g}; a token"
            f" then attends to {self.pairs_per_token():.4g} keys without windows, at least to"
            f" {self.mean / 2:.4g} (equal pieces) and at most to {self.longest / 2:.4g}"
            " (tokens in pieces of the greatest length)"
        )

    def scaled(self, factor: float) -> "Packing":
        """Return the packing of pieces that are so many times as long."""
        return Packing(mean=self.mean * factor, longest=self.longest * factor)

    def pairs_per_token(self, window: int = 0) -> float:
        """Return the query-key pairs of a token in causal attention, without half a diagonal.

        E[pairs of a piece] / E[length], where a piece of length L has L^2 / 2, less
        (L - window)^2 / 2 where it is longer than a window; 0: none.
        """
        squares = self._mean_square()
        if 0 < window < self.longest:
            squares -= self._mean_square_beyond(window)
        return squares / (2 * self.mean)

    def lengths(self, total: int) -> tuple[int, ...]:
        """Return lengths of pieces that add up to a total, as their law has them.

        They are quantiles at equal steps, in an order that a seed fixes, and differ from draws
        in that two calls, and two numbers of pieces of one law, are alike.
        """
        count = max(1, round(total / self.mean))
        exact = [self.quantile((index + 0.5) / count) for index in range(count)]
        scale = total / math.fsum(exact)
        random.Random(_SEED).shuffle(exact)
        lengths = []
        done, end = 0, 0.0
        for length in exact:
            end += length * scale
            lengths.append(round(end) - done)
            done = round(end)
        lengths[-1] += total - done
        return tuple(filter(None, lengths))

    def quantile(self, share: float) -> float:
        """Return the length than which this share of the pieces is shorter."""
        if self.mean == self.longest:
            return self.longest
        rate = _rate(self.mean / self.longest)
        if not rate:
            return self.longest * share
        if rate < 0:  # of the law mirrored, whose exponentials do not overflow
            below = share + (1 - share) * math.exp(rate)
            return self.longest * max(0.0, 1 - math.log(below) / rate) if below else 0.0
        above = 1 - share + share * math.exp(-rate)
        return self.longest * min(1.0, -math.log(above) / rate) if above else self.longest

    def _mean_square(self) -> float:
        """Return E[length^2]."""
        if self.mean == self.longest:
            return self.longest**2
        return self.longest**2 * _second_moment(_rate(self.mean / self.longest))

    def _mean_square_beyond(self, window: float) -> float:
        """Return E[max(0, length - window)^2].

        An exponential law has no memory: what is beyond the window has the same rate on the
        rest.
        """
        rest = self.longest - window
        if self.mean == self.longest:
            return rest**2
        rate = _rate(self.mean / self.longest)
        own = rate * rest / self.longest
        return _share_beyond(rate, window / self.longest) * rest**2 * _second_moment(own)


@functools.lru_cache(maxsize=256)
def _rate(mean: float) -> float:
    """Return a of the law on (0, 1] with a mean, by bisection: the mean falls with a."""
    if mean > 0.5:
        return -_rate(1 - mean)
    low, high = 0.0, 2 * _STEEPEST
    for _ in range(200):
        middle = (low + high) / 2
        if _first_moment(middle) > mean:
            low = middle
        else:
            high = middle
    return low


def _first_moment(rate: float) -> float:
    """Return E[x] of the law on (0, 1], a >= 0."""
    if rate < _NEAR_UNIFORM:
        return 0.5 - rate / 12 + rate**3 / 720
    return 1 / rate - math.exp(-rate) / -math.expm1(-rate)


def _second_moment(rate: float) -> float:
    """Return E[x^2] of the law on (0, 1]; of the mirrored one where a < 0."""
    if abs(rate) < _NEAR_UNIFORM:
        return 1 / 3 - rate / 12 + rate**2 / 360
    if rate < 0:
        return 1 - 2 * _first_moment(-rate) + _second_moment(-rate)
    rest = math.exp(-rate) * (1 + 2 / rate + 2 / rate**2)
    return (2 / rate**2 - rest) / -math.expm1(-rate)


def _share_beyond(rate: float, bound: float) -> float:
    """Return the share of pieces that are longer than a bound between 0 and 1."""
    if not rate:
        return 1 - bound
    if rate < 0:
        return math.expm1(rate * (1 - bound)) / math.expm1(rate)
    return math.exp(-rate * bound) * math.expm1(-rate * (1 - bound)) / math.expm1(-rate)


def _read(text: str, field: str) -> Packing:
    """Read MEAN,MAX."""
    words = text.split(",")
    try:
        mean, longest = map(float, words)
    except ValueError:
        allowed = "the mean and the greatest length of pieces in tokens, such as 1200,8192"
        raise ConfigError(field, text, allowed) from None
    return Packing(mean=mean, longest=longest)


PackingOption = Annotated[
    Packing, Reader(read=_read, show=lambda value: value.text, metavar="MEAN,MAX")
]
