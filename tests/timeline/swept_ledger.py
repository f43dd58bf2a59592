"""The ledger of events, by a sweep over time: what faster ways are compared with."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stepmark.timeline.ledger import Group, Idle, Ledger, Line


@dataclass(frozen=True, slots=True)
class Event:
    """Work of one kind, from start to end in ns."""

    group: Group  # COMPUTE, COMM or COPIES
    name: str  # of Work, or of a collective
    start_ns: int
    end_ns: int


# (start, end of an idle time) -> its parts by cause
Causes = Callable[[int, int], Iterable[tuple[Idle, int]]]


def ledger(events: Iterable[Event], start_ns: int, end_ns: int, causes: Causes) -> Ledger:
    """Return the ledger of the window [start_ns, end_ns).

    Compute goes before communication, this before copies; among events of one group the one
    that began first has the time. causes: splits an idle time by cause.
    """
    lines: Counter[Line] = Counter()
    for first, last, running in _pieces(events, start_ns, end_ns):
        computes, comms, copies = (running[group] for group in _ORDER)
        if computes:
            group = Group.OVERLAPPED if comms else Group.COMPUTE
            lines[group, computes] += last - first
        elif comms or copies:
            group = Group.COMM if comms else Group.COPIES
            lines[group, comms or copies] += last - first
        else:
            for cause, time_ns in causes(first, last):
                if time_ns:
                    lines[Group.IDLE, str(cause)] += time_ns
    return Ledger(window_ns=end_ns - start_ns, lines=dict(lines))


_ORDER = (Group.COMPUTE, Group.COMM, Group.COPIES)


def _pieces(
    events: Iterable[Event], start_ns: int, end_ns: int
) -> Iterator[tuple[int, int, dict[Group, str]]]:
    """Yield pieces of the window with the first running event's name of each group, or "".

    Idle pieces are maximal: nothing begins or ends inside them.
    """
    clipped = sorted(
        (max(event.start_ns, start_ns), min(event.end_ns, end_ns), index, event)
        for index, event in enumerate(events)
        if event.start_ns < end_ns and event.end_ns > start_ns and event.end_ns > event.start_ns
    )
    running: dict[Group, list[tuple[int, int, int, str]]] = {group: [] for group in _ORDER}
    now, place = start_ns, 0
    while now < end_ns:
        while place < len(clipped) and clipped[place][0] <= now:
            first, last, index, event = clipped[place]
            heapq.heappush(running[event.group], (first, index, last, event.name))
            place += 1
        names = {}
        until = clipped[place][0] if place < len(clipped) else end_ns
        for group, heap in running.items():
            while heap and heap[0][2] <= now:
                heapq.heappop(heap)
            names[group] = heap[0][3] if heap else ""
            if heap:
                until = min(until, heap[0][2])
        yield now, until, names
        now = until
