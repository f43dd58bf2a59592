"""What one process did in one step, compact: its GPU events, their launches, its threads."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stepmark.model.collectives import is_synchronizing, torch_collective
from stepmark.timeline.critical_path import COMMUNICATION, COMPUTE, COPIES
from stepmark.timeline.trace_columns import NONE, CommArgs, Flags, GpuKind, Ints, RankTrace
from stepmark.traces.kineto.export import busy_steps
from stepmark.traces.kineto.intervals import Intervals, join, time_before, union
from stepmark.traces.kineto.links import Steps, gpu_comms, launches, name_flags, parents, steps
from stepmark.traces.kineto.messages import members_of
from stepmark.traces.kineto.stream_waits import WAITS, awaited, made_to_wait
from stepmark.traces.kineto.windows import is_communication
from stepmark.traces.trace_options import TraceInputs

_HANDOFF_NS = 10_000  # shorter pauses of a thread are Python's
# Of the window before it: work that a rank whose clock or step differs may still need.
_MARGIN = 8


class Instance(NamedTuple):
    """One collective of a step, the number-th of its group: the same value on each rank."""

    members: tuple[int, ...]
    group: str
    number: int
    arguments: tuple[str, str, int, int]  # collective, dtype, elements in and out


@dataclass(frozen=True, slots=True, kw_only=True)
class HostThread:
    """Operations and calls of one thread that are inside no other.

    sync_end: ends of calls that waited for the GPU; sync_row: for which event. handoff: at
    handoff_end the thread had paused while another, handoff_thread, worked until handoff_start.
    """

    start: Ints
    end: Ints
    name: list[str]
    sync_end: Ints
    sync_row: Ints
    handoff_start: Ints
    handoff_end: Ints
    handoff_thread: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The GPU events of a step's window, in the order of their start, and its threads.

    name: a message's with its group; category: compute, communication or copies. launch: end of
    the call that launched an event; thread: that call's, else NONE. after: the event of another
    stream that its stream was made to wait for, or NONE; waits_on_stream: whether it may have
    been made to wait for one.
    """

    step: int | None  # None: the trace has no marks of steps
    window: tuple[int, int]
    start: Ints
    end: Ints
    name: list[str]
    category: npt.NDArray[np.str_]
    stream: Ints
    launch: Ints
    thread: Ints
    after: Ints
    waits_on_stream: Flags
    instance: list[Instance | None]
    threads: dict[int, HostThread]

    def earlier(self, offset: int) -> "StepWork":
        """Return the work by a clock that this one is ahead of."""
        times = ("start", "end", "sync_end", "handoff_start", "handoff_end")
        return replace(
            self,
            window=(self.window[0] - offset, self.window[1] - offset),
            start=self.start - offset,
            end=self.end - offset,
            launch=self.launch - offset,
            threads={
                number: replace(thread, **{key: getattr(thread, key) - offset for key in times})
                for number, thread in self.threads.items()
            },
        )


