"""Time of a step by operation: kernels of one rank, attributed and summed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stepmark.core.kernel_groups import COMMUNICATION, group_of
from stepmark.core.ops import Gemm, GroupedGemm, Phase
from stepmark.core.trace_columns import NONE, GpuKind, OpColumns, RankTrace
from stepmark.core.trace_ops import COARSE, COMM, COMPUTE, MEMORY, OpKey, OpTable
from stepmark.core.workload import ComputeOp, Workload
from stepmark.trace.kineto.attribution import (
    GLOO,
    PHASES,
    Attribution,
    Host,
    distinct,
    nearest,
    operation_of,
)
from stepmark.trace.kineto.links import Steps, gpu_comms, steps
from stepmark.trace.kineto.windows import Windows, gpu_windows

if TYPE_CHECKING:
    from stepmark.core.trace_columns import Ints

StepRanges = Sequence[tuple[int, int]]
_HOST_COMM = re.compile(
    r"^(?:c10d::|_?c10d_functional|record_param_comms|gloo:|mpi:|ucc:|nccl:)"
)
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
    host = Host(trace)
    work = _on_host(trace, host, marked) if is_host else _on_gpu(trace, marked)
    found = host.attribute(_callers(trace, host) if is_host else work.op_row)
    notes: tuple[str, ...] = ()
    if workload is not None:
        found, notes = _by_shape(work, found, workload, trace.info.rank or 0)
    wanted = [
        index
        for index, number in enumerate(marked.numbers)
        if in_steps is None or any(low <= number <= high for low, high in in_steps)
    ]
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


def _on_host(trace: RankTrace, host: Host, marked: Steps) -> _Work:
    """Return the operations, each without the time of those inside."""
    ops = trace.ops
    own_ns = ops.end - ops.start
    inner = np.flatnonzero(host.parent != NONE)
    np.subtract.at(own_ns, host.parent[inner], (ops.end - ops.start)[inner])
    is_comm = np.isin(ops.name, _matching(trace, _HOST_COMM))
    step = np.searchsorted(marked.start, ops.start, "right") - 1
    step = np.where((step >= 0) & (ops.start < marked.end[np.maximum(step, 0)]), step, NONE)
    return _Work(
        own_ns=own_ns,
        name=ops.name,
        kind=np.where(is_comm, _KINDS.index(COMM), 0),
        num_bytes=np.full(ops.start.size, NONE, np.int64),
        step=step if marked.is_marked else np.zeros(ops.start.size, np.int64),
        op_row=np.arange(ops.start.size),
        counts=(host.inner_product == np.arange(ops.start.size)).astype(np.int64),
    )


def _with_gloo(trace: RankTrace) -> RankTrace:
    """Return the trace with gloo's messages, which are annotations, as operations."""
    spans, ops = trace.spans, trace.ops
    names = [number for number, name in enumerate(trace.names) if name.startswith(GLOO)]
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


def _callers(trace: RankTrace, host: Host) -> Ints:
    """Return each operation, but for gloo's threads the call of torch that enqueued theirs.

    gloo starts messages in the order of their calls; without as many calls none is known.
    """
    ops = trace.ops
    rows = np.arange(ops.start.size)
    messages = np.isin(ops.name, _matching(trace, re.compile(f"^{GLOO}")))
    calls = np.flatnonzero(np.isin(ops.name, _matching(trace, _CALL)))
    own = np.flatnonzero(messages)
    if own.size and own.size == calls.size and (ops.start[calls] <= ops.start[own]).all():
        outer = nearest(host.parent, messages)
        call = np.full(ops.start.size, NONE, np.int64)
        call[own] = calls
        rows = np.where(outer == NONE, rows, call[outer])
    return rows


def _matching(trace: RankTrace, pattern: re.Pattern[str]) -> list[int]:
    return [number for number, name in enumerate(trace.names) if pattern.search(name)]


