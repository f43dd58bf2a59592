"""A layer of experts, and the exchange of rows with the ranks of the experts.

Source: megatron-core 0.16.1, transformer/moe/moe_layer.py, router.py, experts.py,
shared_experts.py, token_dispatcher.py (MoEAlltoAllTokenDispatcher,
MoEAllGatherTokenDispatcher), moe_utils.py (permute, sort_chunks_by_idxs, get_capacity). Shared
experts run before the routed ones (no moe_shared_expert_overlap). Routing is balanced: a rank
sends and computes the average, which is exact for experts that are padded to capacity.
Compared with a run of megatron-core in which routing is even (tests/data/megatron).
"""

import math
from dataclasses import dataclass

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.model import MoeConfig
from stepmark.model.ops import Phase
from stepmark.step.module import Module
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Operation
from stepmark.workloads.job import DUAL
from stepmark.workloads.rules.megatron.layer import Step, column, leaves, of_leaf, row
from stepmark.workloads.rules.megatron.settings import Balancing, Dispatcher, Plan

_Pair = tuple[tuple[Operation, ...], tuple[Operation, ...]]


def moe_of(plan: Plan) -> MoeConfig:
    """Return the experts of a model that has them."""
    assert plan.model.moe is not None
    return plan.model.moe


def exchange(
    plan: Plan,
    kind: Collective,
    elements: int,
    group: str,
    module: str,
    phase: Phase,
    dtype: DType | None = None,
) -> tuple[CommOp, ...]:
    """Return a collective; average parts of an uneven exchange are rounded up."""
    if kind is not Collective.ALL_REDUCE:
        size = plan.size(group)
        elements = math.ceil(elements / size) * size
    return plan.inside(kind, elements, group, phase, module, dtype)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A module whose backward pass reverses the forward pass, step by step."""

    plan: Plan
    module: str

    def step(self, *pairs: _Pair) -> Step:
        return Step(
            module=self.module,
            fwd=tuple(op for fwd, _ in pairs for op in fwd),
            bwd=tuple(op for _, bwd in reversed(pairs) for op in bwd),
        )

    def send(
        self, kind: Collective, elements: int, group: str, dtype: DType | None = None
    ) -> _Pair:
        """Return a collective, and its dual for the backward pass."""
        plan, module, dual = self.plan, self.module, DUAL.get(kind, kind)
        return (
            exchange(plan, kind, elements, group, module, Phase.FWD, dtype),
            exchange(plan, dual, elements, group, module, Phase.BWD, dtype),
        )

    def ep(self, width: int, dtype: DType | None = None) -> _Pair:
        kind = Collective.ALL_TO_ALL if _is_even(self.plan) else Collective.ALL_TO_ALL_V
        return self.send(kind, self.plan.expert_rows * width, "ep", dtype)

    def etp(self, kind: Collective, width: int, dtype: DType | None = None) -> _Pair:
        return self.send(kind, self.plan.expert_rows * width * self.plan.etp, "etp", dtype)

    def permute(
        self, rows: int, forward: str = "permute", backward: str = "unpermute"
    ) -> _Pair:
        """Return kernels that reorder rows."""
        num_bytes = 2 * rows * self.plan.model.hidden_size * self.plan.job.dtype.itemsize

        def kernel(name: str, phase: Phase) -> tuple[ComputeOp, ...]:
            op = Kernel(name=name, flops=0, bytes_moved=num_bytes)
            return (ComputeOp(op=op, phase=phase, module=self.module, layer=0, microbatch=0),)

        return kernel(forward, Phase.FWD), kernel(backward, Phase.BWD)

    def by_expert(self) -> _Pair:
        """Return sort_chunks_by_idxs, or a transpose if experts are padded to capacity."""
        if moe_of(self.plan).num_experts == self.plan.size("ep"):
            return (), ()
        return self.permute(self.plan.expert_rows * self.plan.etp, "sort_chunks", "sort_chunks")


def _is_even(plan: Plan) -> bool:
    return plan.settings.moe_pad_expert_input_to_capacity


def all_to_all(plan: Plan) -> tuple[Step, Step]:
    """Return dispatch of rows and probabilities over ep, then over experts' tp, and combine.

    Without padding to capacity the ranks first exchange the number of rows for each expert.
    combine_preprocess sums in the probabilities' type.
    """
    to_experts, from_experts = _Exchange(plan, "mlp.dispatch"), _Exchange(plan, "mlp.combine")
    hidden, probs, rows = plan.model.hidden_size, plan.probs_dtype, plan.expert_rows
    gather, counts = Collective.ALL_GATHER, moe_of(plan).num_experts * plan.size("tp_ep")
    count_exchange = to_experts.send(gather, counts, "tp_ep", DType.INT64)[0]
    dispatch = to_experts.step(
        (() if _is_even(plan) else count_exchange, ()),
        to_experts.permute(rows),
        to_experts.ep(hidden),
        to_experts.ep(1, probs),
        to_experts.etp(gather, hidden),
        to_experts.etp(gather, 1, probs),
        to_experts.by_expert(),
    )
    combine = from_experts.step(
        from_experts.by_expert(),
        from_experts.etp(Collective.REDUCE_SCATTER, hidden, probs),
        from_experts.ep(hidden),
        from_experts.permute(rows, "unpermute", "permute"),
    )
    return dispatch, combine


def all_gather(plan: Plan) -> tuple[Step, Step]:
    """Return the gather of all tokens over tp and ep, and the scatter of their sums."""
    to_experts, from_experts = _Exchange(plan, "mlp.dispatch"), _Exchange(plan, "mlp.combine")
    hidden, probs, experts = plan.model.hidden_size, plan.probs_dtype, moe_of(plan).num_experts
    rows, local = plan.own_tokens * plan.size("tp_ep"), plan.expert_rows * plan.etp
    gather = Collective.ALL_GATHER
    dispatch = to_experts.step(
        (to_experts.send(gather, rows * experts, "tp_ep", DType.UINT8)[0], ()),
        to_experts.send(gather, rows * experts, "tp_ep", probs),
        to_experts.send(gather, rows * hidden, "tp_ep"),
        to_experts.permute(local),
    )
    combine = from_experts.step(
        from_experts.permute(local, "unpermute", "permute"),
        from_experts.send(Collective.REDUCE_SCATTER, rows * hidden, "tp_ep", probs),
    )
    return dispatch, combine


def experts(plan: Plan) -> tuple[Step, ...]:
    """Return norm, shared.*, router, dispatch, experts.*, combine, residual of one layer."""
    parts = leaves(plan, moe=True)
    hidden = plan.model.hidden_size
    steps = [of_leaf(parts["mlp.norm"])]
    for name, part in parts.items():
        if name.startswith("mlp.shared_"):
            if name.endswith("activation"):
                steps.append(of_leaf(part))
            else:
                linear = row if name.endswith("down") else column
                steps.append(linear(plan, part, hidden))
    steps.append(_router(plan, parts["mlp.router"]))
    gathers = plan.settings.moe_token_dispatcher_type is Dispatcher.ALLGATHER
    before, after = all_gather(plan) if gathers else all_to_all(plan)
    inner = [of_leaf(leaf) for name, leaf in parts.items() if name.startswith("mlp.experts")]
    return (*steps, before, *inner, after, of_leaf(parts["mlp.residual"]))


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
