"""Acceptance of a machine whose cases may be slower than before by a limit.

A machine of which every case is within the limit is rejected in 1 of 100 checks at most; one of
which a case is slower than the limit by MARGIN more is accepted in 5 of 100 at most. What fits
neither is undecided. validation/verdicts.py counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from statistics import NormalDist

from stepmark.ground.ratio import Ratio, holm
from stepmark.ground.verdicts import equal_ratio

MARGIN = 0.03
# Less than 1 and 5 %: a check may ask for more launches, and decide again.
_REJECTED_WRONGLY = 0.007
_ACCEPTED_WRONGLY = 0.03
_MOST_LAUNCHES = 100
# Launches of one machine vary by 0.2 to 1.5 % (ground/verdicts.py); a baseline of one launch
# does not say by how much. Of checks of an equal machine this share may remain undecided.
LAUNCH_SD = 0.01
_UNDECIDED = 0.2


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


def baseline_needed(
    limit: float, *, now: int, num_cases: int, launch_sd: float = LAUNCH_SD
) -> int | None:
    """Return the fewest launches of a baseline that decide; None for over 100.

    They accept every case of an equal machine in most checks: all but _UNDECIDED. now: launches
    of that machine. launch_sd: of a launch, relative.
    """
    unlucky = NormalDist().inv_cdf(1 - _UNDECIDED / num_cases)
    for base in range(1, _MOST_LAUNCHES + 1):
        by_chance = unlucky * launch_sd * math.sqrt(1 / base + 1 / now)
        slowest = replace(
            equal_ratio(launch_sd, base=base, now=now), speed=math.exp(-by_chance)
        )
        if _is_accepted(slowest, limit):
            return base
    return None


def launches_needed(
    ratio: Ratio, limit: float, *, base: int, now: int, num_cases: int, both: bool = False
) -> int | None:
    """Return how many launches of this machine would decide on a case; None for over 100.

    base, now: launches of the baseline and of this machine so far, which vary as the others
    would. both: the baseline has as many.
    """
    assert ratio.se_log is not None
    per_launch = (ratio.se_log**2 - ratio.drift) / (1 / base + 1 / now)
    for count in range(now + 1, _MOST_LAUNCHES + 1):
        counts = 1 / (max(base, count) if both else base) + 1 / count
        variance = per_launch * counts + ratio.drift
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
