"""Acceptance of a machine whose cases may be slower than before by a limit.

A machine of which every case is within the limit is rejected in 1 of 100 checks at most; one of
which a case is slower than the limit by MARGIN more is accepted in 5 of 100 at most. What fits
neither is undecided. recipes/verdicts.py counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

from stepmark.core.ratio import Ratio, holm

MARGIN = 0.03
# Less than 1 and 5 %: a check may ask for more launches, and decide again.
_REJECTED_WRONGLY, _ACCEPTED_WRONGLY = 0.007, 0.03
_MOST_LAUNCHES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Places of cases that are slow, and of those that are neither slow nor accepted."""

    slow: tuple[int, ...]
    undecided: tuple[int, ...]


def accept(ratios: Sequence[Ratio | None], limit: float) -> Acceptance:
    """Decide on the ratios of cases to a baseline. limit: a share of the time."""
    known = [
        (place, p) for place, ratio in enumerate(ratios) if (p := _p(ratio, limit)) is not None
    ]
    is_slow = holm([p for _, p in known], _REJECTED_WRONGLY)
    slow = tuple(place for place, _ in compress(known, is_slow))
    undecided = tuple(
        place
        for place, ratio in enumerate(ratios)
        if place not in slow and not _is_accepted(ratio, limit)
    )
    return Acceptance(slow=slow, undecided=undecided)


def launches_needed(
    ratio: Ratio, limit: float, *, base: int, now: int, num_cases: int
) -> int | None:
    """Return how many launches of this machine would decide on a case; None for over 100.

    base, now: launches of the baseline and of this machine so far, which vary as the others
    would.
    """
    assert ratio.se_log is not None
    per_launch = (ratio.se_log**2 - ratio.drift) / (1 / base + 1 / now)
    for count in range(now + 1, _MOST_LAUNCHES + 1):
        variance = per_launch * (1 / base + 1 / count) + ratio.drift
        then = replace(ratio, se_log=math.sqrt(variance))
        p_slower = _p(then, limit)
        is_slow = p_slower is not None and p_slower <= _REJECTED_WRONGLY / num_cases
        if is_slow or _is_accepted(then, limit):
            return count
    return None


def _p(ratio: Ratio | None, limit: float) -> float | None:
    return None if ratio is None else ratio.p_slower(limit)


def _is_accepted(ratio: Ratio | None, limit: float) -> bool:
    p_slower = _p(ratio, limit + MARGIN)
    return p_slower is not None and p_slower >= 1 - _ACCEPTED_WRONGLY
