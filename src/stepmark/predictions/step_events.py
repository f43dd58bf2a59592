"""Event simulation of consecutive steps of all stages, one rank of each.

A stage's items start in order on each stream, after the items they wait for, once the host has
issued them, and never before the computation of the step before has ended. Computation slows
while communication of its stage is in flight, and communication while computation runs.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from stepmark.predictions.program import Program
from stepmark.predictions.works import Busy, Part, Segment

T = TypeVar("T")
_AHEAD = 2  # steps of the host before the device (training/loop.py)
_MAIN = 0  # the stream COMPUTE
MOST_STEPS = 32  # of a stage


@dataclass(slots=True)
class Step:
    """One step of a stage. starts, ends: of its items; NaN: not yet."""

    number: int
    host_start: float
    waiting: list[int]
    starts: list[float]
    ends: list[float]
    num_left: int


@dataclass(slots=True, eq=False)
class _Compute:
    """Computation that runs. is_fixed: its end is known."""

    where: tuple[int, int]  # step and item
    segment: Segment
    since: float
    progress: float = 0.0
    slow: bool = False
    end: float = math.inf
    is_fixed: bool = False


@dataclass(slots=True, eq=False)
class _Transfer:
    """Communication that runs. sides: those of each call that it is part of."""

    left_s: float
    start: float
    since: float
    sides: "list[_Side]"
    contends: bool
    slow: bool = False
    end: float = math.inf


@dataclass(slots=True, eq=False)
class _Stream:
    """Order of one stream. step None: at the end of what has begun."""

    items: Sequence[int]
    step: Step | None = None
    place: int = 0
    is_busy: bool = False
    compute: _Compute | None = None
    singles: tuple[Segment, ...] = ()  # of a segment that waits for the host inside
    single: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """One stage. ends: of the computation of each step; unfinished: items at that time."""

    stage: int
    program: Program
    has_host: bool
    steps: list[Step] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    busy: list[Busy] = field(default_factory=list)
    sent: list[tuple[float, float]] = field(default_factory=list)  # transfers that have ended
    streams: list[_Stream] = field(default_factory=list)
    num_computing: int = 0
    has_changed: bool = False  # its transfers, since its computation learned of them
    is_computing: bool = False  # as far as its transfers know
    is_sending: bool = False  # as far as its computation knows
    parts_left: dict[tuple[int, int], int] = field(default_factory=dict)
    moved: dict[tuple[int, int], float] = field(default_factory=dict)  # when calls began to
    transfers: dict[_Transfer, None] = field(default_factory=dict)

    @property
    def transferred(self) -> list[tuple[float, float]]:
        """Start and end of its transfers."""
        return self.sent + [(transfer.start, math.inf) for transfer in self.transfers]


def host_start(lane: Lane) -> float:
    """Return when the host begins to issue the next step of a stage."""
    number = len(lane.steps)
    start = lane.steps[-1].host_start + lane.program.host_s if number else 0.0
    return max(start, lane.ends[number - _AHEAD - 1]) if number > _AHEAD else start


class _Side(NamedTuple):
    """One stage's part of a transfer."""

    lane: Lane
    step: Step
    item: int
    part: Part


class Meetings(Generic[T]):
    """Sides of transfers between stages, which begin when all stages are there."""

    def __init__(self) -> None:
        self._sides: dict[object, list[T]] = {}

    def join(self, part: Part, key: object, side: T) -> list[T]:
        """Return the sides of the transfer that begins; none while a stage is awaited."""
        sides = self._sides.setdefault(key, []) if part.key is not None else []
        sides.append(side)
        if len(sides) < part.num_stages:
            return []
        self._sides.pop(key, None)
        return sides


