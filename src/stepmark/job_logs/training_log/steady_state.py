"""The steady state of a training log: warm-up, median, outliers and trend of its steps.

Warm-up: the first line, and as many as stats.steady_from leaves out (MSER) of costs that are
limited to outliers' bounds; before that, all lines of another global batch than the last.
A log is never steady where that is more than half of its lines, and these have a trend.
Outliers: slower than the median by more than 5 standard deviations by the median absolute
deviation, and by more than 2 %. Two speeds: a gap between times that is wider than these bounds
of both sides, with a quarter of the lines on each. The interval of the median and the test of
the trend (Mann and Kendall; slope by Theil and Sen) count as many independent steps as an
autoregression with the autocorrelation r of neighbours has: n (1 - r) / (1 + r). Fewer than 6
have no interval: in more than 5 % of cases all of 5 lie on one side of the median.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import NormalDist, fmean, median

from stepmark.ground.stats import quantile, steady_from
from stepmark.job_logs.training_log.step_lines import LoggedStep
from stepmark.job_logs.training_log.training_log import TrainingLog

_FEWEST = 8  # lines from which warm-up, outliers and a trend can be told
_DEVIATIONS = 5.0
_LEAST_OUTLIER = 0.02
_NORMAL_MAD = 1.4826  # standard deviation of a normal distribution over its MAD
_MOST_AUTOCORRELATION = 0.99
_FEWEST_INDEPENDENT = 6
_LEAST_SHARE = 0.25  # of the lines, which have a speed of their own
_MOST_POINTS = 400  # of the trend, whose pairs are compared
_TREND_P = 0.01
_LEAST_TREND = 0.002  # over all steady steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """Statistics of costs (TrainingLog.costs) after warm-up.

    num_warmup and outliers: lines of the log, from 0. num_others: lines of another
    global batch, before that. low and high: the 95 % interval of the median, at least as wide
    as figures are rounded; None: too few lines. rounding: unit of the last digit, relative.
    speeds: lines and median cost of each of two speeds, between which steps change.
    outlier_share: of the time, beyond the median. trend: change of the cost over 1,000 steps,
    relative; None: none that is certain. is_steady: whether warm-up ends in the first half of
    the log (of its last global batch); else statistics are those of its second half.
    """

    num_warmup: int
    num_others: int = 0
    num_lines: int
    num_steps: int
    median: float
    quartiles: tuple[float, float]
    low: float | None
    high: float | None
    rounding: float = 0.0
    speeds: tuple[tuple[int, float], ...] = ()
    outliers: tuple[int, ...] = ()
    outlier_share: float = 0.0
    trend: float | None = None
    is_steady: bool = True

    @property
    def doubt(self) -> str:
        """Return why the median is not the time of a steady step; empty: it is."""
        if self.num_warmup - self.num_others + self.num_lines < _FEWEST:
            what = "steps of its last global batch" if self.num_others else "steps"
            return f"it has fewer than {_FEWEST} lines of {what}, so its warm-up is unknown"
        if not self.is_steady:
            return "its steps never become steady"
        if self.speeds:
            return "its steps have two speeds"
        return ""


def steady_state(log: TrainingLog) -> SteadyState:
    """Return the steady state of a log."""
    num_others = _num_of_other_batches(log.steps)
    costs = log.costs[num_others:]
    steady_after = min(1, len(costs) - 1) if len(costs) < _FEWEST else _num_warmup(costs)
    is_steady = steady_after is not None
    num_warmup = num_others + (len(costs) // 2 if steady_after is None else steady_after)
    own = log.costs[num_warmup:]
    spans = [step.span for step in log.steps[num_warmup:]]
    ordered = sorted(own)
    middle = quantile(ordered, 0.5)
    correlation = _autocorrelation(_limited(own))
    rounding = median(step.rounding for step in log.steps[num_warmup:])
    low, high = _interval(ordered, correlation, rounding)
    speeds = _speeds(ordered, rounding)
    outliers = _outliers(own) if len(costs) >= _FEWEST and not speeds else []
    lost = math.fsum(max(0.0, own[place] - middle) * spans[place] for place in outliers)
    total = math.fsum(cost * span for cost, span in zip(own, spans, strict=True))
    numbers = [step.number for step in log.steps[num_warmup:]]
    return SteadyState(
        num_warmup=num_warmup,
        num_others=num_others,
        num_lines=len(own),
        num_steps=sum(spans),
        median=middle,
        quartiles=(quantile(ordered, 0.25), quantile(ordered, 0.75)),
        low=low,
        high=high,
        rounding=rounding,
        speeds=speeds,
        outliers=tuple(num_warmup + place for place in outliers),
        outlier_share=lost / total,
        trend=_trend(numbers, own) if len(own) >= _FEWEST else None,
        is_steady=is_steady,
    )


def _num_of_other_batches(steps: Sequence[LoggedStep]) -> int:
    """Return the number of lines before the last change of the global batch."""
    places = [place for place, step in enumerate(steps) if step.batch]
    changes = (b for a, b in pairwise(places) if steps[a].batch != steps[b].batch)
    return max(changes, default=0)


def _bound(costs: Sequence[float]) -> tuple[float, float]:
    """Return the median, and how far from it an outlier is at least."""
    middle = median(costs)
    deviation = median(abs(cost - middle) for cost in costs)
    return middle, max(_DEVIATIONS * _NORMAL_MAD * deviation, _LEAST_OUTLIER * middle)


def _limited(costs: Sequence[float]) -> list[float]:
    """Return the costs, outliers moved to the bound: a checkpoint is no end of warm-up."""
    middle, bound = _bound(costs)
    return [min(max(cost, middle - bound), middle + bound) for cost in costs]


def _outliers(costs: Sequence[float]) -> list[int]:
    middle, bound = _bound(costs)
    return [place for place, cost in enumerate(costs) if cost - middle > bound]


def _speeds(ordered: Sequence[float], rounding: float) -> tuple[tuple[int, float], ...]:
    """Return the lines and the median of each of two speeds; empty: there is one."""
    fewest = math.ceil(_LEAST_SHARE * len(ordered))
    if len(ordered) < _FEWEST:
        return ()
    place = max(
        range(fewest, len(ordered) - fewest + 1),
        key=lambda own: ordered[own] - ordered[own - 1],
    )
    groups = ordered[:place], ordered[place:]
    gap = groups[1][0] - groups[0][-1]
    # Readings of a coarse clock differ by its unit, and are no speeds.
    is_wide = gap > 2 * rounding * groups[1][0]
    if is_wide and all(gap > _bound(group)[1] for group in groups):
        return tuple((len(group), median(group)) for group in groups)
    return ()


def _autocorrelation(costs: Sequence[float]) -> float:
    """Return the correlation of neighbours, 0 where it is negative."""
    mean = fmean(costs)
    squares = math.fsum((cost - mean) ** 2 for cost in costs)
    if squares <= 0.0 or len(costs) < _FEWEST:
        return 0.0
    products = math.fsum((a - mean) * (b - mean) for a, b in pairwise(costs))
    return min(max(0.0, products / squares), _MOST_AUTOCORRELATION)


def _interval(
    ordered: Sequence[float], correlation: float, rounding: float
) -> tuple[float, float] | tuple[None, None]:
    """Return the 95 % interval of the median by order statistics."""
    num_independent = len(ordered) * (1 - correlation) / (1 + correlation)
    if num_independent < _FEWEST_INDEPENDENT:
        return None, None
    half = NormalDist().inv_cdf(0.975) / (2 * math.sqrt(num_independent))
    low, high = (quantile(ordered, min(max(0.0, 0.5 + way), 1.0)) for way in (-half, half))
    middle = quantile(ordered, 0.5)
    return min(low, middle * (1 - rounding / 2)), max(high, middle * (1 + rounding / 2))


def _trend(numbers: Sequence[int], costs: Sequence[float]) -> float | None:
    """Return the relative change over 1,000 steps, if it is certain and not negligible."""
    every = math.ceil(len(costs) / _MOST_POINTS)
    points = list(zip(numbers[::every], costs[::every], strict=True))
    slopes = [
        (later_y - y) / (later_x - x)
        for (x, y), (later_x, later_y) in combinations(points, 2)
        if later_x > x
    ]
    if not slopes:
        return None
    slope = median(slopes)
    # A trend is itself a correlation of neighbours (Hamed and Rao, J. Hydrology 204, 1998).
    correlation = _autocorrelation(_limited([y - slope * x for x, y in points]))
    p = _p_without_trend([y for _, y in points], correlation)
    change = slope / median(costs)
    is_certain = p <= _TREND_P and abs(change) * (numbers[-1] - numbers[0]) >= _LEAST_TREND
    return 1000 * change if is_certain else None


def _p_without_trend(costs: Sequence[float], correlation: float) -> float:
    """Return how likely costs without a trend rank as these do (Mann and Kendall)."""
    n = len(costs)
    sign = sum((later > own) - (later < own) for own, later in combinations(costs, 2))
    variance = n * (n - 1) * (2 * n + 5) / 18 * (1 + correlation) / (1 - correlation)
    return 2 * (1 - NormalDist().cdf(max(0, abs(sign) - 1) / math.sqrt(variance)))


def _num_warmup(costs: Sequence[float]) -> int | None:
    """Return the number of lines before the steady state; None: there is none.

    MSER may leave out more than half of a few lines, or of rounded ones, by chance, so these
    must have a trend, too: without one, all are steady but the first, and outliers after it.
    """
    limited = _limited(costs[1:])
    num_unsteady = steady_from(limited)
    if num_unsteady is not None:
        return 1 + num_unsteady
    every = math.ceil(len(limited) / _MOST_POINTS)
    if _p_without_trend(limited[::every], 0.0) <= _TREND_P:
        return None
    middle, bound = _bound(costs[1:])
    within = (place for place, cost in enumerate(costs) if abs(cost - middle) <= bound)
    return next((place for place in within if place), 1)
