"""The timeline of one step, in few enough bars to draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepmark.model.kernel_groups import COMMUNICATION, COPIES, group_of
from stepmark.timeline.trace_columns import GpuKind, RankTrace
from stepmark.timeline.trace_timeline import Bar, Timeline
from stepmark.traces.kineto.export import busy_steps
from stepmark.traces.kineto.links import steps
from stepmark.traces.kineto.windows import is_communication
from stepmark.traces.trace_options import TraceInputs

if TYPE_CHECKING:
    from stepmark.timeline.trace_columns import Ints

# Bars of one rank, before those of many ranks are joined further.
MOST_BARS = 1200
_FIRST_PARTS = 20_000  # of the window: what is joined at first


def timeline(trace: RankTrace, inputs: TraceInputs) -> Timeline | None:
    """Return the middle one of the chosen steps; None without GPU events."""
    windows = list(busy_steps(trace, inputs).items())
    if not windows:
        return None
    row, (start, end) = windows[len(windows) // 2]
    marked, gpu = steps(trace), trace.gpu
    own = np.flatnonzero((gpu.end > start) & (gpu.start < end))
    names = [*dict.fromkeys(map(group_of, trace.names)), COMMUNICATION, COPIES]
    by_name = np.array([names.index(group_of(name)) for name in trace.names])
    group = by_name[gpu.name[own]]
    group[gpu.kind[own] != GpuKind.KERNEL] = names.index(COPIES)
    group[is_communication(trace)[own]] = names.index(COMMUNICATION)
    order = np.argsort(gpu.stream[own], kind="stable")
    own, group = own[order], group[order]
    joined = (end - start) // _FIRST_PARTS
    while (first := _first(trace, own, group, joined)).size > MOST_BARS:
        joined = 2 * joined + 1
    bars = []
    for low, high in zip(first, [*first[1:], own.size], strict=True):
        part = own[low:high]
        took = gpu.end[part] - gpu.start[part]
        most = np.bincount(group[low:high], weights=took).argmax()
        device, stream = trace.streams[gpu.stream[part[0]]]
        bars.append(
            Bar(
                stream=f"GPU {device} stream {stream}",
                start=max(start, int(gpu.start[part[0]])),
                end=min(end, int(gpu.end[part].max())),
                group=names[most],
                name=trace.names[gpu.name[part[took.argmax()]]],
                num_events=int(part.size),
                busy=int(took.sum()),
            )
        )
    return Timeline(
        step=marked.numbers[row] if marked.is_marked else None,
        start=start,
        end=end,
        joined_ns=joined,
        bars=tuple(bars),
    )


def _first(trace: RankTrace, rows: Ints, group: Ints, joined: int) -> Ints:
    """Return where bars begin among events by stream and start.

    Events are joined over pauses of at most `joined`, if their groups are equal or both are
    shorter than that.
    """
    gpu = trace.gpu
    start, end, stream = gpu.start[rows], gpu.end[rows], gpu.stream[rows]
    is_long = end - start > joined
    is_new = (start[1:] - end[:-1] > joined) | (stream[1:] != stream[:-1])
    is_new |= (group[1:] != group[:-1]) & (is_long[1:] | is_long[:-1])
    return np.flatnonzero(np.concatenate(([True], is_new)))
