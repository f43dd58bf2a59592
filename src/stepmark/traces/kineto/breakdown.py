"""Compute, exposed communication, exposed copies and idle of each step, exact to the ns.

Also its launch calls, the queue between host and GPU, and its copies.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepmark.model.kernel_groups import COPIES, short_name
from stepmark.timeline.trace_breakdown import (
    CommTimes,
    CopyTimes,
    KernelTimes,
    LaunchTimes,
    QueueDepth,
    RankTimes,
    StepTimes,
)
from stepmark.timeline.trace_columns import NONE, Flags, GpuKind, Ints, RankTrace
from stepmark.traces.kineto import idle, links
from stepmark.traces.kineto.checks import device_of, missing_work
from stepmark.traces.kineto.event_tables import narrow
from stepmark.traces.kineto.host_ops import WorkGroups
from stepmark.traces.kineto.host_times import host_times
from stepmark.traces.kineto.intervals import Intervals, clip, join, time_before, union, without
from stepmark.traces.kineto.links import blocks
from stepmark.traces.kineto.windows import (
    Windows,
    gpu_windows,
    in_windows,
    is_communication,
    label_times,
)

Selects = Callable[[int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, and the steps of it that are selected.

    rows: of its events; call, is_comm, is_memory, place: of each, its launch call, whether it
    is communication, whether it is another copy or memset, and the place of its step among
    `numbers` and `windows`, or NONE. all_windows: also of steps that are not selected.
    """

    trace: RankTrace
    device: int
    rows: Ints
    call: Ints
    is_comm: Flags
    is_memory: Flags
    place: Ints
    numbers: tuple[int | None, ...]
    windows: Windows
    all_windows: Windows

    def times(self, which: Flags) -> Intervals:
        """Return when any of these of its events run."""
        rows = self.rows[which]
        return union(self.trace.gpu.start[rows], self.trace.gpu.end[rows])


def breakdown(trace: RankTrace, selects: Selects) -> RankTimes:
    """Return the times of a trace. selects: which steps, by number."""
    if not trace.gpu.start.size:
        steps = links.steps(trace)
        missing = tuple(missing_work(trace))
        if not missing:
            return host_times(trace, steps, selects)
        numbers = steps.numbers if steps.is_marked else ()
        return RankTimes(all_steps=numbers, empty_steps=(), steps=(), damage=missing)
    steps, own = gpus(trace, selects)
    outside = [_outside(gpu) for gpu in own]
    with_work = {steps.numbers[i] for i in np.unique(steps.of_gpu) if i != NONE}
    chosen = np.concatenate([gpu.rows[gpu.place != NONE] for gpu in own])
    return RankTimes(
        all_steps=steps.numbers if steps.is_marked else (),
        empty_steps=tuple(sorted(set(steps.numbers) - with_work)),
        steps=tuple(step for gpu in own for step in _step_times(gpu)),
        comms=tuple(comm for gpu in own for comm in _comm_times(gpu)),
        kernels=tuple(kernel for gpu in own for kernel in _kernel_times(gpu)),
        launches=tuple(launch_times(trace, links.launches(trace), chosen)),
        copies=tuple(copy_times(trace, chosen)),
        num_outside=sum(count for count, _ in outside),
        outside_ns=sum(time_ns for _, time_ns in outside),
    )


def gpus(trace: RankTrace, selects: Selects) -> tuple[links.Steps, list[Gpu]]:
    """Return the steps of a trace with GPU events, and its GPUs by their number."""
    steps = links.steps(trace)
    call = links.launches(trace)
    if steps.is_marked and (steps.of_gpu == NONE).all():
        steps = links.whole(trace)
    is_comm = is_communication(trace)
    device = device_of(trace)
    is_memory = ~is_comm & (trace.gpu.kind != GpuKind.KERNEL)
    result = []
    for number in np.unique(device).tolist():
        rows = np.flatnonzero(device == number)
        is_only = rows.size == device.size  # whose columns need no copies
        windows = gpu_windows(trace, steps, None if is_only else rows)
        index = np.unique(steps.of_gpu[rows])
        index = index[index != NONE]
        if steps.is_marked:
            index = index[[selects(steps.numbers[i]) for i in index]]
        place = np.full(len(steps.numbers) + 1, NONE, np.int64)  # the last one is for NONE
        place[index] = np.arange(index.size)
        result.append(
            Gpu(
                trace=trace,
                device=number,
                rows=rows,
                call=call if is_only else call[rows],
                is_comm=is_comm if is_only else is_comm[rows],
                is_memory=is_memory if is_only else is_memory[rows],
                place=narrow(place)[steps.of_gpu if is_only else steps.of_gpu[rows]],
                numbers=tuple(steps.numbers[i] if steps.is_marked else None for i in index),
                windows=Windows(windows.start[index], windows.end[index]),
                all_windows=windows,
            )
        )
    return steps, result


