"""Calls that must agree between ranks and do not: which, and of which ranks.

One wrong rank disagrees in every group that it shares with others, and from one number on where
it leaves out or adds a call. Such disagreements are one mismatch, not several.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepmark.findings.finding import Evidence
from stepmark.ground.units import ranks_text

MAX_SIDES = 4
Sides = Sequence[tuple[int, ...]]  # ranks that agree with each other, the largest side last


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Calls of one group, or transfers from a rank to another, that differ.

    source: who shows it; what two sources show of the same ranks is one. `suspects` are the
    ranks of which one is wrong: those that differ from a majority, or all.
    """

    source: str
    group: str  # its label
    text: str  # e.g. "collective 4 of group 0 (rank 0: all_reduce of ...; rank 1: ...)"
    suspects: frozenset[int]
    evidence: tuple[Evidence, ...]


def suspects_of(sides: Sides) -> frozenset[int]:
    """Return the minority, or all ranks where there is none."""
    *others, largest = sides
    rest = [rank for ranks in others for rank in ranks]
    return frozenset(rest if len(largest) > max(1, len(rest)) else (*rest, *largest))


def sides_text(sides: Iterable[tuple[Sequence[int], str]]) -> str:
    """Return e.g. 'rank 0: all_reduce of 8 Float; ranks 1-3: broadcast of 8 Float'."""
    return "; ".join(f"{ranks_text(ranks)}: {call}" for ranks, call in list(sides)[:MAX_SIDES])


def merged(disagreements: Iterable[Disagreement]) -> list[list[Disagreement]]:
    """Return those together that one wrong rank can explain."""
    found: list[list[Disagreement]] = []
    for new in disagreements:
        for known in found:
            if new.suspects.intersection(*(old.suspects for old in known)):
                known.append(new)
                break
        else:
            found.append([new])
    return found
