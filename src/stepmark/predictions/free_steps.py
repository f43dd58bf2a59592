"""Consecutive steps of all stages where nothing slows anything.

Every start is then the latest of the ends before it and of its issue by the host, so that items
are computed one by one in issue order instead of as events in time (step_events.py).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stepmark.predictions.program import Program
from stepmark.predictions.step_events import Lane, Meetings, Step, host_start
from stepmark.predictions.works import Busy, Segment


def is_serial(programs: Iterable[Program]) -> bool:
    """Return whether all computation of a stage is on one stream."""
    return not any(
        isinstance(program.works[item], Segment)
        for program in programs
        for queue in program.queues[1:]
        for item in queue
    )


@dataclass(slots=True, eq=False)
class _Parts:
    """Parts of a stage's call that have not ended; end: of the others."""

    lane: Lane
    step: Step
    item: int
    num_left: int
    end: float = 0.0


_Side = tuple[_Parts, float]  # and its seconds


class FreeSteps:
    """Simulates steps as Simulator does.

    Compute may be merged with calls inside its stage, if it waits for no host.
    """

    def __init__(self, programs: Sequence[Program], hosts: Collection[int] = ()) -> None:
        self.lanes = [
            Lane(stage, program, stage in hosts) for stage, program in enumerate(programs)
        ]
        self._meetings = Meetings[_Side]()

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
            works = lane.program.works
            lane.busy = [
                Busy(number, item, own, begin, begin + own.total_s, 0.0, own.total_s, False)
                for item in lane.program.queues[0]
                if isinstance(work := works[item], Segment) and work.total_s
                for own, begin in _computed(lane, lane.steps[number], item, work)
            ]

    def _pass(self, lane: Lane) -> Iterator[int]:
        """Compute a step in issue order. Yield how many items were, before one that waits."""
        program = lane.program
        number = len(lane.steps)
        before = lane.steps[-1] if number else None
        begin = lane.ends[-1] if number else 0.0
        size = len(program.works)
        starts = [math.nan] * size
        ends = [math.nan] * size
        host = host_start(lane) if lane.has_host else -math.inf
        lane.steps.append(step := Step(number, host, [], starts, ends, size))
        earlier: dict[int, float] = {}
        if before:
            for dep, dependents in program.next_dependents.items():
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
            issue = host + program.issues[item]
            earliest = max(begin, free[stream], earlier.get(item, 0.0), issue)
            while math.isnan(start := _latest(earliest, awaited, ends)):
                yield count
                count = 0
            starts[item] = start
            last[stream] = item
            if isinstance(work, Segment):
                ends[item] = start + work.total_s
                if lane.has_host:
                    ends[item] = max(ends[item], host + program.begins[item] + work.tail_s)
            else:
                parts = _Parts(lane, step, item, len(work.parts))
                for part, ordinal in zip(work.parts, program.ordinals[item], strict=True):
                    key = part.key, number, ordinal
                    if sides := self._meetings.join(part, key, (parts, part.time_s)):
                        _transfer(sides)
            count += 1
        while any(map(math.isnan, ends)):
            yield count
            count = 0


def _computed(
    lane: Lane, step: Step, item: int, segment: Segment
) -> Iterator[tuple[Segment, float]]:
    """Yield a segment with its start: its operations, where one of them waits for the host."""
    start = step.starts[item]
    begin = step.host_start + lane.program.begins[item]
    if not lane.has_host or begin + segment.lead_s <= start:
        yield segment, start
        return
    for single, issue in zip(segment.singles, segment.issues, strict=True):
        start = max(start, begin + issue)
        yield single, start
        start += single.total_s


def _transfer(sides: Sequence[_Side]) -> None:
    """Start a transfer when all of its sides have, and end calls with their last part."""
    start = max(parts.step.starts[parts.item] for parts, _ in sides)
    end = start + max(time_s for _, time_s in sides)
    for parts, _ in sides:
        moved = parts.lane.moved
        where = (parts.step.number, parts.item)
        parts.lane.sent.append((start, end))
        moved[where] = min(start, moved.get(where, start))
        parts.num_left -= 1
        parts.end = max(parts.end, end)
        if not parts.num_left:
            parts.step.ends[parts.item] = parts.end


def _latest(earliest: float, items: Iterable[int], ends: Sequence[float]) -> float:
    """Return when these items have ended; NaN: unknown yet."""
    for item in items:
        if not (end := ends[item]) <= earliest:
            if math.isnan(end):
                return end
            earliest = end
    return earliest
