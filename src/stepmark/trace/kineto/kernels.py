"""Time of a step by operation: kernels of one rank, attributed and summed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stepmark.core.kernel_groups import COMMUNICATION, group_of
from stepmark.core.ops import Phase
from stepmark.core.trace_columns import NONE, GpuKind, OpColumns, RankTrace
from stepmark.core.trace_ops import COMM, COMPUTE, MEMORY, OpKey, OpTable
from stepmark.core.workload import Workload
from stepmark.trace.kineto.attribution import PHASES, Attribution, attribute, operation_of
from stepmark.trace.kineto.host_ops import PHASE_MARKS, HostOps, distinct, nearest
from stepmark.trace.kineto.links import Steps, gpu_comms, launches, steps
from stepmark.trace.kineto.shapes import by_shape
from stepmark.trace.kineto.windows import Windows, gpu_windows

if TYPE_CHECKING:
    from stepmark.core.trace_columns import Ints

StepRanges = Sequence[tuple[int, int]]
_HOST_COMM = re.compile(
    r"^(?:c10d::|_?c10d_functional|record_param_comms|gloo:|mpi:|ucc:|nccl:)"
)
_GLOO = "gloo:"
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
_CALL = re.compile(r"^c10d::(?:\w+_|send)$")
_KINDS = (COMPUTE, COMM, MEMORY)
_BACKWARD = (Phase.DGRAD, Phase.WGRAD, Phase.BWD)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Kernels and copies; or operations of a host, with their own time."""

    own_ns: Ints
    name: Ints
    kind: Ints  # index in _KINDS
    num_bytes: Ints
    step: Ints  # index in steps, or NONE
    op_row: Ints
    counts: Ints  # 0: an operation that only dispatches another one of its kind


def measured_ops(
    trace: RankTrace, *, in_steps: StepRanges | None = None, workload: Workload | None = None
) -> OpTable:
    """Return the operations of the trace's steps, and where each belongs.

    in_steps: ranges of the numbers of steps; None: all. workload: tells by shapes what
    annotations do not.
    """
    marked = steps(trace)
    is_host = not trace.gpu.start.size
    if is_host:
        trace = _with_gloo(trace)
    host = HostOps(trace)
    work = _on_host(host, marked) if is_host else _on_gpu(trace, marked)
    found = attribute(host, _callers(host) if is_host else work.op_row)
    notes: tuple[str, ...] = ()
    rank = trace.info.rank
    if workload is not None and (rank is not None or len(workload.stages) == 1):
        is_ordered = not any(name.startswith(_COMPILED) for name in trace.names)
        is_own = any(name in PHASE_MARKS for name in trace.names)
        found, notes = by_shape(
            *(found, work.op_row, work.step, workload, rank or 0),
            is_ordered=is_ordered,
            is_own=is_own,
        )
    if by_graph := _launched_by_graphs(trace, work):
        text = (
            f"{by_graph} kernels and copies were launched by graphs, which record no operations"
        )
        notes = (*notes, text)
    wanted = [
        index
        for index, number in enumerate(marked.numbers)
        if in_steps is None or any(low <= number <= high for low, high in in_steps)
    ]
    if empty := sorted(set(wanted) - set(work.step.tolist())):
        numbers = ", ".join(str(marked.numbers[index]) for index in empty)
        notes = (*notes, f"no work of step {numbers} is in the trace: it does not count")
        wanted = [index for index in wanted if index not in empty]
    windows = Windows(marked.start, marked.end) if is_host else gpu_windows(trace, marked)
    lengths = (windows.end - windows.start).tolist()
    rows = np.flatnonzero(np.isin(work.step, wanted))
    return OpTable(
        steps=tuple(marked.numbers[index] for index in wanted),
        step_ns=tuple(lengths[index] for index in wanted),
        is_marked=marked.is_marked,
        is_host=is_host,
        outside_ns=int(work.own_ns[work.step == NONE].sum()),
        notes=notes,
        **_sums(trace, work, found, rows, wanted),
    )


def _on_gpu(trace: RankTrace, marked: Steps) -> _Work:
    gpu = trace.gpu
    args, _ = gpu_comms(trace)
    by_name = [n for n, name in enumerate(trace.names) if group_of(name) == COMMUNICATION]
    is_comm = (args != NONE) | ((gpu.kind == GpuKind.KERNEL) & np.isin(gpu.name, by_name))
    kind = np.where(gpu.kind != GpuKind.KERNEL, _KINDS.index(MEMORY), 0)
    return _Work(
        own_ns=gpu.end - gpu.start,
        name=gpu.name,
        kind=np.where(is_comm, _KINDS.index(COMM), kind),
        num_bytes=gpu.num_bytes,
        step=marked.of_gpu,
        op_row=operation_of(trace),
        counts=np.ones(gpu.start.size, np.int64),
    )


