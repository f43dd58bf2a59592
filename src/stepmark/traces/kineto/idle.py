"""What an idle GPU waits for."""

from typing import NamedTuple

import numpy as np

from stepmark.timeline.trace_breakdown import IdleTimes
from stepmark.timeline.trace_columns import GpuKind, Ints, RankTrace
from stepmark.traces.kineto.intervals import Intervals, common, union, without
from stepmark.traces.kineto.links import blocks
from stepmark.traces.kineto.windows import Windows

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
    return _causes(trace, rows, call, _gaps(busy, windows), windows)


def idle_times(trace: RankTrace, rows: Ints, call: Ints, windows: Windows) -> list[IdleTimes]:
    """Return the idle times of each window, see idle_gaps; they add up to what is not busy."""
    gaps = _gaps(union(trace.gpu.start[rows], trace.gpu.end[rows]), windows)
    sums = np.zeros((4, windows.start.size), np.int64)
    for block in blocks(gaps.start.size):
        own = Intervals(gaps.start[block], gaps.end[block])
        idle = _causes(trace, rows, call, own, windows)
        parts = (idle.host, idle.in_call, idle.kernel_gap, idle.unknown)
        for total, part in zip(sums, parts, strict=True):
            np.add.at(total, idle.window, part)
    return [
        IdleTimes(
            host_bound_ns=host_ns,
            launch_call_ns=call_ns,
            kernel_gap_ns=gap_ns,
            unknown_ns=unknown_ns,
        )
        for host_ns, call_ns, gap_ns, unknown_ns in sums.T.tolist()
    ]


def _gaps(busy: Intervals, windows: Windows) -> Intervals:
    """Return the times in which nothing runs; none lies in two windows."""
    tiles = Intervals(windows.start, windows.end)
    return common(tiles, without(union(windows.start, windows.end), busy))


def _causes(
    trace: RankTrace, rows: Ints, call: Ints, gaps: Intervals, windows: Windows
) -> IdleGaps:
    """Return what each gap waits for."""
    # Events that start at the end of a gap: a slice of the rows, which are in this order.
    all_rows = rows.size == trace.gpu.start.size
    start = trace.gpu.start if all_rows else trace.gpu.start[rows]
    first = np.searchsorted(start, gaps.end, side="left")
    last = np.searchsorted(start, gaps.end, side="right")
    begun, launched = _launched_first(trace, rows, call, first, last)
    is_known = launched != _NEVER
    length = gaps.end - gaps.start
    host = np.where(is_known, np.clip(launched - gaps.start, 0, length), 0)
    rest = length - host
    is_kernel_gap = is_known & (rest <= MAX_KERNEL_GAP_NS)
    return IdleGaps(
        start=gaps.start,
        window=np.searchsorted(windows.end, gaps.end, side="left"),
        host=host,
        in_call=np.minimum(host, gaps.start + host - np.minimum(begun, gaps.start + host)),
        kernel_gap=np.where(is_kernel_gap, rest, 0),
        unknown=np.where(is_kernel_gap, 0, rest),
    )


def _launched_first(
    trace: RankTrace, rows: Ints, call: Ints, first: Ints, last: Ints
) -> tuple[Ints, Ints]:
    """Return when the launch of one of the rows first:last began and was done.

    It is the one that was done first, of these the one that began first; _NEVER without one.
    """
    shape = first.size
    begun = np.full(shape, _NEVER, np.int64)
    ready = np.full(shape, _NEVER, np.int64)
    has_row = np.flatnonzero(last > first)
    place = first[has_row]
    while has_row.size:  # a turn for each row that starts at the same time
        own_begun, own_ready = _launched(trace, rows[place], call[place])
        is_better = (own_ready < ready[has_row]) | (
            (own_ready == ready[has_row]) & (own_begun < begun[has_row])
        )
        chosen = has_row[is_better]
        begun[chosen], ready[chosen] = own_begun[is_better], own_ready[is_better]
        place = place + 1
        has_more = place < last[has_row]
        has_row = has_row[has_more]
        place = place[has_more]
    return begun, ready


def _launched(trace: RankTrace, rows: Ints, call: Ints) -> tuple[Ints, Ints]:
    """Return when the launch of each event began and was done; _NEVER without one.

    It is done at the end of its call. A copy that ended before its call did is waited for by
    that call, which is then no measure of the launch: its start is.
    """
    begun = np.append(trace.calls.start, _NEVER)[call]
    done = np.append(trace.calls.end, _NEVER)[call]
    is_waited_for = (trace.gpu.kind[rows] != GpuKind.KERNEL) & (done >= trace.gpu.end[rows])
    return begun, np.where(is_waited_for, begun, done)
