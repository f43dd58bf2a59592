"""Ledger of a step: where its time went, in integer nanoseconds that add up to the step.

One definition serves a profiler's trace and a simulated step: both are events with a start, an
end and a name, and `ledger` gives every nanosecond of the window to exactly one line.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from stepmark.model.kernel_groups import group_of
from stepmark.model.ops import Attention, Bmm, CrossEntropy, Gemm, GroupedGemm, Phase
from stepmark.step.workload import ComputeOp


class Work(StrEnum):
    """Kind of computation, a line of a ledger."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ELEMENTWISE = "norm and elementwise"
    LOSS = "loss"
    OPTIMIZER = "optimizer"
    FILE = "computation of the file"  # whole layers, which the file does not divide by kind
    COPY = "copy"  # by a copy engine or a memset: Group.COPIES


class Group(StrEnum):
    """Group of lines. What comes first has the time in which several of them run."""

    COMPUTE = "compute"  # alone; names are those of Work
    OVERLAPPED = "compute under communication"
    COMM = "exposed communication"  # names are collectives
    COPIES = "copies"
    IDLE = "idle"  # names are those of Idle


class Idle(StrEnum):
    """Cause of idle time: what the work that ends it had to wait for."""

    HOST = "host"  # its launch
    LAUNCH_GAP = "launch gap"  # it was launched, and started soon
    DATA = "data"  # the batch
    RANK = "waiting for a rank"
    UNKNOWN = "unknown"
    # Of a measured step: what is left, also below 0, after the profiler's cost is taken off.
    UNEXPLAINED = "unexplained"


_WORK_OF_GROUP = {
    "matrix products": Work.MATMUL,
    "convolutions": Work.MATMUL,
    "attention": Work.ATTENTION,
    "optimizer": Work.OPTIMIZER,
    "softmax and loss": Work.LOSS,
}
_ENDS = ("loss", "head", "head.norm", "output")


def work_of(kernel: str, role: str, phase: str) -> Work:
    """Return the kind of a kernel or operation by its name, role and phase (core.trace_ops).

    All work of the optimizer's phase is the optimizer's; what is no product at the end of the
    model is the loss, since torch.compile fuses it with the last norm.
    """
    if phase == "optim":
        return Work.OPTIMIZER
    work = _WORK_OF_GROUP.get(group_of(kernel), Work.ELEMENTWISE)
    if work in (Work.MATMUL, Work.ATTENTION):
        return work
    return Work.LOSS if role in _ENDS else Work.ELEMENTWISE


def work_of_op(op: ComputeOp) -> Work:
    """Return the kind of work that the operation is for."""
    if op.phase is Phase.OPTIM:
        return Work.OPTIMIZER
    if isinstance(op.op, Gemm | GroupedGemm | Bmm):
        return Work.MATMUL
    if isinstance(op.op, Attention):
        return Work.ATTENTION
    return Work.LOSS if isinstance(op.op, CrossEntropy) else Work.ELEMENTWISE


Line = tuple[Group, str]
# Names of `Ledger.within`.
RECOMPUTED = "recomputed"  # of compute
CONTENTION = "contention"  # of compute under communication
TRANSFER, WAITING = "transfer", "waiting for other ranks"  # of exposed communication


