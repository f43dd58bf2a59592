"""A workload on fewer ranks: groups get smaller, messages and computation stay."""

import math
from dataclasses import replace
from itertools import pairwise

from stepmark.cases.message import RECV, SEND
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, num_parts
from stepmark.step.workload import Block, CommOp, Group, Item, Workload


def shrunk(workload: Workload, num_ranks: int) -> Workload:
    """Return the workload on this many ranks; every pipeline stage keeps as many as the others.

    The outermost dimensions of the mesh are shortened first, thus data parallelism before
    tensor parallelism. Messages keep their size (nccl-tests'), so that parts per rank grow.
    Raises ConfigError where the mesh has no such part.
    """
    world = workload.world_size
    if num_ranks == world:
        return workload
    bounds = _bounds(workload)
    lengths = _lengths(workload, bounds, num_ranks)
    new = {1: 1}
    for (low, high), length in zip(pairwise(bounds), lengths, strict=True):
        new[high] = new[low] * length
    stage = world // len(workload.stages)

    def digit(size: int, stride: int) -> tuple[int, int]:
        if stride % stage == 0:  # over some stages, all of which stay
            return size, stride // stage * new[stage]
        return new[size * stride] // new[stride], new[stride]

    groups = {
        name: Group(digits=tuple(digit(*each) for each in g.digits))
        for name, g in workload.groups.items()
    }

    def resized(item: Item) -> Item:
        if not isinstance(item, CommOp):
            return item
        before = workload.groups[item.group].size
        after = groups[item.group].size
        if item.collective in (SEND, RECV) or before == after:
            return item
        kind = Collective(item.collective)
        count = -(-item.count * num_parts(kind, before) // num_parts(kind, after))
        root = None if item.root is None else item.root % after
        return replace(item, count=count, root=root)

    blocks: dict[str, Block] = {
        name: tuple(map(resized, items)) for name, items in workload.blocks.items()
    }
    note = f"shrunk from {world} to {num_ranks} ranks: groups are smaller, messages as large"
    return replace(
        workload,
        world_size=num_ranks,
        groups=groups,
        blocks=blocks,
        notes=(*workload.notes, note),
    )


def _lengths(workload: Workload, bounds: list[int], num_ranks: int) -> list[int]:
    """Return how long each dimension of the mesh becomes. Raises ConfigError."""
    world = workload.world_size
    stages = len(workload.stages)
    if num_ranks > world or num_ranks % stages:
        allowed = f"at most {world}, and a multiple of its {stages} pipeline stages"
        raise ConfigError("nproc", num_ranks, allowed)
    ratio = world // num_ranks
    lengths = list[int]()
    if world % num_ranks:
        raise ConfigError("nproc", num_ranks, f"a divisor of the file's {world} ranks")
    for low, high in reversed(list(pairwise(bounds))):
        length = high // low
        if low < world // stages:  # the dimension of stages stays
            common = math.gcd(length, ratio)
            length = length // common
            ratio = ratio // common
        lengths.insert(0, length)
    if ratio > 1:
        sizes = " x ".join(map(str, (b // a for a, b in pairwise(bounds))))
        raise ConfigError("nproc", num_ranks, f"ranks of a part of the file's mesh, {sizes}")
    return lengths


def _bounds(workload: Workload) -> list[int]:
    """Return the strides of the mesh and its size. Raises ConfigError if they do not nest."""
    world = workload.world_size
    stage = world // len(workload.stages)
    bounds = {1, world, stage}
    for group in workload.groups.values():
        within = (digit for digit in group.digits if digit[1] % stage)
        bounds |= {b for size, stride in within for b in (stride, size * stride)}
    ordered = sorted(b for b in bounds if b <= world)
    for low, high in pairwise(ordered):
        if high % low:
            text = (
                f"used for a file whose groups are dimensions of one mesh: {workload.name} has "
                f"groups of {low} and {high} ranks"
            )
            raise ConfigError("shrink", "given", text)
    return ordered
