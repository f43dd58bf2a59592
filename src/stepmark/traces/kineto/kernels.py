"""Time of a step by operation: kernels of one rank, attributed and summed."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from stepmark.model.collectives import Collective, torch_collective
from stepmark.step.trace_ops import COMM, COMPUTE, MEMORY, MeasuredOp, OpKey, OpTable
from stepmark.step.workload import Workload
from stepmark.timeline.trace_columns import (
    NONE,
    Flags,
    GpuKind,
    Ints,
    OpColumns,
    RankTrace,
    SpanColumns,
)
from stepmark.traces.kineto.attribution import (
    PHASES,
    Attribution,
    attribute,
    by_shape,
    operation_of,
)
from stepmark.traces.kineto.gloo import WORK
from stepmark.traces.kineto.host_ops import PHASE_MARKS, HostOps, nearest
from stepmark.traces.kineto.host_times import COMM_NAME
from stepmark.traces.kineto.intervals import time_before
from stepmark.traces.kineto.links import (
    Steps,
    distinct,
    gpu_comms,
    launches,
    name_flags,
    step_of,
    steps,
)
from stepmark.traces.kineto.windows import (
    Windows,
    communication_and_compute,
    gpu_windows,
    is_communication,
)

_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
_CALL = re.compile(r"^c10d::(?:\w+_|send)$")
_KINDS = (COMPUTE, COMM, MEMORY)
_COMMS = ("", *Collective)  # of the stream of a kernel
_GATHER = Collective.ALL_GATHER  # of streams without a collective


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Kernels and copies; or operations of a host, with their own time."""

    own_ns: Ints
    overlapped_ns: Ints
    name: Ints
    kind: Ints  # index in _KINDS
    step: Ints  # index in steps, or NONE
    op_row: Ints
    counts: Ints  # 0: an operation that only dispatches another one of its kind
    comm: Ints  # index in _COMMS


def measured_ops(
    trace: RankTrace,
    selects: Callable[[int], bool] = lambda _number: True,
    workload: Workload | None = None,
) -> OpTable:
    """Return the operations of the trace's steps, and where each belongs.

    selects: which steps, by number. workload: tells by shapes what annotations do not.
    """
    marked = steps(trace)
    is_host = not trace.gpu.start.size
    if is_host:
        trace = _with_gloo(trace)
    host = HostOps(trace)
    work = _on_host(host, marked) if is_host else _on_gpu(trace, marked)
    attribution = attribute(host, _callers(host) if is_host else work.op_row)
    notes: tuple[str, ...] = ()
    rank = trace.info.rank
    if workload is not None and (rank is not None or len(workload.stages) == 1):
        attribution, notes = by_shape(
            *(attribution, work.op_row, work.step, workload, rank or 0),
            is_ordered=not any(name.startswith(_COMPILED) for name in trace.names),
            is_own=any(name in PHASE_MARKS for name in trace.names),
        )
    if by_graph := _launched_by_graphs(trace, marked):
        text = "kernels and copies were launched by graphs, which record no operations"
        notes = (*notes, f"{by_graph} {text}")
    wanted = [index for index, number in enumerate(marked.numbers) if selects(number)]
    if empty := sorted(set(wanted) - set(work.step.tolist())):
        numbers = ", ".join(str(marked.numbers[index]) for index in empty)
        notes = (*notes, f"no work of step {numbers} is in the trace: it does not count")
        wanted = [index for index in wanted if index not in empty]
    windows = Windows(marked.start, marked.end) if is_host else gpu_windows(trace, marked)
    rows = np.flatnonzero(np.isin(work.step, wanted))
    return OpTable(
        steps=tuple(marked.numbers[index] for index in wanted),
        step_ns=tuple((windows.end - windows.start)[wanted].tolist()),
        is_marked=marked.is_marked,
        is_host=is_host,
        outside_ns=int(work.own_ns[work.step == NONE].sum()),
        notes=notes,
        ops=tuple(_sums(trace, work, attribution, rows, marked.numbers)),
    )


def _on_gpu(trace: RankTrace, marked: Steps) -> _Work:
    gpu = trace.gpu
    args, _ = gpu_comms(trace)
    is_comm = is_communication(trace) | (args != NONE)
    kind = np.where(gpu.kind == GpuKind.KERNEL, 0, _KINDS.index(MEMORY))
    in_comm, in_compute = (
        time_before(times, gpu.end) - time_before(times, gpu.start)
        for times in communication_and_compute(trace)
    )
    return _Work(
        own_ns=gpu.end - gpu.start,
        overlapped_ns=np.where(is_comm, in_compute, in_comm),
        name=gpu.name,
        kind=np.where(is_comm, _KINDS.index(COMM), kind),
        step=marked.of_gpu,
        op_row=operation_of(trace),
        counts=np.ones(gpu.start.size, np.int64),
        comm=_stream_comms(trace, ~is_comm & (gpu.kind == GpuKind.KERNEL), args),
    )


def _stream_comms(trace: RankTrace, computes: Flags, args: Ints) -> Ints:
    """Return the collective of the stream of each kernel on another stream than most.

    computes: whether an event is computation. args: its index in trace.comm_args, or NONE.
    """
    gpu = trace.gpu
    comms = np.zeros(gpu.start.size, np.int64)
    durations = (gpu.end - gpu.start)[computes]
    times = np.bincount(gpu.stream[computes], durations, len(trace.streams))
    devices = np.array([device for device, _ in trace.streams], np.int64)
    for stream in np.flatnonzero(times).tolist():
        if times[stream] == times[devices == devices[stream]].max():
            continue
        own = gpu.stream == stream
        calls = args[own & (args != NONE)]
        name: str = _GATHER
        if calls.size:
            most = int(np.bincount(calls).argmax())
            name = torch_collective(trace.comm_args[most].collective)
        comms[own & computes] = _COMMS.index(name) if name in _COMMS else 0
    return comms


