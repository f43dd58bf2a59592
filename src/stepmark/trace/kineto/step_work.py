"""What one process did in one step, compact: its GPU events, their launches, its threads."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from stepmark.core.collectives import FACTS, Collective, torch_collective
from stepmark.core.trace_columns import NONE, CommArgs, GpuKind, RankTrace
from stepmark.core.trace_options import TraceInputs
from stepmark.trace.kineto.export import chosen_steps
from stepmark.trace.kineto.intervals import Intervals, time_before, union
from stepmark.trace.kineto.links import Steps, gpu_comms, launches, parents, steps
from stepmark.trace.kineto.messages import members_of
from stepmark.trace.kineto.stream_waits import awaited, told_to_wait
from stepmark.trace.kineto.windows import gpu_windows, is_communication

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepmark.core.trace_columns import Ints
    from stepmark.trace.kineto.stream_waits import Flags

COMPUTE, COMMUNICATION, COPIES = range(3)
_WAITS = re.compile(r"^(?:cuda|hip|cu)(?:Ctx|Device|Stream|Event)Synchronize")
_HANDOFF_NS = 10_000  # shorter pauses of a thread are Python's
# Of the window before it: work that a rank whose clock or step differs may still need.
_MARGIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One collective of a step, the same value on each of its ranks.

    number: it is the number-th of its group in the step.
    """

    members: tuple[int, ...]
    group: str
    number: int
    what: tuple[str, str, int, int]  # collective, dtype, elements in and out