def _outside(gpu: Gpu) -> tuple[int, int]:
    """Return the number of events that no window contains, and the time out of windows."""
    start = gpu.trace.gpu.start[gpu.rows]
    end = gpu.trace.gpu.end[gpu.rows]
    inside = union(gpu.all_windows.start, gpu.all_windows.end)
    is_inside = time_before(inside, end) > time_before(inside, start)
    return int((~is_inside & (end > start)).sum()), without(union(start, end), inside).total


def _work_times(gpu: Gpu) -> Iterator[Intervals]:
    """Yield the times of compute, communication, copies, and exposed ones of the latter two.

    Only few of these sets are in memory at once: each may be as large as the trace.
    """
    compute = gpu.times(~gpu.is_comm & ~gpu.is_memory)
    yield compute
    comm = gpu.times(gpu.is_comm)
    yield comm
    yield without(comm, compute)
    kernels = join(compute, comm)
    del compute, comm
    memory = gpu.times(gpu.is_memory)
    yield memory
    yield without(memory, kernels)


def _step_times(gpu: Gpu) -> Iterator[StepTimes]:
    sums = [in_windows(times, gpu.windows).tolist() for times in _work_times(gpu)]
    idle_times = idle.idle_times(gpu.trace, gpu.rows, gpu.call, gpu.windows)
    depths = queue_depths(gpu.trace, gpu.rows, gpu.call, gpu.windows)
    is_whole = not gpu.trace.info.cut
    for number, step in enumerate(gpu.numbers):
        first = int(gpu.windows.start[number])
        last = int(gpu.windows.end[number])
        own = gpu.place == number
        own_ns = clip(gpu.times(own), first, last).total
        compute_ns, comm_ns, exposed_comm_ns, memory_ns, exposed_memory_ns = (
            each[number] for each in sums
        )
        busy_ns = compute_ns + exposed_comm_ns + exposed_memory_ns
        yield StepTimes(
            device=gpu.device,
            step=step,
            start_ns=first,
            end_ns=last,
            compute_ns=compute_ns,
            comm_ns=comm_ns,
            exposed_comm_ns=exposed_comm_ns,
            memory_ns=memory_ns,
            exposed_memory_ns=exposed_memory_ns,
            idle_ns=last - first - busy_ns if is_whole else None,
            other_steps_ns=busy_ns - own_ns,
            num_events=int(own.sum()),
            idle=idle_times[number] if is_whole else None,
            queue=depths[number],
        )


def _comm_times(gpu: Gpu) -> Iterator[CommTimes]:
    """Yield times of communication by step, collective and group."""
    trace = gpu.trace
    compute = gpu.times(~gpu.is_comm & ~gpu.is_memory)
    rows = gpu.rows[gpu.is_comm]
    place = gpu.place[gpu.is_comm]
    comm = links.gpu_comms(trace)[0][rows]
    ids, of_row = np.unique(
        np.where(comm == NONE, -2 - trace.gpu.name[rows], comm), return_inverse=True
    )
    kinds = [_comm_kind(trace, number) for number in ids.tolist()]
    labels = list(dict.fromkeys(kinds))
    label = np.array([labels.index(kind) for kind in kinds], np.int64)[of_row]
    columns = trace.gpu.start[rows], trace.gpu.end[rows], label, place
    for which, number, count, time_ns, exposed_ns in label_times(columns, compute, gpu.windows):
        yield CommTimes(
            device=gpu.device,
            step=gpu.numbers[number],
            **dict(labels[which]),
            num_events=count,
            time_ns=time_ns,
            exposed_ns=exposed_ns,
        )


def _comm_kind(trace: RankTrace, number: int) -> tuple[tuple[str, Any], ...]:
    """Return what CommTimes says of it. number: of its arguments; below 0, of its name."""
    if number < 0:
        return (("kernel", short_name(trace.names[-2 - number])),)
    args = trace.comm_args[number]
    return tuple(
        (name, getattr(args, name))
        for name in ("collective", "group", "group_desc", "group_size")
    )


def _kernel_times(gpu: Gpu) -> Iterator[KernelTimes]:
    trace = gpu.trace
    groups = WorkGroups(trace)
    copies = groups.names.index(COPIES)
    totals: dict[tuple[int, ...], tuple[int, ...]] = {}
    for block in links.blocks(gpu.rows.size):
        is_own = gpu.place[block] != NONE
        rows = gpu.rows[block][is_own]
        is_kernel = trace.gpu.kind[rows] == GpuKind.KERNEL
        group = groups.of_kernels(rows, gpu.call[block][is_own])
        keys = [gpu.place[block][is_own], np.where(is_kernel, group, copies)]
        for key, sums in links.sums(keys, [trace.gpu.end[rows] - trace.gpu.start[rows]]):
            count, time_ns = totals.get(key, (0, 0))
            totals[key] = count + sums[0], time_ns + sums[1]
    for (number, which), (count, time_ns) in sorted(totals.items()):
        yield KernelTimes(
            device=gpu.device,
            step=gpu.numbers[number],
            group=groups.names[which],
            num_events=count,
            time_ns=time_ns,
        )


