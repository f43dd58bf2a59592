"""Modules with the communication around them, and in which order operations are issued.

Linear layers, embedding and head under tensor and sequence parallelism. Source: megatron-core
0.16.1, tensor_parallel/layers.py (ColumnParallelLinear, RowParallelLinear,
LinearWithGradAccumulationAndAsyncCommunication, VocabParallelEmbedding),
tensor_parallel/cross_entropy.py, fusions/fused_cross_entropy.py. Attention, grouped queries or
latent: transformer/attention.py and multi_latent_attention.py, the latter with
TransformerEngine's down projections, which all tp ranks hold whole. Context parallelism:
TransformerEngine, pytorch/attention/dot_product_attention/context_parallel.py
(AttnFuncWithCPAndKVP2P, AttnFuncWithCPAndKVAllGather).

Compared with a run of Megatron-LM (tests/data/megatron), latent attention with a stand-in for
those down projections. Read only: what context parallelism sends.

An asynchronous collective lies on a stream of its own; it starts after what the stream of
computation was given before it, as NCCL's streams do, and what needs it waits by name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepmark.core.collectives import Collective, RedOp
from stepmark.core.dtypes import DType
from stepmark.core.message import RECV, SEND
from stepmark.core.module import Module
from stepmark.core.ops import Attention, Phase
from stepmark.core.workload import COMPUTE, CommOp, ComputeOp, Operation
from stepmark.workload.pipeline import PASSED
from stepmark.workload.rules.megatron.settings import CpComm, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One module. pending: a collective of its backward that the next computation waits for."""

    module: str
    fwd: tuple[Operation, ...]
    bwd: tuple[Operation, ...]
    pending: str = ""


def of_leaf(leaf: Module) -> Step:
    """A module without communication."""
    return Step(module=leaf.role, fwd=leaf.fwd, bwd=leaf.bwd)


def forward(steps: Iterable[Step], *, again: bool = False) -> tuple[Operation, ...]:
    """again: as the backward pass runs it a second time."""
    found = [op for step in steps for op in step.fwd]
    return issued([replace(op, recompute=True) for op in found] if again else found)


def backward(
    steps: Sequence[Step], recomputed: Mapping[str, str] | None = None
) -> tuple[Operation, ...]:
    """In reverse order of steps. recomputed: of modules, which group they are checkpointed in.

    A group's forward operations run again before the first of its backward operations.
    """
    groups = recomputed or {}
    found: list[Operation] = []
    current, pending = "", ""
    for index in range(len(steps) - 1, -1, -1):
        step, group = steps[index], groups.get(steps[index].module, "")
        own: list[Operation] = []
        if group and group != current:
            members = [one for one in steps[: index + 1] if groups.get(one.module) == group]
            own += forward(members, again=True)
        own += step.bwd
        current = group
        if pending and own:
            own[0] = replace(own[0], after=(*own[0].after, pending))
            pending = ""
        found += own
        pending = step.pending or pending
    return issued(found)


def issued(
    operations: Sequence[Operation], before: tuple[str, ...] = ()
) -> tuple[Operation, ...]:
    """With a name on computation that an asynchronous collective is issued behind.

    before: names of what was computed before all of these.
    """
    found, behind = list(operations), before
    last: int | None = None
    for index, op in enumerate(found):
        if op.stream == COMPUTE:
            last = index
            continue
        if last is not None:
            newest = found[last]
            if not newest.name:
                newest = replace(newest, name=f"{newest.module}.{newest.phase}")
                found[last] = newest
            behind = (newest.name,)
        new = (name for name in behind if name not in op.after)
        found[index] = replace(op, after=(*new, *op.after))
    return tuple(found)


def passed(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """With PASSED on the last computation, for what is issued behind the block."""
    found = list(operations)
    for index in range(len(found) - 1, -1, -1):
        if found[index].stream == COMPUTE:
            found[index] = replace(found[index], name=found[index].name or PASSED)
            break
    return tuple(found)


def marked(operations: Iterable[CommOp], **marks: str) -> tuple[CommOp, ...]:
    """Asynchronous: with a stream and a name."""
    return tuple(replace(op, **marks) for op in operations)  # type: ignore[arg-type]


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
    of_weights: list[Operation] = [op for op in leaf.bwd if op.phase is Phase.WGRAD]
    of_data: list[Operation] = [op for op in leaf.bwd if op.phase is not Phase.WGRAD]
    made, rows = plan.comms, plan.tokens * width
    module, first = leaf.role, leaf.fwd[0]
    of: dict[str, Any] = {"layer": first.layer, "microbatch": first.microbatch}
    if plan.size("tp") == 1:
        return of_leaf(leaf)
    if not plan.sequence_parallel:
        reduce = made(Collective.ALL_REDUCE, rows, "tp", Phase.DGRAD, module, **of)
        name = f"{module}.reduce"
        backward = (*of_data, *marked(reduce, stream="tp", name=name), *of_weights)
        return Step(module=module, fwd=leaf.fwd, bwd=backward, pending=name)
    gather, scatter = f"{module}.gather", f"{module}.scatter"
    ahead = made(Collective.ALL_GATHER, rows, "tp", Phase.FWD, module, **of)
    again = made(Collective.ALL_GATHER, rows, "tp", Phase.WGRAD, module, **of)
    back = made(Collective.REDUCE_SCATTER, rows, "tp", Phase.DGRAD, module, **of)
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
    return _summed(plan, leaf, plan.tokens * width, layer=0)


def _summed(
    plan: Plan, leaf: Module, rows: int, *, layer: int | None, scatters: bool = True
) -> Step:
    """What a module makes is summed over tp; the gradient of a part of it is gathered."""
    scatters = scatters and plan.sequence_parallel
    kind = Collective.REDUCE_SCATTER if scatters else Collective.ALL_REDUCE
    of: dict[str, Any] = {"layer": layer, "microbatch": 0}
    sums = plan.comms(kind, rows, "tp", Phase.FWD, leaf.role, **of)
    back: tuple[CommOp, ...] = ()
    if plan.sequence_parallel:
        back = plan.comms(Collective.ALL_GATHER, rows, "tp", Phase.DGRAD, leaf.role, **of)
    return Step(module=leaf.role, fwd=(*leaf.fwd, *sums), bwd=(*back, *leaf.bwd))


def embedding(plan: Plan) -> Step:
    """Rows of this rank's share of the vocabulary, summed over tp.

    With learned positions the sum is whole even under sequence parallelism, and each rank then
    keeps its part (language_model_embedding.py, reduce_scatter_embeddings).
    """
    leaf = plan.tree.embedding().inside[0]
    rows = plan.tokens * plan.model.hidden_size
    return _summed(plan, leaf, rows, layer=None, scatters=not plan.model.max_positions)


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
            Phase.FWD,
            loss.role,
            DType.FP32,
            microbatch=0,
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
            Collective.BROADCAST, elements, "tp", Phase.FWD, "data", dtype, microbatch=0
        )
    )


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
