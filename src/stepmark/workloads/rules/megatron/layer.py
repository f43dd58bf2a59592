"""Modules with the communication around them, and the order of their operations.

Linear layers, embedding and head under tensor and sequence parallelism. Source: megatron-core
0.16.1, tensor_parallel/layers.py (ColumnParallelLinear, RowParallelLinear,
LinearWithGradAccumulationAndAsyncCommunication, VocabParallelEmbedding),
tensor_parallel/cross_entropy.py, fusions/fused_cross_entropy.py. Attention, grouped queries or
latent: transformer/attention.py and multi_latent_attention.py, the latter with
TransformerEngine's down projections, which are not divided over tp.
Compared with a run of Megatron-LM (tests/data/megatron), latent attention with a stand-in for
those down projections.

Experts, and the exchange of rows with their ranks: transformer/moe/moe_layer.py, router.py,
experts.py, shared_experts.py, token_dispatcher.py (MoEAlltoAllTokenDispatcher,
MoEAllGatherTokenDispatcher), moe_utils.py (permute, sort_chunks_by_idxs, get_capacity). Shared
experts run before the routed ones, or beside their exchanges (moe_shared_expert_overlap).
Routing is balanced: a rank sends and computes the average, which is exact for experts that are
padded to capacity.
Compared with a run of megatron-core in which routing is even (tests/data/megatron).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.layers import Layer
from stepmark.model.ops import Phase
from stepmark.step.kernel_choice import CORE, memory_kernel
from stepmark.step.layout import is_cast
from stepmark.step.module import Module
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Operation
from stepmark.workloads.job import DUAL
from stepmark.workloads.rules.megatron import lora, narrow, userbuffers
from stepmark.workloads.rules.megatron.context_parallel import core
from stepmark.workloads.rules.megatron.dispatch import (
    Exchange,
    combine,
    dispatch,
    exchange,
    exchanges,
    moe_of,
)
from stepmark.workloads.rules.megatron.plan import Plan
from stepmark.workloads.rules.megatron.settings import Balancing
from stepmark.workloads.rules.megatron.steps import Step, awaiting, of_leaf


def leaves(plan: Plan, layer: Layer) -> dict[str, Module]:
    """Return the modules that compute in one layer, by role in forward order."""
    return {leaf.role: leaf for leaf in plan.tree.block(layer).walk() if leaf.work}


def mlp(plan: Plan, layer: Layer) -> tuple[Step, ...]:
    """Return norms, products with adapters beside, activation, residual of a dense FFN."""
    parts = {
        role: leaf for role, leaf in leaves(plan, layer).items() if role.startswith("mlp.")
    }
    return tuple(_in_order(plan, layer, parts))


def _in_order(plan: Plan, layer: Layer, parts: Mapping[str, Module]) -> Iterator[Step]:
    """Yield modules in forward order, each product with its messages and adapters."""
    hidden = plan.model.hidden_size
    for role, leaf in parts.items():
        if lora.adapted(role) != role:
            continue  # they come with their layer
        if role in CORE:
            yield core(plan, leaf, layer)
        elif not leaf.is_linear or leaf.params[0].is_partial:
            yield of_leaf(leaf)
        else:
            yield (row if leaf.is_row else column)(plan, leaf, hidden)
            yield from lora.adapters(plan, parts, role)
        if role == "attention.qkv" and plan.model.num_kv_heads < plan.tp:
            yield _shared_kv_heads(plan, role)


def column(plan: Plan, leaf: Module, width: int) -> Step:
    """Return a linear layer with its output features over tp. width: of its input.

    Under sequence parallelism the input is gathered, again for the weight gradient during the
    input gradient, which is scattered during the weight gradient; else it is all-reduced there.
    A frozen weight has no gradient, so its input is not gathered again.
    """
    if plan.size("tp") == 1:
        return of_leaf(leaf)
    weight_grads: list[Operation] = [op for op in leaf.bwd if op.phase is Phase.WGRAD]
    input_grads: list[Operation] = [op for op in leaf.bwd if op.phase is not Phase.WGRAD]
    module = leaf.role
    rows = plan.tokens * width
    first = leaf.fwd[0]
    sent = narrow.gathered(plan.job.products, leaf, rows, plan.size("tp"))
    casts = tuple(op for op in leaf.fwd if is_cast(op))
    send = partial(
        plan.comms,
        elements=rows,
        group="tp",
        module=module,
        layer=first.layer,
        microbatch=first.microbatch,
    )
    if not plan.sequence_parallel:
        name = f"{module}.reduce"
        reduce = send(Collective.ALL_REDUCE, phase=Phase.DGRAD, stream="tp", name=name)
        backward = (*input_grads, *reduce, *weight_grads)
        return Step(module=module, fwd=leaf.fwd, bwd=backward, pending=name)
    gather = f"{module}.gather"
    scatter = f"{module}.scatter"
    forward: tuple[Operation, ...] = (
        *casts,
        *send(Collective.ALL_GATHER, phase=Phase.FWD, **sent),
        *leaf.fwd[len(casts) :],
    )
    if userbuffers.gathers_by_ring(plan, leaf):
        forward = userbuffers.ring_gather(plan, leaf, leaf.fwd, sent, Phase.FWD)
    forward = (*narrow.cast_amax(plan, leaf, Phase.FWD), *forward)
    again: tuple[CommOp, ...] = ()
    if weight_grads:
        again = send(Collective.ALL_GATHER, phase=Phase.WGRAD, stream="tp", name=gather, **sent)
    return Step(
        module=module,
        fwd=forward,
        bwd=(
            *again,
            *input_grads,
            *send(Collective.REDUCE_SCATTER, phase=Phase.DGRAD, stream="tp", name=scatter),
            *(replace(op, after=(gather,)) for op in weight_grads),
        ),
        pending=scatter,
    )


def row(plan: Plan, leaf: Module, width: int) -> Step:
    """Return a linear layer with its input features over tp. width: of its output."""
    rows = plan.tokens * width
    step = _summed(plan, leaf, rows, layer=0)
    if userbuffers.scatters_in_parts(plan):
        step = replace(step, fwd=userbuffers.pipelined_scatter(plan, leaf, rows))
    if userbuffers.gathers_by_ring(plan, leaf):
        inputs = [op for op in leaf.bwd if op.phase is Phase.DGRAD or is_cast(op)]
        weights = [op for op in leaf.bwd if op not in inputs]
        sent = narrow.gathered(plan.job.products, leaf, rows, plan.size("tp"))
        ring = userbuffers.ring_gather(plan, leaf, inputs, sent, Phase.DGRAD)
        amax = narrow.cast_amax(plan, leaf, Phase.DGRAD)
        backward = userbuffers.with_columns(plan, leaf, ring, weights, sent)
        step = replace(step, bwd=(*amax, *backward))
    return step


def _summed(
    plan: Plan, leaf: Module, rows: int, *, layer: int | None, scatters: bool = True
) -> Step:
    """Sum a module's output over tp; gather its gradient if that is divided over tp."""
    scatters = scatters and plan.sequence_parallel
    kind = Collective.REDUCE_SCATTER if scatters else Collective.ALL_REDUCE
    send = partial(plan.comms, elements=rows, group="tp", module=leaf.role, microbatch=0)
    sums = send(kind, phase=Phase.FWD, layer=layer)
    gathers: tuple[CommOp, ...] = ()
    if plan.sequence_parallel:
        sent = narrow.gathered(plan.job.products, leaf, rows, plan.size("tp"), num_layouts=2)
        gathers = send(Collective.ALL_GATHER, phase=Phase.DGRAD, layer=layer, **sent)
    casts = tuple(op for op in leaf.bwd if is_cast(op))
    amax = narrow.cast_amax(plan, leaf, Phase.DGRAD)
    bwd: tuple[Operation, ...] = (*amax, *casts, *gathers, *leaf.bwd[len(casts) :])
    return Step(module=leaf.role, fwd=(*leaf.fwd, *sums), bwd=bwd)


