"""What an idle GPU waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepmark.timeline.trace_breakdown import IdleTimes
from stepmark.timeline.trace_columns import NONE, GpuKind, RankTrace
from stepmark.traces.kineto.intervals import Intervals, common, union, without
from stepmark.traces.kineto.windows import Windows

if TYPE_CHECKING:
    from stepmark.timeline.trace_columns import Ints

# What is launched starts within this time, unless it waits for something else: on the GPUs of
# published traces within 3 to 85 us.
MAX_KERNEL_GAP_NS = 100_000
_NEVER = np.iinfo(np.int64).max


class IdleGaps(NamedTuple):
    """Times in which nothing runs, with the place of the window that each lies in.

    host, kernel_gap and unknown add up to the gap, in this order; in_call is a part of host.
    """

    start: Ints
    window: Ints
    host: Ints
    in_call: Ints
    kernel_gap: Ints
    unknown: Ints


def idle_gaps(
    trace: RankTrace, rows: Ints, call: Ints, busy: Intervals, windows: Windows
) -> IdleGaps:
    """Return the idle times of one GPU in each window by what they wait for.

    rows, call: its events and the calls that launched them. A gap in which nothing runs ends
    with an event. Up to the end of its launch call the gap is the host's; what remains is a
    kernel gap, or unknown if it is longer than MAX_KERNEL_GAP_NS or the call is not known.
    """
    tiles = Intervals(windows.start, windows.end)
    gaps = common(tiles, without(union(windows.start, windows.end), busy))
    # Of the events that start at the end of a gap, the one that was launched first.
    begun, ready = _launched(trace, rows, call)
    order = np.lexsort((begun, ready, trace.gpu.start[rows]))
    starts, first = np.unique(trace.gpu.start[rows][order], return_index=True)
    place = np.searchsorted(starts, gaps.end)
    is_event = np.append(starts, 0)[place] == gaps.end
    chosen = np.append(order[first], NONE)[place]
    launched = np.where(is_event, ready[chosen], _NEVER)
    is_known = launched != _NEVER
    length = gaps.end - gaps.start
    host = np.where(is_known, np.clip(launched - gaps.start, 0, length), 0)
    rest = length - host
    is_kernel_gap = is_known & (rest <= MAX_KERNEL_GAP_NS)
    return IdleGaps(
        start=gaps.start,
        window=np.searchsorted(windows.end, gaps.end, side="left"),
        host=host,
        in_call=np.minimum(
            host, gaps.start + host - np.minimum(begun[chosen], gaps.start + host)
        ),
        kernel_gap=np.where(is_kernel_gap, rest, 0),
        unknown=np.where(is_kernel_gap, 0, rest),
    )


def idle_times(gaps: IdleGaps, num_windows: int) -> list[IdleTimes]:
    """Return the idle times of each window; they add up to what is not busy."""
    parts = (gaps.host, gaps.in_call, gaps.kernel_gap, gaps.unknown)
    sums = np.zeros((len(parts), num_windows), np.int64)
    for total, part in zip(sums, parts, strict=True):
        np.add.at(total, gaps.window, part)
    return [
        IdleTimes(
            host_bound_ns=host_ns,
            launch_call_ns=call_ns,
            kernel_gap_ns=gap_ns,
            unknown_ns=unknown_ns,
        )
        for host_ns, call_ns, gap_ns, unknown_ns in sums.T.tolist()
    ]


def _launched(trace: RankTrace, rows: Ints, call: Ints) -> tuple[Ints, Ints]:
    """Return when the launch of each event began and was done; _NEVER without one.

    It is done at the end of its call. A copy that ended before its call did is waited for by
    that call, which is then no measure of the launch: its start is.
    """
    begun = np.append(trace.calls.start, _NEVER)[call]
    done = np.append(trace.calls.end, _NEVER)[call]
    is_waited_for = (trace.gpu.kind[rows] != GpuKind.KERNEL) & (done >= trace.gpu.end[rows])
    return begun, np.where(is_waited_for, begun, done)
