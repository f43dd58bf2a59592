"""Times of matrix products: a law, times the measured ratio near the shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import nsmallest
from math import log2

_NEIGHBOURS = 8
_SOFTENING = 1e-3  # squared octaves: a shape that was measured has its own ratio

Point = Sequence[float]


def nearest(point: Point, points: Sequence[Point], values: Sequence[float]) -> float:
    """Return the mean of the values at the nearest points, by inverse squared distance."""
    near = nsmallest(
        _NEIGHBOURS,
        (
            (sum((own - other) ** 2 for own, other in zip(point, each, strict=True)), value)
            for each, value in zip(points, values, strict=True)
        ),
    )
    weights = [1.0 / (square + _SOFTENING) for square, _ in near]
    total = sum(weight * value for weight, (_, value) in zip(weights, near, strict=True))
    return total / sum(weights)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProductLaw:
    """Time of x [m, k] times w [k, n]: launch + FLOP / rate + a m k + b (n k + m n).

    x_s, rest_s: a and b in seconds per element; a has the cast of x where products are narrow.
    ratios: measured time over that of the law at `shapes` (m, n, k), as a share.
    """

    launch_s: float
    flops_per_s: float
    x_s: float
    rest_s: float
    shapes: tuple[tuple[int, int, int], ...] = ()
    ratios: tuple[float, ...] = ()

    @cached_property
    def _points(self) -> tuple[tuple[float, float, float], ...]:
        return tuple((log2(m), log2(n), log2(k)) for m, n, k in self.shapes)

    @lru_cache(maxsize=4096)  # noqa: B019  # laws are made once
    def seconds(self, m: int, n: int, k: int) -> float:
        """Return the seconds of one product in a sustained run of such products."""
        ratio = 1.0
        if self.shapes:
            ratio = nearest((log2(m), log2(n), log2(k)), self._points, self.ratios)
        work_s = 2 * m * n * k / self.flops_per_s + self.x_s * m * k
        return ratio * (self.launch_s + work_s + self.rest_s * (n * k + m * n))
