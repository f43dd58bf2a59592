"""Messages of one rank: kinds and sizes of its calls, times of its steps, its copies."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stepmark.cases.message import MessageKind, sized
from stepmark.findings.log_facts import MAX_RANKS
from stepmark.ground.dtypes import message_dtype
from stepmark.model.collectives import ALL_TO_ALLS, GATHERS, Collective, torch_collective
from stepmark.timeline.trace_columns import (
    NONE,
    CommArgs,
    Damage,
    GpuKind,
    Ints,
    RankInfo,
    RankTrace,
)
from stepmark.traces.kineto import host_times, windows
from stepmark.traces.kineto.checks import missing_work
from stepmark.traces.kineto.instances import CommCalls, comm_calls
from stepmark.traces.kineto.intervals import Intervals, without
from stepmark.traces.kineto.links import Steps, step_of, sums, whole
from stepmark.traces.kineto.links import steps as steps_of

_COPY = re.compile("(H|D)(?:ost|evice)?_?to_?(H|D)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When the steps of one rank run on its GPU, and when it communicates there.

    Without a GPU, on its host. They are defined as in the breakdown: traces/kineto/windows.py
    and host_times.py.
    """

    windows: windows.Windows
    communication: Intervals
    exposed: Intervals
    is_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessages:
    """What is kept of one rank's trace.

    numbers: of its steps; empty: places of those without work, as the last mark of a profiler
    may be. copies: (step, kind, bytes, number, ns). damage: why no times are known although
    calls are.
    """

    calls: CommCalls
    numbers: tuple[int, ...]
    is_marked: bool
    times: StepTimes | None  # None where nothing is recorded
    copies: tuple[tuple[int, str, int, int, int], ...]
    empty: frozenset[int] = frozenset()
    damage: tuple[Damage, ...] = ()

    def selected(self, has_step: Callable[[int], bool]) -> list[int]:
        """Return the places of the selected steps; without marks, of the only one."""
        if not self.is_marked:
            return [0]
        chosen = (n for n, number in enumerate(self.numbers) if has_step(number))
        return [n for n in chosen if n not in self.empty]


def rank_messages(trace: RankTrace) -> RankMessages:
    """Reduce a trace to its calls, the times of its steps and its copies."""
    steps = steps_of(trace)
    if trace.gpu.start.size and (steps.of_gpu == NONE).all():
        steps = whole(trace)  # no launch is in the trace
    calls = comm_calls(trace, steps)
    is_host = not trace.gpu.start.size
    times = _times(trace, steps, is_host)
    busy = {*np.unique(steps.of_gpu).tolist(), *calls.step.tolist()} - {NONE}
    if is_host:
        sends = np.nonzero(windows.in_windows(times.communication, times.windows))
        busy.update(step_of(steps, trace.ops.start).tolist(), *sends)
    missing = tuple(missing_work(trace)) if is_host else ()
    has_time = (times.windows.end > times.windows.start).any() and busy - {NONE}
    return RankMessages(
        calls=calls,
        numbers=steps.numbers,
        is_marked=steps.is_marked,
        times=times if has_time and not missing else None,
        copies=tuple(_copies(trace, steps.of_gpu)),
        empty=frozenset(range(len(steps.numbers))) - busy,
        damage=missing,
    )


def _times(trace: RankTrace, steps: Steps, is_host: bool) -> StepTimes:
    own = host_times if is_host else windows
    communication, compute = own.communication_and_compute(trace)
    return StepTimes(
        windows=windows.Windows(steps.start, steps.end)
        if is_host
        else windows.gpu_windows(trace, steps),
        communication=communication,
        exposed=without(communication, compute),
        is_host=is_host,
    )


def _copies(trace: RankTrace, of_gpu: Ints) -> Iterator[tuple[int, str, int, int, int]]:
    gpu = trace.gpu
    rows = np.flatnonzero(gpu.kind == GpuKind.MEMCPY)
    keys = of_gpu[rows], gpu.name[rows], gpu.num_bytes[rows]
    for (step, name, size), (count, time) in sums(keys, [gpu.end[rows] - gpu.start[rows]]):
        text = trace.names[name]
        ends = _COPY.search(text)
        if re.search("PtoP|Peer", text, re.IGNORECASE):
            kind = "PtoP"
        else:
            kind = f"{ends[1].upper()}to{ends[2].upper()}" if ends else "other"
        yield step, kind, size, count, time


def kind_of(args: CommArgs, members: Sequence[int], phase: str) -> MessageKind | str:
    """Return the kind of message of a call, or why it has none."""
    name = torch_collective(args.collective)
    if not name:
        return f"calls of {args.collective}"
    num_ranks = len(members) or args.group_size
    size = args.group_size
    if size is not None and not (size == num_ranks and 0 < size <= MAX_RANKS):
        return f"calls of a group of {size} ranks that lists {len(members)}"
    least, most = sorted((args.in_elements, args.out_elements))
    is_gloo = not args.group and size is None  # torch records no shapes of its lists of lists
    if least < 0 or (name in GATHERS and least == 0 < most and not is_gloo):
        return "calls of negative size" if least < 0 else "calls without one of their sizes"
    dtype = message_dtype(args.dtype)
    if name == Collective.BARRIER:
        dtype = ("", 0)
    if not args.dtype and dtype is None:
        return "calls without types and sizes (record_shapes=True of the profiler records them)"
    if dtype is None:
        return f"calls of unknown type {args.dtype}"
    if name in ALL_TO_ALLS:
        splits = (args.in_splits, args.out_splits)
        is_uneven = any(len(set(sizes)) > 1 for sizes in splits)
        is_uneven |= args.in_elements != args.out_elements
        is_cut = name == Collective.ALL_TO_ALL_V and not any(splits)
        name = ALL_TO_ALLS[is_uneven or is_cut]
    call_bytes, message_bytes = sized(
        name, args.in_elements * dtype[1], args.out_elements * dtype[1], num_ranks
    )
    desc = "" if args.group_desc == "undefined" else args.group_desc
    return MessageKind(
        collective=str(name),
        dtype=dtype[0],
        group=f"{args.group} {desc}".strip(),
        num_ranks=num_ranks,
        phase=phase,
        call_bytes=call_bytes,
        message_bytes=message_bytes,
    )


def members_of(args: CommArgs, info: RankInfo) -> tuple[int, ...]:
    """Return the ranks of a call's group; () where the trace does not tell them.

    Calls of gloo do not name their group: it is known where all groups have the same ranks.
    """
    if args.ranks:
        return args.ranks
    if not args.group and args.group_size is None:
        groups = {group.ranks for group in info.groups if group.ranks and group.size != 1}
        return groups.pop() if len(groups) == 1 else ()
    for group in info.groups:
        if group.name == args.group and group.size == args.group_size and group.ranks:
            return group.ranks
    is_world = args.group_size is not None and args.group_size == info.world_size
    return tuple(range(info.world_size or 0)) if is_world else ()
