"""Launch calls, the queue between host and GPU, and copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stepmark.timeline.trace_breakdown import CopyTimes, LaunchTimes, QueueDepth
from stepmark.timeline.trace_columns import NONE, GpuKind, RankTrace
from stepmark.traces.kineto.intervals import clip, union

if TYPE_CHECKING:
    from stepmark.timeline.trace_columns import Ints
    from stepmark.traces.kineto.windows import Windows


def launch_times(trace: RankTrace, call: Ints, chosen: Ints) -> Iterator[LaunchTimes]:
    """Yield the calls that launched the events `chosen`, by name, the most time first."""
    calls, gpu = trace.calls, trace.gpu
    events = np.sort(chosen[call[chosen] != NONE])
    rows, first, of_event = np.unique(call[events], return_index=True, return_inverse=True)
    runs = np.zeros(rows.size, np.int64)
    np.add.at(runs, of_event, (gpu.end - gpu.start)[events])
    num_events = np.bincount(of_event, minlength=rows.size)
    duration = calls.end[rows] - calls.start[rows]
    # Events are in the order of their starts: the first of a call is the first that starts.
    delay = gpu.start[events[first]] - calls.start[rows]
    names = calls.name[rows]
    times = []
    for name in np.unique(names):
        own = names == name
        times.append(
            LaunchTimes(
                call=trace.names[name],
                num_calls=int(own.sum()),
                num_events=int(num_events[own].sum()),
                total_ns=int(duration[own].sum()),
                median_ns=_median(duration[own]),
                max_ns=int(duration[own].max()),
                median_delay_ns=_median(delay[own]),
                num_short=int((runs[own] < duration[own]).sum()),
            )
        )
    yield from sorted(times, key=lambda item: -item.total_ns)


def _median(values: Ints) -> int:
    """Return the lower median, which is one of the values."""
    return int(np.sort(values)[(values.size - 1) // 2])


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
    queued = union(start, end)
    time = np.concatenate((start, end))
    change = np.repeat([1, -1], start.size)
    order = np.lexsort((change, time))  # what starts makes place before the next is launched
    time, level = time[order], np.cumsum(change[order])
    result: list[QueueDepth | None] = []
    for first, last in zip(windows.start.tolist(), windows.end.tolist(), strict=True):
        # The level at the start of the window, and all changes inside.
        low = max(int(np.searchsorted(time, first, side="right")) - 1, 0)
        high = int(np.searchsorted(time, last, side="left"))
        result.append(
            QueueDepth(
                depth_ns=int((np.clip(end, first, last) - np.clip(start, first, last)).sum()),
                max=int(level[low:high].max(initial=0)),
                empty_ns=last - first - clip(queued, first, last).total,
            )
        )
    return result


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
