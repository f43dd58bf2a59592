"""Items of a pipeline stage: computation without a break, and calls of communication."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from stepmark.step.workload import CommOp, ComputeOp, Operation
from stepmark.timeline.ledger import Idle, Work
from stepmark.timeline.step_cost import Costs, OpCost

Clock = Mapping[Work, float]
_DIGITS = 12  # of progress in seconds
Kind = tuple[Work | Idle, bool]  # kernels, or a gap; whether it is recomputed


def is_compute(kind: Work | Idle) -> bool:
    """Return whether work is of kernels that compute."""
    return isinstance(kind, Work) and kind is not Work.COPY


class Segment:
    """Computation on one stream that runs without a break once it is issued.

    Before the kernels of each operation come their launch gaps, which are pieces, too.
    kinds, owners: of the pieces, and the index of their operation. ends, slowed: when they end,
    alone and while a collective runs.
    issues: when the host has issued each operation. lead_s: the longest time from the start of
    the segment's issue to that of an operation, less the one to its start on the device: if the
    segment starts later, it never waits for the host. tail_s: from the start of the issue to
    the end, if it does. follows, leads: as of a Call.
    """

    def __init__(
        self, ops: Sequence[ComputeOp], costs: Sequence[OpCost], machine: Costs, clock: Clock
    ) -> None:
        self.ops: Sequence[Operation] = ops
        self._computes = ops
        self._costs = costs
        self._machine = machine
        self._clock = clock
        self.kinds: list[Kind] = []
        self.owners: list[int] = []
        times = list[float]()
        slowdowns = list[float]()
        starts = list[int]()
        for owner, (op, cost) in enumerate(zip(ops, costs, strict=True)):
            starts.append(len(times))
            gap = machine.gap, cost.num_kernels * machine.gap_s
            parts: tuple[tuple[Work | Idle, float], ...] = (gap, *cost.time_s.items())
            for kind, time_s in parts:
                if time_s:
                    self.kinds.append((kind, op.recompute))
                    self.owners.append(owner)
                    work = kind if isinstance(kind, Work) else None
                    times.append(time_s * (clock.get(work, 1.0) if work else 1.0))
                    slowdowns.append(machine.compute_slowdown.get(work, 1.0) if work else 1.0)
        slow_times = [time * factor for time, factor in zip(times, slowdowns, strict=True)]
        self.ends = [0.0, *accumulate(times)]
        self.slowed = [0.0, *accumulate(slow_times)]
        self.total_s = self.ends[-1]
        self.issues = list(accumulate(cost.host_s for cost in costs))
        self.host_s = self.issues[-1]
        self.num_kernels = sum(cost.num_kernels for cost in costs)
        waits = [
            issue - self.ends[start] for issue, start in zip(self.issues, starts, strict=True)
        ]
        self.lead_s = max(waits)
        self.tail_s = self.total_s + self.lead_s
        self.named: tuple[Operation, ...] = (ops[0], *ops[1:][-1:])  # they wait or are awaited
        self._whole: dict[bool, Mapping[Kind, float]] = {}

    @cached_property
    def singles(self) -> "tuple[Segment, ...]":
        """One segment per operation, for a host that is slower than the device."""
        pairs = zip(self._computes, self._costs, strict=True)
        return tuple(Segment((op,), (cost,), self._machine, self._clock) for op, cost in pairs)

    @cached_property
    def computed_s(self) -> float:
        """Seconds of its kernels, alone; copies do not count."""
        times = self.times(0.0, self.total_s, slow=False).items()
        return sum(time_s for (kind, _), time_s in times if is_compute(kind))

    def time_of(self, progress: float, *, slow: bool) -> float:
        """Return the time until this progress, which is the time it takes alone."""
        return _mapped(self.ends, self.slowed, progress) if slow else progress

    def progress_after(self, time_s: float, *, slow: bool) -> float:
        return _mapped(self.slowed, self.ends, time_s) if slow else time_s

    def times(self, first: float, last: float, *, slow: bool) -> Mapping[Kind, float]:
        """Return the time by work from one progress to another."""
        is_whole = first == 0.0 and last == self.total_s
        if is_whole and slow in self._whole:
            return self._whole[slow]
        times: dict[Kind, float] = {}
        for index, time_s in self.pieces(first, last, slow=slow):
            kind = self.kinds[index]
            times[kind] = times.get(kind, 0.0) + time_s
        if is_whole:
            self._whole[slow] = times
        return times

    def pieces(self, first: float, last: float, *, slow: bool) -> Iterator[tuple[int, float]]:
        """Yield the pieces from one progress to another, and how long each takes."""
        ends = self.slowed if slow else self.ends
        for index in range(max(0, bisect_right(self.ends, first) - 1), len(self.kinds)):
            begin = self.ends[index]
            end = self.ends[index + 1]
            if begin >= last:
                break
            share = (min(end, last) - max(begin, first)) / (end - begin) if end > begin else 1
            yield index, (ends[index + 1] - ends[index]) * share


class Busy(NamedTuple):
    """Computation and launch gaps of a segment, from one progress to another at one speed."""

    step: int
    item: int
    segment: Segment
    start: float
    end: float
    first: float
    last: float
    slow: bool

    @property
    def pieces(self) -> Iterator[tuple[int, float]]:
        return self.segment.pieces(self.first, self.last, slow=self.slow)

    def progress(self, time: float) -> float:
        """Return the progress at a time, rounded: equal ones differ in their last bits."""
        before = self.segment.time_of(self.first, slow=self.slow)
        after = before + time - self.start
        return round(self.segment.progress_after(after, slow=self.slow), _DIGITS)

    @property
    def extra_s(self) -> float:
        """Return the time that communication adds."""
        return self.end - self.start - (self.last - self.first)


def _mapped(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y at x on the line through points that increase."""
    index = bisect_right(xs, x)
    if index == len(xs):
        return ys[-1]
    begin = xs[index - 1]
    end = xs[index]
    return ys[index - 1] + (ys[index] - ys[index - 1]) * (x - begin) / (end - begin)


@dataclass(frozen=True, slots=True)
class Part:
    """A transfer of a call. key: what a number of stages begin together; None: one stage's.

    contends: it slows the computation beside it, which slows it.
    """

    time_s: float
    key: object | None = None
    num_stages: int = 1
    contends: bool = True


@dataclass(slots=True, eq=False)
class Call:
    """Collectives that are issued together and end together."""

    ops: tuple[CommOp, ...]
    parts: tuple[Part, ...]
    host_s: float

    @property
    def num_kernels(self) -> float:
        return 1.0

    @property
    def named(self) -> tuple[CommOp, ...]:
        return self.ops

    @property
    def contends(self) -> bool:
        return any(part.contends for part in self.parts)


Placed = tuple[Segment | Call, int, int]  # layer and micro-batch to add
