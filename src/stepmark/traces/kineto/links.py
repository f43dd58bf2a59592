"""Joins between tables of a trace: launch to kernel, call to operation, work to step.

Work on the GPU belongs to what launched it, by correlation, and not to what the host did while
it ran: where the GPU lags behind, that is another step.
"""

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepmark.timeline.trace_columns import NONE, Flags, Ints, RankTrace
from stepmark.traces.kineto.event_tables import narrow

_STEP = re.compile(r"ProfilerStep#(\d+)$")
_BLOCK = 1 << 17  # rows
_ROUNDING_NS = 2_000  # of old traces, in whole microseconds
# Pseudo-collectives that send nothing.
_NO_MESSAGES = frozenset({"wait", "init", "finalize"})


def name_flags(names: Sequence[str], is_wanted: Callable[[str], Any]) -> Flags:
    """Return whether each name is wanted, by its number; NONE is not."""
    return np.array([*(bool(is_wanted(name)) for name in names), False])


def lookup(keys: Ints, values: Ints) -> Ints:
    """Return the row of each value among the keys (the first of equal ones), or NONE."""
    if not keys.size:
        return np.full(len(values), NONE, np.int64)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], values), keys.size - 1)
    rows = order[place]
    return np.where((keys[rows] == values) & (values != NONE), rows, NONE)


def launches(trace: RankTrace) -> Ints:
    """Return the row of the call that launched each GPU event, or NONE.

    A launch lies before the window of the trace where the GPU lagged at its start.
    """
    columns = trace.calls.correlation, trace.gpu.correlation
    for known, rows in _LAUNCHES:
        if all(ref() is column for ref, column in zip(known, columns, strict=True)):
            return rows
    rows = narrow(lookup(*columns))
    rows.flags.writeable = False
    _LAUNCHES[:] = [(tuple(weakref.ref(column, _forget) for column in columns), rows)]
    return rows


# Of the trace that was asked for last: its columns, and the rows.
_LAUNCHES: list[tuple[tuple[weakref.ref[Ints], ...], Ints]] = []


def _forget(_: object) -> None:
    """Free the rows with the columns that they belong to."""
    _LAUNCHES.clear()


def innermost(start: Ints, end: Ints, thread: Ints, places: Ints, place_thread: Ints) -> Ints:
    """Return the row of the innermost interval of a thread that holds each place, or NONE.

    Intervals of a thread are nested, as calls are; rows are in the order of (start, -end).
    Those that are not nested (async annotations) are found where they are the last to start.
    """
    result = np.full(len(places), NONE, np.int64)
    for number in np.unique(place_thread):
        rows = np.flatnonzero(thread == number)
        if rows.size:
            chosen = np.flatnonzero(place_thread == number)
            found = _innermost(start[rows], end[rows], places[chosen])
            result[chosen] = np.where(found == NONE, NONE, rows[found])
    return result


def _innermost(start: Ints, end: Ints, places: Ints) -> Ints:
    """Return the innermost interval of one thread that holds each place, or NONE."""
    parent = parents(start, end)
    row = np.searchsorted(start, places, side="right") - 1
    found = np.where(row >= 0, row, NONE)
    pending = np.flatnonzero((found != NONE) & (end[found] <= places))
    while pending.size:  # one turn per level of nesting
        found[pending] = parent[found[pending]]
        up = found[pending]
        pending = pending[(up != NONE) & (end[up] <= places[pending])]
    return np.asarray(found)


def parents(start: Ints, end: Ints) -> Ints:
    """Return the row of the interval that holds each interval of one thread, or NONE.

    Rows are in the order of (start, -end).
    """
    parent = np.arange(start.size, dtype=np.int64) - 1
    pending = np.flatnonzero(parent >= 0)
    while pending.size:
        up = parent[pending]
        outside = end[up] < end[pending]
        outside |= end[up] <= start[pending]
        pending = pending[outside]
        parent[pending] = parent[parent[pending]]
        pending = pending[parent[pending] >= 0]
    return parent


