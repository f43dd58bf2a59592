"""Exchanges of rows between experts' ranks: dispatch to them, and combine from them.

Source: megatron-core 0.16.1, transformer/moe/token_dispatcher.py (MoEAlltoAllTokenDispatcher,
MoEAllGatherTokenDispatcher, MoEFlexTokenDispatcher) and moe_utils.py (permute,
sort_chunks_by_idxs). Compared with a run of megatron-core in which routing is even
(tests/data/megatron), the flex dispatcher read only.

A message has the expected rows of routing without preference, those of the fullest rank with an
imbalance of its experts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.layers import MoeConfig
from stepmark.model.ops import Phase
from stepmark.step.kernel_choice import memory_kernel
from stepmark.step.layout import QUANTIZE
from stepmark.step.workload import CommOp, ComputeOp, Operation
from stepmark.workloads.job import DUAL
from stepmark.workloads.rules.megatron.deepep import SCALED, Hops
from stepmark.workloads.rules.megatron.plan import Plan
from stepmark.workloads.rules.megatron.settings import DispatchDtype, Dispatcher
from stepmark.workloads.rules.megatron.steps import Step, awaiting

Pair = tuple[tuple[Operation, ...], tuple[Operation, ...]]


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
class Exchange:
    """A module whose backward pass reverses the forward pass, step by step."""

    plan: Plan
    module: str

    def step(self, *pairs: Pair) -> Step:
        return Step(
            module=self.module,
            fwd=tuple(op for fwd, _ in pairs for op in fwd),
            bwd=tuple(op for _, bwd in reversed(pairs) for op in bwd),
        )

    def overlapped(
        self,
        before: Iterable[Pair],
        sent: Iterable[Pair],
        after: Iterable[Pair],
        late: Iterable[Pair] = (),
    ) -> tuple[Step, Step]:
        """Return the steps around an exchange during which other computation runs.

        Each issues the exchange of its pass last, and waits for that of the other pass first.
        late: messages that the backward pass sends only when it would wait.
        """
        backward = f"{self.module}.grad"
        first = self.step(*sent)
        second = self.step(*late)
        fwd = _asynchronous((*first.fwd, *second.fwd), self.module)
        bwd = _asynchronous(first.bwd, backward)
        last = _asynchronous(second.bwd, backward)
        begin = self.step(*before)
        end = self.step(*after)
        if not fwd:
            return begin, end
        has_come = awaiting(Phase.FWD, self.module, *_names(fwd))
        has_come_back = awaiting(Phase.BWD, self.module, *_names((*bwd, *last)))
        return (
            replace(begin, fwd=(*begin.fwd, *fwd), bwd=(*last, has_come_back, *begin.bwd)),
            replace(end, fwd=(has_come, *end.fwd), bwd=(*end.bwd, *bwd)),
        )

    def send(
        self, kind: Collective, elements: int, group: str, dtype: DType | None = None
    ) -> Pair:
        """Return a collective, and its dual for the backward pass."""
        plan = self.plan
        module = self.module
        dual = DUAL.get(kind, kind)
        return (
            exchange(plan, kind, elements, group, module, Phase.FWD, dtype),
            exchange(plan, dual, elements, group, module, Phase.BWD, dtype),
        )

    def ep(self, width: int, dtype: DType | None = None) -> Pair:
        kind = Collective.ALL_TO_ALL if _is_even(self.plan) else Collective.ALL_TO_ALL_V
        return self.send(kind, self.plan.expert_rows * width, "ep", dtype)

    def hops(self, forward_bytes: int, backward_bytes: int, *, sums: bool = False) -> Pair:
        """Return both hops of rows of so many bytes, in each pass.

        sums: the forward pass brings results back, and not the backward pass. DeepEP runs the
        hops chunk by chunk, side by side.
        """
        plan = self.plan
        assert plan.hops is not None
        rows = [*plan.hops.rows(plan.own_tokens).items()]

        def send(phase: Phase, row_bytes: int, *, comes_back: bool) -> tuple[CommOp, ...]:
            ops: list[CommOp] = []
            for group, count in rows[::-1] if comes_back else rows:
                # All ranks together, each as many; whole bytes of the expected rows.
                elements = math.ceil(count * row_bytes) * plan.size(group)
                ops += exchange(
                    plan,
                    Collective.ALL_TO_ALL_V,
                    elements,
                    group,
                    self.module,
                    phase,
                    DType.UINT8,
                )
            return tuple(ops)

        return (
            send(Phase.FWD, forward_bytes, comes_back=sums),
            send(Phase.BWD, backward_bytes, comes_back=not sums),
        )

    def etp(self, kind: Collective, width: int, dtype: DType | None = None) -> Pair:
        return self.send(kind, self.plan.expert_rows * width * self.plan.etp, "etp", dtype)

    def permute(self, rows: int, forward: str = "permute", backward: str = "unpermute") -> Pair:
        """Return kernels that reorder rows. rows: those read and those written."""
        num_bytes = rows * self.plan.routed_width * self.plan.job.dtype.itemsize
        return (
            self.kernel(forward, num_bytes, Phase.FWD),
            self.kernel(backward, num_bytes, Phase.BWD),
        )

    def kernel(self, name: str, num_bytes: int, phase: Phase) -> tuple[ComputeOp, ...]:
        """Return a kernel that moves so many bytes."""
        op = memory_kernel(name, num_bytes)
        return (ComputeOp(op=op, phase=phase, module=self.module, layer=0, microbatch=0),)

    def by_expert(self) -> Pair:
        """Return sort_chunks_by_idxs, or a transpose if experts are padded to capacity."""
        if moe_of(self.plan).num_experts == self.plan.size("ep"):
            return (), ()
        return self.permute(
            2 * self.plan.expert_rows * self.plan.etp, "sort_chunks", "sort_chunks"
        )


def _asynchronous(ops: Iterable[Operation], name: str) -> tuple[Operation, ...]:
    """Return messages on the stream of their group; hops have names of their own."""
    return tuple(
        replace(op, stream=op.group, name=name if op.group == "ep" else f"{name}.{op.group}")
        for op in ops
        if isinstance(op, CommOp)
    )


def _names(ops: Iterable[Operation]) -> Iterable[str]:
    return dict.fromkeys(op.name for op in ops)


def _is_even(plan: Plan) -> bool:
    return plan.settings.moe_pad_expert_input_to_capacity


def exchanges(plan: Plan, *, apart: bool) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps before experts and after them, by the dispatcher.

    apart: exchanges have streams of their own, as two hops always have.
    """
    if plan.settings.moe_token_dispatcher_type is Dispatcher.ALLGATHER:
        first, last = all_gather(plan)
        return (first,), (last,)
    to_experts = Exchange(plan, "mlp.dispatch")
    from_experts = Exchange(plan, "mlp.combine")
    counts, there = dispatch(plan, to_experts)
    back = combine(plan, from_experts)
    if not apart and (plan.hops is None or plan.hops.num_hosts == 1):
        return (to_experts.step(counts, *there.all),), (from_experts.step(*back.all),)
    return (
        (
            to_experts.step(counts),
            *to_experts.overlapped(there.before, there.sent, there.after),
        ),
        from_experts.overlapped(back.before, back.sent, back.after),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What comes before an exchange over ep, the exchange, and what comes after it."""

    before: tuple[Pair, ...]
    sent: tuple[Pair, ...]
    after: tuple[Pair, ...]

    @property
    def all(self) -> tuple[Pair, ...]:
        return (*self.before, *self.sent, *self.after)


def dispatch(plan: Plan, exchange: Exchange) -> tuple[Pair, Parts]:
    """Return the exchange of counts, and the dispatch of rows and probabilities.

    Without padding to capacity the ranks first exchange the number of rows for each expert.
    Rows go over ep, then over experts' tp; by flex over both at once.
    """
    if plan.hops is not None:
        return _hops_to_experts(plan, plan.hops, exchange)
    hidden = plan.routed_width
    probs = plan.probs_dtype
    gather = Collective.ALL_GATHER
    counts = moe_of(plan).num_experts * plan.size("tp_ep")
    count_exchange = exchange.send(gather, counts, "tp_ep", DType.INT64)[0]
    parts = Parts(
        before=(exchange.permute(2 * plan.sent_rows),),
        sent=(exchange.ep(hidden), exchange.ep(1, probs)),
        after=(
            exchange.etp(gather, hidden),
            exchange.etp(gather, 1, probs),
            exchange.by_expert(),
        ),
    )
    return (() if _is_even(plan) else count_exchange, ()), parts


def combine(plan: Plan, exchange: Exchange) -> Parts:
    """Return the combine, whose sum over experts' tp is in the probabilities' type."""
    if plan.hops is not None:
        return _hops_from_experts(plan, plan.hops, exchange)
    hidden = plan.routed_width
    return Parts(
        before=(
            exchange.by_expert(),
            exchange.etp(Collective.REDUCE_SCATTER, hidden, plan.probs_dtype),
        ),
        sent=(exchange.ep(hidden),),
        after=(exchange.permute(2 * plan.sent_rows, "unpermute", "permute"),),
    )


def _hops_to_experts(plan: Plan, hops: Hops, exchange: Exchange) -> tuple[Pair, Parts]:
    """Return DeepEP's exchange of counts, and its dispatch.

    A row has its token's experts and their probabilities in fp32 (FusedDispatch), whose
    gradients come back with the gradients' sums.
    """
    width = plan.routed_width
    chosen = hops.chosen
    counts: list[Operation] = []
    for group, count in hops.counts().items():
        elements = count * plan.size(group)
        kind = Collective.ALL_TO_ALL
        counts += exchange.send(kind, elements, group, DType.INT32)[0]
    forward = _row_bytes(plan, hops, indices=chosen, weights=chosen)
    backward = hops.row_bytes(width * plan.job.dtype.itemsize, weights=chosen)
    cast, restored = _casts(plan, hops, exchange, Phase.FWD)
    parts = Parts(
        before=((cast, ()),),
        sent=(exchange.hops(forward, backward),),
        after=((restored, ()), _by_token(plan, hops, exchange, "permute", "unpermute")),
    )
    return (tuple(counts), ()), parts


def _hops_from_experts(plan: Plan, hops: Hops, exchange: Exchange) -> Parts:
    """Return DeepEP's combine, whose backward pass is a dispatch without probabilities."""
    forward = hops.row_bytes(plan.routed_width * plan.job.dtype.itemsize)
    cast, restored = _casts(plan, hops, exchange, Phase.BWD)
    return Parts(
        before=(_by_token(plan, hops, exchange, "unpermute", "permute"), ((), restored)),
        sent=(exchange.hops(forward, _row_bytes(plan, hops), sums=True),),
        after=(((), cast),),
    )


def _row_bytes(plan: Plan, hops: Hops, *, indices: int = 0, weights: int = 0) -> int:
    """Return the bytes of a dispatched row, in the type of dispatches."""
    width = plan.routed_width
    if plan.settings.dispatch_dtype is DispatchDtype.BF16:
        num_bytes = width * plan.job.dtype.itemsize
        return hops.row_bytes(num_bytes, indices=indices, weights=weights)
    scales = width // SCALED
    return hops.row_bytes(width, scales=scales, indices=indices, weights=weights)


def _casts(
    plan: Plan, hops: Hops, exchange: Exchange, phase: Phase
) -> tuple[tuple[ComputeOp, ...], tuple[ComputeOp, ...]]:
    """Return the cast of rows to FP8 before a dispatch, and that of received rows to bf16."""
    if plan.settings.dispatch_dtype is DispatchDtype.BF16:
        return (), ()
    width = plan.routed_width
    of_row = width * (1 + plan.job.dtype.itemsize) + width // SCALED * DType.FP32.itemsize
    return (
        exchange.kernel(QUANTIZE, plan.own_tokens * of_row, phase),
        exchange.kernel("dequantize", hops.received(plan.own_tokens) * of_row, phase),
    )


def _by_token(plan: Plan, hops: Hops, exchange: Exchange, forward: str, backward: str) -> Pair:
    """Return kernels between received rows, one a token, and those of experts."""
    rows = hops.received(plan.own_tokens) + plan.expert_rows * plan.etp
    return exchange.permute(rows, forward, backward)


def all_gather(plan: Plan) -> tuple[Step, Step]:
    """Return the gather of all tokens over tp and ep, and the scatter of their sums."""
    to_experts = Exchange(plan, "mlp.dispatch")
    from_experts = Exchange(plan, "mlp.combine")
    hidden = plan.routed_width
    probs = plan.probs_dtype
    experts = moe_of(plan).num_experts
    rows = plan.own_tokens * plan.size("tp_ep")
    local = 2 * plan.expert_rows * plan.etp
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
