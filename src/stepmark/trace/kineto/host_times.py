"""The breakdown of a trace without GPU events, by operators on the host.

Communication is when a call of torch.distributed or its work runs on any thread: operators of
c10d and waits for them, record_param_comms, and the spans of gloo's threads. Compute is when
another operator of torch (with a namespace, as aten::mm) runs on any thread, outside the
communication of its own thread. What is left of the window is neither: Python, data loading,
and nodes of autograd, which may wait in Python.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stepmark.core.kernel_groups import group_of
from stepmark.core.trace_breakdown import CommTimes, KernelTimes, RankTimes, StepTimes
from stepmark.core.trace_columns import NONE, RankTrace
from stepmark.trace.kineto.intervals import Intervals, clip, join, time_before, union, without
from stepmark.trace.kineto.links import Steps, parents
from stepmark.trace.kineto.windows import Windows

if TYPE_CHECKING:
    from stepmark.core.trace_columns import Ints

Numbers = Sequence[int | None]  # of the steps of windows
_COMM = re.compile(r"^(?:c10d::|_?c10d_functional|record_param_comms|gloo:|mpi:|ucc:|nccl:)")
_COMPUTE = re.compile(r"^(?!autograd::|torch::autograd::)\w+::|cpp_fused")
_NO_TIMES: Intervals = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def host_times(trace: RankTrace, steps: Steps, selects: Callable[[int], bool]) -> RankTimes:
    """Return the times of the selected steps on the host."""
    num_ops = np.searchsorted(trace.ops.start, steps.end)
    num_ops -= np.searchsorted(trace.ops.start, steps.start)
    index = [
        i
        for i in np.flatnonzero(num_ops).tolist()
        if not steps.is_marked or selects(steps.numbers[i])
    ]
    windows = Windows(steps.start[index], steps.end[index])
    numbers = [steps.numbers[i] if steps.is_marked else None for i in index]
    is_comm = np.array([bool(_COMM.match(name)) for name in trace.names], bool)
    compute, comm = _busy(trace, is_comm)
    exposed = without(comm, compute)
    step_times = []
    for number, step in enumerate(numbers):
        start, end = int(windows.start[number]), int(windows.end[number])
        compute_ns, comm_ns, exposed_ns = (
            clip(times, start, end).total for times in (compute, comm, exposed)
        )
        step_times.append(
            StepTimes(
                device=None,
                step=step,
                start_ns=start,
                end_ns=end,
                compute_ns=compute_ns,
                comm_ns=comm_ns,
                exposed_comm_ns=exposed_ns,
                memory_ns=0,
                exposed_memory_ns=0,
                idle_ns=end - start - compute_ns - exposed_ns,
                other_steps_ns=0,
                num_events=int(num_ops[index[number]]),
                idle=None,
                queue=None,
            )
        )
    return RankTimes(
        is_marked=steps.is_marked,
        all_steps=steps.numbers if steps.is_marked else (),
        empty_steps=tuple(steps.numbers[i] for i in np.flatnonzero(num_ops == 0)),
        steps=tuple(step_times),
        comms=tuple(_comms(trace, windows, numbers, is_comm, compute)),
        kernels=tuple(_operators(trace, windows, numbers)),
    )


def _busy(trace: RankTrace, is_comm: Ints) -> tuple[Intervals, Intervals]:
    """Return when compute and when communication runs on any thread."""
    is_compute = (
        np.array([bool(_COMPUTE.search(name)) for name in trace.names], bool) & ~is_comm
    )
    compute = comm = _NO_TIMES
    for start, end, name in _threads(trace, is_comm):
        computes, calls = is_compute[name], is_comm[name]
        own_comm = union(start[calls], end[calls])
        compute = join(compute, without(union(start[computes], end[computes]), own_comm))
        comm = join(comm, own_comm)
    return compute, comm


def _threads(trace: RankTrace, is_comm: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield start, end and name of the operators and communication of each thread."""
    ops, spans = trace.ops, trace.spans
    span_rows = np.flatnonzero(is_comm[spans.name]) if spans.name.size else spans.name
    start = np.concatenate((ops.start, spans.start[span_rows]))
    end = np.concatenate((ops.end, spans.end[span_rows]))
    name = np.concatenate((ops.name, spans.name[span_rows]))
    thread = np.concatenate((ops.thread, spans.thread[span_rows]))
    for number in np.unique(thread):
        rows = thread == number
        yield start[rows], end[rows], name[rows]


def _comms(
    trace: RankTrace,
    windows: Windows,
    numbers: Numbers,
    is_comm: Ints,
    compute: Intervals,
) -> Iterator[CommTimes]:
    """Yield the outermost calls of communication by step and name."""
    sums: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for table in (trace.ops, trace.spans):
        rows = np.flatnonzero(is_comm[table.name]) if table.name.size else table.name
        for thread in np.unique(table.thread[rows]):
            own = rows[table.thread[rows] == thread]
            own = own[parents(table.start[own], table.end[own]) == NONE]
            start, end = table.start[own], table.end[own]
            exposed = end - start - time_before(compute, end) + time_before(compute, start)
            place = _places(windows, start)
            columns = (place, table.name[own], end - start, exposed)
            for number, name, time_ns, exposed_ns in zip(
                *map(np.ndarray.tolist, columns), strict=True
            ):
                total = sums[number, name]
                total[:] = total[0] + 1, total[1] + time_ns, total[2] + exposed_ns
    for (number, name), (count, time_ns, exposed_ns) in sorted(sums.items()):
        if number != NONE:
            yield CommTimes(
                device=None,
                step=numbers[number],
                collective="",
                kernel=trace.names[name],
                group="",
                group_desc="",
                group_size=None,
                num_events=count,
                time_ns=time_ns,
                exposed_ns=exposed_ns,
            )


def _operators(trace: RankTrace, windows: Windows, numbers: Numbers) -> Iterator[KernelTimes]:
    """Yield the time of operators without those inside, by step and group."""
    ops = trace.ops
    own_time = ops.end - ops.start
    for thread in np.unique(ops.thread):
        rows = np.flatnonzero(ops.thread == thread)
        parent = parents(ops.start[rows], ops.end[rows])
        inner = parent != NONE
        np.subtract.at(own_time, rows[parent[inner]], (ops.end - ops.start)[rows[inner]])
    place = _places(windows, ops.start)
    groups = list(dict.fromkeys(map(group_of, trace.names)))
    group = np.array([groups.index(group_of(name)) for name in trace.names], np.int64)
    for number, step in enumerate(numbers):
        rows = np.flatnonzero(place == number)
        for which in np.unique(group[ops.name[rows]]).tolist():
            own = rows[group[ops.name[rows]] == which]
            yield KernelTimes(
                device=None,
                step=step,
                group=groups[which],
                num_events=own.size,
                time_ns=int(own_time[own].sum()),
            )


def _places(windows: Windows, start: Ints) -> Ints:
    """Return the window in which each time lies, or NONE."""
    if not windows.start.size:
        return np.full(start.size, NONE, np.int64)
    place = np.searchsorted(windows.start, start, side="right") - 1
    return np.where((place >= 0) & (start < windows.end[np.maximum(place, 0)]), place, NONE)