@dataclass(frozen=True, slots=True, kw_only=True)
class HostThread:
    """Operations and calls of one thread that are inside no other.

    sync_end: ends of calls that waited for the GPU; sync_row: for which event. handoff: at
    handoff_end the thread had paused while another, handoff_thread, worked until handoff_start.
    """

    start: Ints
    end: Ints
    name: Ints
    sync_end: Ints
    sync_row: Ints
    handoff_start: Ints
    handoff_end: Ints
    handoff_thread: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The GPU events of a step's window, in the order of their start, and its threads.

    launch: end of the call that launched an event; thread: that call's, else NONE. after: the
    event of another stream that its stream was told to wait for, or NONE; told: whether it may
    have been told to wait for one. instance: number of `instances`, or NONE. label: number of
    `labels`, the group and sizes of a message, or NONE.
    """

    step: int | None  # None: the trace has no marks of steps
    window: tuple[int, int]
    start: Ints
    end: Ints
    name: Ints
    kind: Ints
    stream: Ints
    launch: Ints
    thread: Ints
    after: Ints
    told: Flags
    label: Ints
    labels: tuple[str, ...]
    instance: Ints
    instances: tuple[Instance, ...]
    threads: dict[int, HostThread]
    names: tuple[str, ...]

    def earlier(self, offset: int) -> StepWork:
        """Return the work by a clock that this one is ahead of."""
        if not offset:
            return self
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


def step_work(inputs: TraceInputs, trace: RankTrace) -> tuple[StepWork, ...]:
    """Return the chosen steps that have GPU events; without --steps, the middle one."""
    marked = steps(trace)
    rows = chosen_steps(trace, inputs)
    windows = gpu_windows(trace, marked)
    rows = [row for row in rows if windows.end[row] > windows.start[row]]
    if inputs.steps is None:
        rows = rows[len(rows) // 2 :][:1]
    work = _Work(trace, marked)
    return tuple(
        work.of_step(row, (int(windows.start[row]), int(windows.end[row]))) for row in rows
    )


class _Work:
    """What the steps of one process share."""

    def __init__(self, trace: RankTrace, marked: Steps) -> None:
        self.trace, self.marked = trace, marked
        self.call = launches(trace)
        self.told = told_to_wait(trace, self.call)
        self.args = gpu_comms(trace)[0]
        self.is_comm = is_communication(trace)

    def of_step(self, step: int, window: tuple[int, int]) -> StepWork:
        trace, gpu, calls = self.trace, self.trace.gpu, self.trace.calls
        early = window[0] - (window[1] - window[0]) // _MARGIN
        rows = np.flatnonzero((gpu.end >= early) & (gpu.start <= window[1]))
        call = self.call[rows]
        kind = np.where(self.is_comm[rows], COMMUNICATION, COMPUTE)
        kind[gpu.kind[rows] != GpuKind.KERNEL] = COPIES
        threads = self._threads(rows, early, window[1])
        kept, name = np.unique(
            np.concatenate((gpu.name[rows], *(thread.name for thread in threads.values()))),
            return_inverse=True,
        )
        numbers = {int(old): new for new, old in enumerate(kept)}
        instance, instances = self._instances(rows, step)
        args = np.where(kind == COMMUNICATION, self.args[rows], NONE)
        return StepWork(
            step=self.marked.numbers[step] if self.marked.is_marked else None,
            window=window,
            start=gpu.start[rows],
            end=gpu.end[rows],
            name=name[: rows.size],
            kind=kind,
            stream=gpu.stream[rows],
            launch=np.append(calls.end, NONE)[call],
            thread=np.append(calls.thread, NONE)[call],
            after=awaited(trace, self.call, rows),
            told=self.told[rows],
            label=args,
            labels=tuple(map(_label, trace.comm_args)),
            instance=instance,
            instances=instances,
            threads={number: _renamed(thread, numbers) for number, thread in threads.items()},
            names=tuple(trace.names[each] for each in kept),
        )

    def _instances(self, rows: Ints, step: int) -> tuple[Ints, tuple[Instance, ...]]:
        """Return the collectives that the step launched, numbered by group."""
        result = np.full(rows.size, NONE, np.int64)
        instances: list[Instance] = []
        counts: Counter[tuple[tuple[int, ...], str]] = Counter()
        own = np.flatnonzero(
            (self.args[rows] != NONE) & self.is_comm[rows] & (self.marked.of_gpu[rows] == step)
        )
        issued = np.append(self.trace.calls.start, NONE)[self.call[rows[own]]]
        for place in own[np.argsort(issued, kind="stable")]:
            args = self.trace.comm_args[self.args[rows[place]]]
            members = members_of(args, self.trace.info)
            name = torch_collective(args.collective)
            facts = FACTS[Collective(name)] if name in list(Collective) else None
            if facts is None or not facts.synchronizing or len(members) < 2:
                continue
            key = members, args.group
            what = (args.collective, args.dtype, args.in_elements, args.out_elements)
            result[place] = len(instances)
            instances.append(
                Instance(members=members, group=args.group, number=counts[key], what=what)
            )
            counts[key] += 1
        return result, tuple(instances)

    def _threads(self, rows: Ints, early: int, late: int) -> dict[int, HostThread]:
        tops = dict(self._tops(early, late))
        busy = {number: union(start, end) for number, (start, end, _) in tops.items()}
        threads = {}
        for number, (start, end, name) in tops.items():
            sync_end, sync_row = self._syncs(number, rows)
            others = [times for other, times in busy.items() if other != number]
            times = union(
                np.concatenate([each.start for each in others] or [start[:0]]),
                np.concatenate([each.end for each in others] or [start[:0]]),
            )
            own = busy[number]
            gap_start = np.concatenate(([early], own.end[:-1]))
            free = time_before(times, own.start) - time_before(times, gap_start)
            length = own.start - gap_start
            at = np.flatnonzero((length > _HANDOFF_NS) & (2 * free > length))
            last = [_last_busy(busy, number, int(own.start[place])) for place in at]
            threads[number] = HostThread(
                start=start,
                end=end,
                name=name,
                sync_end=sync_end,
                sync_row=sync_row,
                handoff_start=np.array([time for time, _ in last], np.int64),
                handoff_end=own.start[at],
                handoff_thread=np.array([other for _, other in last], np.int64),
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
        calls, gpu = self.trace.calls, self.trace.gpu
        names = [number for number, name in enumerate(self.trace.names) if _WAITS.match(name)]
        at = np.flatnonzero((calls.thread == thread) & np.isin(calls.name, names))
        order = np.argsort(gpu.end[rows], kind="stable")
        ends = gpu.end[rows][order]
        place = np.searchsorted(ends, calls.end[at], side="right") - 1
        waited = (place >= 0) & (ends[place] > calls.start[at]) if ends.size else place > 0
        call = self.call[rows]
        copies = np.flatnonzero(
            (gpu.kind[rows] == GpuKind.MEMCPY) & (call != NONE) & (calls.thread[call] == thread)
        )
        copies = copies[gpu.end[rows[copies]] <= calls.end[call[copies]]]
        end = np.concatenate((calls.end[at][waited], calls.end[call[copies]]))
        row = np.concatenate((order[place[waited]], copies))
        by_end = np.argsort(end, kind="stable")
        return end[by_end], row[by_end]


def _last_busy(busy: dict[int, Intervals], thread: int, time: int) -> tuple[int, int]:
    """Return until when which other thread worked last, at most to this time."""
    last = (np.iinfo(np.int64).min, thread)
    for number, times in busy.items():
        place = int(np.searchsorted(times.start, time)) - 1
        if number != thread and place >= 0:
            last = max(last, (min(int(times.end[place]), time), number))
    return last


def _renamed(thread: HostThread, numbers: dict[int, int]) -> HostThread:
    return replace(thread, name=np.array([numbers[int(n)] for n in thread.name], np.int64))


def _label(args: CommArgs) -> str:
    size = f" of {args.group_size} ranks" if args.group_size else ""
    return f"{args.collective} in group {args.group_desc or args.group}{size}"
