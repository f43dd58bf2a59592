"""A layer of experts: router, dispatch, experts, combination, shared experts.

Source: megatron-core 0.16.1, transformer/moe/moe_layer.py, router.py, token_dispatcher.py
(MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher), experts.py, shared_experts.py.
Routing is balanced: what a rank sends and computes is the average, exact with experts that are
filled up to capacity. Shared experts run before the routed ones (no moe_shared_expert_overlap).
Compared with a run of megatron-core in which routing is even (tests/data/megatron).
"""

import math
from dataclasses import replace
from typing import Any

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.model import MoeConfig
from stepmark.core.ops import Activation, Gemm, GroupedGemm, Phase
from stepmark.core.workload import CommOp, ComputeOp, Kernel, Operation
from stepmark.workload import decoder
from stepmark.workload.decoder import Part
from stepmark.workload.rules.megatron.layer import column, row
from stepmark.workload.rules.megatron.settings import Balancing, Dispatcher, Plan
from stepmark.workload.rules.megatron.steps import Step, of_part

_EXPERTS = "mlp.experts"


def experts(plan: Plan) -> tuple[Step, ...]:
    """norm, shared.*, router, dispatch, experts.*, combine, residual of one layer."""
    parts = {
        part.module: part
        for part in decoder.experts(plan.job, sequence_parallel=plan.sequence_parallel)
    }
    hidden = plan.model.hidden_size
    found = [of_part(parts["mlp.norm"])]
    for name, part in parts.items():
        if name.startswith("mlp.shared_"):
            if name.endswith("down"):
                found.append(row(plan, part, hidden))
            else:
                found.append(
                    of_part(part) if "activation" in name else column(plan, part, hidden)
                )
    found.append(_router(plan, parts["mlp.router"]))
    gathers = plan.settings.moe_token_dispatcher_type is Dispatcher.ALLGATHER
    before, after = _allgather(plan) if gathers else _alltoall(plan)
    own = (part for name, part in parts.items() if name.startswith(_EXPERTS))
    inner = [of_part(_sharded(plan, part)) for part in own]
    return (*found, before, *inner, after, of_part(parts["mlp.residual"]))


def rows(plan: Plan) -> int:
    """Rows that this rank's own tokens send to experts."""
    moe = _moe(plan)
    sent = plan.own_tokens * moe.top_k
    factor = plan.settings.moe_expert_capacity_factor
    if factor is None:
        return sent
    # get_capacity of moe_utils.py
    capacity = math.ceil(sent / moe.num_experts * factor) * moe.num_experts
    return capacity if plan.settings.moe_pad_expert_input_to_capacity else min(sent, capacity)


def _moe(plan: Plan) -> MoeConfig:
    assert plan.model.moe is not None
    return plan.model.moe


