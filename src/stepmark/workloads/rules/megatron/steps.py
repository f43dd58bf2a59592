"""Steps of a pass: a module's operations, and the order of several modules' operations.

An asynchronous collective has its own stream. It starts after the computation that was issued
before it, as NCCL's streams do; operations that need it wait for its name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stepmark.model.ops import Phase
from stepmark.step.module import Module
from stepmark.step.workload import COMPUTE, ComputeOp, Operation
from stepmark.workloads.pipeline import COMPUTE_DONE, wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A module's operations. pending: a backward collective the next computation waits for."""

    module: str
    fwd: tuple[Operation, ...]
    bwd: tuple[Operation, ...]
    pending: str = ""


def awaiting(phase: Phase, module: str, *names: str) -> ComputeOp:
    """Return an operation inside a layer that only waits for collectives of these names."""
    return replace(wait(names, phase, module), layer=0, microbatch=0)


def of_leaf(leaf: Module) -> Step:
    """A module without communication."""
    return Step(module=leaf.role, fwd=leaf.fwd, bwd=leaf.bwd)


def forward(steps: Iterable[Step], *, again: bool = False) -> tuple[Operation, ...]:
    """Return the forward pass. again: as the backward pass recomputes it."""
    ops = [op for step in steps for op in step.fwd]
    return with_deps([replace(op, recompute=True) for op in ops] if again else ops)


def backward(
    steps: Sequence[Step], recomputed: Mapping[str, str] | None = None
) -> tuple[Operation, ...]:
    """Return the backward pass. recomputed: by module the group it is checkpointed in.

    A group's forward operations run again before the first of its backward operations.
    """
    groups = recomputed or {}
    ops: list[Operation] = []
    current = ""
    pending = ""
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        group = groups.get(steps[index].module, "")
        step_ops: list[Operation] = []
        if group and group != current:
            members = [
                member for member in steps[: index + 1] if groups.get(member.module) == group
            ]
            step_ops += forward(members, again=True)
        step_ops += step.bwd
        current = group
        if pending and step_ops:
            step_ops[0] = replace(step_ops[0], after=(*step_ops[0].after, pending))
            pending = ""
        ops += step_ops
        pending = step.pending or pending
    return with_deps(ops)


def with_deps(
    operations: Sequence[Operation], before: tuple[str, ...] = ()
) -> tuple[Operation, ...]:
    """Name the computation after which an asynchronous collective starts.

    before: names of the computation before all of these operations.
    """
    ops = list(operations)
    behind = before
    last: int | None = None
    for index, op in enumerate(ops):
        if op.stream == COMPUTE:
            last = index
            continue
        if last is not None:
            newest = ops[last]
            if not newest.name:
                newest = replace(newest, name=f"{newest.module}.{newest.phase}")
                ops[last] = newest
            behind = (newest.name,)
        new = (name for name in behind if name not in op.after)
        ops[index] = replace(op, after=(*new, *op.after))
    return tuple(ops)


def with_compute_done(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Name the last computation COMPUTE_DONE, for operations after the block."""
    ops = list(operations)
    for index in range(len(ops) - 1, -1, -1):
        if ops[index].stream == COMPUTE:
            ops[index] = replace(ops[index], name=ops[index].name or COMPUTE_DONE)
            break
    return tuple(ops)
