"""How rows come to the ranks of their experts, and back.

Source: megatron-core 0.16.1, transformer/moe/token_dispatcher.py (MoEAlltoAllTokenDispatcher,
MoEAllGatherTokenDispatcher), moe_utils.py (permute, sort_chunks_by_idxs, get_capacity). Routing
is balanced: what a rank sends and computes is the average, exact with experts that are filled
up to capacity. Compared with a run of megatron-core in which routing is even
(tests/data/megatron).
"""

import math
from dataclasses import dataclass
from typing import Any

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.model import MoeConfig
from stepmark.core.ops import Phase
from stepmark.core.workload import CommOp, ComputeOp, Kernel, Operation
from stepmark.workload.rules.megatron.settings import Plan
from stepmark.workload.rules.megatron.steps import Step

_Comms = tuple[CommOp, ...]


def moe_of(plan: Plan) -> MoeConfig:
    """Of a model that has experts."""
    assert plan.model.moe is not None
    return plan.model.moe


def exchanged(
    plan: Plan,
    kind: Collective,
    elements: int,
    group: str,
    module: str,
    phase: Phase,
    dtype: DType | None = None,
) -> _Comms:
    """Where average parts of an uneven exchange are no whole number they are rounded up."""
    size = plan.size(group)
    if kind is not Collective.ALL_REDUCE:
        elements = math.ceil(elements / size) * size
    of: dict[str, Any] = {"layer": 0, "microbatch": 0}
    return plan.comms(kind, elements, group, phase=phase, module=module, dtype=dtype, **of)


def _permute(plan: Plan, module: str, phase: Phase, name: str, num_rows: int) -> ComputeOp:
    """Rows read and written in another order."""
    moved = 2 * num_rows * plan.model.hidden_size * plan.job.dtype.itemsize
    kernel = Kernel(name=name, flops=0, bytes_moved=moved)
    return ComputeOp(op=kernel, phase=phase, module=module, layer=0, microbatch=0)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Rows and their probabilities to the experts' ranks, then over the experts' tp; back.

    Without fixed capacity all ranks first tell how many rows they have for each expert.
    """

    plan: Plan

    @property
    def is_even(self) -> bool:
        return self.plan.settings.moe_pad_expert_input_to_capacity

    def ep(self, width: int, module: str, phase: Phase, dtype: DType | None = None) -> _Comms:
        kind = Collective.ALL_TO_ALL if self.is_even else Collective.ALL_TO_ALL_V
        return exchanged(
            self.plan, kind, self.plan.expert_rows * width, "ep", module, phase, dtype
        )

    def etp(
        self,
        kind: Collective,
        width: int,
        module: str,
        phase: Phase,
        dtype: DType | None = None,
    ) -> _Comms:
        gathered = self.plan.expert_rows * width * self.plan.etp
        return exchanged(self.plan, kind, gathered, "etp", module, phase, dtype)

    def by_expert(self, module: str, phase: Phase) -> tuple[ComputeOp, ...]:
        """sort_chunks_by_idxs, or a transpose where experts are filled up."""
        if moe_of(self.plan).num_experts == self.plan.size("ep"):
            return ()
        gathered = self.plan.expert_rows * self.plan.etp
        return (_permute(self.plan, module, phase, "sort_chunks", gathered),)

    def dispatch(self) -> Step:
        plan, ep, etp, there = self.plan, self.ep, self.etp, "mlp.dispatch"
        sent, hidden, probs = plan.expert_rows, plan.model.hidden_size, plan.probs_dtype
        gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
        told: _Comms = ()
        if not self.is_even:
            counts = moe_of(plan).num_experts * plan.size("tp_ep")
            told = exchanged(plan, gather, counts, "tp_ep", there, Phase.FWD, DType.INT64)
        return Step(
            module=there,
            fwd=(
                *told,
                _permute(plan, there, Phase.FWD, "permute", sent),
                *ep(hidden, there, Phase.FWD),
                *ep(1, there, Phase.FWD, probs),
                *etp(gather, hidden, there, Phase.FWD),
                *etp(gather, 1, there, Phase.FWD, probs),
                *self.by_expert(there, Phase.FWD),
            ),
            bwd=(
                *self.by_expert(there, Phase.BWD),
                *etp(scatter, 1, there, Phase.BWD, probs),
                *etp(scatter, hidden, there, Phase.BWD),
                *ep(1, there, Phase.BWD, probs),
                *ep(hidden, there, Phase.BWD),
                _permute(plan, there, Phase.BWD, "unpermute", sent),
            ),
        )

    def combine(self) -> Step:
        """combine_preprocess sums in the probabilities' type."""
        plan, ep, etp, back = self.plan, self.ep, self.etp, "mlp.combine"
        sent, hidden, probs = plan.expert_rows, plan.model.hidden_size, plan.probs_dtype
        return Step(
            module=back,
            fwd=(
                *self.by_expert(back, Phase.FWD),
                *etp(Collective.REDUCE_SCATTER, hidden, back, Phase.FWD, probs),
                *ep(hidden, back, Phase.FWD),
                _permute(plan, back, Phase.FWD, "unpermute", sent),
            ),
            bwd=(
                _permute(plan, back, Phase.BWD, "permute", sent),
                *ep(hidden, back, Phase.BWD),
                *etp(Collective.ALL_GATHER, hidden, back, Phase.BWD, probs),
                *self.by_expert(back, Phase.BWD),
            ),
        )


def all_gather(plan: Plan) -> tuple[Step, Step]:
    """All tokens to all ranks of tp and ep; sums scattered back."""
    moe, ranks, probs = moe_of(plan), plan.size("tp_ep"), plan.probs_dtype
    rows_in_all, local = plan.own_tokens * ranks, plan.expert_rows * plan.etp
    there, back = "mlp.dispatch", "mlp.combine"

    def comm(
        kind: Collective, width: int, module: str, phase: Phase, dtype: DType | None = None
    ) -> _Comms:
        return exchanged(plan, kind, rows_in_all * width, "tp_ep", module, phase, dtype)

    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    hidden = plan.model.hidden_size
    fwd: tuple[Operation, ...] = (
        *comm(gather, moe.num_experts, there, Phase.FWD, DType.UINT8),
        *comm(gather, moe.num_experts, there, Phase.FWD, probs),
        *comm(gather, hidden, there, Phase.FWD),
        _permute(plan, there, Phase.FWD, "permute", local),
    )
    bwd: tuple[Operation, ...] = (
        _permute(plan, there, Phase.BWD, "unpermute", local),
        *comm(scatter, hidden, there, Phase.BWD),
        *comm(scatter, moe.num_experts, there, Phase.BWD, probs),
    )
    combine = Step(
        module=back,
        fwd=(
            _permute(plan, back, Phase.FWD, "unpermute", local),
            *comm(scatter, hidden, back, Phase.FWD, probs),
        ),
        bwd=(
            *comm(gather, hidden, back, Phase.BWD, probs),
            _permute(plan, back, Phase.BWD, "permute", local),
        ),
    )
    return Step(module=there, fwd=fwd, bwd=bwd), combine
