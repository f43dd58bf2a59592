"""A layer of experts: router, dispatch, experts, combination, shared experts.

Source: megatron-core 0.16.1, transformer/moe/moe_layer.py, router.py, experts.py,
shared_experts.py. Shared experts run before the routed ones (no moe_shared_expert_overlap).
Compared with a run of megatron-core in which routing is even (tests/data/megatron).
"""

from dataclasses import replace

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.ops import Activation, Gemm, GroupedGemm, Phase
from stepmark.core.workload import CommOp, ComputeOp
from stepmark.workload import decoder
from stepmark.workload.decoder import Part
from stepmark.workload.rules.megatron.dispatch import (
    AllToAll,
    all_gather,
    exchanged,
    moe_of,
    rows,
)
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
    to_all = AllToAll(plan)
    before, after = all_gather(plan) if gathers else (to_all.dispatch(), to_all.combine())
    own = (part for name, part in parts.items() if name.startswith(_EXPERTS))
    inner = [of_part(_sharded(plan, part)) for part in own]
    return (*found, before, *inner, after, of_part(parts["mlp.residual"]))


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
        if op.phase is Phase.WGRAD:
            return replace(op, op=replace(op.op, k=plan.own_tokens))
        return replace(op, op=replace(op.op, m=plan.own_tokens))

    made = tuple(smaller(op) for op in part.fwd)
    loss = plan.settings.moe_router_load_balancing_type
    sums: tuple[CommOp, ...] = ()
    if plan.settings.moe_aux_loss_coeff and loss is not Balancing.NONE:
        times = plan.job.mbs if loss is Balancing.SEQ_AUX_LOSS else 1
        sums = exchanged(
            plan,
            Collective.ALL_REDUCE,
            times * moe_of(plan).num_experts,
            "tp_dp_cp" if loss is Balancing.GLOBAL_AUX_LOSS else "tp_cp",
            part.module,
            Phase.FWD,
            DType.INT64,
        )
    return Step(
        module=part.module, fwd=(*made, *sums), bwd=tuple(smaller(op) for op in part.bwd)
    )