def _sums(
    trace: RankTrace, work: _Work, found: Attribution, rows: Ints, wanted: Sequence[int]
) -> dict[str, Any]:
    """Return the columns of an OpTable: sums of these rows by step and key."""
    ops, op_row = trace.ops, work.op_row[rows]
    op = np.where(op_row == NONE, NONE, ops.name[op_row]) if ops.start.size else op_row
    columns = (
        *(found.role[rows], found.module[rows], found.layer[rows], found.phase[rows]),
        *(found.is_recomputed[rows], work.kind[rows], op, work.name[rows]),
    )
    first_of_key, key = distinct(columns)
    keys = tuple(
        OpKey(
            role=found.roles[role],
            module=found.modules[module],
            layer=None if layer == NONE else layer,
            phase=str(PHASES[phase]),
            is_recomputed=bool(is_recomputed),
            kind=_KINDS[kind],
            op=trace.names[op] if op != NONE else "",
            name=trace.names[name],
        )
        for role, module, layer, phase, is_recomputed, kind, op, name in zip(
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


Shape = tuple[int, int, int]  # rows, columns, contracted


def _by_shape(
    work: _Work, found: Attribution, workload: Workload, rank: int
) -> tuple[Attribution, tuple[str, ...]]:
    """Return the attribution with roles of products by their shapes, and what did not match.

    Products of one shape are taken in the order of the workload where there are as many;
    otherwise they have the roles of all operations of that shape.
    """
    known = _products_of(workload, min(rank, workload.world_size - 1))
    coarse = [number for number, role in enumerate(found.roles) if role in COARSE]
    op_row, first = np.unique(work.op_row, return_index=True)
    is_open = (op_row != NONE) & (found.product[first] != NONE) & (work.step[first] != NONE)
    is_open &= np.isin(found.role[first], coarse)
    first = first[is_open]
    places: dict[tuple[int, int, int, str], list[int]] = defaultdict(list)
    for row, step, product, layer, phase, again in zip(
        *(
            column.tolist()
            for column in (
                first,
                work.step[first],
                found.product[first],
                found.layer[first],
                found.phase[first],
                found.is_recomputed[first],
            )
        ),
        strict=True,
    ):
        when = _pass(PHASES[phase], bool(again)) if phase else ""
        places[step, product, layer, when].append(row)
    columns = {name: getattr(found, name).copy() for name in ("role", "layer", "phase")}
    roles = {role: number for number, role in enumerate(found.roles)}
    unmatched = 0
    of_op: dict[int, int] = {}
    for (_, product, layer, when), rows in places.items():
        candidates = _candidates(known, tuple(found.products[product].tolist()), layer, when)
        unmatched += len(rows) * (not candidates)
        if not candidates:
            continue
        chosen = (
            candidates if len(candidates) == len(rows) else [_merged(candidates)] * len(rows)
        )
        for row, (role, its_layer, phase) in zip(rows, chosen, strict=True):
            columns["role"][row] = roles.setdefault(role, len(roles))
            if its_layer is not None:
                columns["layer"][row] = its_layer
            if phase:
                columns["phase"][row] = PHASES.index(phase)
            of_op[int(work.op_row[row])] = row
    # Other kernels of the same operation.
    if of_op:
        source = np.array(list(of_op.values()), np.int64)
        order = np.argsort(work.op_row[source])
        place = np.searchsorted(work.op_row[source][order], work.op_row)
        place = order[np.minimum(place, source.size - 1)]
        same = work.op_row[source[place]] == work.op_row
        for column in columns.values():
            column[same] = column[source[place[same]]]
    text = f"{unmatched} of {first.size} products have a shape that the workload has not"
    return replace(found, roles=list(roles), **columns), (text,) * bool(unmatched)


Candidate = tuple[str, int | None, str]  # role, layer, phase
Known = dict[str, dict[Shape, list[Candidate]]]


def _products_of(workload: Workload, rank: int) -> Known:
    """Return a rank's products by pass and shape, in the order in which they run."""
    known: Known = {"fwd": defaultdict(list), "bwd": defaultdict(list)}
    for op in workload.expand(workload.stage_of(rank)):
        if not isinstance(op, ComputeOp):
            continue
        if isinstance(op.op, Gemm):
            shape = (op.op.m, op.op.n, op.op.k)
        elif isinstance(op.op, GroupedGemm):
            m, n, k = op.op.tokens, op.op.n, op.op.k
            shape = {Phase.DGRAD: (m, k, n), Phase.WGRAD: (n, k, m)}.get(op.phase, (m, n, k))
        else:
            continue
        candidate = (op.module, op.layer, str(op.phase))
        known[_pass(op.phase, op.recompute)][shape].append(candidate)
    return known


def _pass(phase: str, is_recomputed: bool) -> str:
    return "bwd" if is_recomputed or phase in _BACKWARD else "fwd"


def _candidates(known: Known, shape: Shape, layer: int, when: str) -> list[Candidate]:
    """Return the operations of this shape, or of its transpose where none has the shape."""
    m, n, k = shape
    for wanted in ((m, n, k), (n, m, k)):
        found = [
            candidate
            for name, products in known.items()
            if when in ("", name)
            for candidate in products.get(wanted, ())
            if layer in (NONE, candidate[1])
        ]
        if found:
            return found
    return []


def _merged(candidates: Sequence[Candidate]) -> Candidate:
    """Return what these have in common; all roles where there are several."""
    names, layers, phases = (
        list(dict.fromkeys(part)) for part in zip(*candidates, strict=True)
    )
    return (
        " | ".join(names),
        layers[0] if len(layers) == 1 else None,
        phases[0] if len(phases) == 1 else "",
    )
