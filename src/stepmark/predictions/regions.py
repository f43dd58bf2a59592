"""Regions: parts of a program that begin and end with computation, simulated once."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate

from stepmark.predictions.program import Program
from stepmark.predictions.step_events import Lane, Step
from stepmark.predictions.works import Call, Placed, Segment
from stepmark.step.workload import COMPUTE


class Region(Segment):
    """Computation with calls beside it, which begin after it does and end before it does.

    Nothing outside waits for what is inside or slows it, and its host is ahead of it. placed:
    the items. key: tells it from others, whenever it is compiled. streams: those of the calls
    beside. run_alone: returns a stage that has run the
    items alone, from second 0 to total_s.
    """

    def __init__(
        self, placed: Sequence[Placed], total_s: float, run_alone: Callable[[], Lane]
    ) -> None:
        works = [work for work, _, _ in placed]
        self.placed = placed
        self.total_s = total_s
        self.ends = self.slowed = [0.0, total_s]
        self._run_alone = run_alone
        self.streams = {work.ops[0].stream for work in works} - {COMPUTE}
        for work in works:
            if isinstance(work, Region):
                self.streams |= work.streams
        self.ops = works[0].ops
        self.key = tuple(id(work.ops[0]) for work in works)
        self.host_s = sum(work.host_s for work in works)
        self.issues = [self.host_s]
        self.num_kernels = sum(work.num_kernels for work in works)
        self.computed_s = sum(work.computed_s for work in works if isinstance(work, Segment))

    @cached_property
    def alone(self) -> Lane:
        """The stage that has run the items alone."""
        return self._run_alone()

    @cached_property
    def lane(self) -> Lane:
        """The stage that has run the expanded items alone."""
        return with_items(self.alone)


def expanded(placed: Placed) -> Iterator[Placed]:
    """Yield the items of a Region and of those inside of it, or the item itself."""
    work, layer, microbatch = placed
    if not isinstance(work, Region):
        yield placed
        return
    for each, own, mb in work.placed:
        yield from expanded((each, layer + own, microbatch + mb))


def met(lane: Lane, kind: type[Segment]) -> Iterator[Segment | Call]:
    """Yield works of a kind during which messages beside the computation move."""
    program = lane.program
    items = [item for item in program.queues[0] if isinstance(program.works[item], kind)]
    times = sorted(
        (step.starts[item], _end(step, item), item)
        for step in lane.steps
        for item in items
        if not math.isnan(step.starts[item])
    )
    starts = [start for start, _, _ in times]
    for step in lane.steps:
        for item, call in program.calls:
            if not (call.contends and program.streams[item]) or math.isnan(step.starts[item]):
                continue
            moved = lane.moved.get((step.number, item), step.starts[item])
            last = bisect_left(starts, _end(step, item)) - 1  # that began before its end
            while last >= 0 and times[last][1] > moved:
                yield program.works[times[last][2]]
                last -= 1


def _end(step: Step, item: int) -> float:
    """Return when an item ends; infinity: it runs."""
    end = step.ends[item]
    return math.inf if math.isnan(end) else end


def with_items(lane: Lane) -> Lane:
    """Return a stage with the items of its Regions, and what ran."""
    program = lane.program
    if not any(isinstance(work, Region) for work in program.works):
        return lane
    pairs = zip(program.works, program.offsets, strict=True)
    items = [[*expanded((work, *offset))] for work, offset in pairs]
    firsts = [0, *accumulate(map(len, items))]
    placed = [each for own in items for each in own]
    # Nothing asks for streams and for what waits.
    whole = Program(placed, [0] * len(placed), [()] * len(placed), {})
    whole.bounds = [firsts[bound] for bound in program.bounds]
    new = Lane(lane.stage, whole, lane.has_host, ends=lane.ends, unfinished=lane.unfinished)
    new.sent = lane.transferred
    new.moved = {(step, firsts[item]): time_s for (step, item), time_s in lane.moved.items()}
    new.busy = [
        each._replace(item=firsts[each.item])
        for each in lane.busy
        if not isinstance(program.works[each.item], Region)
    ]
    for step in lane.steps:
        times = list[tuple[float, float]]()
        for first, work, start, end in zip(
            firsts, program.works, step.starts, step.ends, strict=False
        ):
            if isinstance(work, Region):
                times += _place(new, work.lane, step.number, first, start)
            else:
                times.append((start, end))
        starts, ends = map(list, zip(*times, strict=True))
        new.steps.append(Step(step.number, step.host_start, [], starts, ends, step.num_left))
    return new


def _place(
    lane: Lane, alone: Lane, step: int, first: int, start: float
) -> Iterator[tuple[float, float]]:
    """Yield the times of a Region's items; record in a stage what ran. start: NaN: not yet.

    first: of the items in the stage.
    """
    own = alone.steps[0]
    yield from ((start + a, start + b) for a, b in zip(own.starts, own.ends, strict=True))
    if math.isnan(start):
        return
    lane.busy += [
        each._replace(
            step=step, item=first + each.item, start=start + each.start, end=start + each.end
        )
        for each in alone.busy
        if not each.step
    ]
    ended = alone.ends[0]
    lane.sent += [(start + a, start + b) for a, b in alone.sent if a < ended]
    lane.moved |= {
        (step, first + item): start + time_s
        for (number, item), time_s in alone.moved.items()
        if not number
    }
