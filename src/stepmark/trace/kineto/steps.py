"""Windows of steps: the time on a GPU, or on the host, that a step accounts for.

Windows of consecutive steps tile the time of a GPU: each lasts from the end of the last GPU
event of the step before to the end of its own last event. The first one, and one after steps
that were not profiled, begins where the host begins the step, or where earlier work on the
GPU ends if that is later. Without marks the one window is from the first event to the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from stepmark.core.trace_columns import NONE, RankTrace
from stepmark.trace.kineto import links

if TYPE_CHECKING:
    from stepmark.core.trace_columns import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows of one GPU or of the host, in the order of time.

    numbers: of the steps, None for a whole trace. index: their place in links.Steps. Steps that
    launched no work have none.
    """

    numbers: tuple[int | None, ...]
    index: Ints
    start: Ints
    end: Ints

    def only(self, keep: list[bool]) -> Windows:
        """Return the windows for which keep is true."""
        mask = np.array(keep, bool)
        numbers = tuple(n for n, kept in zip(self.numbers, keep, strict=True) if kept)
        return replace(
            self,
            numbers=numbers,
            index=self.index[mask],
            start=self.start[mask],
            end=self.end[mask],
        )


def gpu_windows(trace: RankTrace, steps: links.Steps, rows: Ints) -> Windows:
    """Return the windows on the GPU whose events are `rows`; there is at least one."""
    start, end = trace.gpu.start[rows], trace.gpu.end[rows]
    if not steps.is_marked:
        whole = np.array([start.min()]), np.array([end.max()])
        return Windows(
            numbers=(None,), index=np.zeros(1, np.int64), start=whole[0], end=whole[1]
        )
    of_step = steps.of_gpu[rows]
    reach = np.maximum.accumulate(end)  # rows are in the order of their starts
    numbers: list[int] = []
    windows: list[tuple[int, int, int]] = []
    for index, number in enumerate(steps.numbers):
        own = np.flatnonzero(of_step == index)
        if not own.size:
            continue
        last = int(end[own].max())
        first = windows[-1][2] if windows else int(steps.start[index])
        if not windows or numbers[-1] != number - 1:
            earlier = int(own[0]) - 1
            reached = int(reach[earlier]) if earlier >= 0 else first
            first = max(first, int(steps.start[index]), reached)
        numbers.append(number)
        windows.append((index, first, max(first, last)))
    table = np.array(windows, np.int64).reshape(-1, 3)
    return Windows(
        numbers=tuple(numbers),
        index=table[:, 0],
        start=table[:, 1],
        end=table[:, 2],
    )


def host_windows(trace: RankTrace, steps: links.Steps) -> Windows:
    """Return the spans of the marks on the host, without those in which no operator starts."""
    if not steps.is_marked:
        whole = Windows(
            numbers=(None,), index=np.zeros(1, np.int64), start=steps.start, end=steps.end
        )
        return whole.only([trace.ops.start.size > 0])
    counts = np.searchsorted(trace.ops.start, steps.end) - np.searchsorted(
        trace.ops.start, steps.start
    )
    windows = Windows(
        numbers=steps.numbers,
        index=np.arange(len(steps.numbers)),
        start=steps.start,
        end=steps.end,
    )
    return windows.only([bool(count) for count in counts])


def of_events(steps: links.Steps, windows: Windows, rows: Ints) -> Ints:
    """Return the place in `windows` of the step that launched each event, or NONE."""
    place = np.full(len(steps.numbers) + 1, NONE, np.int64)  # the last one is for NONE
    place[windows.index] = np.arange(windows.index.size)
    return np.asarray(place[steps.of_gpu[rows]])