def parents_by_thread(start: Ints, end: Ints, thread: Ints) -> Ints:
    """Return the row of the interval of the same thread that holds each interval, or NONE."""
    parent = narrow(np.full(start.size, NONE, np.int64))
    for number in np.unique(thread):
        rows = np.flatnonzero(thread == number)
        parent[rows] = np.append(rows, NONE)[parents(start[rows], end[rows])]
    return parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of one process: their numbers, and their spans on the host.

    of_gpu: index of the step that launched each GPU event; NONE: outside all steps, or the
    launch is not in the trace. is_marked: by prof.step(); otherwise the whole trace is one.
    """

    numbers: tuple[int, ...]
    start: Ints
    end: Ints
    of_gpu: Ints
    is_marked: bool


def steps(trace: RankTrace) -> Steps:
    """Return the steps that prof.step() marked; without any, the whole trace as step 0.

    Marks that overlap, as of several processes in one file, mark no steps.
    """
    spans = trace.spans
    rows = step_rows(trace)
    if not rows.size or marks_overlap(spans.start[rows], spans.end[rows]):
        return whole(trace)
    start = spans.start[rows]
    end = spans.end[rows]
    call = launches(trace)
    launched = np.append(trace.calls.start, NONE)[call]
    return Steps(
        numbers=step_numbers(trace),
        start=start,
        end=end,
        of_gpu=narrow(np.where(call == NONE, NONE, span_of(start, end, launched))),
        is_marked=True,
    )


def span_of(start: Ints, end: Ints, times: Ints) -> Ints:
    """Return the row of the span in which each time lies, or NONE. Spans do not overlap."""
    row = np.searchsorted(start, times, side="right") - 1
    return np.where((row >= 0) & (times < np.append(end, NONE)[row]), row, NONE)


def step_of(steps: Steps, times: Ints) -> Ints:
    """Return the index of the step during which each time on the host lies, or NONE."""
    if not steps.is_marked:
        return np.zeros(times.size, np.int64)
    return span_of(steps.start, steps.end, times)


def step_rows(trace: RankTrace) -> Ints:
    """Return the rows of spans that mark steps."""
    return np.flatnonzero(name_flags(trace.names, _STEP.search)[trace.spans.name])


def step_numbers(trace: RankTrace) -> tuple[int, ...]:
    """Return the numbers of the steps that are marked."""
    names = trace.spans.name[step_rows(trace)]
    return tuple(int(trace.names[name].rpartition("#")[2]) for name in names)


def whole(trace: RankTrace) -> Steps:
    """Return the whole trace as one step."""
    first, last = first_and_last(trace)
    return Steps(
        numbers=(0,),
        start=np.array([first]),
        end=np.array([last]),
        of_gpu=narrow(np.zeros(trace.gpu.start.size, np.int64)),
        is_marked=False,
    )


def marks_overlap(start: Ints, end: Ints) -> bool:
    """Return whether steps last beyond the start of the next by more than rounding."""
    return bool((end[:-1] - start[1:] > _ROUNDING_NS).any())


def first_and_last(trace: RankTrace) -> tuple[int, int]:
    """Return the first start and the last end of any work; (0, 0) without any."""
    tables = [table for table in (trace.gpu, trace.calls, trace.ops) if table.start.size]
    if not tables:
        return 0, 0
    return min(int(t.start[0]) for t in tables), max(int(t.end.max()) for t in tables)


def gpu_comms(trace: RankTrace) -> tuple[Ints, Ints]:
    """Return (comm_args, seq) of each GPU event that carries out a call of torch.distributed.

    They are the event's own arguments, else those of the host call that launched it: the
    innermost record_param_comms around the launch. Copies that a collective launches count.
    """
    gpu = trace.gpu
    comms = trace.comms
    calls = trace.calls
    args = gpu.comm.copy()
    seq = gpu.seq.copy()
    for block in blocks(args.size):
        missing = block.start + np.flatnonzero(args[block] == NONE)
        launch = launches(trace)[missing]
        missing = missing[launch != NONE]
        launch = launch[launch != NONE]
        row = innermost(
            comms.start, comms.end, comms.thread, calls.start[launch], calls.thread[launch]
        )
        missing = missing[row != NONE]
        row = row[row != NONE]
        args[missing], seq[missing] = comms.comm[row], comms.seq[row]
    return args, seq


def blocks(size: int) -> Iterator[slice]:
    """Yield slices of columns of this size: what is computed of one takes little memory."""
    yield from (slice(first, min(first + _BLOCK, size)) for first in range(0, size, _BLOCK))


def sends(trace: RankTrace) -> Ints:
    """Return the rows of comms that send messages: waits and starts do not."""
    silent = [
        number for number, args in enumerate(trace.comm_args) if args.collective in _NO_MESSAGES
    ]
    return np.flatnonzero(~np.isin(trace.comms.comm, silent))


def sums(
    keys: Sequence[Ints], values: Sequence[Ints]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield each key in ascending order with its number of rows and sums of the values."""
    totals: dict[tuple[int, ...], Ints] = {}
    for block in blocks(keys[0].size):
        own = [key[block] for key in keys]
        first, row = distinct(own)
        columns = [np.ones(row.size, np.int64), *(value[block] for value in values)]
        sums = np.zeros((len(first), len(columns)), np.int64)
        for number, column in enumerate(columns):
            np.add.at(sums[:, number], row, column)
        unique = np.stack([key[first] for key in own], axis=1)
        for each, total in zip(map(tuple, unique.tolist()), sums, strict=True):
            totals[each] = totals.get(each, 0) + total
    for each in sorted(totals):
        yield each, tuple(totals[each].tolist())


def distinct(keys: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return a row of each distinct key in ascending order, and of each row its key's place."""
    first = np.empty(0, np.int64)
    place = np.zeros(keys[0].size, np.int64)
    for key in keys:
        values, number = np.unique(key, return_inverse=True)
        both = place * values.size + number
        _, first, place = np.unique(both, return_index=True, return_inverse=True)
    return first, place
