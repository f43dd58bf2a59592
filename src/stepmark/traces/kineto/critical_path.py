"""The critical path of a step: what each moment of its window was spent on, from its end back.

From the last GPU event back: an event starts when its stream is free, its launch has returned,
and what its stream was made to wait for has ended; the last of these is its cause. A launch is
caused by what the host thread did since it last waited for the GPU. A collective ends when the
last rank has arrived: there the path goes on. Segments tile the window exactly.

Which event of another stream is awaited stands in few traces (cuda_sync). In others it is
inferred: the last event to end before the start, where stream and launch do not explain it and
the host made a stream wait since the launch before.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import median

import numpy as np

from stepmark.timeline.critical_path import (
    COMMUNICATION,
    GAP,
    HOST,
    LAUNCH,
    PEER,
    UNKNOWN,
    Path,
    Segment,
)
from stepmark.timeline.trace_columns import NONE
from stepmark.traces.kineto.intervals import clip, union
from stepmark.traces.kineto.step_work import HostThread, Instance, StepWork

# A launch, or the next event of a stream, needs 1 to 7 us on an H200.
_DELAY_NS = 10_000
# Ends of a collective differ over ranks by some 10 us. Clocks are set so that half of them
# differ by less; below it a rank counts as no later than another.
CLOCKS_NS = 20_000
_PYTHON = "Python and other host code"  # between operations and calls that the trace names


def critical_path(works: Mapping[int, StepWork]) -> Path:
    """Return the critical path of one step. works: by rank."""
    walk = _Walk(works)
    rank = walk.from_last_end()
    return Path(
        step=walk.ranks[rank].work.step,
        rank=rank,
        window=walk.ranks[rank].work.window,
        segments=tuple(reversed(walk.segments)),
        at_least=walk.at_least(rank),
        without_clocks=tuple(sorted(works.keys() - walk.offsets.keys())),
        absent=tuple(sorted(walk.absent)),
        unmatched=walk.unmatched,
        uncounted=walk.uncounted,
    )


def _offsets(works: Mapping[int, StepWork]) -> dict[int, int]:
    """Return how far the clock of each rank is ahead of the first one's, where it is known.

    That is the median over the collectives that two ranks have in common, as all ranks leave
    them at about the same time.
    """
    ends = {
        rank: dict(zip(work.instance, work.end.tolist(), strict=True))
        for rank, work in works.items()
    }
    offsets = {min(works): 0}
    reached = [min(works)]
    for known in reached:
        for other in works.keys() - offsets.keys():
            spread = [
                ends[other][each] - ends[known][each]
                for each in ends[other].keys() & ends[known].keys() - {None}
            ]
            ahead = round(median(spread or (0,)))
            if spread and median(abs(each - ahead) for each in spread) <= CLOCKS_NS:
                offsets[other] = offsets[known] + ahead
                reached.append(other)
    return offsets


class _Rank:
    """A rank's columns as lists, which a walk reads one by one, and what it derives of them."""

    def __init__(self, work: StepWork) -> None:
        self.work = work
        self.start: list[int] = work.start.tolist()
        self.end: list[int] = work.end.tolist()
        self.category, self.launch = work.category.tolist(), work.launch.tolist()
        self.thread: list[int] = work.thread.tolist()
        self.after: list[int] = work.after.tolist()
        self.waits_on_stream: list[bool] = work.waits_on_stream.tolist()
        self.by_end = np.argsort(work.end, kind="stable").tolist()
        self.ends = [self.end[row] for row in self.by_end]
        self.before: list[int] = []  # the event before it on its stream, or NONE
        newest: dict[int, int] = {}
        for row, stream in enumerate(work.stream.tolist()):
            self.before.append(newest.get(stream, NONE))
            newest[stream] = row
        self.rows = {instance: row for row, instance in enumerate(work.instance)}

    def last_ended(self, row: int) -> int:
        """Return the last event to end before this one starts, or NONE."""
        place = bisect_right(self.ends, self.start[row]) - 1
        while place >= 0 and self.start[self.by_end[place]] >= self.start[row]:
            place -= 1
        return self.by_end[place] if place >= 0 else NONE


