"""A layer's passes in pieces, which those of two micro-batches interleave.

With overlap_moe_expert_parallel_comm a layer forward of one micro-batch and a layer backward of
another one run together: the exchange over ep of each has computation of the other beside it.

    exchange   combine backward | dispatch forward, backward          | combine forward
    compute    attention fwd    | experts bwd, their weights, forward | attention backward

The exchanges are on a stream of their own and wait for their own pass alone. What Megatron-LM
runs on that stream besides (rows back in order, the residual sum) is on the stream of
computation here, behind the other pass's piece. With delay_wgrad_compute weight gradients of
linear layers come after what their exchange needs.

Source: megatron-core 0.16.1, models/common/model_chunk_schedule_plan.py
(TransformerLayerSchedulePlan.run, TransformerModelChunkSchedulePlan.run),
models/gpt/fine_grained_callables.py (build_transformer_layer_callables),
pipeline_parallel/combined_1f1b.py. Only the order of messages was compared with a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stepmark.model.ops import Phase
from stepmark.step.workload import ComputeOp, Operation
from stepmark.workloads.rules.megatron import deepep
from stepmark.workloads.rules.megatron.steps import Step, backward, forward

_EXCHANGES = ("ep", deepep.ACROSS_HOSTS, deepep.IN_HOST)  # streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A layer's operations: three pieces of each pass, and delayed weight gradients.

    The first forward piece ends with the dispatch, the second one with the combine; backward
    the other way round. A dense layer has no exchange: its MLP is the second piece forward and
    backward, its attention the first one forward and the third one backward.
    """

    forward: tuple[tuple[Operation, ...], ...]
    backward: tuple[tuple[Operation, ...], ...]
    mlp_weights: tuple[Operation, ...]
    attention_weights: tuple[Operation, ...]


def pieces(
    attention: Sequence[Step],
    mlp: Sequence[Step],
    recomputed: Mapping[str, str],
    *,
    is_moe: bool,
    delays: bool,
) -> Pieces:
    """Return the pieces of a layer. delays: weight gradients come last."""
    steps = (*attention, *mlp)
    delayed = [_weights(step) if delays else () for step in steps]
    kept = [
        replace(step, bwd=tuple(op for op in step.bwd if op not in later))
        for step, later in zip(steps, delayed, strict=True)
    ]
    count = len(attention)
    if is_moe:
        fwd = _cut(forward(steps))
        bwd = _cut(backward(kept, recomputed))
    else:
        fwd = (forward(attention), forward(mlp), ())
        bwd = ((), backward(kept[count:], recomputed), backward(kept[:count], recomputed))
    in_mlp = [_is_in_mlp(step, is_moe=is_moe) for step in steps]
    last_first = [*zip(in_mlp, delayed, strict=True)][::-1]
    return Pieces(
        forward=fwd,
        backward=bwd,
        mlp_weights=tuple(op for inside, ops in last_first if inside for op in ops),
        attention_weights=tuple(op for inside, ops in last_first if not inside for op in ops),
    )


def _is_in_mlp(step: Step, *, is_moe: bool) -> bool:
    """Return whether a step is of the experts, or of a dense layer's MLP."""
    return step.module.startswith("mlp.experts" if is_moe else "mlp.")


def _weights(step: Step) -> tuple[Operation, ...]:
    """Return the weight gradients of a step that TransformerEngine can delay."""
    if step.module == "mlp.router":
        return ()
    return tuple(op for op in step.bwd if op.phase is Phase.WGRAD and isinstance(op, ComputeOp))


def _cut(operations: Sequence[Operation]) -> tuple[tuple[Operation, ...], ...]:
    """Cut a pass behind each of its exchanges over ep."""
    ends = [
        index + 1
        for index, op in enumerate(operations)
        if op.stream in _EXCHANGES
        and (index + 1 == len(operations) or operations[index + 1].stream not in _EXCHANGES)
    ]
    first, second = ends
    return (
        tuple(operations[:first]),
        tuple(operations[first:second]),
        tuple(operations[second:]),
    )


def order(num_forward: int, num_backward: int) -> Iterator[tuple[str, bool, int]]:
    """Yield the pieces of two chunks in the order in which they are issued.

    Each with whether it is the forward pass's, and the place of its layer in that pass. What
    the next layer backward sends first is beside the delayed gradients of attention; those of
    the last layer are beside the transfer between stages.
    """
    yield "backward0", False, 0
    pairs = max(num_forward, num_backward)
    for place in range(pairs):
        yield "forward0", True, place
        yield "backward1", False, place
        yield "mlp_weights", False, place
        yield "forward1", True, place
        yield "backward2", False, place
        is_last = place + 1 == num_backward
        yield "backward0", False, place + 1
        if not is_last:
            yield "attention_weights", False, place
        yield "forward2", True, place
        if is_last:
            yield "attention_weights", False, place
