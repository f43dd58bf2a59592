"""The calls of torch.distributed of one process, with the kernels that carried them out.

A call is what the host issued; its kernels are those that it launched. Counted are calls, so
that what was issued and never ran on the GPU is there, untimed. Kernels whose call the trace
does not have (launched before the trace began, replayed CUDA graphs, coalesced calls, which
share one kernel that is launched after them) belong to none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepmark.core.trace_columns import NONE, CommArgs, RankTrace
from stepmark.trace.kineto.links import Steps, innermost, launches, parents, sends
from stepmark.trace.kineto.windows import is_communication

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepmark.core.trace_columns import Ints, OpColumns, SpanColumns
    from stepmark.trace.kineto.windows import Flags

    Pattern = re.Pattern[str]

PHASES = ("", "forward", "backward", "optimizer")
_AUTOGRAD = "autograd::engine::evaluate_function"
# Annotations of users, torch and modules, by the phase during which they are open.
_ANNOTATIONS = {
    "forward": re.compile(r"forward|^nn\.Module: ", re.IGNORECASE),
    "backward": re.compile("backward", re.IGNORECASE),
    "optimizer": re.compile(r"^Optimizer\.step|\boptimizer\b", re.IGNORECASE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommCalls:
    """Calls of one process in the order in which it issued them; times in ns.

    start and end: of a call's kernels (the first start and the last end of several), or of
    gloo's work; NONE where none is known. unlinked: kernels of collectives without a call, by
    name: their number, and their time.
    """

    args: tuple[CommArgs, ...]
    comm: Ints  # index of args
    step: Ints  # index of Steps.numbers, or NONE
    phase: Ints  # index of PHASES
    seq: Ints  # number of the collective in its group, or NONE
    issued: Ints
    start: Ints
    end: Ints
    unlinked: tuple[tuple[str, int, int], ...] = ()
    without_args: int = 0  # calls that old versions of torch recorded without saying what


def comm_calls(trace: RankTrace, steps: Steps) -> CommCalls:
    """Return the calls, and kernels of unlinked ones that say themselves what they are."""
    comms, gpu = trace.comms, trace.gpu
    known = np.flatnonzero(comms.comm != NONE)
    columns_of_known = comms.start[known], comms.end[known], comms.thread[known]
    rows = _leaves(trace, known)
    unknown = np.flatnonzero(comms.comm == NONE)
    inside = innermost(*columns_of_known, comms.start[unknown], comms.thread[unknown])
    kernels = np.flatnonzero(is_communication(trace))
    call = launches(trace)[kernels]
    host = np.full(kernels.size, NONE, np.int64)
    launched = call != NONE
    calls = trace.calls
    parent = innermost(
        *columns_of_known, calls.start[call[launched]], calls.thread[call[launched]]
    )
    places = np.full(comms.start.size + 1, NONE, np.int64)  # the last one is of NONE
    places[rows] = np.arange(rows.size)
    host[launched] = places[np.append(known, NONE)[parent]]
    start = np.full(rows.size, np.iinfo(np.int64).max, np.int64)
    end = np.full(rows.size, NONE, np.int64)
    linked = host != NONE
    np.minimum.at(start, host[linked], gpu.start[kernels[linked]])
    np.maximum.at(end, host[linked], gpu.end[kernels[linked]])
    start = np.where(end == NONE, comms.work_start[rows], start)
    end = np.where(end == NONE, comms.work_end[rows], end)
    alone = kernels[~linked]
    says = gpu.comm[alone] != NONE
    own, unlinked = alone[says], alone[~says]
    issued = np.concatenate((comms.start[rows], gpu.start[own]))
    order = np.argsort(issued, kind="stable")
    threads = comms.thread[rows]
    columns = {
        "comm": (comms.comm[rows], gpu.comm[own]),
        "step": (_steps_of(steps, comms.start[rows]), steps.of_gpu[own]),
        "phase": (_phases(trace, threads, comms.start[rows]), np.zeros(own.size, np.int64)),
        "seq": (comms.seq[rows], gpu.seq[own]),
        "start": (start, gpu.start[own]),
        "end": (end, gpu.end[own]),
    }
    return CommCalls(
        args=trace.comm_args,
        issued=issued[order],
        **{name: np.concatenate(parts)[order] for name, parts in columns.items()},
        unlinked=_by_name(trace, unlinked[steps.of_gpu[unlinked] != NONE]),
        without_args=int((inside == NONE).sum()),
    )


def _leaves(trace: RankTrace, known: Ints) -> Ints:
    """Return the calls that send something and contain no other: NCCL's barrier does."""
    comms = trace.comms
    is_outer = np.zeros(comms.start.size, bool)
    for thread in np.unique(comms.thread[known]):
        rows = known[comms.thread[known] == thread]
        parent = parents(comms.start[rows], comms.end[rows])
        is_outer[rows[parent[parent != NONE]]] = True
    rows = np.intersect1d(sends(trace), known)
    return np.asarray(rows[~is_outer[rows]])


