"""Attention under context parallelism: what the ranks of cp exchange, and what each computes.

Source: TransformerEngine 2.9, pytorch/attention/dot_product_attention/context_parallel.py
(AttnFuncWithCPAndKVP2P, AttnFuncWithCPAndKVAllGather, AttnFuncWithCPAndQKVOA2A), only read.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.layers import Layer
from stepmark.model.ops import Attention, Op, Phase
from stepmark.step.kernel_choice import memory_kernel
from stepmark.step.module import Module
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Operation
from stepmark.workloads.rules.megatron.plan import Plan
from stepmark.workloads.rules.megatron.settings import CpComm
from stepmark.workloads.rules.megatron.steps import Step, of_leaf


def core(plan: Plan, leaf: Module, layer: Layer) -> Step:
    """Return a layer's attention core, with the exchange of keys and values over cp."""
    cp = plan.size("cp")
    if cp == 1:
        return of_leaf(leaf)
    model = plan.model.of_layer(layer)
    kv_heads = model.num_heads if model.mla else model.num_kv_heads
    local_size = plan.tokens * max(1, kv_heads // plan.tp)
    sizes = [local_size * width for width in (model.d_qk, model.d_v)]
    match plan.settings.cp_comm_type:
        case CpComm.A2A:
            return _by_heads(plan, leaf, layer, sizes)
        case CpComm.ALL_GATHER:
            return _gathered(plan, leaf, sizes)
        case CpComm.A2A_P2P:
            return _ring_by_heads(plan, leaf, layer, sizes)
    return _ring(plan, leaf, sum(sizes), "cp")


def _gathered(plan: Plan, leaf: Module, sizes: list[int]) -> Step:
    """Gather keys and values, again in the backward pass; scatter their gradients."""
    cp = plan.size("cp")

    def both(kind: Collective, phase: Phase) -> tuple[CommOp, ...]:
        return tuple(
            op
            for elements in sizes
            for op in plan.inside(kind, cp * elements, "cp", phase, leaf.role)
        )

    return Step(
        module=leaf.role,
        fwd=(*both(Collective.ALL_GATHER, Phase.FWD), *leaf.fwd),
        bwd=(
            *both(Collective.ALL_GATHER, Phase.BWD),
            *leaf.bwd,
            *both(Collective.REDUCE_SCATTER, Phase.BWD),
        ),
    )


def _ring(plan: Plan, leaf: Module, local_size: int, group: str) -> Step:
    """Pass keys and values round a ring during the attention to the previous ones.

    The backward pass sends their gradients one step later: cp messages, the first without
    gradients, the last with nothing else. Steps are assumed to be equally long; their sum is
    exact.
    """
    cp = plan.size(group)
    name = "kv"

    def pass_on(elements: int, phase: Phase) -> tuple[CommOp, ...]:
        message = (elements, group, phase, leaf.role)
        sent = plan.inside(SEND, *message, peer=1, stream="cp")
        received = plan.inside(RECV, *message, peer=-1, fused=True, stream="cp", name=name)
        return (*sent, *received)

    fwd: list[Operation] = []
    bwd: list[Operation] = []
    for index in range(cp):
        moves = index < cp - 1
        if moves:
            fwd += pass_on(local_size, Phase.FWD)
        received = f"{name}~1" if moves else name
        fwd += [_piece(op, cp, (received,) if index else ()) for op in leaf.fwd]
        bwd += pass_on(2 * local_size if 0 < index < cp - 1 else local_size, Phase.BWD)
        bwd += [_piece(op, cp, (f"{name}~1",) if index else ()) for op in leaf.bwd]
    return Step(module=leaf.role, fwd=tuple(fwd), bwd=tuple(bwd), pending=name)


def _piece(op: ComputeOp, cp: int, after: tuple[str, ...]) -> ComputeOp:
    assert isinstance(op.op, Attention)
    return replace(op, op=replace(op.op, seq_kv=op.op.seq_kv // cp), after=after)


def _by_heads(plan: Plan, leaf: Module, layer: Layer, sizes: list[int]) -> Step:
    """Exchange parts of all heads for whole sequences of some, and back (Ulysses).

    arXiv:2309.14509; TransformerEngine, AttnFuncWithCPAndQKVOA2A: queries, keys and values,
    then the result; backward its gradient, then those of the three. Each is copied before its
    exchange and after it (flash_attn_a2a_communicate). Gradients of sinks, of which a rank has
    those of its heads, are gathered (flash_attn_a2a_communicate_softmax_offset). sizes:
    elements of keys and of values.
    """
    inside, result = _exchanged_sizes(plan, layer, sizes)
    model = plan.model.of_layer(layer)
    heads = model.num_heads // plan.tp
    exchanged = partial(_exchanged, plan, leaf.role, "cp")
    of_sinks: tuple[CommOp, ...] = ()
    if model.has_sinks:
        message = (heads, "cp", Phase.BWD, leaf.role, DType.FP32)
        of_sinks = plan.inside(Collective.ALL_GATHER, *message)
    return Step(
        module=leaf.role,
        fwd=(
            *exchanged(inside, Phase.FWD),
            *(_of_heads(op, plan, layer) for op in leaf.fwd),
            *exchanged([result], Phase.FWD),
        ),
        bwd=(
            *exchanged([result], Phase.BWD),
            *(_of_heads(op, plan, layer) for op in leaf.bwd),
            *exchanged(inside, Phase.BWD),
            *of_sinks,
        ),
    )


def _exchanged_sizes(plan: Plan, layer: Layer, sizes: list[int]) -> tuple[list[int], int]:
    """Return elements of queries, keys and values, and of the result. sizes: of the two."""
    model = plan.model.of_layer(layer)
    heads = model.num_heads // plan.tp
    queries, result = (plan.tokens * heads * width for width in (model.d_qk, model.d_v))
    return [queries, *sizes], result


def _exchanged(
    plan: Plan, role: str, group: str, parts: Iterable[int], phase: Phase
) -> Iterator[Operation]:
    """Yield exchanges of tensors with so many elements, and copies before and after."""
    for elements in parts:
        copy = memory_kernel("reorder", 2 * elements * plan.job.dtype.itemsize)
        moved = ComputeOp(op=copy, phase=phase, module=role, layer=0, microbatch=0)
        yield moved
        yield from plan.inside(Collective.ALL_TO_ALL, elements, group, phase, role)
        yield moved


def _ring_by_heads(plan: Plan, leaf: Module, layer: Layer, sizes: list[int]) -> Step:
    """Exchange heads among neighbours, whose rings pass keys and values of these heads.

    AttnFuncWithCPAndKVP2P with two groups. Its backward pass exchanges the result again, with
    the gradient. Messages of the ring are as large as without neighbours: more tokens of fewer
    heads.
    """
    inside, result = _exchanged_sizes(plan, layer, sizes)
    exchanged = partial(_exchanged, plan, leaf.role, "cp_a2a")
    parts = plan.size("cp_a2a")
    work = tuple(replace(op, op=_of_neighbours(op.op, parts)) for op in leaf.work)
    ring = _ring(plan, replace(leaf, work=work), sum(sizes), "cp_p2p")
    return replace(
        ring,
        fwd=(*exchanged(inside, Phase.FWD), *ring.fwd, *exchanged([result], Phase.FWD)),
        bwd=(
            *exchanged([result, result], Phase.BWD),
            *ring.bwd,
            *exchanged(inside, Phase.BWD),
        ),
    )


def _of_neighbours(op: Op | Kernel, parts: int) -> Op | Kernel:
    """Return attention of the tokens of so many ranks, by a part of the heads."""
    if not isinstance(op, Attention):
        return op
    heads, kv_heads = op.heads // parts, op.kv_heads // parts
    return replace(op, seq_q=op.seq_q * parts, heads=heads, kv_heads=kv_heads)


def _of_heads(op: ComputeOp, plan: Plan, layer: Layer) -> ComputeOp:
    """Return a layer's attention over whole sequences by a rank's share of the heads."""
    core = op.op
    if not isinstance(core, Attention):
        return op
    cp = plan.size("cp")
    length = plan.model.seq_len
    whole = replace(
        core,
        seq_q=length,
        seq_kv=length,
        heads=core.heads // cp,
        kv_heads=core.kv_heads // cp,
        causal=True,
        window=layer.window if layer.window < length else 0,
    )
    return replace(op, op=whole)