def embedding(plan: Plan) -> tuple[Step, ...]:
    """Return the lookup in this rank's share of the vocabulary, summed over tp, and dropout.

    With learned positions the sum is an all-reduce even under sequence parallelism, after which
    each rank keeps its part (language_model_embedding.py, reduce_scatter_embeddings).
    """
    leaf, *rest = plan.tree.embedding().inside
    rows = plan.tokens * plan.model.hidden_size
    step = _summed(plan, leaf, rows, layer=None, scatters=not plan.model.max_positions)
    step = step if leaf.bwd else replace(step, bwd=())
    steps = (step, *(of_leaf(each) for each in rest if each.work))
    return (*steps, *_embedding_dropout(plan)) if plan.kernels.dropout_of_rows else steps


def _embedding_dropout(plan: Plan) -> Iterator[Step]:
    """Yield the dropout of the embedding's rows; a frozen table needs no gradient."""
    numel = plan.own_tokens * plan.model.hidden_size
    kernel = memory_kernel("dropout", numel * (2 * plan.job.dtype.itemsize + 1))
    module = "embedding.dropout"
    fwd, bwd = (
        ComputeOp(op=kernel, phase=phase, module=module, microbatch=0)
        for phase in (Phase.FWD, Phase.BWD)
    )
    yield Step(module=module, fwd=(fwd,), bwd=(bwd,) if plan.lora is None else ())