def step_work(inputs: TraceInputs, trace: RankTrace) -> list[StepWork]:
    """Return the chosen steps that have GPU events; without --steps, the middle one."""
    windows = list(busy_steps(trace, inputs).items())
    if inputs.steps is None:
        windows = windows[len(windows) // 2 :][:1]
    work = _Work(trace, steps(trace))
    return [work.of_step(row, window) for row, window in windows]


class _Work:
    """What the steps of one process share."""

    def __init__(self, trace: RankTrace, marked: Steps) -> None:
        self.trace = trace
        self.marked = marked
        self.call = launches(trace)
        self.waits_on_stream = made_to_wait(trace, self.call)
        self.args = gpu_comms(trace)[0]
        self.is_comm = is_communication(trace)
        self.is_sync = name_flags(trace.names, WAITS.search)[trace.calls.name]

    def of_step(self, step: int, window: tuple[int, int]) -> StepWork:
        trace = self.trace
        gpu = self.trace.gpu
        calls = self.trace.calls
        early = window[0] - (window[1] - window[0]) // _MARGIN
        rows = np.flatnonzero((gpu.end >= early) & (gpu.start <= window[1]))
        call = self.call[rows]
        category = np.where(self.is_comm[rows], COMMUNICATION, COMPUTE)
        category[gpu.kind[rows] != GpuKind.KERNEL] = COPIES
        names = [*trace.names, *map(_label, trace.comm_args)]
        is_message = (category == COMMUNICATION) & (self.args[rows] != NONE)
        label = len(trace.names) + self.args[rows]
        return StepWork(
            step=self.marked.numbers[step] if self.marked.is_marked else None,
            window=window,
            start=gpu.start[rows],
            end=gpu.end[rows],
            name=[names[each] for each in np.where(is_message, label, gpu.name[rows])],
            category=category,
            stream=gpu.stream[rows],
            launch=np.append(calls.end, NONE)[call],
            thread=np.append(calls.thread, NONE)[call],
            after=awaited(trace, self.call, rows),
            waits_on_stream=self.waits_on_stream[rows],
            instance=self._instances(rows, step),
            threads=self._threads(rows, early, window[1]),
        )

    def _instances(self, rows: Ints, step: int) -> list[Instance | None]:
        """Return the collectives that the step launched, numbered by group."""
        result: list[Instance | None] = [None] * rows.size
        counts: Counter[tuple[tuple[int, ...], str]] = Counter()
        own = np.flatnonzero(
            (self.args[rows] != NONE) & self.is_comm[rows] & (self.marked.of_gpu[rows] == step)
        )
        issued = np.append(self.trace.calls.start, NONE)[self.call[rows[own]]]
        for place in own[np.argsort(issued, kind="stable")]:
            args = self.trace.comm_args[self.args[rows[place]]]
            key = members_of(args, self.trace.info), args.group
            name = torch_collective(args.collective)
            if is_synchronizing(name) and len(key[0]) > 1:
                sizes = args.in_elements, args.out_elements
                result[place] = Instance(
                    *key, counts[key], (args.collective, args.dtype, *sizes)
                )
                counts[key] += 1
        return result

    def _threads(self, rows: Ints, early: int, late: int) -> dict[int, HostThread]:
        tops = dict(self._tops(early, late))
        busy = {number: union(start, end) for number, (start, end, _) in tops.items()}
        threads = {}
        for number, (start, end, name) in tops.items():
            sync_end, sync_row = self._syncs(number, rows)
            own = busy[number]
            others = {other: times for other, times in busy.items() if other != number}
            times = reduce(join, others.values(), Intervals(start[:0], end[:0]))
            gap_start = np.concatenate(([early], own.end[:-1]))
            free = time_before(times, own.start) - time_before(times, gap_start)
            length = own.start - gap_start
            handoff_end = own.start[(length > _HANDOFF_NS) & (2 * free > length)]
            last = [_last_busy(others, time) for time in handoff_end.tolist()]
            handoff = np.array(last, np.int64).reshape(-1, 2)
            threads[number] = HostThread(
                start=start,
                end=end,
                name=[self.trace.names[each] for each in name],
                sync_end=sync_end,
                sync_row=sync_row,
                handoff_start=handoff[:, 0],
                handoff_end=handoff_end,
                handoff_thread=handoff[:, 1],
            )
        return threads

    def _tops(self, early: int, late: int) -> Iterator[tuple[int, tuple[Ints, Ints, Ints]]]:
        """Yield the operations and calls of each thread that are inside no other."""
        tables = (self.trace.ops, self.trace.calls)
        rows = [np.flatnonzero((t.end > early) & (t.start < late)) for t in tables]
        start, end, name, thread = (
            np.concatenate([getattr(t, key)[at] for t, at in zip(tables, rows, strict=True)])
            for key in ("start", "end", "name", "thread")
        )
        order = np.lexsort((-end, start))
        for number in np.unique(thread):
            at = order[thread[order] == number]
            at = at[parents(start[at], end[at]) == NONE]
            yield int(number), (start[at], end[at], name[at])

    def _syncs(self, thread: int, rows: Ints) -> tuple[Ints, Ints]:
        """Return ends of the thread's calls that waited for the GPU, and for which event.

        Of synchronizations that is the last event to end inside the call; copies wait for
        themselves where they end inside their own call.
        """
        calls = self.trace.calls
        gpu = self.trace.gpu
        call = self.call[rows]
        at = np.flatnonzero((calls.thread == thread) & self.is_sync)
        order = np.argsort(gpu.end[rows], kind="stable")
        ends = gpu.end[rows][order]
        place = np.searchsorted(ends, calls.end[at], side="right") - 1
        waited = (place >= 0) & (ends[place] > calls.start[at])
        copies = np.flatnonzero(
            (gpu.kind[rows] == GpuKind.MEMCPY) & (call != NONE) & (calls.thread[call] == thread)
        )
        copies = copies[gpu.end[rows[copies]] <= calls.end[call[copies]]]
        end = np.concatenate((calls.end[at][waited], calls.end[call[copies]]))
        row = np.concatenate((order[place[waited]], copies))
        by_end = np.argsort(end, kind="stable")
        return end[by_end], row[by_end]


def _last_busy(threads: dict[int, Intervals], time: int) -> tuple[int, int]:
    """Return until when which thread, of those that did, worked last before this time."""
    places = {n: int(np.searchsorted(each.start, time)) - 1 for n, each in threads.items()}
    return max(
        (min(int(threads[number].end[place]), time), number)
        for number, place in places.items()
        if place >= 0
    )


def _label(args: CommArgs) -> str:
    size = f" of {args.group_size} ranks" if args.group_size else ""
    return f"{args.collective} in group {args.group_desc or args.group}{size}"