class _Walk:
    def __init__(self, works: Mapping[int, StepWork]) -> None:
        self.offsets = _offsets(works)
        self.ranks = {
            rank: _Rank(work.earlier(self.offsets.get(rank, 0))) for rank, work in works.items()
        }
        self.segments: list[Segment] = []
        self.absent: set[int] = set()
        self.unmatched = self.uncounted = self.time = self.floor = 0
        self._unequal = _unequal(works)

    def at_least(self, rank: int) -> dict[str, int]:
        """Return the longest work that remains without each category of the path.

        Waiting for other ranks is no work: it may end with what is left out.
        """
        spent: Counter[str] = Counter()
        for segment in self.segments:
            spent[segment.category] += segment.time
        own = self.ranks[rank]
        end = own.work.end.copy()
        for row in np.flatnonzero(own.work.category == COMMUNICATION).tolist():
            calls, is_complete = self._rows(rank, row)
            end[row] = own.start[row] + (self._shortest(calls) if is_complete else 0)
        zero = end == own.work.start
        whole = union(own.work.start[zero], own.work.end[zero])
        self.uncounted = clip(whole, *own.work.window).total
        result = {}
        for category, time in spent.items():
            remains = sum(spent.values()) - time
            remains -= spent[PEER] if category != PEER else 0
            remains -= self.unmatched if category != COMMUNICATION else 0
            for stream in np.unique(own.work.stream):
                rows = (own.work.category != category) & (own.work.stream == stream)
                busy = clip(union(own.work.start[rows], end[rows]), *own.work.window)
                remains = max(remains, busy.total)
            result[category] = remains
        return result

    def from_last_end(self) -> int:
        """Walk back from where the last rank ends, of those whose clocks are set. Return it."""
        last = max(self.offsets, key=lambda each: (self.ranks[each].work.window[1], -each))
        rank = last
        work = self.ranks[last].work
        self.floor, self.time = work.window
        row = int(np.flatnonzero(work.end == self.time)[0])
        while self.time > self.floor and row != NONE:
            rank, row = self._event(rank, row)
            row = self._cause(rank, row)
        self._to(self.floor, rank, UNKNOWN, "before the events that were read")
        return last

    def _to(
        self, start: int, rank: int, category: str, name: str, *, is_inferred: bool = False
    ) -> None:
        """Add the segment from this start to where the path is."""
        start = max(start, self.floor)
        if start < self.time:
            self.segments.append(Segment(rank, start, self.time, category, name, is_inferred))
            self.time = start

    def _event(self, rank: int, row: int) -> tuple[int, int]:
        """Add an event. Return the one whose start is next: that of the last rank to arrive."""
        own = self.ranks[rank]
        start = own.start[row]
        name = own.work.name[row]
        if own.category[row] != COMMUNICATION:
            self._to(start, rank, own.category[row], name)
            return rank, row
        rows, is_complete = self._rows(rank, row)
        arrival, cause = self._arrival(rank, row, rows)
        since = self.time
        self._to(arrival, rank, COMMUNICATION, name)
        self.unmatched += 0 if is_complete else since - self.time
        if cause == (rank, row):
            self._to(start, rank, PEER, name)
        return cause

    def _arrival(
        self, rank: int, row: int, rows: Mapping[int, int]
    ) -> tuple[int, tuple[int, int]]:
        """Return when the last rank arrived at a collective, and its event of the collective.

        Where clocks do not tell that event, it is the rank's own.
        """
        own = self.ranks[rank]
        start = own.start[row]
        if rows.keys() <= self.offsets.keys():
            last = max(rows, key=lambda other: (self.ranks[other].start[rows[other]], -other))
            arrival = self.ranks[last].start[rows[last]]
            if arrival - start <= CLOCKS_NS:
                return start, (rank, row)
            if arrival < self.time:
                return arrival, (last, rows[last])
        return max(start, own.end[row] - self._shortest(rows)), (rank, row)

    def _shortest(self, rows: Mapping[int, int]) -> int:
        """Return the time of a collective on the rank that waited least."""
        return min(
            self.ranks[each].end[at] - self.ranks[each].start[at] for each, at in rows.items()
        )

    def _rows(self, rank: int, row: int) -> tuple[dict[int, int], bool]:
        """Return the event of each rank of a collective that has a trace, and if all have."""
        instance = self.ranks[rank].work.instance[row]
        if instance is None or (instance.members, instance.group) in self._unequal:
            return {rank: row}, False
        traced = {
            other: self.ranks[other].rows for other in instance.members if other in self.ranks
        }
        rows = {other: own[instance] for other, own in traced.items() if instance in own}
        self.absent.update(set(instance.members) - set(rows))
        return rows, len(rows) == len(instance.members)

    def _cause(self, rank: int, row: int) -> int:
        """Add what lies before the start of an event. Return the event that it waited for."""
        own = self.ranks[rank]
        start = self.time
        before = own.before[row]
        thread = own.thread[row]
        free = min(own.end[before], start) if before != NONE else NONE
        launched = min(own.launch[row], start) if thread != NONE else NONE
        known = max(free, launched)
        other = own.after[row]
        is_inferred = other == NONE and own.waits_on_stream[row] and start - known > _DELAY_NS
        if is_inferred:
            other = own.last_ended(row)
        if other != NONE and known < own.end[other] <= start:
            name = "after an event of another stream"
            self._to(own.end[other], rank, GAP, name, is_inferred=is_inferred)
            return other
        is_short = start - known <= _DELAY_NS
        if known == NONE or self.time <= self.floor:
            return NONE
        if free >= launched:
            name = "between events of a stream" if is_short else "no cause in the trace"
            self._to(free, rank, GAP, name)
            return before
        name = "from the launch to the start" if is_short else "no cause in the trace"
        self._to(launched, rank, LAUNCH if is_short else GAP, name)
        return self._host(rank, thread)

    def _host(self, rank: int, thread: int) -> int:
        """Add what host threads did. Return the GPU event that the host had waited for."""
        own = self.ranks[rank]
        latest = self.time
        while self.time > self.floor and thread in own.work.threads:
            host = own.work.threads[thread]
            sync = int(np.searchsorted(host.sync_end, self.time, side="right")) - 1
            hand = int(np.searchsorted(host.handoff_end, latest, side="right")) - 1
            synced = int(host.sync_end[sync]) if sync >= 0 else self.floor
            if hand >= 0 and host.handoff_end[hand] > synced:
                self._operations(rank, host, int(host.handoff_start[hand]))
                thread = int(host.handoff_thread[hand])
                latest = self.time - 1
                continue
            self._operations(rank, host, synced)
            if sync < 0 or self.time <= self.floor:
                return NONE
            row = int(host.sync_row[sync])
            self._to(own.end[row], rank, HOST, "return from waiting for the GPU")
            return row
        self._to(self.floor, rank, HOST, _PYTHON)
        return NONE

    def _operations(self, rank: int, host: HostThread, until: int) -> None:
        """Add the operations of a thread back to a time."""
        until = max(until, self.floor)
        place = int(np.searchsorted(host.start, self.time)) - 1
        while place >= 0 and self.time > until:
            start = int(host.start[place])
            end = int(host.end[place])
            self._to(max(end, until), rank, HOST, _PYTHON)
            self._to(max(start, until), rank, HOST, host.name[place])
            place -= 1
        self._to(until, rank, HOST, _PYTHON)


def _unequal(works: Mapping[int, StepWork]) -> set[tuple[tuple[int, ...], str]]:
    """Return the groups whose collectives differ over the ranks that have a trace."""
    calls: dict[tuple[tuple[int, ...], str], dict[int, set[Instance]]] = defaultdict(dict)
    for rank, work in works.items():
        for each in filter(None, work.instance):
            calls[each.members, each.group].setdefault(rank, set()).add(each)
    return {
        group
        for group, by_rank in calls.items()
        if len(set(map(frozenset, by_rank.values()))) > 1
    }
