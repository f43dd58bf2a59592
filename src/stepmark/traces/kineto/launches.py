"""Launch calls, the queue between host and GPU, and copies."""

from collections.abc import Iterator

import numpy as np

from stepmark.timeline.trace_breakdown import CopyTimes, LaunchTimes, QueueDepth
from stepmark.timeline.trace_columns import NONE, GpuKind, Ints, RankTrace
from stepmark.traces.kineto.intervals import clip, union
from stepmark.traces.kineto.links import blocks
from stepmark.traces.kineto.windows import Windows


def launch_times(trace: RankTrace, call: Ints, chosen: Ints) -> Iterator[LaunchTimes]:
    """Yield the calls that launched the events `chosen`, by name, the most time first."""
    calls = trace.calls
    gpu = trace.gpu
    size = calls.start.size
    num_events = np.zeros(size, np.int32)
    runs = np.zeros(size, np.int64)
    first = np.full(size, np.iinfo(np.int64).max)  # start of the first event of each call
    for block in blocks(chosen.size):
        events = chosen[block]
        events = events[call[events] != NONE]
        own = call[events]
        np.add.at(num_events, own, 1)
        np.add.at(runs, own, gpu.end[events] - gpu.start[events])
        np.minimum.at(first, own, gpu.start[events])
    times = []
    for name in np.unique(calls.name[num_events > 0]):
        own = np.flatnonzero((num_events > 0) & (calls.name == name))
        duration = calls.end[own] - calls.start[own]
        num_short = int((runs[own] < duration).sum())
        delay = first[own] - calls.start[own]
        times.append(
            LaunchTimes(
                call=trace.names[name],
                num_calls=own.size,
                num_events=int(num_events[own].sum()),
                total_ns=int(duration.sum()),
                median_ns=_median(duration),
                max_ns=int(duration.max()),
                median_delay_ns=_median(delay),
                num_short=num_short,
            )
        )
    yield from sorted(times, key=lambda item: -item.total_ns)


def _median(values: Ints) -> int:
    """Return the lower median, which is one of the values; they are put into another order."""
    middle = (values.size - 1) // 2
    values.partition(middle)
    return int(values[middle])


def queue_depths(
    trace: RankTrace, rows: Ints, call: Ints, windows: Windows
) -> list[QueueDepth | None]:
    """Return the depth of the queue of one GPU in each window; None without launches.

    An event is in the queue from the start of its call to its own start.
    """
    is_known = call != NONE
    if not is_known.any():
        return [None] * windows.start.size
    start = trace.calls.start[call[is_known]]
    end = np.maximum(trace.gpu.start[rows[is_known]], start)
    bounds = list(zip(windows.start.tolist(), windows.end.tolist(), strict=True))
    queued = union(start, end)
    queued_ns = [clip(queued, first, last).total for first, last in bounds]
    del queued
    # Only how many are in the queue counts, not which: starts and ends are sorted apart.
    start.sort()
    end.sort()
    # What starts makes place before the next is launched.
    level = np.searchsorted(end, start, side="right")
    np.subtract(np.arange(1, start.size + 1), level, out=level)
    result: list[QueueDepth | None] = []
    for (first, last), own_ns in zip(bounds, queued_ns, strict=True):
        begun, ended = (_inside(times, first, last) for times in (start, end))
        result.append(
            QueueDepth(
                depth_ns=_rest_ns(start, begun, first, last)
                - _rest_ns(end, ended, first, last),
                max=max(begun.start - ended.start, int(level[begun].max(initial=0))),
                empty_ns=last - first - own_ns,
            )
        )
    return result


def _inside(times: Ints, first: int, last: int) -> slice:
    """Return which of sorted times are after first and before last."""
    low = np.searchsorted(times, first, "right")
    high = np.searchsorted(times, last, "left")
    return slice(int(low), max(int(low), int(high)))


def _rest_ns(times: Ints, inside: slice, first: int, last: int) -> int:
    """Return the sum of what is left of a window at each time, the whole one before it."""
    return int(inside.start * (last - first) + (last - times[inside]).sum())


def copy_times(trace: RankTrace, chosen: Ints) -> Iterator[CopyTimes]:
    """Yield the chosen copies and memsets by name, the most time first."""
    gpu = trace.gpu
    rows = chosen[gpu.kind[chosen] != GpuKind.KERNEL]
    times = []
    for name in np.unique(gpu.name[rows]):
        own = rows[gpu.name[rows] == name]
        is_known = bool((gpu.num_bytes[own] >= 0).all())
        times.append(
            CopyTimes(
                name=trace.names[name],
                num_copies=own.size,
                num_bytes=int(gpu.num_bytes[own].sum()) if is_known else None,
                time_ns=int((gpu.end - gpu.start)[own].sum()),
            )
        )
    yield from sorted(times, key=lambda item: -item.time_ns)
