"""Intervals of predictions, from past predictions that were committed before the measurement.

Split conformal prediction (Vovk et al., Algorithmic Learning in a Random World, 2005): of n
past errors in the same stratum the ceil((n + 1) * 0.9)-th smallest bounds the next one with
a probability of at least 0.9, if rows are exchangeable. Fewer than nine rows have no such one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, exp, log

COVERAGE = 0.9
_FEWEST = 9  # rows that give an interval of this coverage


@dataclass(frozen=True, slots=True, kw_only=True)
class PastPrediction:
    """A prediction and what was measured afterwards. stratum: bound, strategy, compiled."""

    stratum: tuple[str, str, str]
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Range in which the step is with a probability of COVERAGE; None: too few rows."""

    low_s: float | None
    high_s: float | None
    num_rows: int

    def __str__(self) -> str:
        if self.low_s is None or self.high_s is None:
            return f"no interval: {self.num_rows} past predictions like it, {_FEWEST} needed"
        low = self.low_s * 1e3
        high = self.high_s * 1e3
        return f"{COVERAGE:.0%} interval {low:.1f} to {high:.1f} ms"


def interval(
    past: Iterable[PastPrediction], stratum: tuple[str, str, str], predicted_s: float
) -> Interval:
    """Return the interval of a prediction from past ones of its stratum."""
    errors = sorted(
        abs(log(row.measured_s / row.predicted_s)) for row in past if row.stratum == stratum
    )
    place = ceil((len(errors) + 1) * COVERAGE)
    if place > len(errors):
        return Interval(low_s=None, high_s=None, num_rows=len(errors))
    factor = exp(errors[place - 1])
    return Interval(
        low_s=predicted_s / factor, high_s=predicted_s * factor, num_rows=len(errors)
    )
