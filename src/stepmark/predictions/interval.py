"""Intervals of predictions, from errors of other predictions whose steps were measured.

Split conformal prediction (Vovk et al., Algorithmic Learning in a Random World, 2005): of n
errors of predictions like it the ceil((n + 1) * 0.9)-th smallest bounds the next one with a
probability of at least 0.9, if rows are exchangeable. Fewer than nine rows have no such one;
the largest of n bounds it with n / (n + 1).
Predictions that are mostly too short have an interval with 0.05 on each side by the same rule
on signed errors, which takes 19 rows. It reaches to the prediction, which errors of others
cannot rule out: that all of their steps took longer says how they ran, not what is possible.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from math import ceil, exp
from statistics import median

from stepmark.ground.units import format_time, with_one_unit

COVERAGE = 0.9
_FEWEST = 9  # rows that give an interval of this coverage
_FEWEST_SIGNED = 19  # that give one of half the rest on each side
_ROUNDING = 1e-9  # of sums of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Range in which the step is with a probability of `coverage`; None: too few rows.

    basis: which predictions the errors are of. traits: what these have in common with this one.
    median_ratio: of measured over predicted seconds, where the errors alone have the prediction
    outside of the range, which then ends at it. num_anchors: too few for an interval.
    """

    low_s: float | None
    high_s: float | None
    num_rows: int
    basis: str
    traits: tuple[str, ...] = ()
    median_ratio: float | None = None
    coverage: float = COVERAGE
    num_anchors: int = 0

    @property
    def is_known(self) -> bool:
        return self.low_s is not None

    def reaching(self, step_s: float) -> "Interval":
        """Return the interval that also has this step, if it is known."""
        if self.low_s is None or self.high_s is None:
            return self
        return replace(self, low_s=min(self.low_s, step_s), high_s=max(self.high_s, step_s))

    def __str__(self) -> str:
        if self.low_s is None or self.high_s is None:
            return f"no interval: {self.num_rows} {self.basis}, {_FEWEST} needed"
        ends = with_one_unit(format_time(self.low_s), "to", format_time(self.high_s))
        text = f"{100 * self.coverage:.0f} % interval {ends} by {self.num_rows} {self.basis}"
        traits = "; ".join(self.traits)
        text += f" ({traits})".replace("(the host", "(bound by the host") if traits else ""
        if self.median_ratio is not None:
            # The range ends at the prediction, on the side where the others are not.
            own_s = self.low_s if self.median_ratio > 1 else self.high_s
            text += (
                f", which took {self.median_ratio:.2g} x as long in the median: "
                f"expect {format_time(self.median_ratio * own_s)}, not {format_time(own_s)}"
            )
        if self.num_anchors:
            text += f", of the step without anchors ({_FEWEST} give one of their own)"
        return text


def few_sided(
    errors: Sequence[float], predicted_s: float, basis: str, traits: tuple[str, ...] = ()
) -> Interval:
    """Return the interval from errors of either sign, of what so few give of COVERAGE.

    errors: logarithms of measured over predicted seconds.
    """
    count = len(errors)
    size = max(map(abs, errors), default=0.0)
    sides = _equal_sides(errors) or ((-size, size) if errors else None)
    around = _around(predicted_s, sides, count, basis)
    return replace(around, traits=traits, coverage=min(COVERAGE, count / (count + 1)))


def signed_interval(
    errors: Sequence[float], predicted_s: float, basis: str, weights: Sequence[float] = ()
) -> Interval:
    """Return the interval from errors whose signs matter, or their sizes where they are few.

    errors: logarithms of measured over predicted seconds. weights: their shares, which add up
    to 1; equal ones if left out.
    """
    count = len(errors)
    if count < _FEWEST_SIGNED:
        return _around(predicted_s, _equal_sides(errors), count, basis)
    weights = weights or [1 / count] * count
    level = (1 + COVERAGE) / 2 * (count + 1) / count
    high = _bound(zip(errors, weights, strict=True), level)
    low = -_bound(((-own, weight) for own, weight in zip(errors, weights, strict=True)), level)
    around = _around(predicted_s, (min(low, 0.0), max(high, 0.0)), count, basis)
    is_outside = not low <= 0.0 <= high
    return replace(around, median_ratio=exp(median(errors)) if is_outside else None)


def _bound(weighted: Iterable[tuple[float, float]], level: float) -> float:
    """Return the least error that has this share of the weights at or below it."""
    ordered = sorted(weighted)
    shares = accumulate(weight for _, weight in ordered)
    enough = (share >= level - _ROUNDING for share in shares)
    return next(compress((error for error, _ in ordered), enough), ordered[-1][0])


def _equal_sides(errors: Sequence[float]) -> tuple[float, float] | None:
    rank = ceil((len(errors) + 1) * COVERAGE)
    if rank > len(errors):
        return None
    size = sorted(map(abs, errors))[rank - 1]
    return -size, size


def _around(
    predicted_s: float,
    sides: tuple[float, float] | None,
    num_rows: int,
    basis: str,
) -> Interval:
    if sides is None:
        return Interval(low_s=None, high_s=None, num_rows=num_rows, basis=basis)
    low, high = sides
    return Interval(
        low_s=predicted_s * exp(low),
        high_s=predicted_s * exp(high),
        num_rows=num_rows,
        basis=basis,
    )