def _launched_by_graphs(trace: RankTrace, work: _Work) -> int:
    graphs = [number for number, name in enumerate(trace.names) if "GraphLaunch" in name]
    call = launches(trace)
    launch = np.append(trace.calls.name, NONE)[call]
    return int((np.isin(launch, graphs) & (work.step != NONE)).sum()) if graphs else 0


def _on_host(host: HostOps, marked: Steps) -> _Work:
    """Return the operations, each without the time of those inside."""
    ops = host.ops
    own_ns = ops.end - ops.start
    inner = np.flatnonzero(host.parent != NONE)
    np.subtract.at(own_ns, host.parent[inner], (ops.end - ops.start)[inner])
    rows = np.arange(own_ns.size - 1)  # without the row for NONE
    start = ops.start[rows]
    step = np.searchsorted(marked.start, start, "right") - 1
    is_inside = (step >= 0) & (start < marked.end[step])
    is_comm = host.where(_HOST_COMM.match)[ops.name[rows]]
    return _Work(
        own_ns=np.maximum(own_ns[rows], 0),  # asynchronous ones may overlap
        name=ops.name[rows],
        kind=is_comm.astype(np.int64) * _KINDS.index(COMM),
        num_bytes=np.full(rows.size, NONE, np.int64),
        step=np.where(is_inside, step, NONE) if marked.is_marked else rows * 0,
        op_row=rows,
        counts=(host.inner_product[rows] == rows).astype(np.int64),
    )


def _with_gloo(trace: RankTrace) -> RankTrace:
    """Return the trace with gloo's messages, which are annotations, as operations."""
    spans, ops = trace.spans, trace.ops
    names = [number for number, name in enumerate(trace.names) if name.startswith(_GLOO)]
    own = np.flatnonzero(np.isin(spans.name, names))
    none = np.full(own.size, NONE, np.int64)
    columns = {
        field: np.concatenate(
            (getattr(ops, field), getattr(spans, field)[own] if field in _SHARED else none)
        )
        for field in OpColumns.__dataclass_fields__
    }
    order = np.lexsort((-columns["end"], columns["start"]))
    return replace(
        trace, ops=OpColumns(**{field: column[order] for field, column in columns.items()})
    )


_SHARED = ("start", "end", "name", "thread")


def _callers(host: HostOps) -> Ints:
    """Return each operation, but for gloo's threads the call of torch that enqueued theirs.

    gloo starts messages in the order of their calls; without as many calls none is known.
    """
    ops, rows = host.ops, np.arange(host.ops.start.size - 1)
    is_message = host.where(lambda name: name.startswith(_GLOO))[ops.name]
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
    trace: RankTrace, work: _Work, found: Attribution, rows: Ints, wanted: Sequence[int]
) -> dict[str, Any]:
    """Return the columns of an OpTable: sums of these rows by step and key."""
    ops, op_row = trace.ops, work.op_row[rows]
    op = np.where(op_row == NONE, NONE, ops.name[op_row]) if ops.start.size else op_row
    columns = (
        *(found.place[rows], found.phase[rows], found.is_recomputed[rows]),
        *(work.kind[rows], op, work.name[rows]),
    )
    first_of_key, key = distinct(columns)
    keys = tuple(
        OpKey(
            role=found.places[place].role,
            module=found.places[place].module,
            layer=found.places[place].layer,
            phase=str(PHASES[phase]),
            is_recomputed=bool(is_recomputed),
            kind=_KINDS[kind],
            op=trace.names[op] if op != NONE else "",
            name=trace.names[name],
        )
        for place, phase, is_recomputed, kind, op, name in zip(
            *(column[first_of_key].tolist() for column in columns), strict=True
        )
    )
    step = np.searchsorted(wanted, work.step[rows])
    first, group = distinct((step, key))
    # An operation counts where its first kernel does, or else its first copy or memset.
    calls = (op_row == NONE).astype(np.int64)
    with_op = np.flatnonzero(op_row != NONE)
    is_copy = work.kind[rows[with_op]] == _KINDS.index(MEMORY)
    with_op = with_op[np.argsort(is_copy, kind="stable")]
    calls[with_op[np.unique(op_row[with_op], return_index=True)[1]]] = 1
    calls *= work.counts[rows]

    def summed(values: Ints) -> Ints:
        total = np.zeros(first.size, np.int64)
        np.add.at(total, group, values)
        return total

    own_ns, num_bytes = work.own_ns[rows], work.num_bytes[rows]
    shortest, longest = np.full(first.size, 2**62), np.zeros(first.size, np.int64)
    np.minimum.at(shortest, group, own_ns)
    np.maximum.at(longest, group, own_ns)
    copied = summed((num_bytes != NONE).astype(np.int64)) > 0
    return {
        "keys": keys,
        "step": step[first],
        "key": key[first],
        "time_ns": summed(own_ns),
        "calls": summed(calls),
        "kernels": summed(np.ones(rows.size, np.int64)),
        "shortest_ns": shortest,
        "longest_ns": longest,
        "num_bytes": np.where(copied, summed(np.maximum(num_bytes, 0)), NONE),
    }
