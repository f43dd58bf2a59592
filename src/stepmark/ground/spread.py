"""How launches vary in the rows of a table: each row alone, and all rows of a launch together.

What moves all rows of a launch (clocks, placement) is estimated from the means of launches, in
which quiet rows count for more: rows weigh by the inverse of their variance. It has few degrees
of freedom, however many rows there are. What is left varies in each row alone, and rows share
what is known of it (variance.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepmark.ground.launches import residuals
from stepmark.ground.variance import MIN_ROWS, Variance, prior_of, total

Run = Mapping[str, float]  # logarithms of times by launch
_Effects = Mapping[tuple[str, ...], Sequence[float]]  # of launches on all rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Runs of a row whose launches vary alike, such as those of one side.

    weight: of their variance in that of the row: the inverse of the launches that are compared.
    """

    runs: Sequence[Run]
    weight: float = 1.0

    def variance(self, effects: _Effects) -> Variance:
        """Return the variance of a launch without these effects; of no degrees if unknown."""
        squares = 0.0
        df = 0
        for run in self.runs:
            names = tuple(sorted(run))
            logs = residuals(run[name] for name in names)
            effect = effects.get(names, [0.0] * len(names))
            squares += math.fsum((x - y) ** 2 for x, y in zip(logs, effect, strict=True))
            df += len(names) - 1
        return Variance(squares / df if df else 0.0, df)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Variances of one launch. own: of each row alone. common: of all rows together.

    seen_df: degrees of freedom in which rare states of a row would have been seen; None where
    each row stands for itself.
    """

    own: Sequence[Variance]
    common: Variance
    seen_df: float | None

    def of_launch(self, place: int) -> Variance:
        """Return the variance of a launch in a row, with what all rows share."""
        return total([self.own[place], self.common])


def spread_of(rows: Sequence[Sequence[Part]]) -> Spread | None:
    """Return how launches of rows vary, each in parts; None where no row has two launches."""
    effects: dict[tuple[str, ...], list[float]] = {}
    own = [_variance_of(parts, effects) for parts in rows]
    prior = prior_of(own)
    if prior is None:
        return None
    if prior.df == 0 or prior.variance == 0:
        own = [_variance_of(parts, effects, is_alike=False) for parts in rows]
        moderated = [prior.moderated(variance) for variance in own]
        return Spread(own=moderated, common=Variance(0.0, 1), seen_df=None)
    moderated = [prior.moderated(variance) for variance in own]
    effects = _effects(rows, [1 / variance.value for variance in moderated])
    df = sum(len(names) - 1 for names in effects)
    squares = math.fsum(x * x for effect in effects.values() for x in effect)
    own = [_variance_of(parts, effects) for parts in rows]
    prior = prior_of(own)
    assert prior is not None
    return Spread(
        own=[prior.moderated(variance) for variance in own],
        common=Variance(squares / df if df else 0.0, df or 1),
        seen_df=prior.seen_df,
    )


def _variance_of(
    parts: Sequence[Part], effects: _Effects, *, is_alike: bool = True
) -> Variance:
    """Return what a row alone says of its variance.

    is_alike: whether all parts have one variance; else the degrees of freedom are Welch's.
    """
    known = [(part.weight, part.variance(effects)) for part in parts]
    known = [(weight, variance) for weight, variance in known if variance.df]
    if not known:
        return Variance(0.0, 0)
    weights = math.fsum(weight for weight, _ in known)
    both = total([variance.scaled(weight / weights) for weight, variance in known])
    squares_by_df = math.fsum(
        (weight / weights) ** 2 / variance.df for weight, variance in known
    )
    return Variance(both.value, 1 / squares_by_df) if is_alike else both


def _effects(
    rows: Sequence[Sequence[Part]], weights: Sequence[float]
) -> dict[tuple[str, ...], list[float]]:
    """Return what launches have in common in their rows, by launches that enough rows have."""
    groups: dict[tuple[str, ...], list[tuple[float, list[float]]]] = {}
    for parts, weight in zip(rows, weights, strict=True):
        for run in (run for part in parts for run in part.runs if len(run) > 1):
            names = tuple(sorted(run))
            groups.setdefault(names, []).append((weight, residuals(run[n] for n in names)))
    return {
        names: [
            math.fsum(weight * logs[launch] for weight, logs in members)
            / math.fsum(weight for weight, _ in members)
            for launch in range(len(names))
        ]
        for names, members in groups.items()
        if len(members) >= MIN_ROWS
    }
