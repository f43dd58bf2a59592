"""What activation checkpointing runs again in the backward pass of a block."""

from dataclasses import replace

from stepmark.core.ops import Attention, Gemm, GroupedGemm
from stepmark.core.training import Recompute
from stepmark.core.workload import ComputeOp, Operation
from stepmark.workload.units import Unit


def is_checkpointed(recompute: Recompute, blocks: tuple[int, int], layer: int) -> bool:
    """blocks: so many of so many, where recompute says blocks."""
    match recompute:
        case Recompute.NONE:
            return False
        case Recompute.BLOCKS:
            some, every = blocks
            return layer % every < some
        case _:
            return True


def again(unit: Unit, recompute: Recompute) -> tuple[tuple[Operation, ...], ...]:
    """What checkpointing runs again: up to the last input that its backward pass needs.

    torch.utils.checkpoint stops early there: before the last product, whose own input is
    known by then, and what follows it. Per operator (bench/training/parallelize.py)
    attention, communication and every second product are kept.
    """
    stop, place = _last_needed(unit), 0
    products = 0
    pieces: list[tuple[Operation, ...]] = []
    for piece in unit.fwd:
        found: list[Operation] = []
        for one in piece:
            place += 1
            if isinstance(one, ComputeOp) and isinstance(one.op, Gemm | GroupedGemm):
                products += 1
            if place > stop or (recompute is Recompute.OPS and _is_kept(one, products)):
                continue
            found.append(replace(one, recompute=True))
        pieces.append(tuple(found))
    return tuple(pieces)


def _last_needed(unit: Unit) -> int:
    """Forward operations up to the last product; with it where it is of experts.

    Rows of experts are weighted and sent back after their last product.
    """
    ops = [one for piece in unit.fwd for one in piece]
    products = [
        (at, one)
        for at, one in enumerate(ops)
        if isinstance(one, ComputeOp) and isinstance(one.op, Gemm | GroupedGemm)
    ]
    if not products:
        return len(ops)
    last, product = products[-1]
    if isinstance(product, ComputeOp) and isinstance(product.op, Gemm):
        return last
    return 1 + max(at for at, one in enumerate(ops) if one.module == product.module)


def _is_kept(one: Operation, products: int) -> bool:
    if not isinstance(one, ComputeOp):
        return True
    if isinstance(one.op, Gemm | GroupedGemm):
        return products % 2 == 1
    return isinstance(one.op, Attention)


def ahead(unit: Unit) -> int:
    """Backward operations before those of the last product, which need nothing kept.

    Blocks are computed again when the first kept tensor is asked for.
    """
    products = [one for piece in unit.fwd for one in piece if _is_product(one)]
    if not products or not _is_plain(products[-1]):
        return 0
    module = products[-1].module
    places = [
        at
        for at, one in enumerate(unit.bwd[0])
        if one.module == module and isinstance(one, ComputeOp)
    ]
    return min(places, default=0)


def _is_product(one: Operation) -> bool:
    return isinstance(one, ComputeOp) and isinstance(one.op, Gemm | GroupedGemm)


def _is_plain(one: Operation) -> bool:
    return isinstance(one, ComputeOp) and isinstance(one.op, Gemm)
