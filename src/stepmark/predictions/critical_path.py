"""The critical path of a simulated stage: the messages for which the end of its step waits."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator

from stepmark.predictions.regions import Region
from stepmark.predictions.step_events import Lane
from stepmark.predictions.works import Call

_SAME = 1e-9  # of a step: times that differ less are equal


def critical_messages(lane: Lane, number: int, since: float) -> Iterator[tuple[float, float]]:
    """Yield when messages on the critical path of a step move, the latest first.

    since: the time back to which the path is followed. From the last computation it goes back
    to what ended last of all that an item waits for: the item before on its stream, items of
    other streams, and those of the step before. It ends at one that waits for its host, which
    is busy until then; the delays of other stages are no part of it.
    """
    program = lane.program
    of_step_before = defaultdict[int, list[int]](list)
    for dep, dependents in program.next_dependents.items():
        for dependent in dependents:
            of_step_before[dependent].append(dep)
    tolerance = _SAME * (lane.ends[number] - since)
    path = [(lane.ends[number], number, program.queues[0][-1])]
    while path and path[0][0] > since:
        end, number, item = path[0]
        work = program.works[item]
        start = lane.steps[number].starts[item]
        if isinstance(work, Call):
            yield lane.moved.get((number, item), start), end
        elif isinstance(work, Region):
            inside = critical_messages(work.alone, 0, since - start)
            yield from ((start + begin, start + stop) for begin, stop in inside)
        queue = program.queues[program.streams[item]]
        place = bisect_left(queue, item)
        awaited = [(number, dep) for dep in program.deps[item]]
        if place:
            awaited.append((number, queue[place - 1]))
        if number:
            before = (
                of_step_before.get(item, []) if place else [queue[-1], program.queues[0][-1]]
            )
            awaited += [(number - 1, dep) for dep in before]
        ends = [(lane.steps[step].ends[dep], step, dep) for step, dep in awaited]
        latest = max((end for end, _, _ in ends), default=start)
        if lane.has_host and start > latest:
            return
        # Of what ends at once, computation: then a faster message shortens nothing.
        last = [
            (program.streams[dep] == 0, step, dep, end)
            for end, step, dep in ends
            if end >= latest - tolerance
        ]
        path = [(end, step, dep) for _, step, dep, end in sorted(last)[-1:]]
