"""A layer of experts: router, dispatch, experts, combination, shared experts.

Source: megatron-core 0.16.1, transformer/moe/moe_layer.py, router.py, experts.py,
shared_experts.py. Shared experts run before the routed ones (no moe_shared_expert_overlap).
Compared with a run of megatron-core in which routing is even (tests/data/megatron).
"""

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.module import Module
from stepmark.core.ops import Phase
from stepmark.core.workload import CommOp
from stepmark.workload.rules.megatron.dispatch import (
    AllToAll,
    all_gather,
    exchanged,
    moe_of,
)
from stepmark.workload.rules.megatron.layer import column, leaves, row
from stepmark.workload.rules.megatron.settings import Balancing, Dispatcher, Plan
from stepmark.workload.rules.megatron.steps import Step, of_leaf

_EXPERTS = "mlp.experts"


def experts(plan: Plan) -> tuple[Step, ...]:
    """norm, shared.*, router, dispatch, experts.*, combine, residual of one layer."""
    parts = leaves(plan, moe=True)
    hidden = plan.model.hidden_size
    found = [of_leaf(parts["mlp.norm"])]
    for name, part in parts.items():
        if name.startswith("mlp.shared_"):
            if name.endswith("down"):
                found.append(row(plan, part, hidden))
            else:
                found.append(
                    of_leaf(part) if "activation" in name else column(plan, part, hidden)
                )
    found.append(_router(plan, parts["mlp.router"]))
    gathers = plan.settings.moe_token_dispatcher_type is Dispatcher.ALLGATHER
    to_all = AllToAll(plan)
    before, after = all_gather(plan) if gathers else (to_all.dispatch(), to_all.combine())
    own = (leaf for name, leaf in parts.items() if name.startswith(_EXPERTS))
    inner = [of_leaf(leaf) for leaf in own]
    return (*found, before, *inner, after, of_leaf(parts["mlp.residual"]))


def _router(plan: Plan, leaf: Module) -> Step:
    """On this rank's tokens; with an auxiliary loss the experts' loads are summed."""

    loss = plan.settings.moe_router_load_balancing_type
    sums: tuple[CommOp, ...] = ()
    if plan.settings.moe_aux_loss_coeff and loss is not Balancing.NONE:
        times = plan.job.mbs if loss is Balancing.SEQ_AUX_LOSS else 1
        sums = exchanged(
            plan,
            Collective.ALL_REDUCE,
            times * moe_of(plan).num_experts,
            "tp_dp_cp" if loss is Balancing.GLOBAL_AUX_LOSS else "tp_cp",
            leaf.role,
            Phase.FWD,
            DType.INT64,
        )
    return Step(module=leaf.role, fwd=(*leaf.fwd, *sums), bwd=leaf.bwd)
