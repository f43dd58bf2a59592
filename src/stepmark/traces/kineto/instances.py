"""The calls of torch.distributed of one process, with the kernels that carried them out.

A call is what the host issued; its kernels are those that it launched. Counted are calls, so
that what was issued and never ran on the GPU is there, untimed. Kernels whose call the trace
does not have (launched before the trace began, replayed CUDA graphs, coalesced calls, which
share one kernel that is launched after them) belong to none.
"""

import re
from dataclasses import dataclass

import numpy as np

from stepmark.timeline.trace_columns import (
    NONE,
    CommArgs,
    Flags,
    Ints,
    OpColumns,
    RankTrace,
    SpanColumns,
)
from stepmark.traces.kineto.links import (
    Steps,
    innermost,
    launches,
    name_flags,
    parents_by_thread,
    sends,
    step_of,
    step_rows,
    sums,
)
from stepmark.traces.kineto.windows import is_communication

PHASES = ("", "forward", "backward", "optimizer")
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
    comms = trace.comms
    gpu = trace.gpu
    calls = trace.calls
    known = np.flatnonzero(comms.comm != NONE)
    spans = comms.start[known], comms.end[known], comms.thread[known]
    unknown = np.flatnonzero(comms.comm == NONE)
    inside = innermost(*spans, comms.start[unknown], comms.thread[unknown])
    rows = _leaves(trace, known)
    place = np.full(comms.start.size + 1, NONE, np.int64)  # the last one is of NONE
    place[rows] = np.arange(rows.size)
    kernels = np.flatnonzero(is_communication(trace))
    call = launches(trace)[kernels]
    launched = call != NONE
    call = call[call != NONE]
    host = np.full(kernels.size, NONE, np.int64)
    around = innermost(*spans, calls.start[call], calls.thread[call])
    host[launched] = place[np.append(known, NONE)[around]]
    start = np.full(rows.size, np.iinfo(np.int64).max, np.int64)
    end = np.full(rows.size, NONE, np.int64)
    linked = host != NONE
    np.minimum.at(start, host[linked], gpu.start[kernels[linked]])
    np.maximum.at(end, host[linked], gpu.end[kernels[linked]])
    start = np.where(end == NONE, comms.work_start[rows], start)
    end = np.where(end == NONE, comms.work_end[rows], end)
    alone = kernels[~linked]
    says = gpu.comm[alone] != NONE
    own = alone[says]
    unlinked = alone[~says]
    issued = np.concatenate((comms.start[rows], gpu.start[own]))
    order = np.argsort(issued, kind="stable")
    columns = {
        "comm": (comms.comm[rows], gpu.comm[own]),
        "step": (step_of(steps, comms.start[rows]), steps.of_gpu[own]),
        "phase": (
            _phases(trace, comms.thread[rows], comms.start[rows]),
            np.zeros(own.size, np.int64),
        ),
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
    parent = parents_by_thread(comms.start[known], comms.end[known], comms.thread[known])
    rows = np.intersect1d(sends(trace), known)
    return np.setdiff1d(rows, known[parent[parent != NONE]])


def _phases(trace: RankTrace, threads: Ints, times: Ints) -> Ints:
    """Return the phase of each place on a thread; 0 where nothing proves one.

    Autograd's own threads run nothing but backward passes. Recomputed layers run there, or
    inside an operation of autograd, so that backward goes before forward.
    """
    ops = trace.ops
    spans = trace.spans
    autograd = re.compile("autograd::engine::evaluate_function")

    def rows_of(table: OpColumns | SpanColumns, pattern: re.Pattern[str]) -> Ints:
        return np.flatnonzero(name_flags(trace.names, pattern.search)[table.name])

    def is_inside(table: OpColumns | SpanColumns, pattern: re.Pattern[str]) -> Flags:
        rows = rows_of(table, pattern)
        columns = table.start[rows], table.end[rows], table.thread[rows]
        return np.asarray(innermost(*columns, times, threads) != NONE)

    phase = np.zeros(times.size, np.int64)
    for name, pattern in _ANNOTATIONS.items():
        phase[is_inside(spans, pattern)] = PHASES.index(name)
    is_backward = is_inside(ops, autograd) | is_inside(spans, _ANNOTATIONS["backward"])
    marked = spans.thread[step_rows(trace)]
    if marked.size:
        own = np.setdiff1d(ops.thread[rows_of(ops, autograd)], marked)
        is_backward |= np.isin(threads, own)
    phase[is_backward] = PHASES.index("backward")
    return phase


def _by_name(trace: RankTrace, kernels: Ints) -> tuple[tuple[str, int, int], ...]:
    """Return (name, number, ns) of kernels, the longest together first."""
    gpu = trace.gpu
    totals = sums([gpu.name[kernels]], [gpu.end[kernels] - gpu.start[kernels]])
    rows = [(trace.names[name], count, time) for (name,), (count, time) in totals]
    return tuple(sorted(rows, key=lambda row: -row[2]))
