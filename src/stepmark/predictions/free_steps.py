"""Consecutive steps of all stages where nothing slows anything.

Every start is then the latest of the ends before it and of its issue by the host, so that items
are computed one by one in issue order instead of as events in time (step_events.py).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stepmark.predictions.program import Program
from stepmark.predictions.step_events import Lane, Meetings, Step, host_start
from stepmark.predictions.works import Busy, Call, Segment


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

    Items may be Regions, if they wait for no host.
    """

    def __init__(self, programs: Sequence[Program], hosts: Collection[int] = ()) -> None:
        self.lanes = [
            Lane(stage, program, stage in hosts) for stage, program in enumerate(programs)
        ]
        self._durations = [[*map(_alone_s, program.works)] for program in programs]
        self._meetings = Meetings[_Side]()
        self._recorded = set[int]()

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

    def record(self, lane: Lane, number: int) -> None:
        """Record the computation of a stage's step, and its calls without other stages."""
        if lane.stage in self._recorded:
            return
        self._recorded.add(lane.stage)
        works = lane.program.works
        lane.busy = [
            Busy(number, item, own, begin, begin + own.total_s, 0.0, own.total_s, False)
            for item in lane.program.queues[0]
            if isinstance(work := works[item], Segment) and work.total_s
            for own, begin in _computed(lane, lane.steps[number], item, work)
        ]
        alone = [i for i, _ in lane.program.calls if self._durations[lane.stage][i] is not None]
        for step in lane.steps:
            for item in alone:
                lane.sent.append((step.starts[item], step.ends[item]))
                lane.moved[step.number, item] = step.starts[item]

    def _pass(self, lane: Lane) -> Iterator[int]:
        """Compute a step in issue order. Yield how many items were, before one that waits."""
        program = lane.program
        step, free = self._begin(lane)
        earliest = _earliest(lane, step)
        starts, ends = step.starts, step.ends
        last: list[int | None] = [None] * len(free)
        durations = self._durations[lane.stage]
        count = 0
        for item, (stream, deps) in enumerate(zip(program.streams, program.deps, strict=True)):
            own = last[stream]
            start = max(free[stream], earliest[item]) if earliest else free[stream]
            for dep in deps if own is None else (own, *deps):
                while (end := ends[dep]) != end:  # NaN: not yet
                    yield count
                    count = 0
                start = max(start, end)
            starts[item] = start
            last[stream] = item
            duration_s = durations[item]
            if duration_s is None:
                self._meet(lane, step, item)
            else:
                ends[item] = start + duration_s
                if lane.has_host and isinstance(work := program.works[item], Segment):
                    issued_s = step.host_start + program.begins[item]
                    ends[item] = max(ends[item], issued_s + work.tail_s)
            count += 1
        while any(map(math.isnan, ends)):
            yield count
            count = 0

    def _begin(self, lane: Lane) -> tuple[Step, list[float]]:
        """Begin a step. Return it, and when each stream is free."""
        number = len(lane.steps)
        queues = lane.program.queues
        free = [0.0] * len(queues)
        if number:
            ends = lane.steps[-1].ends
            free = [max(lane.ends[-1], ends[queue[-1]]) for queue in queues]
        size = len(lane.program.works)
        nan = [math.nan] * size
        step = Step(number, host_start(lane), [], nan, nan.copy(), size)
        lane.steps.append(step)
        return step, free

    def _meet(self, lane: Lane, step: Step, item: int) -> None:
        """Begin a call whose parts other stages take part in."""
        work = lane.program.works[item]
        assert isinstance(work, Call)
        parts = _Parts(lane, step, item, len(work.parts))
        for part, ordinal in zip(work.parts, lane.program.ordinals[item], strict=True):
            key = part.key, step.number, ordinal
            if sides := self._meetings.join(part, key, (parts, part.time_s)):
                _transfer(sides)


def _earliest(lane: Lane, step: Step) -> list[float]:
    """Return when each item can start by its host and the step before; [] without either."""
    program = lane.program
    earliest = list[float]()
    if lane.has_host:
        earliest = [step.host_start + issue for issue in program.issues]
    if step.number and program.next_dependents:
        earliest = earliest or [0.0] * len(program.works)
        before = lane.steps[step.number - 1]
        for dep, dependents in program.next_dependents.items():
            for item in dependents:
                earliest[item] = max(earliest[item], before.ends[dep])
    return earliest


def _alone_s(work: Segment | Call) -> float | None:
    """Return the seconds of a work of one stage; None: it waits for others."""
    if isinstance(work, Segment):
        return work.total_s
    if any(part.key is not None for part in work.parts):
        return None
    return max(part.time_s for part in work.parts)


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