def head(plan: Plan) -> tuple[Step, ...]:
    """Return the final norm, logits of this rank's share of the vocabulary, and their loss.

    The loss reduces over tp: maximum, logit of the target, sum of exponentials, each one fp32
    per token; cross_entropy_loss_fusion sends the latter two in one message.
    """
    norm, logits, *scaled, loss = plan.tree.output().inside
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
        *map(of_leaf, scaled),
        Step(module=loss.role, fwd=(*loss.fwd, *sums), bwd=loss.bwd),
    )


def around_mtp(plan: Plan, layer: Iterable[Step]) -> Iterator[Step]:
    """Yield multi-token prediction around its layer, from the norms to the norm before logits.

    The projection's output features, over tp, are gathered whole, and under sequence
    parallelism each rank goes on with its tokens. Source:
    transformer/multi_token_prediction.py (_concat_embeddings, _postprocess).
    """
    parts = {leaf.role: leaf for leaf in plan.tree.mtp().walk() if leaf.work}
    hidden = plan.model.hidden_size
    for name in ("embedding_norm", "hidden_norm", "joined"):
        yield of_leaf(parts[f"mtp.{name}"])
    projection = column(plan, parts["mtp.projection"], 2 * hidden)
    module = projection.module
    send = partial(plan.inside, Collective.ALL_GATHER, plan.tokens * hidden, "tp")
    whole = send(Phase.FWD, module)
    again = send(Phase.DGRAD, module) if plan.sequence_parallel else ()
    yield replace(projection, fwd=(*projection.fwd, *whole), bwd=(*again, *projection.bwd))
    yield from layer
    yield of_leaf(parts["mtp.norm"])


def mtp_heads(plan: Plan, logits: Sequence[Step]) -> Iterator[Step]:
    """Yield logits and loss of each prediction, behind the hidden states as one tensor."""
    count = plan.model.num_mtp_layers
    numel = (1 + count) * plan.own_tokens * plan.model.hidden_size
    kernel = memory_kernel("concatenate", 2 * numel * plan.job.dtype.itemsize)
    joined, split = (
        ComputeOp(op=kernel, phase=phase, module="mtp.states", microbatch=0)
        for phase in (Phase.FWD, Phase.BWD)
    )
    yield Step(module="mtp.states", fwd=(joined,), bwd=(split,))
    for _ in range(count):
        yield from logits


def data(plan: Plan, *, first: bool, last: bool) -> tuple[Operation, ...]:
    """Return the broadcasts of a micro-batch over tp, before cp divides it.

    Source: get_batch_on_this_tp_rank, megatron/training/utils.py, whose last lines broadcast
    the boundaries of packed sequences again. Its empty broadcasts, for sequences that are not
    packed, are left out.
    """
    tokens = plan.job.mbs * plan.model.seq_len
    mask = tokens * plan.model.seq_len
    masked = plan.settings.create_attention_mask_in_dataloader
    messages: list[tuple[bool, int, DType]] = [
        (first, tokens, DType.INT64),  # tokens
        (last, tokens, DType.INT64),  # labels
        (last, tokens, DType.FP32),  # mask of the loss
        (masked and (first or last), mask, DType.UINT8),
        (first, tokens, DType.INT64),  # positions
    ]
    boundaries: list[tuple[int, DType]] = [(1, DType.INT64)]  # the number of boundaries
    if (packing := plan.model.packing) is not None:
        count = 1 + max(1, round(plan.model.seq_len / packing.mean))
        boundaries += [(count, DType.INT32), (1, DType.INT32)]  # also the longest
    for is_sent in (first, first or last):
        messages += [(is_sent, *each) for each in boundaries]
    return tuple(
        replace(op, root=0)
        for is_sent, elements, dtype in messages
        if is_sent
        for op in plan.comms(
            Collective.BROADCAST, elements, "tp", Phase.FWD, "data", dtype, microbatch=0
        )
    )