def launch_times(trace: RankTrace, call: Ints, chosen: Ints) -> Iterator[LaunchTimes]:
    """Yield the calls that launched the events `chosen`, by name, the most time first."""
    calls = trace.calls
    gpu = trace.gpu
    size = calls.start.size
    num_events = np.zeros(size, np.int32)
    runs = np.zeros(size, np.int64)
    first = np.full(size, np.iinfo(np.int64).max)  # start of the first event of each call
    for block in blocks(chosen.size):
        events = chosen[block]
        events = events[call[events] != NONE]
        own = call[events]
        np.add.at(num_events, own, 1)
        np.add.at(runs, own, gpu.end[events] - gpu.start[events])
        np.minimum.at(first, own, gpu.start[events])
    times = []
    for name in np.unique(calls.name[num_events > 0]):
        own = np.flatnonzero((num_events > 0) & (calls.name == name))
        duration = calls.end[own] - calls.start[own]
        num_short = int((runs[own] < duration).sum())
        delay = first[own] - calls.start[own]
        times.append(
            LaunchTimes(
                call=trace.names[name],
                num_calls=own.size,
                num_events=int(num_events[own].sum()),
                total_ns=int(duration.sum()),
                median_ns=_median(duration),
                max_ns=int(duration.max()),
                median_delay_ns=_median(delay),
                num_short=num_short,
            )
        )
    yield from sorted(times, key=lambda item: -item.total_ns)


def _median(values: Ints) -> int:
    """Return the lower median, which is one of the values; they are put into another order."""
    middle = (values.size - 1) // 2
    values.partition(middle)
    return int(values[middle])


def queue_depths(
    trace: RankTrace, rows: Ints, call: Ints, windows: Windows
) -> list[QueueDepth | None]:
    """Return the depth of the queue of one GPU in each window; None without launches.

    An event is in the queue from the start of its call to its own start.
    """
    is_known = call != NONE
    if not is_known.any():
        return [None] * windows.start.size
    start = trace.calls.start[call[is_known]]
    end = np.maximum(trace.gpu.start[rows[is_known]], start)
    bounds = list(zip(windows.start.tolist(), windows.end.tolist(), strict=True))
    queued = union(start, end)
    queued_ns = [clip(queued, first, last).total for first, last in bounds]
    del queued
    # Only how many are in the queue counts, not which: starts and ends are sorted apart.
    start.sort()
    end.sort()
    # What starts makes place before the next is launched.
    level = np.searchsorted(end, start, side="right")
    np.subtract(np.arange(1, start.size + 1), level, out=level)
    result: list[QueueDepth | None] = []
    for (first, last), own_ns in zip(bounds, queued_ns, strict=True):
        begun, ended = (_inside(times, first, last) for times in (start, end))
        result.append(
            QueueDepth(
                depth_ns=_rest_ns(start, begun, first, last)
                - _rest_ns(end, ended, first, last),
                max=max(begun.start - ended.start, int(level[begun].max(initial=0))),
                empty_ns=last - first - own_ns,
            )
        )
    return result


def _inside(times: Ints, first: int, last: int) -> slice:
    """Return which of sorted times are after first and before last."""
    low = np.searchsorted(times, first, "right")
    high = np.searchsorted(times, last, "left")
    return slice(int(low), max(int(low), int(high)))


def _rest_ns(times: Ints, inside: slice, first: int, last: int) -> int:
    """Return the sum of what is left of a window at each time, the whole one before it."""
    return int(inside.start * (last - first) + (last - times[inside]).sum())


def copy_times(trace: RankTrace, chosen: Ints) -> Iterator[CopyTimes]:
    """Yield the chosen copies and memsets by name, the most time first."""
    gpu = trace.gpu
    rows = chosen[gpu.kind[chosen] != GpuKind.KERNEL]
    times = []
    for name in np.unique(gpu.name[rows]):
        own = rows[gpu.name[rows] == name]
        is_known = bool((gpu.num_bytes[own] >= 0).all())
        times.append(
            CopyTimes(
                name=trace.names[name],
                num_copies=own.size,
                num_bytes=int(gpu.num_bytes[own].sum()) if is_known else None,
                time_ns=int((gpu.end - gpu.start)[own].sum()),
            )
        )
    yield from sorted(times, key=lambda item: -item.time_ns)
