"""Consecutive steps of all stages where nothing slows anything and hosts are ahead.

Every start is then the latest of the ends before it, so that items are computed one by one in
issue order instead of as events in time (step_events.py).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

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
