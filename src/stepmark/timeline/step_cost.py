"""Costs of the parts of a training step, from which its time is predicted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stepmark.step.workload import CommOp, ComputeOp, Group, Operation
from stepmark.timeline.ledger import Idle, Work

# AICB and SimAI give computation of unknown time 1 ns, and rows of several the sum.
_FILLER_S = 1e-7


class Source(StrEnum):
    """Origin of a cost."""

    MEASURED = "measured"  # this very operation in a step
    SCALED = "scaled"  # the same operation at another shape, by the roofline's ratio
    OPERATOR = "operator"  # the same operation by itself
    SHEET = "sheet"  # operators that were measured on such a device
    RULE = "rule"  # operators on another device, or a rule
    FILE = "file"  # the workload file's own time
    UNKNOWN = "unknown"  # no time


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """Cost of one computation on a GPU at full clock, or on a CPU.

    time_s: sum of its kernels by kind of work. host_s: in which the host launches it.
    """

    time_s: Mapping[Work, float]
    num_kernels: float = 1.0
    host_s: float = 0.0
    source: Source = Source.RULE

    @property
    def total_s(self) -> float:
        return sum(self.time_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Everything that the timeline of a step needs.

    compute: cost of an operation. comm: seconds of a collective when all ranks have begun it;
    host_comm_s: in which the host issues one. gap_s: from the end of a kernel to the start of
    the next one that is launched already; gap: what this time is called. compute_slowdown,
    comm_slowdown: factors on the time of compute while a collective runs, and of a collective
    while compute runs. sends_contend: so it is with sends, too.
    """

    compute: Callable[[ComputeOp], OpCost]
    comm: Callable[[CommOp, Group], float]
    gap_s: float = 0.0
    gap: Idle = Idle.LAUNCH_GAP
    host_comm_s: Callable[[CommOp], float] = lambda _op: 0.0
    compute_slowdown: Mapping[Work, float] = field(default_factory=dict)  # missing: 1
    comm_slowdown: float = 1.0
    sends_contend: bool = True

    @property
    def has_contention(self) -> bool:
        """Return whether compute and communication slow each other."""
        return self.comm_slowdown != 1 or any(x != 1 for x in self.compute_slowdown.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerModel:
    """Power of a GPU, and how it lowers the clock to keep its limit.

    slowdown x: log of the time of attention over that at full clock. Work of a kind takes
    exp(sensitivity x) times as long, and draws dynamic_w * exp(-decay x) over static_w, at
    full_clock_hz * exp(-x). dynamic_w of products is that of product_flops_per_s at full clock,
    and proportional to it. comm_w: over static_w while messages move. measured_x: of a step by
    its kernels, which has model_x by this power; others differ alike. is_limited: it has a
    limit.
    """

    limit_w: float  # mean power that the device holds under load
    static_w: float  # at full clock without work
    dynamic_w: Mapping[Work, float]  # at full clock
    sensitivity: Mapping[Work, float]
    decay: float
    product_flops_per_s: float
    full_clock_hz: float
    comm_w: float = 0.0
    measured_x: float = 0.0
    model_x: float = 0.0
    is_limited: bool = True


def known_time(op: Operation) -> float | None:
    """Return the time that a workload file has of the operation."""
    return op.time_s if op.time_s is not None and op.time_s > _FILLER_S else None
