"""What an idle GPU waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepmark.core.trace_breakdown import IdleTimes
from stepmark.core.trace_columns import GpuKind, RankTrace
from stepmark.trace.kineto.intervals import Intervals, common, union, without
from stepmark.trace.kineto.windows import Windows

if TYPE_CHECKING:
    from stepmark.core.trace_columns import Ints

# What is launched starts within this time, unless it waits for something else: on the GPUs of
# published traces within 3 to 85 us.
MAX_KERNEL_GAP_NS = 100_000
_NEVER = np.iinfo(np.int64).max


def idle_times(
    trace: RankTrace, rows: Ints, call: Ints, busy: Intervals, windows: Windows
) -> list[IdleTimes]:
    """Return the idle times of one GPU in each window; they add up to what is not busy.

    rows, call: its events and the calls that launched them. A gap in which nothing runs ends
    with an event. Up to the end of its launch call the gap is the host's; what remains is a
    kernel gap, or unknown if it is longer than MAX_KERNEL_GAP_NS or the call is not known.
    """
    tiles = Intervals(windows.start, windows.end)
    gaps = common(tiles, without(union(windows.start, windows.end), busy))
    window = np.searchsorted(windows.end, gaps.end, side="left")
    # Of the events that start at the end of a gap, the one that was launched first.
    starts, first = np.unique(trace.gpu.start[rows], return_index=True)
    ready = np.append(np.minimum.reduceat(_launched_at(trace, rows, call), first), _NEVER)
    place = np.searchsorted(starts, gaps.end)
    is_event = np.append(starts, 0)[place] == gaps.end
    launched = np.where(is_event, ready[place], _NEVER)
    is_known = launched != _NEVER
    length = gaps.end - gaps.start
    host = np.where(is_known, np.clip(launched - gaps.start, 0, length), 0)
    rest = length - host
    is_kernel_gap = is_known & (rest <= MAX_KERNEL_GAP_NS)
    sums = np.zeros((3, windows.start.size), np.int64)
    np.add.at(sums[0], window, host)
    np.add.at(sums[1], window, np.where(is_kernel_gap, rest, 0))
    np.add.at(sums[2], window, np.where(is_kernel_gap, 0, rest))
    return [
        IdleTimes(host_bound_ns=host_ns, kernel_gap_ns=gap_ns, unknown_ns=unknown_ns)
        for host_ns, gap_ns, unknown_ns in sums.T.tolist()
    ]


def _launched_at(trace: RankTrace, rows: Ints, call: Ints) -> Ints:
    """Return when each event was launched: at the end of its call; _NEVER without one.

    A copy that ended before its call did is waited for by that call, which is then no measure
    of the launch: its start is.
    """
    launched = np.append(trace.calls.end, _NEVER)[call]
    is_waited_for = (trace.gpu.kind[rows] != GpuKind.KERNEL) & (launched >= trace.gpu.end[rows])
    return np.where(is_waited_for, np.append(trace.calls.start, _NEVER)[call], launched)
