"""Steps on the GPU: their windows, and what of them is communication that nothing hides.

The window of a step is from the end of the last GPU event of the step before it (of events
launched before all steps, for the first) to the end of its own last event. Windows tile the
time, so times of steps add up to the time of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepmark.core.kernel_groups import COMMUNICATION, group_of
from stepmark.core.trace_columns import NONE, GpuKind, RankTrace
from stepmark.trace.kineto.intervals import Intervals, time_before, union, without
from stepmark.trace.kineto.links import Steps, launches

if TYPE_CHECKING:
    import numpy.typing as npt

    from stepmark.core.trace_columns import Ints

    Flags = npt.NDArray[np.bool_]


class Windows(NamedTuple):
    """Start and end of each step on the GPU. A step without GPU events is empty."""

    start: Ints
    end: Ints


def gpu_windows(trace: RankTrace, steps: Steps) -> Windows:
    """Return the window of each step.

    Where nothing runs before the first step, it starts with its mark on the host, or with its
    first event if that is earlier; without marks, with the first event.
    """
    gpu, of_gpu = trace.gpu, steps.of_gpu
    count = len(steps.numbers)
    if not gpu.start.size:
        return Windows(np.zeros(count, np.int64), np.zeros(count, np.int64))
    last = np.full(count, np.iinfo(np.int64).min, np.int64)
    inside = of_gpu != NONE
    np.maximum.at(last, of_gpu[inside], gpu.end[inside])
    first = int(gpu.start[inside].min()) if inside.any() else int(gpu.end.max())
    begin = min(first, int(steps.start[0])) if steps.is_marked else first
    call = launches(trace)
    is_early = (call != NONE) & (np.append(trace.calls.start, 0)[call] < steps.start[0])
    earlier = gpu.end[~inside & (is_early | (gpu.start < first))]
    begin = int(earlier.max()) if earlier.size else begin
    end = np.maximum(np.maximum.accumulate(last), begin)
    return Windows(np.concatenate(([begin], end[:-1])), end)


def is_communication(trace: RankTrace) -> Flags:
    """Return which GPU events are kernels of a collective: by their arguments or their name."""
    is_named = [group_of(name) == COMMUNICATION for name in trace.names]
    gpu = trace.gpu
    by_name = np.array(is_named, bool)[gpu.name] if gpu.name.size else np.zeros(0, bool)
    return np.asarray((by_name | (gpu.comm != NONE)) & (gpu.kind == GpuKind.KERNEL))


def communication_and_compute(trace: RankTrace) -> tuple[Intervals, Intervals]:
    """Return the times in which kernels of collectives run, and those of other kernels."""
    gpu = trace.gpu
    comm = is_communication(trace)
    compute = ~comm & (gpu.kind == GpuKind.KERNEL)
    return union(gpu.start[comm], gpu.end[comm]), union(gpu.start[compute], gpu.end[compute])


def in_windows(times: Intervals, windows: Windows) -> Ints:
    """Return how much of the times lies in each window."""
    return time_before(times, windows.end) - time_before(times, windows.start)


def exposed(communication: Intervals, compute: Intervals, windows: Windows) -> Ints:
    """Return the communication of each window during which no compute kernel runs."""
    return in_windows(without(communication, compute), windows)
