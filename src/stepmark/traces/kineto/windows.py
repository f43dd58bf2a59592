"""Steps on the GPU: their windows, and what of them is communication that nothing hides.

The window of a step is from the end of the last GPU event of the step before it (of events
launched before all steps, for the first) to the end of its own last event. Windows tile the
time, so times of steps add up to the time of all. Where steps between were not profiled, a
window starts where the host starts the step, or where earlier work ends if that is later.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from stepmark.model.kernel_groups import COMMUNICATION, group_of
from stepmark.timeline.trace_columns import NONE, Flags, GpuKind, Ints, RankTrace
from stepmark.traces.kineto.intervals import Intervals, time_before, union, without
from stepmark.traces.kineto.links import Steps, launches, name_flags


class Windows(NamedTuple):
    """Start and end of each step on the GPU. A step without GPU events is empty."""

    start: Ints
    end: Ints


def gpu_windows(trace: RankTrace, steps: Steps, rows: "Ints | None" = None) -> Windows:
    """Return the window of each step on the GPU whose events are `rows` (all of them).

    Where nothing runs before the first step, it starts with its mark on the host, or with its
    first event if that is earlier; without marks, with the first event.
    """
    own_rows = slice(None) if rows is None else rows
    start = trace.gpu.start[own_rows]
    end = trace.gpu.end[own_rows]
    of_gpu = steps.of_gpu[own_rows]
    windows = np.zeros((len(steps.numbers), 2), np.int64)
    if not start.size:
        return Windows(windows[:, 0], windows[:, 1])
    reach = np.maximum.accumulate(end)  # rows are in the order of their starts
    unmarked = np.flatnonzero(of_gpu == NONE)
    call = launches(trace)[own_rows][unmarked]
    launched = np.append(trace.calls.start, np.iinfo(np.int64).max)[call]
    early = end[unmarked[launched < steps.start[0]]]
    begin = int(early.max()) if early.size else np.iinfo(np.int64).min
    last = None  # number of the step before that has events
    for index, number in enumerate(steps.numbers):
        own = np.flatnonzero(of_gpu == index)
        if own.size:
            earlier = int(np.searchsorted(start, start[own[0]]))  # those that start before
            before = int(reach[earlier - 1]) if earlier else begin
            host = min(int(steps.start[index]), int(start[own[0]]))
            if last is None:
                begin = max(begin, before)
                if begin == np.iinfo(np.int64).min:
                    begin = host if steps.is_marked else int(start[0])
            elif last != number - 1:
                begin = max(begin, before, host)
            windows[index] = begin, max(begin, int(end[own].max()))
            begin = int(windows[index, 1])
            last = number
        else:
            windows[index] = begin if last is not None else steps.start[index]
    return Windows(windows[:, 0], windows[:, 1])


def is_communication(trace: RankTrace) -> Flags:
    """Return which GPU events carry out a collective: by their arguments, kernels by name too.

    A copy that a call of torch.distributed launched has the call's arguments: it is one.
    """
    gpu = trace.gpu
    by_name = name_flags(trace.names, lambda name: group_of(name) == COMMUNICATION)[gpu.name]
    return np.asarray((by_name & (gpu.kind == GpuKind.KERNEL)) | (gpu.comm != NONE))


def communication_and_compute(trace: RankTrace) -> tuple[Intervals, Intervals]:
    """Return the times in which kernels of collectives run, and those of other kernels."""
    gpu = trace.gpu
    comm = is_communication(trace)
    compute = ~comm & (gpu.kind == GpuKind.KERNEL)
    return union(gpu.start[comm], gpu.end[comm]), union(gpu.start[compute], gpu.end[compute])


def in_windows(times: Intervals, windows: Windows) -> Ints:
    """Return how much of the times lies in each window."""
    return time_before(times, windows.end) - time_before(times, windows.start)


def label_times(
    columns: tuple[Ints, Ints, Ints, Ints], compute: Intervals, windows: Windows
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (label, window, its events, time in which any runs, the part without compute).

    columns: start, end, label and window, or NONE, of each event.
    """
    start, end, label, place = columns
    for which in np.unique(label).tolist():
        own = label == which
        times = union(start[own], end[own])
        count = np.bincount(place[own & (place != NONE)], minlength=windows.start.size)
        sums = count, in_windows(times, windows), in_windows(without(times, compute), windows)
        for number in np.flatnonzero(sums[0] + sums[1]).tolist():
            yield (which, number, *(int(each[number]) for each in sums))
