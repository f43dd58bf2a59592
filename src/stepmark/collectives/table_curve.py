"""Times and bandwidths of a table of results by size, and faults that their shape shows.

A fault of shape needs no reference: it compares a table's rows with each other. Each rule's
limit lies beyond what healthy tables show (validation/normal_ranges.py counts them).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, pairwise
from math import exp, inf, log
from operator import sub
from statistics import median

from stepmark.ground.reading import Reading, Table
from stepmark.ground.units import GB, GIB, MIB, format_bytes, format_time
from stepmark.model.collectives import Collective, busbw_factor

_PLATEAU_BYTES = 256 * MIB
_MIN_FLAT_BYTES = GIB
_MAX_FLAT_GAIN = 1.05  # of the last row over the one before
_SMALL_BYTES = 65536  # up to here a time is latency
_MIN_RATE = 0.1 * GB  # below, two decimals of GB/s give no time
# Of healthy curves one row of three is up to 4.7 times slower, no second one over 1.5 times.
_SLOW_ROW = 1.65
_SLOW_ALONE = 6.0
_MAX_NEIGHBOURS = 32  # on each side, in interpolations
_FALL = 1.5
_FLOOR_S = 1e-3
_FLOOR_OF_RANK_S = 2e-5  # healthy curves take at most 16 us for each rank
PAIRS = "measure hosts in pairs to find a slow one (stepmark doctor --nodes, comm p2p-matrix)"
SLOW_ON_ONE_HOST = ("a path by the host's memory", "NCCL_DEBUG=INFO for GPUs (SHM, not P2P)")
SLOW_ON_A_NETWORK = (
    "a network over TCP or the host's memory",
    "NCCL_DEBUG=INFO (NET/Socket, connections without GDRDMA)",
)
_FALL_ON_ONE_HOST = (
    "congestion, load on the host's memory or cores, or a slow GPU or link",
    "measure pairs to find a slow one (stepmark comm p2p-matrix)",
)
_FALL_ON_A_NETWORK = (
    "lost packets or paused ports (a step to tens of milliseconds), congestion, or a slow host "
    "or link",
    "read the NICs' counters of retransmissions and pauses before and after a run, check PFC "
    f"and ECN, and {PAIRS}",
)


# Not frozen: as of Reading, a table of 10 MB has thousands. Nothing changes one.
@dataclass(slots=True, kw_only=True)
class Point:
    """One size, of the faster placement; times are medians over repeats."""

    line: int
    size_bytes: int
    time_s: float
    busbw: float  # bytes/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Rows of one data type and column, by size."""

    dtype: str
    column: str
    points: tuple[Point, ...]
    peak: Point

    @property
    def fingerprint(self) -> str:
        """Return what tells this curve from others: a hash of its sizes and nanoseconds."""
        rows = [(point.size_bytes, round(point.time_s * 1e9)) for point in self.points]
        return sha256(repr(rows).encode()).hexdigest()[:16]

    @property
    def is_large(self) -> bool:
        """Whether the table reaches sizes whose bandwidth is compared."""
        return self.points[-1].size_bytes >= _PLATEAU_BYTES

    @property
    def is_flat(self) -> bool:
        """Whether larger messages would hardly be faster.

        Healthy curves of some networks still rise by a third from 1 to 2 GiB.
        """
        rates = [point.busbw for point in self.points[-2:]]
        is_large = self.points[-1].size_bytes >= _MIN_FLAT_BYTES and len(rates) == 2
        return is_large and rates[1] <= _MAX_FLAT_GAIN * rates[0]

    @property
    def smallest(self) -> Point | None:
        """Return the row with the shortest time up to 64 KiB."""
        small = [point for point in self.points if point.size_bytes <= _SMALL_BYTES]
        return min(small, key=lambda point: point.time_s, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFault:
    """What is wrong with a curve, the usual cause and what to try. is_severe: not normal."""

    name: str
    text: str
    cause: str
    action: str
    points: Sequence[Point]
    is_severe: bool = True


def curves_of(table: Table) -> list[Curve]:
    """Return a curve for each data type and column; [] for a table of anything else."""
    if table.collective not in set(Collective) or table.method.endswith("time to enqueue"):
        return []
    factor = busbw_factor(Collective(table.collective), table.num_ranks or 1)
    groups: dict[tuple[str, str], dict[int, list[Reading]]] = {}
    for reading in table.readings:
        sizes = groups.setdefault((reading.dtype, reading.column), {})
        sizes.setdefault(reading.size_bytes or 0, []).append(reading)
    curves = []
    for (dtype, column), sizes in groups.items():
        if points := tuple(_points(sizes, factor)):
            peak = max(points, key=lambda point: point.busbw)
            curves.append(Curve(dtype=dtype, column=column, points=points, peak=peak))
    return curves


def _points(sizes: Mapping[int, Sequence[Reading]], factor: float) -> Iterator[Point]:
    """Yield sizes with a time: as printed, or by a bandwidth of enough digits."""
    for size, readings in sorted(sizes.items()):
        times: dict[str, list[float]] = {}
        printed = 0.0
        for reading in readings:
            rate = reading.busbw_bytes_per_s or 0.0
            printed = max(printed, rate)
            time = reading.time_s
            if not time and (rate := rate or reading.rate or 0.0) > _MIN_RATE:
                time = factor * size / rate
            if time:
                times.setdefault(reading.placement, []).append(time)
        if not (size and times and (factor or printed)):
            continue
        medians = {
            placement: median(values) if len(values) > 1 else values[0]
            for placement, values in times.items()
        }
        best = min(medians.values())
        yield Point(
            line=readings[0].line,
            size_bytes=size,
            time_s=best,
            busbw=factor * size / best or printed,
        )


def curve_faults(curve: Curve, num_ranks: int, num_hosts: int) -> list[CurveFault]:
    """Return the faults that the shape shows. num_hosts: 0 is unknown."""
    points = curve.points
    falls = list(_fall(points, num_hosts))
    named = {point.line for fault in falls for point in fault.points}
    return [*_floor(points, num_ranks, num_hosts), *falls, *_slow_rows(points, named)]


def _floor(points: Sequence[Point], num_ranks: int, num_hosts: int) -> Iterator[CurveFault]:
    """Yield a time of a millisecond and more that sizes up to eight times larger share.

    Rings of many ranks need that long for small messages: 20 us for each rank is no fault.
    """
    first = points[0]
    flat = [point for point in points if point.time_s < 2 * first.time_s]
    is_wide = flat[-1].size_bytes >= 8 * first.size_bytes
    path, action = SLOW_ON_ONE_HOST if num_hosts == 1 else SLOW_ON_A_NETWORK
    if is_wide and first.time_s >= max(_FLOOR_S, _FLOOR_OF_RANK_S * num_ranks):
        yield CurveFault(
            name="floor",
            text=f"every size up to {format_bytes(flat[-1].size_bytes)} takes "
            f"{format_time(min(point.time_s for point in flat))} and more",
            cause=f"{path}, ranks that share cores, or too few warm-up iterations",
            action=f"{action}, and -w 20",
            points=flat,
        )


def _fall(points: Sequence[Point], num_hosts: int) -> Iterator[CurveFault]:
    """Yield a bandwidth below 2/3 of that of a smaller size, in two rows one after another."""
    best = points[0]
    cause, action = _FALL_ON_ONE_HOST if num_hosts == 1 else _FALL_ON_A_NETWORK
    for place, (this, after) in enumerate(pairwise(points)):
        if max(this.busbw, after.busbw) < best.busbw / _FALL:
            low = [point for point in points[place:] if point.busbw < best.busbw / _FALL]
            yield CurveFault(
                name="fall",
                text=f"the bandwidth falls from {best.busbw / GB:.3g} GB/s at "
                f"{format_bytes(best.size_bytes)} to {this.busbw / GB:.3g} GB/s at "
                f"{format_bytes(this.size_bytes)} ({format_time(this.time_s)}) and low up to "
                f"{format_bytes(low[-1].size_bytes)}",
                cause=cause,
                action=action,
                points=[best, *low],
            )
            return
        best = this if this.busbw > best.busbw else best


def _slow_rows(points: Sequence[Point], named: set[int]) -> Iterator[CurveFault]:
    """Yield rows of twice what other sizes suggest. named: lines that have a fault already."""
    ratios = zip(points, _ratios_to_least(points), strict=True)
    slow = [(point, ratio) for point, ratio in ratios if ratio >= _SLOW_ROW]
    is_severe = len(slow) > 1 or any(ratio >= _SLOW_ALONE for _, ratio in slow)
    if slow := [(point, ratio) for point, ratio in slow if point.line not in named]:
        sizes = ", ".join(f"{format_bytes(p.size_bytes)} ({r:.1f} x)" for p, r in slow[:6])
        yield CurveFault(
            name="slow-rows" if is_severe else "slow-row",
            text=f"far longer than other sizes suggest: {sizes}",
            cause="another job on the hosts or the network, retransmissions, a protocol (LL or "
            "LL128) that is used for sizes that are too large for it, or of a single row the "
            "first use of a connection",
            action="repeat with more iterations (-n 100 -w 20); if the same rows are slow, "
            "compare with NCCL_PROTO=^LL and ^LL128, and update NCCL or its plug-in",
            points=[point for point, _ in slow],
            is_severe=is_severe,
        )


def _ratios_to_least(points: Sequence[Point]) -> list[float]:
    """Return each time / the longest that the others allow: no larger size takes less, no
    smaller one has more bandwidth, and between two sizes log time is convex in log size.
    """
    sizes = [log(point.size_bytes) for point in points]
    times = [log(point.time_s) for point in points]
    later = reversed(list(accumulate(reversed(times), min)))
    rates = accumulate(map(sub, times, sizes), min)
    least = [
        min(time, rate + size) for time, rate, size in zip(later, rates, sizes, strict=True)
    ]
    for this in range(len(points)):
        chords = (
            _between(before, this, after, sizes, least)
            for before in range(max(this - _MAX_NEIGHBOURS, 0), this)
            for after in range(this + 1, min(this + _MAX_NEIGHBOURS, len(points)))
        )
        least[this] = min(least[this], *chords, inf)
    return [exp(time - low) for time, low in zip(times, least, strict=True)]


def _between(first: int, this: int, last: int, x: Sequence[float], y: Sequence[float]) -> float:
    """Return y of the middle point by interpolation between the others."""
    return y[first] + (y[last] - y[first]) * (x[this] - x[first]) / (x[last] - x[first])
