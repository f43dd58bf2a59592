"""Times of one collective by size, as measured."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from statistics import median

MEASURED = "measured"  # between two measured sizes, or at one
BELOW = "below the smallest"  # measured size, whose time is an upper bound
ABOVE = "extrapolated"  # with the bandwidth of the largest measured size


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Times of one collective at ascending sizes, which are as in nccl-tests."""

    collective: str
    num_ranks: int
    points: tuple[tuple[int, float], ...]  # bytes, seconds
    source: str
    num_hosts: int | None = None  # that the ranks were on; None where it is not known

    def time_s(self, num_bytes: int) -> tuple[float, str]:
        """Return seconds and their source; between sizes by log-log interpolation."""
        sizes = [size for size, _ in self.points]
        if num_bytes < sizes[0]:
            return self.points[0][1], BELOW
        if num_bytes > sizes[-1]:
            size, seconds = self.points[-1]
            return seconds * num_bytes / size, ABOVE
        place = bisect_left(sizes, num_bytes)
        high_size, high_s = self.points[place]
        if high_size == num_bytes:
            return high_s, MEASURED
        low_size, low_s = self.points[place - 1]
        share = log(num_bytes / low_size) / log(high_size / low_size)
        return exp(log(low_s) + share * log(high_s / low_s)), MEASURED


def curve_of(
    collective: str,
    num_ranks: int,
    points: Iterable[tuple[int, float]],
    source: str,
    num_hosts: int | None = None,
) -> Curve | None:
    """Return a curve through points, medians by size; None without a usable point."""
    by_size: dict[int, list[float]] = {}
    for size, seconds in points:
        if size > 0 and seconds > 0:
            by_size.setdefault(size, []).append(seconds)
    if not by_size:
        return None
    medians = tuple((size, median(by_size[size])) for size in sorted(by_size))
    return Curve(
        collective=collective,
        num_ranks=num_ranks,
        points=medians,
        source=source,
        num_hosts=num_hosts,
    )
