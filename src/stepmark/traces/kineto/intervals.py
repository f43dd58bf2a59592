"""Exact sets of integer intervals: half-open, disjoint and sorted, as numpy columns."""

from typing import NamedTuple

import numpy as np

from stepmark.timeline.trace_columns import Ints

_FEW = 64  # intervals to which others are clipped one by one, which takes less memory


class Intervals(NamedTuple):
    """Disjoint intervals, none empty and no two adjacent, in ascending order."""

    start: Ints
    end: Ints

    @property
    def total(self) -> int:
        return int((self.end - self.start).sum())


def union(start: Ints, end: Ints) -> Intervals:
    """Return the union of intervals in any order; empty ones and negative ones add nothing."""
    keep = end > start
    if not keep.all():
        start = start[keep]
        end = end[keep]
    if not start.size:
        return Intervals(start, end)
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start = start[order]
        end = end[order]
        del order
    reach = np.maximum.accumulate(end)
    begins = np.ones(start.size, bool)
    np.greater(start[1:], reach[:-1], out=begins[1:])
    # An interval of the union ends before the next one begins, and where the last one does.
    ends = np.append(begins[1:], True)
    return Intervals(start[begins], reach[ends])


class Pieces(NamedTuple):
    """Disjoint times in ascending order, and the row of what each belongs to."""

    start: Ints
    end: Ints
    row: Ints

    @property
    def times(self) -> Intervals:
        return Intervals(self.start, self.end)

    def clip(self, start: int, end: int) -> "Pieces":
        """Return the parts inside [start, end)."""
        own = slice(
            int(np.searchsorted(self.end, start, "right")),
            int(np.searchsorted(self.start, end, "left")),
        )
        return Pieces(
            np.maximum(self.start[own], start), np.minimum(self.end[own], end), self.row[own]
        )

    def without(self, times: Intervals) -> "Pieces":
        """Return the parts that are not in these times."""
        left = without(self.times, times)
        return Pieces(*left, self.row[np.searchsorted(self.start, left.start, "right") - 1])


def first_begun(start: Ints, end: Ints, row: Ints) -> Pieces:
    """Return the union of intervals, each time with the interval around it that begins first.

    Rows that begin at once count in their order.
    """
    order = np.argsort(start, kind="stable")
    start = start[order]
    end = end[order]
    row = row[order]
    reach = np.maximum.accumulate(end)
    start = np.concatenate((start[:1], np.maximum(start[1:], reach[:-1])))
    keep = end > start
    return Pieces(start[keep], end[keep], row[keep])


def join(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in a or b."""
    return union(np.concatenate((a.start, b.start)), np.concatenate((a.end, b.end)))


def common(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in a and in b."""
    if not a.start.size or not b.start.size:
        return Intervals(a.start[:0], a.start[:0])
    smaller, larger = (a, b) if a.start.size < b.start.size else (b, a)
    if smaller.start.size <= _FEW:
        bounds = zip(smaller.start.tolist(), smaller.end.tolist(), strict=True)
        starts, ends = zip(*(clip(larger, start, end) for start, end in bounds), strict=True)
        return Intervals(np.concatenate(starts), np.concatenate(ends))
    # Each interval of a meets those of b from `first` to before `last`.
    first = np.searchsorted(b.end, a.start, side="right")
    last = np.searchsorted(b.start, a.end, side="left")
    counts = np.maximum(last - first, 0)
    of_a = np.repeat(np.arange(a.start.size), counts)
    offset = np.arange(of_a.size) - np.repeat(np.cumsum(counts) - counts, counts)
    of_b = first[of_a] + offset
    return Intervals(
        np.maximum(a.start[of_a], b.start[of_b]), np.minimum(a.end[of_a], b.end[of_b])
    )


def without(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in a that are not in b."""
    if not a.start.size or not b.start.size:
        return a
    low = a.start[0]
    high = a.end[-1]
    gaps = Intervals(
        np.concatenate(([min(low, b.start[0])], b.end)),
        np.concatenate((b.start, [max(high, b.end[-1])])),
    )
    keep = gaps.end > gaps.start
    if not keep.all():
        gaps = Intervals(gaps.start[keep], gaps.end[keep])
    return common(a, gaps)


def clip(a: Intervals, start: int, end: int) -> Intervals:
    """Return the part of a inside [start, end)."""
    first = int(np.searchsorted(a.end, start, side="right"))
    last = int(np.searchsorted(a.start, end, side="left"))
    if last <= first or end <= start:
        return Intervals(a.start[:0], a.end[:0])
    return Intervals(np.maximum(a.start[first:last], start), np.minimum(a.end[first:last], end))


def time_before(a: Intervals, places: Ints) -> Ints:
    """Return how much of a lies before each place: differences are sums over windows."""
    if not a.start.size:
        return np.zeros(len(places), np.int64)
    before = np.concatenate(([0], np.cumsum(a.end - a.start)))
    number = np.searchsorted(a.start, places, side="right")
    inside = np.where(
        number > 0, np.minimum(places, a.end[number - 1]) - a.start[number - 1], 0
    )
    return np.asarray(before[np.maximum(number - 1, 0)] + inside)
