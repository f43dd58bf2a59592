"""Head and loss chunk by chunk, whose gradients are taken while a chunk's logits exist.

training/transformer.py (chunked_loss): per chunk of tokens the head's products of both passes
and the loss; the rows' gradients are copied into one tensor, those of the weight are added up.
What is left for the backward pass is the factor of the loss's own gradient.
"""

from collections.abc import Iterable
from dataclasses import replace

from stepmark.model.ops import CrossEntropy, Gemm, Phase
from stepmark.step.workload import ComputeOp, Kernel, Operation

_LOSS = ("head", "loss")


def in_chunks(
    fwd: Iterable[Operation], bwd: Iterable[Operation], *, chunks: int, itemsize: int
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Return both passes of the output. itemsize: of activations and of the weight."""
    forward = list(fwd)
    backward = list(bwd)
    inside = [op for op in (*forward, *backward) if op.module in _LOSS]
    products = [op.op for op in inside if isinstance(op, ComputeOp) and isinstance(op.op, Gemm)]
    rows = products[0].m * products[0].k * itemsize
    weight = products[0].n * products[0].k * itemsize
    is_trained = any(op.phase is Phase.WGRAD for op in inside)
    per_chunk = [_part(op, chunks) for op in inside if isinstance(op, ComputeOp)]
    items = [op for op in forward if op.module not in _LOSS]
    for index in range(chunks):
        items += per_chunk
        items.append(_kernel("grad_copy", 2 * rows // chunks, Phase.BWD))
        if is_trained:  # the first one is cloned
            items.append(_kernel("grad_sum", (3 if index else 2) * weight, Phase.BWD))
    scaled = 2 * (rows + weight * is_trained)
    rest = [op for op in backward if op.module not in _LOSS]
    return tuple(items), (_kernel("grad_scale", scaled, Phase.BWD), *rest)


def _part(op: ComputeOp, chunks: int) -> ComputeOp:
    """Return the operation on one chunk's tokens."""
    match op.op:
        case Gemm() if op.phase is Phase.WGRAD:
            return replace(op, op=replace(op.op, k=op.op.k // chunks))
        case Gemm():
            return replace(op, op=replace(op.op, m=op.op.m // chunks))
        case CrossEntropy():
            return replace(op, op=replace(op.op, tokens=op.op.tokens // chunks))
        case _:
            raise AssertionError(op)


def _kernel(name: str, num_bytes: int, phase: Phase) -> ComputeOp:
    kernel = Kernel(name=name, flops=0, bytes_moved=num_bytes)
    return ComputeOp(op=kernel, phase=phase, module="loss", microbatch=0)
