"""Find repeats in a flat list: "E A M A M E A M A M" is 2 x (E, 2 x (A, M)).

The search goes level by level, short periods first, so that loops nest as they were written. A
level starts where an item recurs after p others and extends both copies while they agree.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_LEVELS = 16
_WORK = 64  # comparisons per item of a level before the rest is left as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat(Generic[T]):
    """A body of items that occurs several times in a row."""

    body: "tuple[T | Repeat[T], ...]"
    times: int


def fold(items: Sequence[T]) -> "tuple[T | Repeat[T], ...]":
    """Replace repeats with Repeat, in time linear in the length of the sequence."""
    numbers: dict[T | Repeat[T], int] = {}
    values: list[T | Repeat[T]] = []

    def number(item: "T | Repeat[T]") -> int:
        index = numbers.setdefault(item, len(numbers))
        if index == len(values):
            values.append(item)
        return index

    row = [number(item) for item in items]
    for _ in range(_LEVELS):
        spans = _spans(row)
        if not spans:
            break
        shorter: list[int] = []
        place = 0
        for start, period, times in spans:
            shorter += row[place:start]
            body = tuple(values[index] for index in row[start : start + period])
            shorter.append(number(Repeat(body=body, times=times)))
            place = start + period * times
        row = shorter + row[place:]
    return tuple(values[index] for index in row)


def unfold(folded: "Sequence[T | Repeat[T]]") -> list[T]:
    """Return the sequence that was folded."""
    items: list[T] = []
    for item in folded:
        if isinstance(item, Repeat):
            items += unfold(item.body) * item.times
        else:
            items.append(item)
    return items


def _spans(row: list[int]) -> list[tuple[int, int, int]]:
    """Return (start, period, times) of repeats that do not overlap, in order of start."""
    seeds: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for place, item in enumerate(row):
        if item in last:
            seeds.setdefault(place - last[item], []).append(last[item])
        last[item] = place
    covered = bytearray(len(row))
    spans: list[tuple[int, int, int]] = []
    budget = _WORK * len(row)
    for period in sorted(seeds):
        done = 0  # places before it were examined with this period
        for seed in seeds[period]:
            if seed < done or budget < 0:
                continue
            # The largest range around seed whose items all recur one period later.
            start = seed
            stop = seed + 1
            last_place = len(row) - period
            while start > done and row[start - 1] == row[start - 1 + period]:
                start -= 1
            while stop < last_place and row[stop] == row[stop + period]:
                stop += 1
            budget -= stop - start
            done = stop
            times = (stop - start) // period + 1
            end = start + period * times
            if times > 1 and covered.find(1, start, end) < 0:
                spans.append((start, period, times))
                covered[start:end] = b"\1" * (end - start)
                done = end
    return sorted(spans)
