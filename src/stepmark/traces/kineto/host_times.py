"""The breakdown of a trace without GPU events, by operators on the host.

Communication is when a call of torch.distributed or its work runs on any thread: operators of
c10d and waits for them, record_param_comms, and the spans of gloo's threads. Compute is when
another operator of torch (with a namespace, as aten::mm) runs on any thread, outside the
communication of its own thread. What is left of the window is neither: Python, data loading,
and nodes of autograd, which may wait in Python.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stepmark.timeline.trace_breakdown import CommTimes, KernelTimes, RankTimes, StepTimes
from stepmark.timeline.trace_columns import NONE, RankTrace
from stepmark.traces.kineto.event_tables import narrow
from stepmark.traces.kineto.host_ops import WorkGroups
from stepmark.traces.kineto.intervals import Intervals, Pieces, first_begun, union, without
from stepmark.traces.kineto.links import (
    Steps,
    blocks,
    name_flags,
    parents_by_thread,
    span_of,
    sums,
)
from stepmark.traces.kineto.windows import Windows, in_windows, label_times

Numbers = Sequence[int | None]  # of the steps of windows
COMM_NAME = re.compile(
    r"^(?:c10d::|_?c10d_functional|record_param_comms|gloo:|mpi:|ucc:|nccl:)"
)
_WAIT = re.compile(r"c10d_functional::(?:wait_tensor|_wrap_tensor_autograd)$")
_COMPUTE = re.compile(r"^(?!autograd::|torch::autograd::)\w+::|cpp_fused")


def host_times(trace: RankTrace, steps: Steps, selects: Callable[[int], bool]) -> RankTimes:
    """Return the times of the selected steps on the host."""
    comm, compute = communication_and_compute(trace)
    num_ops = np.searchsorted(trace.ops.start, steps.end)
    num_ops -= np.searchsorted(trace.ops.start, steps.start)
    runs = (num_ops > 0) | (in_windows(comm, Windows(steps.start, steps.end)) > 0)
    index = [
        i
        for i in np.flatnonzero(runs).tolist()
        if not steps.is_marked or selects(steps.numbers[i])
    ]
    windows = Windows(steps.start[index], steps.end[index])
    numbers = [steps.numbers[i] if steps.is_marked else None for i in index]
    exposed = without(comm, compute)
    compute_ns, comm_ns, exposed_ns = (
        in_windows(times, windows).tolist() for times in (compute, comm, exposed)
    )
    return RankTimes(
        all_steps=steps.numbers if steps.is_marked else (),
        empty_steps=tuple(steps.numbers[i] for i in np.flatnonzero(~runs)),
        steps=tuple(
            StepTimes(
                device=None,
                step=step,
                start_ns=int(start),
                end_ns=int(end),
                compute_ns=compute_ns[place],
                comm_ns=comm_ns[place],
                exposed_comm_ns=exposed_ns[place],
                idle_ns=None
                if trace.info.cut
                else int(end - start) - compute_ns[place] - exposed_ns[place],
                num_events=int(num_ops[index[place]]),
            )
            for place, (step, start, end) in enumerate(zip(numbers, *windows, strict=True))
        ),
        comms=tuple(_comms(trace, windows, numbers, compute)),
        kernels=tuple(_operators(trace, windows, numbers)),
    )


def communication_and_compute(trace: RankTrace) -> tuple[Intervals, Intervals]:
    """Return when communication and when compute runs on any thread."""
    comm, compute = work_on_threads(trace)
    return union(comm.start, comm.end), union(compute.start, compute.end)


def work_on_threads(trace: RankTrace) -> tuple[Pieces, Pieces]:
    """Return communication by name, and compute by the row of its operation.

    Where several run, on one thread or on many, it is the one that began first; a wait for a
    collective only has the time in which none runs.
    """
    is_comm = name_flags(trace.names, COMM_NAME.match)
    is_compute = name_flags(trace.names, _COMPUTE.search) & ~is_comm
    ops = trace.ops
    spans = trace.spans
    calls = [
        np.stack((table.start, table.end, table.name, table.thread))[:, is_comm[table.name]]
        for table in (ops, spans)
    ]
    start, end, name, thread = np.concatenate(calls, axis=1)
    rows = np.flatnonzero(is_compute[ops.name])
    parts = [np.empty((3, 0), np.int64)]
    for number in np.unique(ops.thread[rows]):
        own = rows[ops.thread[rows] == number]
        own_comm = union(start[thread == number], end[thread == number])
        pieces = first_begun(ops.start[own], ops.end[own], own).without(own_comm)
        parts.append(np.stack(pieces))
    is_wait = name_flags(trace.names, _WAIT.search)[name]
    comm, waits = (
        first_begun(start[rows], end[rows], name[rows]) for rows in (~is_wait, is_wait)
    )
    waits = waits.without(comm.times)
    comm = first_begun(*np.concatenate((comm, waits), axis=1))
    return comm, first_begun(*np.concatenate(parts, axis=1))


def _comms(
    trace: RankTrace,
    windows: Windows,
    numbers: Numbers,
    compute: Intervals,
) -> Iterator[CommTimes]:
    """Yield the outermost calls of communication by step and name."""
    parts = []
    is_comm = name_flags(trace.names, COMM_NAME.match)
    for table in (trace.ops, trace.spans):
        rows = np.flatnonzero(is_comm[table.name])
        columns = table.start[rows], table.end[rows], table.thread[rows]
        own = rows[parents_by_thread(*columns) == NONE]
        parts.append(np.stack((table.start[own], table.end[own], table.name[own]), axis=1))
    start, end, name = np.concatenate(parts).T
    calls = start, end, name, span_of(*windows, start)
    for which, number, count, time_ns, exposed_ns in label_times(calls, compute, windows):
        yield CommTimes(
            device=None,
            step=numbers[number],
            kernel=trace.names[which],
            num_events=count,
            time_ns=time_ns,
            exposed_ns=exposed_ns,
        )


def _operators(trace: RankTrace, windows: Windows, numbers: Numbers) -> Iterator[KernelTimes]:
    """Yield the time of operators without those inside, by step and group."""
    ops = trace.ops
    own_time = ops.end - ops.start
    parent = parents_by_thread(ops.start, ops.end, ops.thread)
    for block in blocks(parent.size):
        inner = block.start + np.flatnonzero(parent[block] != NONE)
        np.subtract.at(own_time, parent[inner], ops.end[inner] - ops.start[inner])
    place = narrow(span_of(*windows, ops.start))
    rows = np.flatnonzero(place != NONE)
    groups = WorkGroups(trace)
    group = groups.of(ops.name[rows], ops.start[rows], ops.thread[rows])
    for (number, which), total in sums([place[rows], group], [own_time[rows]]):
        yield KernelTimes(
            device=None,
            step=numbers[number],
            group=groups.names[which],
            num_events=total[0],
            time_ns=total[1],
        )
