"""A stage's program operation by operation, without a copy of each: for long files."""

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from stepmark.core.workload import Operation, Run, Workload

T = TypeVar("T")


class Placed(NamedTuple, Generic[T]):
    """What was made of an operation; its layer and micro-batch before those of its place."""

    made: T
    layer: int | None
    microbatch: int | None


class Segment(NamedTuple, Generic[T]):
    """Operations in a row, and the layer and micro-batch that are added to theirs."""

    operations: list[Placed[T]]
    layer: int
    microbatch: int


def walk(
    workload: Workload, stage: int, make: Callable[[Operation], T], *, setup: bool = False
) -> Iterator[Segment[T]]:
    """As `workload.expand(stage)`; `make` is called once for each operation of a block."""
    chosen = workload.stages[stage]
    block = chosen.setup if setup else chosen.step
    if block:
        yield from _visit(workload, block, 0, 0, make, {})


def _visit(
    workload: Workload,
    block: str,
    layer: int,
    microbatch: int,
    make: Callable[[Operation], T],
    known: dict[str, list[Run | list[Placed[T]]]],
) -> Iterator[Segment[T]]:
    if block not in known:
        known[block] = _parts(workload, block, make)
    for part in known[block]:
        if not isinstance(part, Run):
            yield Segment(part, layer, microbatch)
            continue
        for index in range(part.times):
            yield from _visit(
                workload,
                part.block,
                layer + part.layer + index * part.layer_step,
                microbatch + part.microbatch + index * part.microbatch_step,
                make,
                known,
            )


def _parts(
    workload: Workload, block: str, make: Callable[[Operation], T]
) -> list[Run | list[Placed[T]]]:
    """Runs as they are; operations between them together."""
    parts: list[Run | list[Placed[T]]] = []
    for item in workload.blocks[block]:
        if isinstance(item, Run):
            parts.append(item)
            continue
        if not parts or isinstance(parts[-1], Run):
            parts.append([])
        last = parts[-1]
        assert not isinstance(last, Run)
        last.append(Placed(make(item), item.layer, item.microbatch))
    return parts