@dataclass(frozen=True, slots=True)
class Event:
    """Work of one kind, from start to end in ns."""

    group: Group  # COMPUTE, COMM or COPIES
    name: str  # of Work, or of a collective
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Lines of a window; they add up to it.

    within: parts of lines that explain them and are not added, e.g. the contention in compute
    under communication, or the transfer in exposed communication.
    """

    window_ns: int
    lines: Mapping[Line, int]
    within: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = sum(self.lines.values())
        if total != self.window_ns:
            raise ValueError(f"lines add up to {total} ns, the window is {self.window_ns} ns")

    def total(self, group: Group) -> int:
        """Return the time of all lines of a group, in ns."""
        return sum(time for (own, _), time in self.lines.items() if own is group)


# Idle times in which the profiler's own work is: it slows the host.
_PROFILED = (Idle.HOST, Idle.LAUNCH_GAP, Idle.DATA)


def without_profiler(profiled: Ledger, step_ns: int) -> Ledger:
    """Return the ledger of a step that takes `step_ns` without the profiler.

    What the profiled step takes longer is idle time of the host, then launch gaps, then data.
    What this does not explain, either way, is idle time that is unexplained.
    """
    lines, rest_ns = dict(profiled.lines), profiled.window_ns - step_ns
    for cause in _PROFILED:
        line = Group.IDLE, str(cause)
        cost_ns = max(0, min(rest_ns, lines.get(line, 0)))
        if cost_ns:
            lines[line] -= cost_ns
            rest_ns -= cost_ns
    lines[Group.IDLE, str(Idle.UNEXPLAINED)] = -rest_ns
    return replace(
        profiled, window_ns=step_ns, lines={line: ns for line, ns in lines.items() if ns}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLedger:
    """Ledger of a training step, from its profile.

    ledger: of the step without the profiler; profiled: of the profiled step of the rank that
    works the longest, thus the one that others wait for. None: the trace is not kept.
    """

    ledger: Ledger
    rank: int
    profiled: Ledger | None = None
    num_ranks: int = 1  # with a trace
    step: int | None = None
    num_steps: int = 0  # profiled, of which `step` is the median by its time
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPower:
    """Means of a step over one GPU, and its energy. None: unknown."""

    clock_hz: float | None = None
    power_w: float | None = None
    energy_j: float | None = None


# (start, end of an idle time) -> its parts by cause
Causes = Callable[[int, int], Iterable[tuple[Idle, int]]]


def ledger(events: Iterable[Event], start_ns: int, end_ns: int, causes: Causes) -> Ledger:
    """Return the ledger of the window [start_ns, end_ns).

    Compute goes before communication, this before copies; among events of one group the one
    that began first has the time. causes: splits an idle time by cause.
    """
    lines: Counter[Line] = Counter()
    for first, last, running in _pieces(events, start_ns, end_ns):
        computes, comms, copies = (running[group] for group in _ORDER)
        if computes:
            group = Group.OVERLAPPED if comms else Group.COMPUTE
            lines[group, computes] += last - first
        elif comms or copies:
            group = Group.COMM if comms else Group.COPIES
            lines[group, comms or copies] += last - first
        else:
            for cause, time_ns in causes(first, last):
                if time_ns:
                    lines[Group.IDLE, str(cause)] += time_ns
    return Ledger(window_ns=end_ns - start_ns, lines=dict(lines))


_ORDER = (Group.COMPUTE, Group.COMM, Group.COPIES)


def _pieces(
    events: Iterable[Event], start_ns: int, end_ns: int
) -> Iterator[tuple[int, int, dict[Group, str]]]:
    """Yield pieces of the window with the first running event's name of each group, or "".

    Idle pieces are maximal: nothing begins or ends inside them.
    """
    clipped = sorted(
        (max(event.start_ns, start_ns), min(event.end_ns, end_ns), index, event)
        for index, event in enumerate(events)
        if event.start_ns < end_ns and event.end_ns > start_ns and event.end_ns > event.start_ns
    )
    running: dict[Group, list[tuple[int, int, int, str]]] = {group: [] for group in _ORDER}
    now, place = start_ns, 0
    while now < end_ns:
        while place < len(clipped) and clipped[place][0] <= now:
            first, last, index, event = clipped[place]
            heapq.heappush(running[event.group], (first, index, last, event.name))
            place += 1
        names = {}
        until = clipped[place][0] if place < len(clipped) else end_ns
        for group, heap in running.items():
            while heap and heap[0][2] <= now:
                heapq.heappop(heap)
            names[group] = heap[0][3] if heap else ""
            if heap:
                until = min(until, heap[0][2])
        yield now, until, names
        now = until
