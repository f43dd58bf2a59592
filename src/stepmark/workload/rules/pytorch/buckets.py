"""Which gradients share a bucket of DistributedDataParallel, and when it is full.

torch 2.13.0, torch/csrc/distributed/c10d/reducer.cpp: compute_bucket_assignment_by_size,
mark_bucket_ready.
"""

from collections.abc import Iterator, Sequence

from stepmark.core.module import Param
from stepmark.core.workload import Operation


def closed(sizes: Sequence[int], itemsize: int, limits: tuple[int, ...]) -> Iterator[list[int]]:
    """Places of tensors by bucket: each is closed by the tensor that reaches its limit.

    limits: of the first ones in bytes; the last stands for all others
    (compute_bucket_assignment_by_size).
    """
    bucket: list[int] = []
    held, closed = 0, 0
    for at, size in enumerate(sizes):
        bucket.append(at)
        held += size * itemsize
        if held >= limits[min(closed, len(limits) - 1)]:
            yield bucket
            bucket, held = [], 0
            closed += 1
    if bucket:
        yield bucket


def filled(
    params: Sequence[Param], itemsize: int, limits: tuple[int, ...]
) -> Iterator[list[Param]]:
    for bucket in closed([one.numel for one in params], itemsize, limits):
        yield [params[at] for at in bucket]


Placed = tuple[int, Param]  # number of its unit


def completed(
    ready: Sequence[Placed], buckets: Sequence[Sequence[Placed]]
) -> dict[int, list[tuple[Param, int]]]:
    """Which gradient, ready in this order, lets which buckets go."""
    place = {(number, one.name): at for at, (number, one) in enumerate(ready)}
    found: dict[int, list[tuple[Param, int]]] = {}
    latest = -1
    for bucket in buckets:
        latest = max(latest, *(place[number, one.name] for number, one in bucket))
        number, param = ready[latest]
        elements = sum(one.numel for _, one in bucket)
        found.setdefault(number, []).append((param, elements))
    return found


def ready_at(body: tuple[Operation, ...], param: Param) -> int:
    """Behind the last operation of the parameter's module."""
    places = [at for at, one in enumerate(body, 1) if one.module == param.part]
    return places[-1] if places else len(body)


def ready_order(params: tuple[Param, ...], *, autocast: bool) -> tuple[Param, ...]:
    """Parameters as their gradients become ready, the last module's first.

    Nodes of autograd run newest first; of one node's parameters the order is that of
    torch 2.13: bias before weight of a linear layer, weight before bias of a norm, and the
    other way round under autocast, whose casts are nodes of their own.
    """
    by_module: dict[str, list[Param]] = {}
    for one in params:
        if one.is_trained:
            by_module.setdefault(one.name.rpartition(".")[0], []).append(one)
    found: list[Param] = []
    for members in reversed(by_module.values()):
        in_order = members[0].is_norm is not autocast and not members[0].is_expert
        found += members if in_order else reversed(members)
    return tuple(found)