class Simulator:
    """Simulates steps until `run` returns. hosts: stages whose items wait for their issue."""

    def __init__(
        self, programs: Sequence[Program], comm_slowdown: float, hosts: Collection[int] = ()
    ) -> None:
        self.lanes = [
            Lane(stage, program, stage in hosts) for stage, program in enumerate(programs)
        ]
        self.now = 0.0
        self._comm_slowdown = comm_slowdown
        self._heap: list[tuple[float, int, Lane, _Stream | _Transfer]] = []
        self._count = 0
        self._meetings = Meetings[_Side]()
        for lane in self.lanes:
            lane.streams = [_Stream(items) for items in lane.program.queues]
            self._begin_step(lane)
            self._settle(lane)

    def run(self, num_steps: int) -> bool:
        """Run until the computation of so many steps has ended; False: it never does."""
        heap = self._heap
        while any(len(lane.ends) < num_steps for lane in self.lanes):
            if not heap:
                return False
            self.now, _, lane, active = heapq.heappop(heap)
            if isinstance(active, _Transfer):
                if active.end == self.now:
                    self._end_transfer(active)
            elif (compute := active.compute) is not None:
                if compute.end == self.now:
                    self._end_compute(lane, active)
            else:
                self._start(lane, active)
            self._settle(lane)
        return True

    def _push(self, time: float, lane: Lane, active: _Stream | _Transfer) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, lane, active))

    def _begin_step(self, lane: Lane) -> None:
        program = lane.program
        number = len(lane.steps)
        if number == MOST_STEPS:
            return
        host = host_start(lane)
        size = len(program.works)
        waiting = [len(deps) for deps in program.deps]
        if number and lane.steps[-1].num_left:
            ends = lane.steps[-1].ends
            for item, dependents in program.next_dependents.items():
                for dependent in dependents:
                    waiting[dependent] += ends[item] != ends[item]
        nan = [math.nan] * size
        step = Step(number, host, waiting, nan, nan.copy(), size)
        lane.steps.append(step)
        for stream in lane.streams:
            if stream.step is None:
                stream.step = step
                stream.place = 0
        for stream in lane.streams:
            self._start(lane, stream)

    def _start(self, lane: Lane, stream: _Stream) -> None:
        """Start the next item of a stream if it can."""
        if stream.is_busy or not self._has_next(lane, stream):
            return
        step = stream.step
        assert step is not None
        item = stream.items[stream.place]
        if step.waiting[item]:
            return
        work = lane.program.works[item]
        issue = -math.inf
        if lane.has_host:
            issue = step.host_start + lane.program.issues[item]
            if stream.singles and isinstance(work, Segment):
                begin = step.host_start + lane.program.begins[item]
                issue = begin + work.issues[stream.single]
            if issue > self.now:
                self._push(issue, lane, stream)
                return
        if not stream.single:
            step.starts[item] = self.now
        stream.is_busy = True
        if isinstance(work, Segment):
            self._compute(lane, stream, step, item, work)
        else:
            lane.parts_left[step.number, item] = len(work.parts)
            ordinals = lane.program.ordinals[item]
            for part, ordinal in zip(work.parts, ordinals, strict=True):
                key = (part.key, step.number, ordinal)
                side = _Side(lane, step, item, part)
                if sides := self._meetings.join(part, key, side):
                    self._transfer(sides)

    def _has_next(self, lane: Lane, stream: _Stream) -> bool:
        """Return whether a stream has another item, in this step or the next one."""
        step = stream.step
        if step is None or stream.place < len(stream.items):
            return step is not None
        if step is not lane.steps[-1]:
            stream.step = lane.steps[step.number + 1]
            stream.place = 0
            return bool(stream.items)
        stream.step = None
        if stream is lane.streams[_MAIN]:
            lane.ends.append(self.now)
            lane.unfinished.append(sum(step.num_left for step in lane.steps))
            self._begin_step(lane)
        return False

    def _compute(
        self, lane: Lane, stream: _Stream, step: Step, item: int, segment: Segment
    ) -> None:
        lane.num_computing += 1
        where = step.number, item
        if stream.singles:
            segment = stream.singles[stream.single]
        elif lane.has_host:
            begin = step.host_start + lane.program.begins[item]
            if begin + segment.lead_s > self.now:
                end = begin + segment.tail_s
                if self._is_quiet(lane, stream, step, item, end):
                    # All that it waits for the host is before its computation.
                    start = end - segment.total_s
                    stream.compute = _Compute(where, segment, start, end=end, is_fixed=True)
                    self._push(end, lane, stream)
                    return
                stream.singles = segment.singles
                stream.single = 0
                segment = stream.singles[0]
        stream.compute = compute = _Compute(where, segment, self.now, slow=lane.is_sending)
        self._plan_compute(lane, stream, compute)

    def _is_quiet(self, lane: Lane, stream: _Stream, step: Step, item: int, end: float) -> bool:
        """Return whether nothing can start or run beside a segment that begins now."""
        if lane.transfers or lane.is_sending:
            return False
        for other in lane.streams:
            if other is stream or other.step is None:
                continue
            if other.is_busy or other.step is not step:
                return False
            if other.place == len(other.items):
                continue
            head = other.items[other.place]
            issue = step.host_start + lane.program.issues[head]
            if issue < end and not lane.program.waits_for(head, item):
                return False
        return True

    def _plan_compute(self, lane: Lane, stream: _Stream, compute: _Compute) -> None:
        segment = compute.segment
        slow = compute.slow
        left_s = segment.time_of(segment.total_s, slow=slow) - segment.time_of(
            compute.progress, slow=slow
        )
        compute.end = self.now + left_s
        self._push(compute.end, lane, stream)

    def _record(self, lane: Lane, compute: _Compute) -> None:
        """Record the computation since its last change, and move it on to now."""
        segment = compute.segment
        slow = compute.slow
        if compute.end == self.now:
            progress = segment.total_s
        else:
            before = segment.time_of(compute.progress, slow=slow)
            progress = segment.progress_after(before + self.now - compute.since, slow=slow)
        if self.now > compute.since:
            times = compute.since, self.now, compute.progress, progress
            lane.busy.append(Busy(*compute.where, segment, *times, slow))
        compute.progress = progress
        compute.since = self.now

    def _end_compute(self, lane: Lane, stream: _Stream) -> None:
        compute = stream.compute
        step = stream.step
        assert compute is not None
        assert step is not None
        self._record(lane, compute)
        lane.num_computing -= 1
        stream.compute = None
        stream.is_busy = False
        if stream.singles:
            stream.single += 1
            if stream.single < len(stream.singles):
                self._start(lane, stream)
                return
            stream.singles = ()
            stream.single = 0
        self._end_item(lane, stream, step)

    def _end_item(self, lane: Lane, stream: _Stream, step: Step) -> None:
        item = stream.items[stream.place]
        step.ends[item] = self.now
        step.num_left -= 1
        stream.place += 1
        program = lane.program
        dependents = [(step, other) for other in program.dependents.get(item, ())]
        if step is not lane.steps[-1]:
            following = lane.steps[step.number + 1]
            later = program.next_dependents.get(item, ())
            dependents += [(following, other) for other in later]
        for its, other in dependents:
            its.waiting[other] -= 1
        self._start(lane, stream)
        for _, other in dependents:
            self._start(lane, lane.streams[program.streams[other]])

    def _transfer(self, sides: list[_Side]) -> None:
        time_s = max(side.part.time_s for side in sides)
        contends = any(side.part.contends for side in sides)
        transfer = _Transfer(time_s, self.now, self.now, sides, contends)
        transfer.slow = contends and any(side.lane.is_computing for side in sides)
        for side in sides:
            side.lane.moved.setdefault((side.step.number, side.item), self.now)
            side.lane.has_changed = True
            side.lane.transfers[transfer] = None
        self._plan_transfer(transfer)
        for side in sides[:-1]:
            self._settle(side.lane)

    def _plan_transfer(self, transfer: _Transfer) -> None:
        factor = self._comm_slowdown if transfer.slow else 1.0
        transfer.end = self.now + transfer.left_s * factor
        self._push(transfer.end, transfer.sides[-1].lane, transfer)

    def _end_transfer(self, transfer: _Transfer) -> None:
        transfer.end = -math.inf
        for lane, _, _, _ in transfer.sides:
            lane.has_changed = True
            del lane.transfers[transfer]
            lane.sent.append((transfer.start, self.now))
        for lane, step, item, _ in transfer.sides:
            key = step.number, item
            lane.parts_left[key] -= 1
            if not lane.parts_left[key]:
                del lane.parts_left[key]
                stream = lane.streams[lane.program.streams[item]]
                stream.is_busy = False
                self._end_item(lane, stream, step)
        for side in transfer.sides[:-1]:
            self._settle(side.lane)

    def _settle(self, lane: Lane) -> None:
        """Slow down or speed up what runs, where other work began or ended."""
        if lane.is_computing is not (lane.num_computing > 0):
            lane.is_computing = not lane.is_computing
            for transfer in lane.transfers:
                slow = transfer.contends and any(s.lane.is_computing for s in transfer.sides)
                if slow is not transfer.slow:
                    factor = self._comm_slowdown if transfer.slow else 1.0
                    transfer.left_s -= (self.now - transfer.since) / factor
                    transfer.left_s = max(0.0, transfer.left_s)
                    transfer.since = self.now
                    transfer.slow = slow
                    self._plan_transfer(transfer)
        if lane.has_changed:
            lane.has_changed = False
            lane.is_sending = any(transfer.contends for transfer in lane.transfers)
            for stream in lane.streams:
                compute = stream.compute
                if compute is not None and not compute.is_fixed:
                    self._record(lane, compute)
                    if compute.slow is not lane.is_sending:
                        compute.slow = lane.is_sending
                        self._plan_compute(lane, stream, compute)
