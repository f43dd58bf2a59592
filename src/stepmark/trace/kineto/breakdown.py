"""Compute, exposed communication, exposed copies and idle of each step, exact to the ns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepmark.core.kernel_groups import group_of
from stepmark.core.trace_breakdown import (
    CommTimes,
    KernelTimes,
    RankTimes,
    StepTimes,
)
from stepmark.core.trace_columns import NONE, RankTrace
from stepmark.trace.kineto import idle, launches, links
from stepmark.trace.kineto.checks import check
from stepmark.trace.kineto.gpu_work import Work, device_of, gpu_work
from stepmark.trace.kineto.host_times import host_times
from stepmark.trace.kineto.intervals import Intervals, clip, join, time_before, union, without
from stepmark.trace.kineto.steps import Windows, gpu_windows, of_events

if TYPE_CHECKING:
    from stepmark.core.trace_columns import Ints

Selects = Callable[[int], bool]


class Busy(NamedTuple):
    """Times in which each kind of work runs on one GPU."""

    compute: Intervals
    comm: Intervals
    memory: Intervals
    exposed_comm: Intervals
    exposed_memory: Intervals
    all: Intervals


def breakdown(trace: RankTrace, selects: Selects) -> RankTimes:
    """Return the times of a trace. selects: which steps, by number."""
    steps = links.steps(trace)
    call = links.launches(trace)
    damage = tuple(check(trace, call))
    if not trace.gpu.start.size:
        return replace(host_times(trace, steps, selects), damage=damage)
    if steps.is_marked and (steps.of_gpu == NONE).all():
        steps = links.whole(trace)
    comm, _ = links.gpu_comms(trace)
    work = gpu_work(trace, comm)
    device = device_of(trace)
    step_times: list[StepTimes] = []
    comms: list[CommTimes] = []
    kernels: list[KernelTimes] = []
    chosen = np.zeros(work.size, bool)
    num_outside = outside_ns = 0
    empty = set(steps.numbers if steps.is_marked else ())
    for number in map(int, np.unique(device)):
        rows = np.flatnonzero(device == number)
        windows = gpu_windows(trace, steps, rows)
        empty.difference_update(n for n in windows.numbers if n is not None)
        busy = busy_times(trace, rows, work[rows])
        in_windows = union(windows.start, windows.end)
        beyond = without(busy.all, in_windows)
        outside_ns += beyond.total
        num_outside += _num_outside(trace, rows, in_windows)
        windows = windows.only([n is None or selects(n) for n in windows.numbers])
        place = of_events(steps, windows, rows)
        step_times += _step_times(trace, rows, windows, place, busy, call[rows], number)
        own, place = rows[place != NONE], place[place != NONE]
        chosen[own] = True
        kernels += _kernel_times(trace, own, windows, place, number)
        is_comm = work[own] == Work.COMM
        own, place = own[is_comm], place[is_comm]
        comms += _comm_times(trace, own, windows, place, busy.compute, comm[own], number)
    return RankTimes(
        is_marked=steps.is_marked,
        all_steps=steps.numbers if steps.is_marked else (),
        empty_steps=tuple(sorted(empty)),
        steps=tuple(step_times),
        comms=tuple(comms),
        kernels=tuple(kernels),
        launches=tuple(launches.launch_times(trace, call, chosen)),
        copies=tuple(launches.copy_times(trace, chosen)),
        num_outside=num_outside,
        outside_ns=outside_ns,
        damage=damage,
    )


def busy_times(trace: RankTrace, rows: Ints, work: Ints) -> Busy:
    """Return when the events `rows` of one GPU run, by their Work."""
    start, end = trace.gpu.start[rows], trace.gpu.end[rows]
    compute, comm, memory = (union(start[work == k], end[work == k]) for k in Work)
    kernels = join(compute, comm)
    return Busy(
        compute=compute,
        comm=comm,
        memory=memory,
        exposed_comm=without(comm, compute),
        exposed_memory=without(memory, kernels),
        all=join(kernels, memory),
    )


def within(times: Intervals, windows: Windows) -> Ints:
    """Return how much of `times` lies in each window."""
    return np.asarray(time_before(times, windows.end) - time_before(times, windows.start))


def _num_outside(trace: RankTrace, rows: Ints, windows: Intervals) -> int:
    start, end = trace.gpu.start[rows], trace.gpu.end[rows]
    return int(
        ((time_before(windows, end) - time_before(windows, start) == 0) & (end > start)).sum()
    )


def _step_times(
    trace: RankTrace,
    rows: Ints,
    windows: Windows,
    place: Ints,
    busy: Busy,
    call: Ints,
    device: int,
) -> Iterator[StepTimes]:
    sums = [within(times, windows) for times in busy]
    idle_times = idle.idle_times(trace, rows, call, busy.all, windows)
    depths = launches.queue_depths(trace, rows, call, windows)
    for number, step in enumerate(windows.numbers):
        start, end = int(windows.start[number]), int(windows.end[number])
        own = rows[place == number]
        own_busy = union(trace.gpu.start[own], trace.gpu.end[own])
        own_ns = clip(own_busy, start, end).total
        compute, comm, memory, exposed_comm, exposed_memory, all_busy = (
            int(each[number]) for each in sums
        )
        yield StepTimes(
            device=device,
            step=step,
            start_ns=start,
            end_ns=end,
            compute_ns=compute,
            comm_ns=comm,
            exposed_comm_ns=exposed_comm,
            memory_ns=memory,
            exposed_memory_ns=exposed_memory,
            idle_ns=end - start - all_busy,
            other_steps_ns=all_busy - own_ns,
            num_events=own.size,
            idle=idle_times[number],
            queue=depths[number],
        )


def _comm_times(
    trace: RankTrace,
    rows: Ints,
    windows: Windows,
    place: Ints,
    compute: Intervals,
    comm: Ints,
    device: int,
) -> Iterator[CommTimes]:
    """Yield times by step, collective and group. rows: communication of the windows."""
    start, end, name = trace.gpu.start[rows], trace.gpu.end[rows], trace.gpu.name[rows]
    hidden = time_before(compute, end) - time_before(compute, start)
    ids, of_row = np.unique(np.where(comm == NONE, -2 - name, comm), return_inverse=True)
    kinds = [_comm_kind(trace, int(number)) for number in ids]
    labels = list(dict.fromkeys(kinds))
    label = np.array([labels.index(kind) for kind in kinds], np.int64)[of_row]
    for (number, which), sums in _sums([place, label], [end - start, end - start - hidden]):
        collective, kernel, group, desc, size = labels[which]
        yield CommTimes(
            device=device,
            step=windows.numbers[number],
            collective=collective,
            kernel=kernel,
            group=group,
            group_desc=desc,
            group_size=size,
            num_events=sums[0],
            time_ns=sums[1],
            exposed_ns=sums[2],
        )


def _comm_kind(trace: RankTrace, number: int) -> tuple[str, str, str, str, int | None]:
    """Return (collective, kernel, group, description, size). number: below 0 for a name."""
    if number < 0:
        return "", trace.names[-2 - number].partition("(")[0], "", "", None
    args = trace.comm_args[number]
    return args.collective, "", args.group, args.group_desc, args.group_size


def _kernel_times(
    trace: RankTrace, rows: Ints, windows: Windows, place: Ints, device: int
) -> Iterator[KernelTimes]:
    groups = list(dict.fromkeys(map(group_of, trace.names)))
    group = np.array([groups.index(group_of(name)) for name in trace.names], np.int64)
    duration = trace.gpu.end[rows] - trace.gpu.start[rows]
    for (number, which), sums in _sums([place, group[trace.gpu.name[rows]]], [duration]):
        yield KernelTimes(
            device=device,
            step=windows.numbers[number],
            group=groups[which],
            num_events=sums[0],
            time_ns=sums[1],
        )


def _sums(
    keys: Sequence[Ints], values: Sequence[Ints]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield each key in ascending order with its number of rows and sums of the values."""
    unique, row = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)
    columns = [np.ones(row.size, np.int64), *values]
    sums = np.zeros((len(unique), len(columns)), np.int64)
    for number, column in enumerate(columns):
        np.add.at(sums[:, number], row.reshape(-1), column)
    for key, total in zip(unique.tolist(), sums.tolist(), strict=True):
        yield tuple(key), tuple(total)