def attention(plan: Plan, layer: Layer) -> tuple[Step, ...]:
    """Return norms, projections, core or scan, out, residual of one layer's mixer."""
    parts = {
        role: leaf
        for role, leaf in leaves(plan, layer).items()
        if role.startswith("attention.")
    }
    if plan.model.mla is None or not layer.has_attention:
        return tuple(_in_order(plan, layer, parts))
    latent = {role.removeprefix("attention."): leaf for role, leaf in parts.items()}
    rest = {role: leaf for role, leaf in parts.items() if role not in _LATENT}
    steps: list[Step] = []
    for role, leaf in rest.items():
        steps += _in_order(plan, layer, {role: leaf})
        if role == "attention.norm":
            steps += _latent(plan, latent)
    return tuple(steps)


_LATENT = tuple(
    f"attention.{name}"
    for name in ("q", "q_down", "q_norm", "q_up", "kv_down", "kv_norm", "kv_up")
)


def _shared_kv_heads(plan: Plan, module: str) -> Step:
    """Return the exchange of queries, keys and values where tp ranks share KV heads.

    A rank's part of the fused product is no whole group of heads, so the ranks gather the
    product of all and keep their own (attention.py, get_query_key_value_tensors; mappings.py,
    all_gather_last_dim_from_tensor_parallel_region). The weights are divided as always.
    """
    model = plan.model
    width = model.head_dim * (model.num_heads + 2 * model.num_kv_heads)
    elements = plan.tokens * width
    send = partial(plan.inside, elements=elements, group="tp", module=module)
    num_bytes = 2 * elements * plan.job.dtype.itemsize  # read and written

    def copy(phase: Phase) -> ComputeOp:
        """Return the torch.cat that moves the ranks' parts to or from the last dimension."""
        op = Kernel(name="concatenate", flops=0, bytes_moved=num_bytes)
        return ComputeOp(op=op, phase=phase, module=module, layer=0, microbatch=0)

    return Step(
        module=module,
        fwd=(*send(Collective.ALL_GATHER, phase=Phase.FWD), copy(Phase.FWD)),
        bwd=(copy(Phase.DGRAD), *send(Collective.REDUCE_SCATTER, phase=Phase.DGRAD)),
    )


def _latent(plan: Plan, parts: dict[str, Module]) -> Iterator[Step]:
    """Yield undivided down projections of this rank's tokens, and up projections over tp."""
    mla = plan.model.mla
    assert mla is not None
    if "q_down" in parts:
        yield of_leaf(parts["q_down"])
    down = of_leaf(parts["kv_down"])
    if plan.sequence_parallel:
        shared = plan.tokens * mla.qk_rope_head_dim
        name = down.module
        gather = plan.inside(Collective.ALL_GATHER, shared, "tp", Phase.FWD, name)
        scatter = plan.inside(Collective.REDUCE_SCATTER, shared, "tp", Phase.DGRAD, name)
        down = Step(module=name, fwd=(*down.fwd, *gather), bwd=(*scatter, *down.bwd))
    yield down
    yield from (of_leaf(parts[name]) for name in ("q_norm", "kv_norm") if name in parts)
    if "q_up" in parts:
        yield column(plan, parts["q_up"], mla.q_lora_rank or 0)
    else:
        yield column(plan, parts["q"], plan.model.hidden_size)
    yield column(plan, parts["kv_up"], mla.kv_lora_rank)


def experts(plan: Plan, layer: Layer, *, apart: bool = False) -> tuple[Step, ...]:
    """Return norm, shared.*, router, dispatch, experts.*, combine, residual of one layer.

    apart: exchanges have streams of their own.
    """
    parts = leaves(plan, layer)
    steps = [of_leaf(parts["mlp.norm"])]
    ends = [of_leaf(parts[role]) for role in _AFTER_EXPERTS if role in parts]
    if plan.settings.moe_shared_expert_overlap and plan.has_shared_experts:
        return (*steps, *_beside_exchanges(plan, parts), *ends)
    shared = {role: leaf for role, leaf in parts.items() if role.startswith("mlp.shared_")}
    steps += _in_order(plan, layer, shared)
    steps.append(_router(plan, parts["mlp.router"]))
    if "mlp.to_latent" in parts:
        steps.append(of_leaf(parts["mlp.to_latent"]))
    inner = [of_leaf(leaf) for name, leaf in parts.items() if name.startswith("mlp.experts")]
    before, after = exchanges(plan, apart=apart)
    return (*steps, *before, *inner, *after, *ends)