def _sharded(plan: Plan, part: Part) -> Part:
    """Rows of all ranks of the experts' tp, widths divided by it."""
    gathered = rows(plan) * plan.etp

    def smaller(op: ComputeOp) -> ComputeOp:
        inner = op.op
        if isinstance(inner, Activation):
            return replace(
                op, op=replace(inner, tokens=gathered, width=inner.width // plan.etp)
            )
        assert isinstance(inner, GroupedGemm)
        if part.module != "mlp.experts_down":
            return replace(op, op=replace(inner, tokens=gathered, n=inner.n // plan.etp))
        return replace(op, op=replace(inner, tokens=gathered, k=inner.k // plan.etp))

    return replace(
        part,
        fwd=tuple(smaller(op) for op in part.fwd),
        bwd=tuple(smaller(op) for op in part.bwd),
    )


def _router(plan: Plan, part: Part) -> Step:
    """On this rank's tokens; with an auxiliary loss the experts' loads are summed."""

    def smaller(op: ComputeOp) -> ComputeOp:
        assert isinstance(op.op, Gemm)
        size = {"k" if op.phase is Phase.WGRAD else "m": plan.own_tokens}
        return replace(op, op=replace(op.op, **size))  # type: ignore[arg-type]

    made = tuple(smaller(op) for op in part.fwd)
    loss = plan.settings.moe_router_load_balancing_type
    sums: tuple[CommOp, ...] = ()
    if plan.settings.moe_aux_loss_coeff and loss is not Balancing.NONE:
        times = plan.job.mbs if loss is Balancing.SEQ_AUX_LOSS else 1
        sums = _comm(
            plan,
            Collective.ALL_REDUCE,
            times * _moe(plan).num_experts,
            "tp_dp_cp" if loss is Balancing.GLOBAL_AUX_LOSS else "tp_cp",
            part.module,
            Phase.FWD,
            DType.INT64,
        )
    return Step(
        module=part.module, fwd=(*made, *sums), bwd=tuple(smaller(op) for op in part.bwd)
    )


def _comm(
    plan: Plan,
    kind: Collective,
    elements: int,
    group: str,
    module: str,
    phase: Phase,
    dtype: DType | None = None,
) -> tuple[CommOp, ...]:
    """Where average parts of an uneven exchange are no whole number they are rounded up."""
    size = plan.size(group)
    if kind is not Collective.ALL_REDUCE:
        elements = math.ceil(elements / size) * size
    of: dict[str, Any] = {"layer": 0, "microbatch": 0}
    return plan.comms(kind, elements, group, phase=phase, module=module, dtype=dtype, **of)


def _permute(plan: Plan, module: str, phase: Phase, name: str) -> ComputeOp:
    """Rows read and written in another order."""
    moved = 2 * rows(plan) * plan.model.hidden_size * plan.job.dtype.itemsize
    kernel = Kernel(name=name, flops=0, bytes_moved=moved)
    return ComputeOp(op=kernel, phase=phase, module=module, layer=0, microbatch=0)


def _alltoall(plan: Plan) -> tuple[Step, Step]:
    """Rows and their probabilities to the experts' ranks, then over the experts' tp; back.

    Without fixed capacity all ranks first tell how many rows they have for each expert.
    """
    moe, sent, hidden = _moe(plan), rows(plan), plan.model.hidden_size
    even = plan.settings.moe_pad_expert_input_to_capacity
    to_all = Collective.ALL_TO_ALL if even else Collective.ALL_TO_ALL_V
    probs = plan.probs_dtype

    def ep(width: int, module: str, phase: Phase, dtype: DType | None = None) -> list[CommOp]:
        return [*_comm(plan, to_all, sent * width, "ep", module, phase, dtype)]

    def etp(
        kind: Collective, width: int, module: str, phase: Phase, dtype: DType | None = None
    ) -> list[CommOp]:
        rows_in_all = sent * width * plan.etp
        return [*_comm(plan, kind, rows_in_all, "etp", module, phase, dtype)]

    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    there, back = "mlp.dispatch", "mlp.combine"
    told: list[CommOp] = []
    if not even:
        counts = moe.num_experts * plan.size("tp_ep")
        told = [*_comm(plan, gather, counts, "tp_ep", there, Phase.FWD, DType.INT64)]
    dispatch = Step(
        module=there,
        fwd=(
            *told,
            _permute(plan, there, Phase.FWD, "permute"),
            *ep(hidden, there, Phase.FWD),
            *ep(1, there, Phase.FWD, probs),
            *etp(gather, hidden, there, Phase.FWD),
            *etp(gather, 1, there, Phase.FWD, probs),
        ),
        bwd=(
            *etp(scatter, 1, there, Phase.BWD, probs),
            *etp(scatter, hidden, there, Phase.BWD),
            *ep(1, there, Phase.BWD, probs),
            *ep(hidden, there, Phase.BWD),
            _permute(plan, there, Phase.BWD, "unpermute"),
        ),
    )
    summed = probs  # combine_preprocess sums in the probabilities' type
    combine = Step(
        module=back,
        fwd=(
            *etp(scatter, hidden, back, Phase.FWD, summed),
            *ep(hidden, back, Phase.FWD),
            _permute(plan, back, Phase.FWD, "unpermute"),
        ),
        bwd=(
            _permute(plan, back, Phase.BWD, "permute"),
            *ep(hidden, back, Phase.BWD),
            *etp(gather, hidden, back, Phase.BWD, summed),
        ),
    )
    return dispatch, combine


def _allgather(plan: Plan) -> tuple[Step, Step]:
    """All tokens to all ranks of tp and ep; sums scattered back."""
    moe, ranks, probs = _moe(plan), plan.size("tp_ep"), plan.probs_dtype
    rows_in_all = plan.own_tokens * ranks
    there, back = "mlp.dispatch", "mlp.combine"

    def comm(
        kind: Collective, width: int, module: str, phase: Phase, dtype: DType | None = None
    ) -> tuple[CommOp, ...]:
        return _comm(plan, kind, rows_in_all * width, "tp_ep", module, phase, dtype)

    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    hidden = plan.model.hidden_size
    fwd: tuple[Operation, ...] = (
        *comm(gather, moe.num_experts, there, Phase.FWD, DType.UINT8),
        *comm(gather, moe.num_experts, there, Phase.FWD, probs),
        *comm(gather, hidden, there, Phase.FWD),
        _permute(plan, there, Phase.FWD, "permute"),
    )
    bwd: tuple[Operation, ...] = (
        _permute(plan, there, Phase.BWD, "unpermute"),
        *comm(scatter, hidden, there, Phase.BWD),
        *comm(scatter, moe.num_experts, there, Phase.BWD, probs),
    )
    combine = Step(
        module=back,
        fwd=(
            _permute(plan, back, Phase.FWD, "unpermute"),
            *comm(scatter, hidden, back, Phase.FWD, probs),
        ),
        bwd=(
            *comm(gather, hidden, back, Phase.BWD, probs),
            _permute(plan, back, Phase.BWD, "permute"),
        ),
    )
    return Step(module=there, fwd=fwd, bwd=bwd), combine
