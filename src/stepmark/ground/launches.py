"""Rows of a comparison: the launches of two sides, and how they lie in time."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from stepmark.ground.variance import Variance


class Order(StrEnum):
    """How the launches of two sides lie in time. PAIRED: in rounds, with one of each side."""

    PAIRED = "paired"
    MIXED = "mixed"
    BLOCKS = "blocks"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Logarithms of times of one side of a row, by launch.

    starts: when launches began, if known. past: runs of the same on the same machine and
    software. rounding: unit of the last printed digit, relative.
    """

    logs: Mapping[str, float]
    starts: Mapping[str, float] = field(default_factory=dict)
    past: tuple[Mapping[str, float], ...] = ()
    rounding: float = 0.0

    @property
    def mean(self) -> float:
        return fmean(self.logs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Two sides of a measurement. Rows of one kind vary alike.

    by_round: a launch is a round, and its name the same on both sides. noise: relative standard
    deviation of a launch, as stated; it counts where a side has a single one. repeats: variance
    of a launch on other machines; it counts where both sides have a single one, and neither has
    a past, and in rounds where too few rows and launches show their own.
    """

    kind: Hashable
    base: Sample
    other: Sample
    by_round: bool = False
    noise: float | None = None
    repeats: Variance | None = None

    @property
    def is_same(self) -> bool:
        """Whether both sides are the same launches, and not rounds of two settings.

        With a stated noise they count as two, as those of a copy do.
        """
        return self.stated is None and not self.by_round and self.base.logs == self.other.logs

    @property
    def stated(self) -> float | None:
        """Return the stated noise where it counts."""
        is_single = min(len(self.base.logs), len(self.other.logs)) == 1
        return self.noise if is_single else None

    @property
    def of_repeats(self) -> Variance | None:
        """Return the variance of other machines where it counts."""
        counts = {len(self.base.logs), len(self.other.logs)}
        is_bare = counts == {1} and not self.base.past and not self.other.past
        return self.repeats if is_bare and self.noise is None and not self.by_round else None

    @property
    def order(self) -> Order:
        names = self.base.logs.keys()
        if self.by_round and names == self.other.logs.keys():
            return Order.PAIRED
        times = [
            [sample.starts.get(launch) for launch in sample.logs]
            for sample in (self.base, self.other)
        ]
        known = [[time for time in side if time is not None] for side in times]
        if not all(known) or known != times:
            return Order.UNKNOWN
        apart = max(known[0]) < min(known[1]) or max(known[1]) < min(known[0])
        return Order.BLOCKS if apart else Order.MIXED


def past_runs(past: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return runs with several launches, and those with one as if they were launches of one."""
    single = {
        f"{number}/{launch}": log
        for number, run in enumerate(past)
        if len(run) == 1
        for launch, log in run.items()
    }
    several = [run for run in past if len(run) > 1]
    return [*several, single] if len(single) > 1 else several


def residuals(logs: Iterable[float]) -> list[float]:
    """Return the differences from the mean."""
    values = list(logs)
    mean = fmean(values)
    return [value - mean for value in values]


def squares_within(runs: Iterable[Mapping[str, float]]) -> tuple[float, int]:
    """Return the sum of squared residuals within runs, and its degrees of freedom."""
    by_run = [residuals(run.values()) for run in runs if run]
    return (
        math.fsum(x * x for run in by_run for x in run),
        sum(len(run) - 1 for run in by_run),
    )
