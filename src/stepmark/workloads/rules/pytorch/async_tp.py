"""Tensor parallelism whose products run in pieces while their operands or results are sent.

torch 2.13: torch/_inductor/fx_passes/micro_pipeline_tp.py finds a gather with the products of
its result, and a product whose result is scattered, in the compiled graph of a block;
torch/distributed/_symmetric_memory/__init__.py runs them (_pipelined_all_gather_and_consume,
_pipelined_produce_and_all2all). A rank copies the other ranks' parts out of their memory, one
at a time, and each piece of the product is that of one rank's rows. A product with a bias
(addmm) is no match, nor is a sum of gradients of two products, so those collectives stay whole.
Copies are sends and receipts here, as the two sides of a copy; barriers are left out. Torch has
the pieces alternate between two streams, on which they could run at the same time; here they
run one after the other.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from stepmark.cases.message import RECV, SEND
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.ops import Gemm, Phase
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Operation

# Names for `after`.
_PIECE = "tp_piece"
_COPY = "tp_copy"
_READY = "tp_copy_in"


def in_pieces(
    ops: Sequence[Operation], ranks: int, biased: Collection[str]
) -> tuple[Operation, ...]:
    """Return a block's pass with its products of tp in pieces. biased: modules with a bias."""
    return tuple(_lowered(list(ops), ranks, biased))


def _lowered(ops: list[Operation], ranks: int, biased: Collection[str]) -> Iterator[Operation]:
    while ops:
        op = ops.pop(0)
        if _is_collective(op, Collective.ALL_GATHER):
            assert isinstance(op, CommOp)
            products, others = _consumers(ops, biased)
            if products:
                yield from _gathered(op, products, ranks)
                del ops[: len(products) + len(others)]
                yield from others
                continue
        elif (
            ops
            and _is_product(op, biased)
            and _is_collective(ops[0], Collective.REDUCE_SCATTER)
        ):
            scatter = ops.pop(0)
            assert isinstance(op, ComputeOp)
            assert isinstance(scatter, CommOp)
            yield from _scattered(op, scatter, ranks)
            continue
        yield op


def _consumers(
    ops: list[Operation], biased: Collection[str]
) -> tuple[list[ComputeOp], list[Operation]]:
    """Return the products that begin with a gathered tensor, and weight gradients before them.

    The latter multiply its transpose, so they wait for all of it.
    """
    products: list[ComputeOp] = []
    others: list[Operation] = []
    for op in ops:
        if isinstance(op, ComputeOp) and op.phase is Phase.WGRAD and not products:
            others.append(op)
        elif _is_product(op, biased) and isinstance(op, ComputeOp):
            products.append(op)
            if op.phase is Phase.DGRAD:
                break
        else:
            break
    return products, others


def _is_product(op: Operation, biased: Collection[str]) -> bool:
    if not isinstance(op, ComputeOp) or not isinstance(op.op, Gemm):
        return False
    return op.phase is Phase.DGRAD or (op.phase is Phase.FWD and op.module not in biased)


def _is_collective(op: Operation, kind: Collective) -> bool:
    return isinstance(op, CommOp) and op.collective == kind and op.group == "tp"


def _gathered(gather: CommOp, products: list[ComputeOp], ranks: int) -> Iterator[Operation]:
    """Yield the copy of the own rows, then each other rank's copy and the products of its rows.

    Of two copies one goes on while a piece is computed; the next one waits for that piece.
    """
    num_bytes = 2 * gather.count * gather.dtype.itemsize
    yield _kernel("tp_copy_in", num_bytes, gather, name=_READY)
    for step in range(ranks):
        if step + 1 < ranks:
            # The first copy waits for the own rows of all ranks, later ones for the piece
            # before the newest on their stream.
            yield from _copied(gather, step + 1, _PIECE if step else _READY)
        after = () if step == 0 else (_COPY if step + 1 == ranks else f"{_COPY}~1",)
        yield from _pieces(products, ranks, after)
    yield _kernel("tp_copy_own", num_bytes, gather)


def _scattered(product: ComputeOp, scatter: CommOp, ranks: int) -> Iterator[Operation]:
    """Yield each other rank's piece and its copy, the own piece, and the sum of all.

    There are two buffers, so that a piece waits for the copy of the last but one.
    """
    for step in range(1, ranks):
        yield from _pieces([product], ranks, (f"{_COPY}~1",) if step > 2 else ())
        yield from _copied(scatter, -step, _PIECE)
    yield from _pieces([product], ranks, ())
    num_bytes = (ranks + 1) * scatter.count * scatter.dtype.itemsize
    yield _kernel("tp_sum", num_bytes, scatter, after=(_COPY,))


def _pieces(
    products: list[ComputeOp], ranks: int, after: tuple[str, ...]
) -> Iterator[ComputeOp]:
    """Yield the products of one rank's rows; the last one has a name."""
    for index, product in enumerate(products):
        assert isinstance(product.op, Gemm)
        yield replace(
            product,
            op=replace(product.op, m=product.op.m // ranks),
            after=after if index == 0 else (),
            name=_PIECE if index + 1 == len(products) else "",
        )


def _copied(whole: CommOp, distance: int, after: str) -> Iterator[CommOp]:
    """Yield the copy of one rank's part out of the rank this far ahead, and of the own part."""
    for kind, peer in ((SEND, -distance), (RECV, distance)):
        yield replace(
            whole,
            collective=kind,
            redop=RedOp.NONE,
            peer=peer,
            stream=whole.group,
            name="" if kind == SEND else _COPY,
            after=(after,) if kind == SEND else (),
            fused=kind == RECV,
        )


def _kernel(
    kernel: str, num_bytes: int, of: CommOp, *, name: str = "", after: tuple[str, ...] = ()
) -> ComputeOp:
    return ComputeOp(
        op=Kernel(name=kernel, flops=0, bytes_moved=num_bytes),
        phase=of.phase,
        module=of.module,
        layer=of.layer,
        microbatch=of.microbatch,
        recompute=of.recompute,
        name=name,
        after=after,
    )
