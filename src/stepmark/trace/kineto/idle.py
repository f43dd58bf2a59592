"""What an idle GPU waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepmark.core.trace_breakdown import IdleTimes
from stepmark.core.trace_columns import NONE, GpuKind, RankTrace
from stepmark.trace.kineto.intervals import Intervals, common, union, without
from stepmark.trace.kineto.steps import Windows

if TYPE_CHECKING:
    from stepmark.core.trace_columns import Ints

# What is launched starts within this time, unless it waits for something else: on the GPUs of
# published traces within 3 to 85 us.
MAX_KERNEL_GAP_NS = 100_000


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
    ready = _launched_at(trace, rows, call)
    next_row = np.searchsorted(trace.gpu.start[rows], gaps.end, side="left")
    is_event = next_row < rows.size
    next_row = np.minimum(next_row, rows.size - 1)
    is_event &= trace.gpu.start[rows[next_row]] == gaps.end
    is_known = is_event & (call[next_row] != NONE)
    length = gaps.end - gaps.start
    host = np.where(is_known, np.clip(ready[next_row] - gaps.start, 0, length), 0)
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
    """Return when each event was launched: at the end of its call.

    A copy that ended before its call did is waited for by that call, which is then no measure
    of the launch: its start is.
    """
    if not trace.calls.start.size:
        return np.zeros(rows.size, np.int64)
    launched = trace.calls.end[call]
    is_waited_for = (trace.gpu.kind[rows] != GpuKind.KERNEL) & (launched >= trace.gpu.end[rows])
    return np.where(is_waited_for, trace.calls.start[call], launched)