_AFTER_EXPERTS = ("mlp.from_latent", "mlp.norm_after", "mlp.residual")


def _beside_exchanges(plan: Plan, parts: Mapping[str, Module]) -> Iterator[Step]:
    """Yield router, experts, and shared experts beside the exchanges of the routed ones.

    The first product of shared experts and its activation run beside the dispatch, the second
    one beside the combine; their gather and scatter over tp are issued apart. They have a
    stream of computation of their own there; here they have the time of the exchange on the
    one stream (shared_experts.py, pre_forward_comm to get_output; token_dispatcher.py,
    dispatch_preprocess, dispatch_postprocess, combine_postprocess).
    """
    yield _router(plan, parts["mlp.router"])
    to_experts = Exchange(plan, "mlp.dispatch")
    from_experts = Exchange(plan, "mlp.combine")
    counts, there = dispatch(plan, to_experts)
    back = combine(plan, from_experts)
    rows, probs = there.sent
    # Autograd is told to send rows as soon as it can (set_tensor_grad_fn_sequence_sr).
    begin_dispatch, end_dispatch = to_experts.overlapped(
        there.before, (rows,), there.after, late=(probs,)
    )
    begin_combine, end_combine = from_experts.overlapped(back.before, back.sent, back.after)
    *ups, activation, down = (
        leaf for role, leaf in parts.items() if role.startswith("mlp.shared_")
    )
    (up,) = ups
    gather, gathered = _apart(plan, Collective.ALL_GATHER, up.role)
    scatter, scattered = _apart(plan, Collective.REDUCE_SCATTER, down.role)
    inner = [of_leaf(leaf) for role, leaf in parts.items() if role.startswith("mlp.experts")]
    yield to_experts.step(counts)
    yield gather
    yield begin_dispatch
    yield from (gathered, of_leaf(up), of_leaf(activation))
    yield end_dispatch
    yield from inner
    yield begin_combine
    yield from (of_leaf(down), scatter)
    yield end_combine
    yield scattered


def _apart(plan: Plan, kind: Collective, module: str) -> tuple[Step, Step]:
    """Return a collective of rows over tp, and the wait for it; backward those of its dual."""
    rows = plan.tokens * plan.model.hidden_size
    send = partial(plan.inside, elements=rows, group="tp", module=module, stream="tp")
    there, back = (f"{module}.{_WORDS[each]}" for each in (kind, DUAL[kind]))
    sent = send(kind, phase=Phase.FWD, name=there)
    if not sent:
        return (Step(module="mlp.shared", fwd=(), bwd=()),) * 2
    sent_back = send(DUAL[kind], phase=Phase.DGRAD, name=back)
    return (
        Step(module=module, fwd=sent, bwd=(awaiting(Phase.DGRAD, module, back),)),
        Step(module=module, fwd=(awaiting(Phase.FWD, module, there),), bwd=sent_back),
    )


_WORDS = {Collective.ALL_GATHER: "gather", Collective.REDUCE_SCATTER: "scatter"}


def _router(plan: Plan, leaf: Module) -> Step:
    """Return the router; with an auxiliary loss the experts' loads are summed."""
    loss = plan.settings.moe_router_load_balancing_type
    sums: tuple[CommOp, ...] = ()
    if plan.settings.moe_aux_loss_coeff and loss is not Balancing.NONE:
        times = plan.job.mbs if loss is Balancing.SEQ_AUX_LOSS else 1
        sums = exchange(
            plan,
            Collective.ALL_REDUCE,
            times * moe_of(plan).num_experts,
            "tp_dp_cp" if loss is Balancing.GLOBAL_AUX_LOSS else "tp_cp",
            leaf.role,
            Phase.FWD,
            DType.INT64,
        )
    return Step(module=leaf.role, fwd=(*leaf.fwd, *sums), bwd=leaf.bwd)