def _launched_by_graphs(trace: RankTrace, marked: Steps) -> int:
    launch = np.append(trace.calls.name, NONE)[launches(trace)]
    is_graph = name_flags(trace.names, lambda name: "GraphLaunch" in name)[launch]
    return int((is_graph & (marked.of_gpu != NONE)).sum())


def _on_host(host: HostOps, marked: Steps) -> _Work:
    """Return the operations, each without the time of those inside."""
    ops = host.ops
    own_ns = ops.end - ops.start
    inner = np.flatnonzero(host.parent != NONE)
    np.subtract.at(own_ns, host.parent[inner], (ops.end - ops.start)[inner])
    rows = np.arange(own_ns.size - 1)  # without the row for NONE
    is_comm = host.where(COMM_NAME.match)[ops.name[rows]]
    return _Work(
        own_ns=np.maximum(own_ns[rows], 0),  # asynchronous ones may overlap
        overlapped_ns=np.zeros(rows.size, np.int64),
        name=ops.name[rows],
        kind=is_comm.astype(np.int64) * _KINDS.index(COMM),
        step=step_of(marked, ops.start[rows]),
        op_row=rows,
        counts=(host.inner_product[rows] == rows).astype(np.int64),
        comm=np.zeros(rows.size, np.int64),
    )


def _with_gloo(trace: RankTrace) -> RankTrace:
    """Return the trace with gloo's messages, which are annotations, as operations."""
    spans = trace.spans
    ops = trace.ops
    is_gloo = name_flags(trace.names, lambda name: name.startswith(WORK))
    own = np.flatnonzero(is_gloo[spans.name])
    columns = {each.name: np.full(own.size, NONE, np.int64) for each in fields(OpColumns)}
    columns |= {each.name: getattr(spans, each.name)[own] for each in fields(SpanColumns)}
    columns = {name: np.append(getattr(ops, name), more) for name, more in columns.items()}
    order = np.lexsort((-columns["end"], columns["start"]))
    return replace(
        trace, ops=OpColumns(**{name: column[order] for name, column in columns.items()})
    )


def _callers(host: HostOps) -> Ints:
    """Return each operation, but for gloo's threads the call of torch that enqueued theirs.

    gloo starts messages in the order of their calls; without as many calls none is known.
    """
    ops = host.ops
    rows = np.arange(host.ops.start.size - 1)
    is_message = host.where(lambda name: name.startswith(WORK))[ops.name]
    messages = np.flatnonzero(is_message)
    calls = np.flatnonzero(host.where(_CALL.match)[ops.name])
    if messages.size == calls.size and (ops.start[calls] <= ops.start[messages]).all():
        call = np.full(ops.start.size, NONE, np.int64)
        call[messages] = calls
        outer = nearest(host.parent, is_message)[rows]
        is_elsewhere = ops.thread[outer] != ops.thread[call[outer]]
        rows = np.where((outer == rows) | is_elsewhere, call[outer], rows)
    return rows


def _sums(
    trace: RankTrace,
    work: _Work,
    attribution: Attribution,
    rows: Ints,
    numbers: tuple[int, ...],
) -> Iterator[MeasuredOp]:
    """Yield sums of these rows by step and key."""
    op_row = work.op_row[rows]
    op = np.where(op_row == NONE, NONE, np.append(trace.ops.name, NONE)[op_row])
    columns = (
        *(
            work.step[rows],
            attribution.place[rows],
            attribution.phase[rows],
            attribution.is_recomputed[rows],
        ),
        *(work.kind[rows], op, work.name[rows], work.comm[rows]),
    )
    first, group = distinct(columns)
    # An operation counts where its first kernel does, or else its first copy or memset.
    calls = (op_row == NONE).astype(np.int64)
    with_op = np.flatnonzero(op_row != NONE)
    is_copy = work.kind[rows[with_op]] == _KINDS.index(MEMORY)
    with_op = with_op[np.argsort(is_copy, kind="stable")]
    calls[with_op[np.unique(op_row[with_op], return_index=True)[1]]] = 1
    calls *= work.counts[rows]
    own_ns = work.own_ns[rows]
    time_ns, num_calls, longest, overlapped = (np.zeros(first.size, np.int64) for _ in range(4))
    shortest = np.full(first.size, 2**62)
    np.add.at(time_ns, group, own_ns)
    np.add.at(num_calls, group, calls)
    np.add.at(overlapped, group, work.overlapped_ns[rows])
    np.maximum.at(longest, group, own_ns)
    np.minimum.at(shortest, group, own_ns)
    kernels = np.bincount(group, minlength=first.size)
    sums = np.stack((time_ns, num_calls, kernels, shortest, longest, overlapped), axis=1)
    keys = np.stack([column[first] for column in columns], axis=1)
    for indices, values in zip(keys.tolist(), sums.tolist(), strict=True):
        step, place, phase, is_recomputed, kind, op_name, name, comm = indices
        role, module, layer = attribution.places[place]
        key = OpKey(
            role=role,
            module=module,
            layer=layer,
            phase=str(PHASES[phase]),
            is_recomputed=bool(is_recomputed),
            kind=_KINDS[kind],
            op=trace.names[op_name] if op_name != NONE else "",
            name=trace.names[name],
        )
        yield replace(MeasuredOp(numbers[step], key, *values), comm=_COMMS[comm])
