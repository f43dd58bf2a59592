"""Latency and bandwidth of a transfer: t(S) = alpha + S / beta, fitted to measured times.

The squares of the relative error (model - t) / t are minimized, so that a microsecond counts
at 1 KiB as a millisecond does at 1 GiB. A library changes protocol and algorithm with the
size, so one line rarely holds: `piecewise` finds where to cut.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

MIN_POINTS = 3  # two points make a line, whatever they are
# One more segment must cut the squared relative error by this factor.
FACTOR = 4.0
# A fit this good (root mean square of the relative error) is not cut.
GOOD_RMS = 0.01

Point = tuple[float, float]  # bytes, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One line. beta is None where the time does not grow with the size."""

    alpha_s: float
    beta_bytes_per_s: float | None
    worst_rel: float  # largest |model - t| / t
    num_points: int

    def time_s(self, num_bytes: float) -> float:
        """Return the time of a size on the line."""
        beta = self.beta_bytes_per_s
        return self.alpha_s + (num_bytes / beta if beta is not None else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A line and the sizes it was fitted to."""

    first_bytes: float
    last_bytes: float
    fit: Fit


class _Moments:
    """Weighted moments of points that are added one by one (West 1979); weights are 1 / t^2.

    Running sums instead of differences of prefix sums: the weights span ten orders of
    magnitude between the smallest and the largest size.
    """

    __slots__ = ("n", "size", "size_size", "size_time", "time", "time_time", "vv", "weight")

    def __init__(self) -> None:
        self.n = 0
        self.weight = self.size = self.time = 0.0  # the last two are weighted means
        self.size_size = self.size_time = self.time_time = 0.0  # about these means
        self.vv = 0.0  # about 0, for the line through the origin

    def add(self, size: float, time: float) -> None:
        weight = 1 / time**2
        self.n += 1
        self.weight += weight
        from_size = size - self.size
        from_time = time - self.time
        self.size += from_size * weight / self.weight
        self.time += from_time * weight / self.weight
        self.size_size += weight * from_size * (size - self.size)
        self.size_time += weight * from_size * (time - self.time)
        self.time_time += weight * from_time * (time - self.time)
        self.vv += weight * size * size

    def line(self) -> tuple[float, float]:
        """Return alpha and seconds per byte, both at least 0."""
        slope = self.size_time / self.size_size if self.size_size > 0 else 0.0
        if slope <= 0:
            return self.time, 0.0
        alpha = self.time - slope * self.size
        if alpha >= 0:
            return alpha, slope
        return 0.0, self._sum_size_time() / self.vv

    def squared_error(self) -> float:
        """Return the sum of the squares of the relative errors of line()."""
        alpha, slope = self.line()
        if slope == 0:
            return self.time_time
        if alpha > 0:
            return max(0.0, self.time_time - self.size_time**2 / self.size_size)
        return max(0.0, self.n - self._sum_size_time() ** 2 / self.vv)

    def _sum_size_time(self) -> float:
        return self.size_time + self.weight * self.size * self.time


def fit(points: Iterable[Point]) -> Fit | None:
    """Return the best single line. None for fewer than three distinct sizes.

    Raises ValueError for a time that is not positive or a negative size.
    """
    ordered = _checked(points)
    if len({size for size, _ in ordered}) < MIN_POINTS:
        return None
    return _fitted(ordered)


def piecewise(points: Iterable[Point], max_segments: int = 3) -> list[Segment]:
    """Return the best cut into contiguous segments of at least three distinct sizes each.

    Exact, by dynamic programming over the sizes. A further segment is taken only if it
    divides the squared relative error by FACTOR, and none once a fit is within GOOD_RMS.
    Empty for fewer than three distinct sizes.
    """
    by_size: dict[float, list[Point]] = {}
    for point in _checked(points):
        by_size.setdefault(point[0], []).append(point)
    stacks = list(by_size.values())
    if len(stacks) < MIN_POINTS:
        return []
    num_points = sum(map(len, stacks))
    plans = _plans(_errors(stacks), len(stacks), max_segments)
    enough = num_points * GOOD_RMS**2
    error, cuts = plans[0]
    for more_error, more_cuts in plans[1:]:
        if error <= enough:
            break
        if more_error * FACTOR ** (len(more_cuts) - len(cuts)) < error:
            error = more_error
            cuts = more_cuts
    edges = (0, *cuts, len(stacks))
    parts = [list(chain(*stacks[low:high])) for low, high in pairwise(edges)]
    return [
        Segment(first_bytes=part[0][0], last_bytes=part[-1][0], fit=_fitted(part))
        for part in parts
    ]


def _checked(points: Iterable[Point]) -> list[Point]:
    ordered = sorted(points)
    if any(size < 0 or not time > 0 for size, time in ordered):
        raise ValueError("a fit needs sizes of at least 0 and times above 0")
    return ordered


def _fitted(ordered: Sequence[Point]) -> Fit:
    moments = _Moments()
    for size, time in ordered:
        moments.add(size, time)
    alpha, slope = moments.line()
    return Fit(
        alpha_s=alpha,
        beta_bytes_per_s=1 / slope if slope > 0 else None,
        worst_rel=max(abs(alpha + slope * size - time) / time for size, time in ordered),
        num_points=len(ordered),
    )


def _errors(stacks: Sequence[Sequence[Point]]) -> dict[tuple[int, int], float]:
    """Return the squared relative error of one line over sizes low..high-1, by (low, high)."""
    errors = {}
    for low in range(len(stacks)):
        moments = _Moments()
        for high in range(low + 1, len(stacks) + 1):
            for size, time in stacks[high - 1]:
                moments.add(size, time)
            if high - low >= MIN_POINTS:
                errors[low, high] = moments.squared_error()
    return errors


def _plans(
    errors: dict[tuple[int, int], float], num_sizes: int, max_segments: int
) -> list[tuple[float, tuple[int, ...]]]:
    """Return the least error and its inner cuts with 1, 2, ... segments, while these fit."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        high: (error, ()) for (low, high), error in errors.items() if low == 0
    }
    plans = [best[num_sizes]]
    for _ in range(1, max_segments):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for (low, high), error in errors.items():
            if low not in best:
                continue
            candidate = (best[low][0] + error, (*best[low][1], low))
            longer[high] = min(longer.get(high, candidate), candidate)
        if num_sizes not in longer:
            break
        best = longer
        plans.append(best[num_sizes])
    return plans
