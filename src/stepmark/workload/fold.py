"""Finding repeats in a flat list: "E A M A M E A M A M" is 2 x (E, 2 x (A, M)).

Level by level, short periods first, so that loops nest as they were written. A level looks at
each place where an item comes again after p others, and at how far both copies then agree.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_LEVELS = 16
_WORK = 64  # comparisons per item of a level before the rest is left as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat(Generic[T]):
    """These, so many times."""

    body: "tuple[T | Repeat[T], ...]"
    times: int


def fold(items: Sequence[T]) -> "tuple[T | Repeat[T], ...]":
    """The same sequence with repeats as Repeat, in time linear in its length."""
    numbers: dict[T | Repeat[T], int] = {}
    held: list[T | Repeat[T]] = []

    def number(item: "T | Repeat[T]") -> int:
        found = numbers.setdefault(item, len(numbers))
        if found == len(held):
            held.append(item)
        return found

    now = [number(item) for item in items]
    for _ in range(_LEVELS):
        spans = _spans(now)
        if not spans:
            break
        shorter: list[int] = []
        place = 0
        for start, period, times in spans:
            shorter += now[place:start]
            body = tuple(held[one] for one in now[start : start + period])
            shorter.append(number(Repeat(body=body, times=times)))
            place = start + period * times
        now = shorter + now[place:]
    return tuple(held[one] for one in now)


def unfold(folded: "Sequence[T | Repeat[T]]") -> list[T]:
    """What was folded."""
    found: list[T] = []
    for item in folded:
        if isinstance(item, Repeat):
            found += unfold(item.body) * item.times
        else:
            found.append(item)
    return found


def _spans(now: list[int]) -> list[tuple[int, int, int]]:
    """(start, period, times) of repeats that do not overlap, in order of start."""
    seeds: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for place, item in enumerate(now):
        if item in last:
            seeds.setdefault(place - last[item], []).append(last[item])
        last[item] = place
    taken = bytearray(len(now))
    found: list[tuple[int, int, int]] = []
    left = _WORK * len(now)
    for period in sorted(seeds):
        done = 0  # places before it were looked at with this period
        for seed in seeds[period]:
            if seed < done or left < 0:
                continue
            start, stop = _agreement(now, seed, period, done)
            left -= stop - start
            done = stop
            times = (stop - start) // period + 1
            end = start + period * times
            if times > 1 and taken.find(1, start, end) < 0:
                found.append((start, period, times))
                taken[start:end] = b"\1" * (end - start)
                done = end
    return sorted(found)


def _agreement(now: list[int], seed: int, period: int, low: int) -> tuple[int, int]:
    """The largest range around seed whose items all come again one period later."""
    start, stop, end = seed, seed + 1, len(now) - period
    while start > low and now[start - 1] == now[start - 1 + period]:
        start -= 1
    while stop < end and now[stop] == now[stop + period]:
        stop += 1
    return start, stop