def _steps_of(steps: Steps, times: Ints) -> Ints:
    if not steps.is_marked:
        return np.zeros(times.size, np.int64)
    step = np.searchsorted(steps.start, times, side="right") - 1
    inside = (step >= 0) & (times < steps.end[np.maximum(step, 0)])
    return np.where(inside, step, NONE)


def _phases(trace: RankTrace, threads: Ints, times: Ints) -> Ints:
    """Return the phase of each place on a thread; 0 where nothing proves one.

    Autograd's own threads run nothing but backward passes. Recomputed layers run there, or
    inside an operation of autograd, so that backward goes before forward.
    """
    ops, spans = trace.ops, trace.spans
    phase = np.zeros(times.size, np.int64)
    for number, name in enumerate(PHASES):
        if pattern := _ANNOTATIONS.get(name):
            phase[_inside(spans, trace.names, pattern, threads, times)] = number
    autograd = re.compile(_AUTOGRAD)
    is_backward = _inside(ops, trace.names, autograd, threads, times)
    is_backward |= _inside(spans, trace.names, _ANNOTATIONS["backward"], threads, times)
    marked = _threads(spans, trace.names, re.compile("ProfilerStep#"))
    if marked.size:
        is_backward |= np.isin(
            threads, np.setdiff1d(_threads(ops, trace.names, autograd), marked)
        )
    phase[is_backward] = PHASES.index("backward")
    return phase


def _rows(table: OpColumns | SpanColumns, names: Sequence[str], pattern: Pattern) -> Ints:
    numbers = [number for number, name in enumerate(names) if pattern.search(name)]
    return np.flatnonzero(np.isin(table.name, numbers))


def _threads(table: OpColumns | SpanColumns, names: Sequence[str], pattern: Pattern) -> Ints:
    return np.unique(table.thread[_rows(table, names, pattern)])


def _inside(
    table: OpColumns | SpanColumns,
    names: Sequence[str],
    pattern: Pattern,
    threads: Ints,
    times: Ints,
) -> Flags:
    """Return which places lie in an interval of that name on their thread."""
    rows = _rows(table, names, pattern)
    columns = (table.start[rows], table.end[rows], table.thread[rows])
    return np.asarray(innermost(*columns, times, threads) != NONE)


def _by_name(trace: RankTrace, kernels: Ints) -> tuple[tuple[str, int, int], ...]:
    """Return (name, number, ns) of kernels, the longest together first."""
    gpu, sums = trace.gpu, {}
    for name in np.unique(gpu.name[kernels]):
        rows = kernels[gpu.name[kernels] == name]
        sums[trace.names[name]] = (rows.size, int((gpu.end[rows] - gpu.start[rows]).sum()))
    return tuple(sorted(((n, *s) for n, s in sums.items()), key=lambda row: -row[2]))
