"""Modules with the communication around them, and in which order their operations are issued.

An asynchronous collective lies on a stream of its own; it starts after what the stream of
computation was given before it, as NCCL's streams do, and what needs it waits by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stepmark.core.module import Module
from stepmark.core.ops import Phase
from stepmark.core.workload import COMPUTE, CommOp, Operation

PASSED = "passed"  # the newest operation that ends a block of computation, or a wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One module. pending: a collective of its backward that the next computation waits for."""

    module: str
    fwd: tuple[Operation, ...]
    bwd: tuple[Operation, ...]
    pending: str = ""


def of_leaf(leaf: Module) -> Step:
    """A module without communication."""
    return Step(module=leaf.role, fwd=leaf.fwd, bwd=leaf.bwd)


def forward(steps: Iterable[Step], *, again: bool = False) -> tuple[Operation, ...]:
    """again: as the backward pass runs it a second time."""
    found = [op for step in steps for op in step.fwd]
    return issued([replace(op, recompute=True) for op in found] if again else found)


def backward(
    steps: Sequence[Step], recomputed: Mapping[str, str] | None = None
) -> tuple[Operation, ...]:
    """In reverse order of steps. recomputed: of modules, which group they are checkpointed in.

    A group's forward operations run again before the first of its backward operations.
    """
    groups = recomputed or {}
    found: list[Operation] = []
    current, pending = "", ""
    for index in range(len(steps) - 1, -1, -1):
        step, group = steps[index], groups.get(steps[index].module, "")
        own: list[Operation] = []
        if group and group != current:
            members = [one for one in steps[: index + 1] if groups.get(one.module) == group]
            own += forward(members, again=True)
        own += step.bwd
        current = group
        if pending and own:
            own[0] = replace(own[0], after=(*own[0].after, pending))
            pending = ""
        found += own
        pending = step.pending or pending
    return issued(found)


def issued(
    operations: Sequence[Operation], before: tuple[str, ...] = ()
) -> tuple[Operation, ...]:
    """With a name on computation that an asynchronous collective is issued behind.

    before: names of what was computed before all of these.
    """
    found, behind = list(operations), before
    last: int | None = None
    for index, op in enumerate(found):
        if op.stream == COMPUTE:
            last = index
            continue
        if last is not None:
            newest = found[last]
            if not newest.name:
                newest = replace(newest, name=f"{newest.module}.{newest.phase}")
                found[last] = newest
            behind = (newest.name,)
        new = (name for name in behind if name not in op.after)
        found[index] = replace(op, after=(*new, *op.after))
    return tuple(found)


def passed(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """With PASSED on the last computation, for what is issued behind the block."""
    found = list(operations)
    for index in range(len(found) - 1, -1, -1):
        if found[index].stream == COMPUTE:
            found[index] = replace(found[index], name=found[index].name or PASSED)
            break
    return tuple(found)


def split_backward(leaf: Module) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Gradients of the data, and those of the weights."""
    of_weights = tuple(op for op in leaf.bwd if op.phase is Phase.WGRAD)
    return tuple(op for op in leaf.bwd if op.phase is not Phase.WGRAD), of_weights


def marked(operations: Iterable[CommOp], **marks: str) -> tuple[CommOp, ...]:
    """Asynchronous: with a stream and a name."""
    return tuple(replace(op, **marks) for op in operations)  # type: ignore[arg-type]
