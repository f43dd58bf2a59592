"""Ratio of two speeds with its confidence interval, and the distributions behind it.

The launch is the statistical unit (docs/adr/0008-students-t-over-launches.md);
ground/verdicts.py estimates the interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist

CONFIDENCE = 0.99  # of intervals
EFFECT_FLOOR = 0.01  # a smaller change is not reported, however certain
_NORMAL = 1000  # degrees of freedom from which t is the normal distribution to four digits


# Reasons: other work ran while a side was measured; noise of a launch of other machines.
BUSY = "busy host"
OF_REPEATS = "of repeats"


class Verdict(StrEnum):
    """SAME: the whole interval lies within EFFECT_FLOOR: any difference is negligible."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """`speed` is B's speed over A's: 1.05 is 5 % faster. low and high span 99 %, if known."""

    speed: float
    low: float | None
    high: float | None
    verdict: Verdict
    reason: str  # of "cannot tell"; else what the interval rests on
    se_log: float | None = None
    df: int | None = None  # of Student's t; None for the normal distribution
    launches: int | None = None  # per side, that would tell where the verdict cannot
    drift: float = 0.0  # part of se_log**2 that more launches do not lower
    repeats_df: int = 0  # part of df that repeats on other machines give
    slow: float = 0.0  # part of the logarithm that slow launches of so few may explain

    def p_slower(self, limit: float) -> float | None:
        """Return the one-sided p of "at most `limit` slower", a share of the time (0.05: 5 %).

        None where nothing is known of how launches differ.
        """
        return self._p(-math.log(self.speed) - math.log1p(limit))

    @property
    def p_faster(self) -> float | None:
        """Return the one-sided p of "not faster at all"."""
        return self._p(math.log(self.speed))

    def _p(self, excess: float) -> float | None:
        if self.se_log is None:
            return None
        excess -= self.slow
        if self.se_log == 0:
            return 0.0 if excess > 0 else 1.0
        return 1 - t_cdf(excess / self.se_log, self.df)

    def is_within(self, limit: float) -> bool:
        """Return whether it is certainly at most `limit` slower: the whole interval is."""
        return self.low is not None and self.low * (1 + limit) >= 1


def interval(log_speed: float, half: float) -> tuple[float, float, float]:
    """Return a speed and the bounds of its interval, whose half-width is of the logarithm.

    The interval of two launches that differ wildly can exceed the range of a float.
    """
    low, speed, high = (
        math.exp(max(-700.0, min(700.0, log_speed + part))) for part in (-half, 0.0, half)
    )
    return low, speed, high


def is_negligible(low: float, high: float) -> bool:
    """Return whether the whole interval lies within EFFECT_FLOOR."""
    return low >= 1 / (1 + EFFECT_FLOOR) and high <= 1 + EFFECT_FLOOR


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Return which hypotheses are rejected, any wrongly with probability alpha at most.

    Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    rejected = [False] * len(p_values)
    for place, index in enumerate(order):
        if p_values[index] > alpha / (len(order) - place):
            break
        rejected[index] = True
    return rejected


def t_cdf(t: float, df: int | None) -> float:
    """Return Student's distribution for whole degrees of freedom; the normal one for None.

    Finite sums 26.7.3 and 26.7.4 of Abramowitz and Stegun, Handbook of Mathematical Functions.
    """
    if df is None or df >= _NORMAL:
        return NormalDist().cdf(t)
    angle = math.atan(abs(t) / math.sqrt(df))
    sine = math.sin(angle)
    cosine = math.cos(angle)
    odd = df % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(2 + odd, df + 1, 2):
        total += term
        term *= (power - 1) / power * cosine**2
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + math.copysign(within / 2, t)


@lru_cache(maxsize=4096)
def t_quantile(p: float, df: int | None) -> float:
    """Return the t below which a share p of the distribution lies, for p from 0.5."""
    if df is None or df >= _NORMAL:
        return NormalDist().inv_cdf(p)
    low = 0.0
    high = 1.0
    while t_cdf(high, df) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return high
