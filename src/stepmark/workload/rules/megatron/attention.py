"""Attention of a layer: grouped queries or latent, under tensor and context parallelism.

Source: megatron-core 0.16.1, transformer/attention.py and multi_latent_attention.py, the latter
with TransformerEngine's down projections, which all tp ranks hold whole. Context parallelism:
TransformerEngine, pytorch/attention/dot_product_attention/context_parallel.py
(AttnFuncWithCPAndKVP2P, AttnFuncWithCPAndKVAllGather).
Compared with a run of megatron-core (tests/data/megatron), latent attention with a stand-in for
those down projections. Read only: what context parallelism sends.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stepmark.core.collectives import Collective
from stepmark.core.message import RECV, SEND
from stepmark.core.module import Module
from stepmark.core.ops import Attention, Phase
from stepmark.core.workload import CommOp, ComputeOp, Operation
from stepmark.workload.rules.megatron.layer import Step, column, leaves, of_leaf, row
from stepmark.workload.rules.megatron.settings import CpComm, Plan


def attention(plan: Plan) -> tuple[Step, ...]:
    """norm, projections, core, out, residual of one layer."""
    parts = {
        role.removeprefix("attention."): leaf
        for role, leaf in leaves(plan, moe=plan.model.num_dense_layers == 0).items()
    }
    hidden = plan.model.hidden_size
    found = [of_leaf(parts["norm"])]
    if plan.model.mla is None:
        found.append(column(plan, parts["qkv"], hidden))
        found += [of_leaf(parts[name]) for name in ("q_norm", "k_norm") if name in parts]
    else:
        found += _latent(plan, parts)
    if "rope" in parts:
        found.append(of_leaf(parts["rope"]))
    found.append(_core(plan, parts["core"]))
    found.append(row(plan, parts["out"], hidden))
    found.append(of_leaf(parts["residual"]))
    return tuple(found)


def _latent(plan: Plan, parts: dict[str, Module]) -> Iterator[Step]:
    """Down projections whole on this rank's tokens; up projections over tp."""
    mla = plan.model.mla
    assert mla is not None
    if "q_down" in parts:
        yield of_leaf(parts["q_down"])
    down = of_leaf(parts["kv_down"])
    if plan.sequence_parallel:
        shared = plan.tokens * mla.qk_rope_head_dim
        name, made = down.module, plan.inside
        ahead = made(Collective.ALL_GATHER, shared, "tp", Phase.FWD, name)
        back = made(Collective.REDUCE_SCATTER, shared, "tp", Phase.DGRAD, name)
        down = Step(module=down.module, fwd=(*down.fwd, *ahead), bwd=(*back, *down.bwd))
    yield down
    yield from (of_leaf(parts[name]) for name in ("q_norm", "kv_norm") if name in parts)
    if "q_up" in parts:
        yield column(plan, parts["q_up"], mla.q_lora_rank or 0)
    else:
        yield column(plan, parts["q"], plan.model.hidden_size)
    yield column(plan, parts["kv_up"], mla.kv_lora_rank)


def _core(plan: Plan, leaf: Module) -> Step:
    """Scores and values, the other ranks' keys and values as cp brings them."""
    cp = plan.size("cp")
    if cp == 1:
        return of_leaf(leaf)
    heads = plan.model.num_heads if plan.model.mla else plan.model.num_kv_heads
    own = plan.tokens * (heads // plan.tp)
    widths = (plan.model.d_qk, plan.model.d_v)
    if plan.settings.cp_comm_type is CpComm.ALL_GATHER:
        return _gathered(plan, leaf, [own * width for width in widths])
    return _ring(plan, leaf, own * sum(widths))


def _gathered(plan: Plan, leaf: Module, own: list[int]) -> Step:
    """Keys and values gathered, again in the backward pass; their gradients scattered."""
    cp = plan.size("cp")

    def both(kind: Collective, phase: Phase) -> tuple[CommOp, ...]:
        return tuple(
            op
            for elements in own
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


def _ring(plan: Plan, leaf: Module, own: int) -> Step:
    """Keys and values go round, each step's beside the scores of those that are here.

    Backward their gradients go round too, one step behind: cp messages of which the first has
    no gradients and the last nothing else. Steps are taken to be equally long; their sum is
    exact.
    """
    cp, name = plan.size("cp"), "kv"
    of: dict[str, Any] = {"layer": 0, "microbatch": 0, "stream": "cp"}

    def pass_on(elements: int, phase: Phase) -> tuple[CommOp, ...]:
        where = (elements, "cp", phase, leaf.role)
        sent = plan.comms(SEND, *where, peer=1, **of)
        return (*sent, *plan.comms(RECV, *where, peer=-1, fused=True, name=name, **of))

    fwd: list[Operation] = []
    bwd: list[Operation] = []
    for index in range(cp):
        moves = index < cp - 1
        if moves:
            fwd += pass_on(own, Phase.FWD)
        came = f"{name}~1" if moves else name
        fwd += [_piece(op, cp, (came,) if index else ()) for op in leaf.fwd]
        bwd += pass_on(2 * own if 0 < index < cp - 1 else own, Phase.BWD)
        bwd += [_piece(op, cp, (f"{name}~1",) if index else ()) for op in leaf.bwd]
    return Step(module=leaf.role, fwd=tuple(fwd), bwd=tuple(bwd), pending=name)


def _piece(op: ComputeOp, cp: int, after: tuple[str, ...]) -> ComputeOp:
    assert isinstance(op.op, Attention)
    return replace(op, op=replace(op.op, seq_kv=op.op.seq_kv // cp), after=after)
