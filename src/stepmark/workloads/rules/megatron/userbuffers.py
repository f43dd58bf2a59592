"""Linear layers whose products overlap with their own communication over tp (tp_comm_overlap).

TransformerEngine's userbuffers divide a product and the collective next to it into pieces:

- The input of a column-parallel layer, and the gradient of a row-parallel layer's output, go
  round a ring of tp ranks while the rows that have arrived are multiplied (ring_exchange).
- The output of a row-parallel layer is scattered in four parts of its features, each while the
  next part is multiplied (pipeline). The last part has nothing beside it.
- The backward pass of a column-parallel layer gathers its input during the input gradient and
  scatters that during the weight gradient (bulk), as it does without userbuffers.

Source: TransformerEngine v2.9 (70f5366), pytorch/module/base.py (initialize_ub: the method of
each product, num_splits), layernorm_linear.py, linear.py, common/comm_gemm_overlap/
comm_gemm_overlap.cpp (CommOverlapP2PBase::split_overlap_ag, CommOverlapBase::split_overlap_rs);
megatron-core 0.16.1, extensions/transformer_engine.py. Only read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.ops import Gemm, Phase
from stepmark.step.module import Module
from stepmark.step.workload import CommOp, ComputeOp, Operation
from stepmark.workloads.rules.megatron.plan import Plan
from stepmark.workloads.rules.megatron.steps import awaiting

NUM_SPLITS = 4  # num_splits of the method pipeline


def gathers_by_ring(plan: Plan, leaf: Module) -> bool:
    """Return whether a layer multiplies rows while others arrive.

    Buffers are of qkv, proj, fc1 and fc2; the head and the router are other layers.
    """
    settings = plan.settings
    if not (settings.tp_comm_overlap and settings.tp_comm_overlap_ag) or leaf.role == "head":
        return False
    is_qkv = leaf.role == "attention.qkv"
    is_disabled = (
        settings.tp_comm_overlap_disable_qkv if is_qkv else settings.tp_comm_overlap_disable_fc1
    )
    return leaf.is_row or not is_disabled


def scatters_in_parts(plan: Plan) -> bool:
    """Return whether a row-parallel layer scatters its output part by part."""
    return plan.settings.tp_comm_overlap and plan.settings.tp_comm_overlap_rs


def ring_gather(
    plan: Plan, leaf: Module, ops: Sequence[ComputeOp], sent: Mapping[str, Any], phase: Phase
) -> tuple[Operation, ...]:
    """Return products of rows that go round the ring, after casts of the rank's own rows.

    sent: elements of all rows, and their type. A piece of rows is sent on when it has come,
    whatever the products do.
    """
    tp = plan.tp
    name = f"{leaf.role}.ring"
    message = (sent["elements"] // tp, "tp", phase, leaf.role, sent.get("dtype"))
    moves: list[CommOp] = []
    for _ in range(tp - 1):
        moves += plan.inside(SEND, *message, peer=1, stream="tp")
        moves += plan.inside(RECV, *message, peer=-1, stream="tp", name=name, fused=True)
    whole, divided = _with_products_apart(ops)
    products: list[ComputeOp] = []
    for index in range(tp):
        # The first product has the rank's own rows.
        received = (f"{name}~{tp - 1 - index}",) if index else ()
        products += [_of_rows(op, tp, received) for op in divided]
    return (*whole, *moves, *products)


def with_columns(
    plan: Plan,
    leaf: Module,
    ring: Sequence[Operation],
    weights: Sequence[Operation],
    sent: Mapping[str, Any],
) -> tuple[Operation, ...]:
    """Return a row-parallel layer's backward pass with the gather of its gradient's columns.

    Of MXFP8 the ring has the layout along rows alone. That along columns, which the weight's
    gradient reads, is gathered behind it during the input's gradient (linear.py, backward).
    """
    products = plan.job.products
    if products is None or products.dtype is not DType.MXFP8 or "dtype" not in sent:
        return (*ring, *weights)
    name = f"{leaf.role}.columns"
    gather = plan.inside(
        Collective.ALL_GATHER,
        sent["elements"],
        "tp",
        Phase.WGRAD,
        leaf.role,
        sent["dtype"],
        stream="tp",
        name=name,
    )
    first = next(
        index
        for index, op in enumerate(ring)
        if isinstance(op, ComputeOp) and isinstance(op.op, Gemm)
    )
    awaited = (replace(op, after=(*op.after, name)) for op in weights)
    return (*ring[:first], *gather, *ring[first:], *awaited)


def pipelined_scatter(plan: Plan, leaf: Module, elements: int) -> tuple[Operation, ...]:
    """Return the products of parts of a layer's output, and the scatter of each."""
    name = f"{leaf.role}.scatter"
    whole, divided = _with_products_apart(leaf.fwd)
    ops: list[Operation] = [*whole]
    for _ in range(NUM_SPLITS):
        ops += [_of_features(op) for op in divided]
        ops += plan.inside(
            Collective.REDUCE_SCATTER,
            elements // NUM_SPLITS,
            "tp",
            Phase.FWD,
            leaf.role,
            stream="tp",
            name=name,
        )
    return (*ops, awaiting(Phase.FWD, leaf.role, name))


def _with_products_apart(
    ops: Sequence[ComputeOp],
) -> tuple[list[ComputeOp], list[ComputeOp]]:
    """Return what comes before products, such as casts, and the products."""
    whole: list[ComputeOp] = []
    divided: list[ComputeOp] = []
    for op in ops:
        (divided if isinstance(op.op, Gemm) else whole).append(op)
    return whole, divided


def _of_rows(op: ComputeOp, parts: int, after: tuple[str, ...]) -> ComputeOp:
    assert isinstance(op.op, Gemm)
    return replace(op, op=replace(op.op, m=op.op.m // parts), after=after)


def _of_features(op: ComputeOp) -> ComputeOp:
    assert isinstance(op.op, Gemm)
    return replace(op, op=replace(op.op, n=op.op.n // NUM_SPLITS))
