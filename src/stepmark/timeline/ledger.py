"""Ledger of a step: where its time went, in integer nanoseconds that add up to the step.

One definition serves a profiler's trace and a simulated step: every nanosecond of the window
has exactly one line. Compute goes before communication, this before copies; among work of one
group that which began first has the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from stepmark.model.kernel_groups import group_of
from stepmark.model.ops import Attention, Bmm, CrossEntropy, Gemm, GroupedGemm, HostCopy, Phase
from stepmark.step.trace_ops import OpKey
from stepmark.step.workload import ComputeOp, Kernel


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
    if isinstance(op.op, HostCopy):
        return Work.COPY
    is_loss = isinstance(op.op, CrossEntropy) or op.module == "loss"
    return Work.LOSS if is_loss else Work.ELEMENTWISE


def work_of_key(key: OpKey) -> Work:
    """Return the kind of an operation that was measured."""
    return work_of(key.name, key.role, key.phase)


def work_in_trace(op: ComputeOp) -> Work:
    """Return the kind of work of an operation; that of a kernel is by its name in a trace."""
    if isinstance(op.op, Kernel):
        return work_of(op.op.name, op.module, op.phase)
    return work_of_op(op)


Line = tuple[Group, str]
# Names of `Ledger.within`.
RECOMPUTED = "recomputed"  # of compute
CONTENTION = "contention"  # of compute under communication
# of compute under communication: while the step waits for these messages, not for the compute
CRITICAL = "under critical communication"
# of exposed communication
TRANSFER = "transfer"
WAITING = "waiting for other ranks"


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
    lines = dict(profiled.lines)
    rest_ns = profiled.window_ns - step_ns
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
