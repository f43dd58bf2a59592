"""Linear layers, embedding and head under tensor and sequence parallelism.

Source: megatron-core 0.16.1, tensor_parallel/layers.py (ColumnParallelLinear,
RowParallelLinear, LinearWithGradAccumulationAndAsyncCommunication, VocabParallelEmbedding),
tensor_parallel/cross_entropy.py, fusions/fused_cross_entropy.py.
Compared with a run of Megatron-LM (tests/data/megatron).
"""

from dataclasses import replace
from typing import Any

from stepmark.core.collectives import Collective, RedOp
from stepmark.core.dtypes import DType
from stepmark.core.module import Module
from stepmark.core.ops import Phase
from stepmark.core.workload import CommOp, Operation
from stepmark.workload.rules.megatron.settings import Plan
from stepmark.workload.rules.megatron.steps import Step, marked, of_leaf, split_backward


def leaves(plan: Plan, *, moe: bool) -> dict[str, Module]:
    """What computes in one layer, by role in forward order."""
    return {leaf.role: leaf for leaf in plan.tree.block(moe=moe).walk() if leaf.work}


def mlp(plan: Plan) -> tuple[Step, ...]:
    """norm, up, activation, down, residual of a dense layer."""
    listed = [leaf for role, leaf in leaves(plan, moe=False).items() if role.startswith("mlp.")]
    norm, up, active, down, rest = listed
    hidden = plan.model.hidden_size
    return (
        of_leaf(norm),
        column(plan, up, hidden),
        of_leaf(active),
        row(plan, down, hidden),
        of_leaf(rest),
    )


def column(plan: Plan, leaf: Module, width: int) -> Step:
    """A linear layer with its output features over tp; width: of its input.

    Under sequence parallelism the input is gathered, again for the weights' gradient beside
    the data's, and the data's is scattered beside the weights'; else it is all-reduced there.
    """
    of_data, of_weights = split_backward(leaf)
    made, rows = plan.comms, plan.tokens * width
    module, first = leaf.role, leaf.fwd[0]
    of: dict[str, Any] = {"layer": first.layer, "microbatch": first.microbatch}
    if plan.size("tp") == 1:
        return of_leaf(leaf)
    if not plan.sequence_parallel:
        reduce = made(Collective.ALL_REDUCE, rows, "tp", phase=Phase.DGRAD, module=module, **of)
        name = f"{module}.reduce"
        backward = (*of_data, *marked(reduce, stream="tp", name=name), *of_weights)
        return Step(module=module, fwd=leaf.fwd, bwd=backward, pending=name)
    gather, scatter = f"{module}.gather", f"{module}.scatter"
    ahead = made(Collective.ALL_GATHER, rows, "tp", phase=Phase.FWD, module=module, **of)
    again = made(Collective.ALL_GATHER, rows, "tp", phase=Phase.WGRAD, module=module, **of)
    back = made(Collective.REDUCE_SCATTER, rows, "tp", phase=Phase.DGRAD, module=module, **of)
    return Step(
        module=module,
        fwd=(*ahead, *leaf.fwd),
        bwd=(
            *marked(again, stream="tp", name=gather),
            *of_data,
            *marked(back, stream="tp", name=scatter),
            *(replace(op, after=(gather,)) for op in of_weights),
        ),
        pending=scatter,
    )


def row(plan: Plan, leaf: Module, width: int) -> Step:
    """A linear layer with its input features over tp; width: of its output."""
    made, rows, first = plan.comms, plan.tokens * width, leaf.fwd[0]
    of: dict[str, Any] = {"layer": first.layer, "microbatch": first.microbatch}
    kind = Collective.REDUCE_SCATTER if plan.sequence_parallel else Collective.ALL_REDUCE
    sums = made(kind, rows, "tp", phase=Phase.FWD, module=leaf.role, **of)
    back: tuple[CommOp, ...] = ()
    if plan.sequence_parallel:
        back = made(
            Collective.ALL_GATHER, rows, "tp", phase=Phase.DGRAD, module=leaf.role, **of
        )
    return Step(module=leaf.role, fwd=(*leaf.fwd, *sums), bwd=(*back, *leaf.bwd))


def embedding(plan: Plan) -> Step:
    """Rows of this rank's share of the vocabulary, summed over tp.

    With learned positions the sum is whole even under sequence parallelism, and each rank then
    keeps its part (language_model_embedding.py, reduce_scatter_embeddings).
    """
    leaf = plan.tree.embedding().inside[0]
    rows = plan.tokens * plan.model.hidden_size
    scatters = plan.sequence_parallel and not plan.model.max_positions
    kind = Collective.REDUCE_SCATTER if scatters else Collective.ALL_REDUCE
    of: dict[str, Any] = {"module": leaf.role, "microbatch": 0}
    ahead = plan.comms(kind, rows, "tp", phase=Phase.FWD, **of)
    back: tuple[CommOp, ...] = ()
    if plan.sequence_parallel:
        back = plan.comms(Collective.ALL_GATHER, rows, "tp", phase=Phase.DGRAD, **of)
    return Step(module=leaf.role, fwd=(*leaf.fwd, *ahead), bwd=(*back, *leaf.bwd))


def head(plan: Plan) -> tuple[Step, ...]:
    """Final norm, logits of this rank's share of the vocabulary, their loss.

    The loss sums over tp: maximum, logit of the target, sum of exponentials, each one fp32 per
    token; cross_entropy_loss_fusion sends the latter two in one.
    """
    norm, logits, loss = plan.tree.output().inside
    sums: list[Operation] = []
    sizes = [(1, RedOp.MAX), (1, RedOp.SUM), (1, RedOp.SUM)]
    if plan.settings.cross_entropy_loss_fusion:
        sizes = [(1, RedOp.MAX), (2, RedOp.SUM)]
    for per_token, redop in sizes:
        sums += plan.comms(
            Collective.ALL_REDUCE,
            per_token * plan.tokens,
            "tp",
            phase=Phase.FWD,
            module=loss.role,
            microbatch=0,
            dtype=DType.FP32,
            redop=redop,
        )
    return (
        of_leaf(norm),
        column(plan, logits, plan.model.hidden_size),
        Step(module=loss.role, fwd=(*loss.fwd, *sums), bwd=loss.bwd),
    )


def data(plan: Plan, *, first: bool, last: bool) -> tuple[Operation, ...]:
    """A micro-batch, from the tp rank that read it to the others, before cp divides it.

    Source: get_batch_on_this_tp_rank, megatron/training/utils.py. Broadcasts of no elements,
    which it makes for sequences that are not packed, are left out.
    """
    whole = plan.job.mbs * plan.model.seq_len
    mask = whole * plan.model.seq_len
    masked = plan.settings.create_attention_mask_in_dataloader
    wanted: list[tuple[bool, int, DType]] = [
        (first, whole, DType.INT64),  # tokens
        (last, whole, DType.INT64),  # labels
        (last, whole, DType.FP32),  # mask of the loss
        (masked and (first or last), mask, DType.UINT8),
        (first, whole, DType.INT64),  # positions
        (first, 1, DType.INT64),  # how many packed sequences
        (first or last, 1, DType.INT64),
    ]
    return tuple(
        replace(op, root=0)
        for asked, elements, dtype in wanted
        if asked
        for op in plan.comms(
            Collective.BROADCAST,
            elements,
            "tp",
            phase=Phase.FWD,
            module="data",
            microbatch=0,
            dtype=dtype,
        )
    )
