"""What a replay runs in the place of a workload's computation."""

from collections import Counter
from dataclasses import replace

from stepmark.cases.replay_case import Compute
from stepmark.ground.units import GIB
from stepmark.model.ops import FAMILY_OF, Copy, CrossEntropy, Op, Optimizer
from stepmark.model.ops.backends import Capabilities, usual
from stepmark.step.workload import ComputeOp, Kernel, Workload
from stepmark.workloads.durations import computations

ReplayCompute = (
    Op | float | None
)  # an operator, seconds in which the device is busy, or nothing
_WORD = 4  # bytes that a copy moves at a time
# Operators whose time is proportional to this field: they run in equal parts, one after the
# other on the same memory, so that a step's operands fit beside one another.
_PART_BYTES = GIB // 2
_MOST_PARTS = 1024
_PROPORTIONAL: dict[type[Op], str] = {
    Optimizer: "num_params",
    Copy: "num_bytes",
    CrossEntropy: "tokens",
}


def replay_compute(
    op: ComputeOp, compute: Compute, capabilities: Capabilities
) -> ReplayCompute:
    """Return what runs for a computation.

    Of Compute.REAL this is its operator. A kernel that is none, or that nothing here runs, is
    busy for its time; without a time it is a copy that moves as many bytes.
    """
    if compute is Compute.NONE or op.is_wait:
        return None
    if compute is Compute.SLEEP:
        return op.time_s
    if not isinstance(op.op, Kernel) and backend_of(op.op, capabilities):
        return op.op
    if op.time_s is not None:
        return op.time_s
    copied = (op.op.bytes_moved or 0) // 2 // _WORD * _WORD
    return Copy(num_bytes=copied) if copied else None


def parts_of(op: Op) -> tuple[Op, int]:
    """Return the operator that runs, and how often, in the place of a large one."""
    name = _PROPORTIONAL.get(type(op))
    least = -(-op.memory_bytes // _PART_BYTES)
    if name is None or least == 1:
        return op, 1
    total = getattr(op, name)
    unit = _WORD if isinstance(op, Copy) else 1
    parts = (n for n in range(least, _MOST_PARTS + 1) if total % (n * unit) == 0)
    number = next(parts, 1)
    return replace(op, **{name: total // number}), number


def backend_of(op: Op, capabilities: Capabilities) -> str:
    """Return the first backend of an operator that runs here; "" for none."""
    return next(iter(usual(FAMILY_OF[type(op)], op, capabilities)), "")


def count_computes(
    workload: Workload, compute: Compute, capabilities: Capabilities
) -> Counter[str]:
    """Count the distinct computations of a step by what runs for them.

    The names are operator, busy, copy and nothing.
    """
    counts = Counter[str]()
    for op in dict.fromkeys(computations(workload)):
        replacement = replay_compute(op, compute, capabilities)
        if replacement is None:
            counts["nothing"] += 1
        elif isinstance(replacement, float):
            counts["busy"] += 1
        else:
            counts["operator" if replacement is op.op else "copy"] += 1
    return counts
