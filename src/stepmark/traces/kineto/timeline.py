"""The timeline of one step: what ran on the streams of a GPU."""

from collections.abc import Iterator

import numpy as np

from stepmark.model.kernel_groups import COMMUNICATION, COPIES, group_of
from stepmark.timeline.timeline import Span, Timeline
from stepmark.timeline.trace_columns import GpuKind, RankTrace
from stepmark.traces.kineto.export import busy_steps
from stepmark.traces.kineto.links import steps
from stepmark.traces.kineto.windows import is_communication
from stepmark.traces.trace_options import TraceInputs


def timeline(trace: RankTrace, inputs: TraceInputs) -> Timeline | None:
    """Return the middle one of the chosen steps; None without GPU events."""
    windows = list(busy_steps(trace, inputs).items())
    if not windows:
        return None
    row, window = windows[len(windows) // 2]
    marked = steps(trace)
    step = marked.numbers[row] if marked.is_marked else None
    return Timeline(_spans(trace, *window), window, step)


def _spans(trace: RankTrace, start: int, end: int) -> Iterator[Span]:
    """Yield the GPU events of a window."""
    gpu = trace.gpu
    communicates = is_communication(trace)
    groups = [group_of(name) for name in trace.names]
    streams = [f"GPU {device} stream {stream}" for device, stream in trace.streams]
    for place in np.flatnonzero((gpu.end > start) & (gpu.start < end)).tolist():
        name = int(gpu.name[place])
        kind = groups[gpu.name[place]]
        if communicates[place]:
            kind = COMMUNICATION
        elif gpu.kind[place] != GpuKind.KERNEL:
            kind = COPIES
        yield Span(
            rank=trace.info.rank or 0,
            stream=streams[gpu.stream[place]],
            kind=kind,
            name=trace.names[name],
            start_ns=int(gpu.start[place]),
            end_ns=int(gpu.end[place]),
        )
