"""Consecutive steps of all stages where nothing slows anything and hosts are ahead.

Every start is then the latest of the ends before it, so that items are computed one by one in
issue order instead of as events in time (step_events.py), and the ledger is a sum over items.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stepmark.core.ledger import (
    CONTENTION,
    RECOMPUTED,
    TRANSFER,
    Group,
    Idle,
    Line,
    Work,
)
from stepmark.predict.program import Program
from stepmark.predict.step_events import Lane, Step
from stepmark.predict.works import Busy, Call, Part, Segment

_DIGITS = 12  # of cuts of segments in seconds: equal cuts differ in the last bits of a float


def is_serial(programs: Iterable[Program]) -> bool:
    """Return whether all computation of a stage is on one stream."""
    return not any(
        isinstance(program.works[item], Segment)
        for program in programs
        for queue in program.queues[1:]
        for item in queue
    )


class _Side(NamedTuple):
    """One stage's part of a transfer between stages, which starts when all sides have."""

    lane: Lane
    step: Step
    item: int
    part: Part
    start: float


class FreeSteps:
    """Simulates steps as Simulator does. Compute may be merged with calls inside its stage."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.lanes = [Lane(stage, program, False) for stage, program in enumerate(programs)]
        self._meetings: dict[object, list[_Side]] = {}
        self._latest: dict[tuple[int, int, int], float] = {}  # ends of calls' parts

    def run(self, num_steps: int) -> bool:
        """Run so many steps; False: stages wait for one another."""
        while len(self.lanes[0].ends) < num_steps:
            size = len(self.lanes[0].ends)
            passes = {lane.stage: self._pass(lane) for lane in self.lanes}
            while passes:
                counts = {stage: next(each, None) for stage, each in passes.items()}
                if not any(counts.values()) and None not in counts.values():
                    return False
                passes = {s: each for s, each in passes.items() if counts[s] is not None}
            for lane in self.lanes:
                step = lane.steps[size]
                lane.ends.append(step.ends[lane.program.queues[0][-1]])
                step.num_left = sum(end > lane.ends[size] for end in step.ends)
                lane.unfinished.append(step.num_left)
        return True

    def record(self, number: int) -> None:
        """Record the computation of a step."""
        for lane in self.lanes:
            step, works = lane.steps[number], lane.program.works
            lane.busy = [
                Busy(
                    number,
                    item,
                    work,
                    step.starts[item],
                    step.ends[item],
                    0.0,
                    total_s,
                    slow=False,
                )
                for item in lane.program.queues[0]
                if isinstance(work := works[item], Segment) and (total_s := work.total_s)
            ]

    def _pass(self, lane: Lane) -> Iterator[int]:
        """Compute a step in issue order. Yield how many items were, before one that waits."""
        program, number = lane.program, len(lane.steps)
        before = lane.steps[-1] if number else None
        begin, size = lane.ends[-1] if number else 0.0, len(program.works)
        starts, ends = [math.nan] * size, [math.nan] * size
        lane.steps.append(step := Step(number, 0.0, [], starts, ends, size))
        earlier: dict[int, float] = {}
        if before:
            for dep, dependents in enumerate(program.next_dependents):
                for item in dependents:
                    earlier[item] = max(earlier.get(item, 0.0), before.ends[dep])
        free = [before.ends[queue[-1]] if before else 0.0 for queue in program.queues]
        last: list[int | None] = [None] * len(free)
        count = 0
        for item, (work, stream, deps) in enumerate(
            zip(program.works, program.streams, program.deps, strict=True)
        ):
            own = last[stream]
            awaited = deps if own is None else [own, *deps]
            earliest = max(begin, free[stream], earlier.get(item, 0.0))
            while math.isnan(start := _latest(earliest, awaited, ends)):
                yield count
                count = 0
            starts[item], last[stream] = start, item
            if isinstance(work, Segment):
                ends[item] = start + work.total_s
            else:
                self._call(lane, step, item, work)
            count += 1
        while any(map(math.isnan, ends)):
            yield count
            count = 0

    def _call(self, lane: Lane, step: Step, item: int, call: Call) -> None:
        lane.parts_left[step.number, item] = len(call.parts)
        for part, ordinal in zip(call.parts, lane.program.ordinals[item], strict=True):
            key = part.key, step.number, ordinal
            sides = self._meetings.setdefault(key, []) if part.key is not None else []
            sides.append(_Side(lane, step, item, part, step.starts[item]))
            if len(sides) == part.num_stages:
                self._meetings.pop(key, None)
                self._transfer(sides)

    def _transfer(self, sides: list[_Side]) -> None:
        start = max(side.start for side in sides)
        end = start + max(side.part.time_s for side in sides)
        for lane, step, item, _, _ in sides:
            where = step.number, item
            lane.sent.append((start, end))
            lane.moved[where] = min(start, lane.moved.get(where, start))
            lane.parts_left[where] -= 1
            latest = self._latest[lane.stage, *where] = max(
                end, self._latest.get((lane.stage, *where), end)
            )
            if not lane.parts_left[where]:
                step.ends[item] = latest


def _latest(earliest: float, items: Iterable[int], ends: Sequence[float]) -> float:
    """Return when these items have ended; NaN: unknown yet."""
    for item in items:
        if not (end := ends[item]) <= earliest:
            if math.isnan(end):
                return end
            earliest = end
    return earliest


class _Cover(NamedTuple):
    """Time in which a call has the line of communication. began: of the call."""

    start: float
    end: float
    name: str
    began: float


def seconds_of(
    lane: Lane, number: int, end: float, length_s: float
) -> tuple[dict[Line, float], dict[str, float], float]:
    """Return the seconds of a stage's window by line, of what is within, and of messages.

    end: of the window. What is left of the window is idle.
    """
    start = end - length_s
    busy = [each for each in lane.busy if each.end > start and each.start < end]
    total = _under([_Cover(start, end, "", start)], busy)
    calls = _covers(_calls(lane, number), start, end)
    moves = _covers([(*times, TRANSFER) for times in lane.sent], start, end)
    hidden, moving = _under(calls, busy), _under(moves, busy)
    lines, recomputed_s = defaultdict[Line, float](float), 0.0
    for (_, work, is_recomputed), time_s in total.items():
        lines[_line(work)] += time_s
        recomputed_s += time_s * is_recomputed * isinstance(work, Work)
    for (name, work, _), time_s in hidden.items():
        lines[_line(work)] -= time_s
        if _is_compute(work):
            lines[Group.OVERLAPPED, work] += time_s
            lines[Group.COMM, name] -= time_s
    for call in calls:
        lines[Group.COMM, call.name] += call.end - call.start
        for name, time_s in _own_first(call, busy):
            lines[Group.COMM, call.name] -= time_s
            lines[Group.COMM, name] += time_s
    moved_s: float = sum(move.end - move.start for move in moves)
    moved_s += sum(time_s for (_, work, _), time_s in total.items() if _is_call(work))
    moved_s -= sum(time_s for (_, work, _), time_s in moving.items() if _is_call(work))
    computed_s = sum(time_s for (_, work, _), time_s in moving.items() if _is_compute(work))
    within = {CONTENTION: 0.0, RECOMPUTED: recomputed_s, TRANSFER: moved_s - computed_s}
    return lines, within, moved_s


def _is_call(work: str) -> bool:
    return not isinstance(work, Work | Idle)


def _is_compute(work: str) -> bool:
    return isinstance(work, Work) and work is not Work.COPY


def _line(work: str) -> Line:
    """Return the line of work where no other call is."""
    if isinstance(work, Idle):
        return Group.IDLE, work
    if _is_call(work):
        return Group.COMM, work
    return (Group.COPIES if work is Work.COPY else Group.COMPUTE), work


def _calls(lane: Lane, number: int) -> Iterator[tuple[float, float, str]]:
    """Yield start, end and name of the calls of a step and of the one before."""
    for step in lane.steps[max(0, number - 1) : number + 1]:
        for work, start, end in zip(lane.program.works, step.starts, step.ends, strict=True):
            if isinstance(work, Call):
                yield start, end, work.ops[0].collective


def _covers(
    calls: Iterable[tuple[float, float, str]], start: float, end: float
) -> list[_Cover]:
    """Return the pieces of a window in which calls run; the one that began first has each."""
    covers, now = list[_Cover](), start
    clipped = sorted(
        (max(first, start), name, min(last, end))
        for first, last, name in calls
        if last > start and first < end
    )
    for first, name, last in clipped:
        if last > now:
            covers.append(_Cover(max(first, now), last, name, first))
            now = last
    return covers


def _under(
    covers: Iterable[_Cover], busy: Sequence[Busy]
) -> dict[tuple[str, str, bool], float]:
    """Return the seconds of work in these times, by their name, work and recomputation."""
    counts = Counter[tuple[str, Segment, float, float]]()
    place = 0
    for start, end, name, _ in covers:
        while place < len(busy) and busy[place].end <= start:
            place += 1
        index = place
        while index < len(busy) and busy[index].start < end:
            _, _, segment, begin, stop, _, last, _ = busy[index]
            # Rounded, since equal cuts differ in the last bits.
            first = round(start - begin, _DIGITS) if start > begin else 0.0
            counts[
                name, segment, first, last if end >= stop else round(end - begin, _DIGITS)
            ] += 1
            index += 1
    times = defaultdict[tuple[str, str, bool], float](float)
    for (name, segment, first, last), count in counts.items():
        for (work, is_recomputed), time_s in segment.times(first, last, slow=False).items():
            times[name, work, is_recomputed] += count * time_s
    return times


def _own_first(call: _Cover, busy: Sequence[Busy]) -> Iterator[tuple[str, float]]:
    """Yield the call on the compute stream that has the start of this time, and how long.

    Calls that begin at the same nanosecond are ordered by name.
    """
    index = bisect_right(busy, call.start, key=lambda each: each.start) - 1
    if index >= 0 and busy[index].end > call.start:
        segment, begin = busy[index].segment, busy[index].start
        piece = bisect_right(segment.ends, call.start - begin, hi=len(segment.kinds)) - 1
        work, _ = segment.kinds[piece]
        began = round((begin + segment.ends[piece]) * 1e9)
        if _is_call(work) and (began, work) < (round(call.began * 1e9), call.name):
            yield work, min(call.end, begin + segment.ends[piece + 1]) - call.start
