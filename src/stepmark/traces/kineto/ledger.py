"""Ledger of each step of a trace, as timeline/ledger.py defines it, for all events at once."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from stepmark.model.collectives import torch_collective
from stepmark.model.kernel_groups import short_name
from stepmark.step.trace_ops import MARK
from stepmark.timeline.ledger import RECOMPUTED, Group, Idle, Ledger, Line, Work, work_of
from stepmark.timeline.trace_columns import NONE, GpuKind, Ints, RankTrace
from stepmark.traces.kineto.attribution import PHASES, attribute, operation_of
from stepmark.traces.kineto.breakdown import Gpu, gpus
from stepmark.traces.kineto.checks import missing_work
from stepmark.traces.kineto.host_ops import HostOps
from stepmark.traces.kineto.host_times import host_times, work_on_threads
from stepmark.traces.kineto.idle import idle_gaps
from stepmark.traces.kineto.intervals import (
    Intervals,
    Pieces,
    clip,
    first_begun,
    join,
    time_before,
    union,
    without,
)
from stepmark.traces.kineto.links import distinct, gpu_comms, name_flags, steps
from stepmark.traces.kineto.windows import is_communication

# Names of lines: kinds of work, and the same where it is recomputed.
_WORKS = list(Work)
_NAMES = list(map(str, _WORKS * 2))


def ledgers(
    trace: RankTrace, selects: Callable[[int], bool]
) -> list[tuple[int | None, Ledger]]:
    """Return number and ledger of the steps that `breakdown` has, in its order.

    Without GPU events work is the host's: operations that compute, by the outermost of each
    thread, and messages. All other time is then the host's, or the batch's.
    """
    if not trace.gpu.start.size:
        return [] if any(missing_work(trace)) else list(_on_host(trace, selects))
    labels, names = _gpu_labels(trace)
    return [item for gpu in gpus(trace, selects)[1] for item in _on_gpu(gpu, labels, names)]


def _works(trace: RankTrace, op_row: Ints, name: Ints) -> Ints:
    """Return the kind of work of each row as its place in _NAMES."""
    own = attribute(HostOps(trace), op_row)
    columns = name, own.place, own.phase, own.is_recomputed
    first, which = distinct(columns)
    works = [
        _WORKS.index(work_of(trace.names[name], own.places[place].role, PHASES[phase]))
        + len(_WORKS) * is_recomputed
        for name, place, phase, is_recomputed in zip(
            *(column[first].tolist() for column in columns), strict=True
        )
    ]
    return np.array(works, np.int64)[which]


def _gpu_labels(trace: RankTrace) -> tuple[Ints, list[str]]:
    """Return the name of each GPU event's line, as its place among names."""
    gpu = trace.gpu
    args = gpu_comms(trace)[0]
    kernels = list(map(short_name, trace.names))
    calls = [torch_collective(a.collective) or a.collective for a in trace.comm_args]
    comm = len(_NAMES) + np.where(args == NONE, gpu.name, len(kernels) + args)
    work = _works(trace, operation_of(trace), gpu.name)
    work = np.where(gpu.kind == GpuKind.KERNEL, work, _WORKS.index(Work.COPY))
    return np.where(is_communication(trace), comm, work), [*_NAMES, *kernels, *calls]


def _on_gpu(
    gpu: Gpu, labels: Ints, names: Sequence[str]
) -> Iterator[tuple[int | None, Ledger]]:
    events = gpu.trace.gpu
    kinds = (~gpu.is_comm & ~gpu.is_memory, gpu.is_comm, gpu.is_memory)
    groups = [
        first_begun(events.start[rows], events.end[rows], labels[rows])
        for rows in (gpu.rows[kind] for kind in kinds)
    ]
    busy = gpu.times(np.ones(gpu.rows.size, bool))
    gaps = idle_gaps(gpu.trace, gpu.rows, gpu.call, busy, gpu.windows)
    data = _data(gpu.trace)
    in_data = time_before(data, gaps.start + gaps.host) - time_before(data, gaps.start)
    causes = {
        Idle.HOST: gaps.host - in_data,
        Idle.DATA: in_data,
        Idle.LAUNCH_GAP: gaps.kernel_gap,
        Idle.UNKNOWN: gaps.unknown,
    }
    for place, (number, *window) in enumerate(zip(gpu.numbers, *gpu.windows, strict=True)):
        own = gaps.window == place
        idle = {cause: int(times[own].sum()) for cause, times in causes.items()}
        yield number, _ledger(groups, names, idle, *map(int, window))


def _on_host(
    trace: RankTrace, selects: Callable[[int], bool]
) -> Iterator[tuple[int | None, Ledger]]:
    comm, compute = work_on_threads(trace)
    ops = trace.ops
    works = _works(trace, np.arange(ops.name.size), ops.name)
    calls = [
        torch_collective(n.rpartition(":")[2]) or n.rpartition(":")[2] for n in trace.names
    ]
    groups = (
        compute._replace(row=works[compute.row]),
        comm._replace(row=len(_NAMES) + comm.row),
        Pieces(*(comm.row[:0],) * 3),
    )
    data = without(_data(trace), join(compute.times, comm.times))
    for step in host_times(trace, steps(trace), selects).steps:
        data_ns = clip(data, step.start_ns, step.end_ns).total
        work_ns = step.compute_ns + step.exposed_comm_ns + data_ns
        idle = {Idle.HOST: step.window_ns - work_ns, Idle.DATA: data_ns}
        yield step.step, _ledger(groups, [*_NAMES, *calls], idle, step.start_ns, step.end_ns)


def _data(trace: RankTrace) -> Intervals:
    """Return when `stepmark train` waits for a batch."""
    is_data = name_flags(trace.names, lambda name: name == f"{MARK}data")[trace.spans.name]
    return union(trace.spans.start[is_data], trace.spans.end[is_data])


def _ledger(
    groups: Sequence[Pieces],
    names: Sequence[str],
    idle: Mapping[Idle, int],
    start: int,
    end: int,
) -> Ledger:
    """Return the ledger of a window. groups: compute, communication and copies by name."""
    compute, comm, copies = (pieces.clip(start, end) for pieces in groups)
    kernels = join(compute.times, comm.times)
    lines: Counter[Line] = Counter({(Group.IDLE, str(cause)): ns for cause, ns in idle.items()})
    recomputed_ns = 0
    for group, pieces, beside in (
        (Group.COMPUTE, compute, comm.times),
        (Group.COMM, comm, compute.times),
        (Group.COPIES, copies, kernels),
    ):
        hidden = time_before(beside, pieces.end) - time_before(beside, pieces.start)
        sums = np.zeros((2, len(names)), np.int64)
        np.add.at(sums[0], pieces.row, pieces.end - pieces.start - hidden)
        np.add.at(sums[1], pieces.row, hidden)
        for label in np.flatnonzero(sums.any(axis=0)).tolist():
            exposed_ns, hidden_ns = sums[:, label].tolist()
            lines[group, names[label]] += exposed_ns
            if group is Group.COMPUTE:
                lines[Group.OVERLAPPED, names[label]] += hidden_ns
                recomputed_ns += (exposed_ns + hidden_ns) * (label >= len(_WORKS))
    return Ledger(
        window_ns=end - start,
        lines={line: time_ns for line, time_ns in lines.items() if time_ns},
        within={RECOMPUTED: recomputed_ns},
    )
