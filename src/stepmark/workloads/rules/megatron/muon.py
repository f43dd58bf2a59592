"""Muon: matrices of hidden layers by Newton-Schulz, all else by Adam.

Source: megatron-core 0.16.1, optimizer/muon.py (TensorParallelMuon,
get_megatron_muon_optimizer), optimizer/layer_wise_optimizer.py (shard_params,
allgather_params), optimizer/optimizer.py (ChainedOptimizer), and Emerging-Optimizers 0.1.0,
which it requires: orthogonalized_optimizers/orthogonalized_optimizer.py (step) and
muon_utils.py (newton_schulz_tp). Embedding and head have Adam, a router has Muon. Products
are in bf16, as --muon-fp32-matmul-prec medium has them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.ops import Phase
from stepmark.step.kernel_choice import memory_kernel
from stepmark.step.newton_schulz import (
    ITEMSIZE,
    MODULE,
    Orthogonalization,
    computed,
    iterations,
    orthogonalization,
    repeated,
)
from stepmark.step.workload import Block, ComputeOp, Item
from stepmark.workloads.rules.megatron.adam_states import adam
from stepmark.workloads.rules.megatron.gradients import (
    Param,
    StageParams,
    model_copy,
    over_parameters,
    scalar_sum,
)
from stepmark.workloads.rules.megatron.plan import Plan
from stepmark.workloads.rules.megatron.settings import MuonTpMode

_FP32 = DType.FP32.itemsize
_QKV = "attention.qkv"
_TABLES = ("embedding", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parameters by the data rank that updates them: of dense ones and of experts apart.

    One share each: all ranks update all of them.
    """

    dense: tuple[tuple[Param, ...], ...]
    experts: tuple[tuple[Param, ...], ...]

    def largest(self, plan: Plan) -> tuple[tuple[Param, ...], tuple[Param, ...]]:
        """Return the shares with most FLOPs, which the others wait for."""

        def flops(share: tuple[Param, ...]) -> tuple[int, int]:
            works = (work for param in share for work in _works(plan, param))
            return sum(work.flops for work in works), sum(param.count for param in share)

        return max(self.dense, key=flops), max(self.experts, key=flops)


def shares(plan: Plan, params: Sequence[Param]) -> Shares:
    """Return which data rank updates what: whole parameters, dealt by size, there and back.

    Among equal sizes matrices come first, then tables, then vectors (_get_param_groups).
    """
    by_group = sorted(params, key=lambda param: (not param.matrix, param.module not in _TABLES))
    kinds = (
        tuple(param for param in by_group if param.expert is expert) for expert in (False, True)
    )
    if not plan.settings.optimizer.is_divided or plan.size("dp_cp") == 1:
        dense, experts = kinds
        return Shares(dense=(dense,), experts=(experts,))
    sizes = (plan.size("dp_cp"), plan.size("expt_dp") if plan.model.moe else 1)
    dense_shares, expert_shares = (
        _dealt(own, ranks) for own, ranks in zip(kinds, sizes, strict=True)
    )
    return Shares(dense=dense_shares, experts=expert_shares)


def _dealt(params: Sequence[Param], ranks: int) -> tuple[tuple[Param, ...], ...]:
    order = (*range(ranks), *reversed(range(ranks)))
    dealt: list[list[Param]] = [[] for _ in range(ranks)]
    for place, param in enumerate(sorted(params, key=lambda param: param.count)):
        dealt[order[place % len(order)]].append(param)
    return tuple(map(tuple, dealt))


def update(plan: Plan, stage: StageParams, blocks: dict[str, Block]) -> list[Item]:
    """Return ChainedOptimizer.step, then the gather of what other data ranks updated.

    Of ranks that update different parameters it is the one with most FLOPs.
    """
    params = [param for chunk in stage.params for param in chunk]
    by_rank = shares(plan, params)
    own = by_rank.largest(plan)
    is_divided = plan.settings.optimizer.is_divided
    has_experts = bool(plan.model.num_moe_layers) and plan.job.parallel.ep > 1
    total = sum(param.count for kind in own for param in kind)
    items: list[Item] = []
    gradient_size = plan.gradient_dtype.itemsize
    if gradient_size < _FP32:
        items += over_parameters("gradient_cast", total, gradient_size + _FP32)
    items += over_parameters("gradient_norm", total, _FP32)
    # Optimizers whose groups differ each have a norm: Muon's, then Adam's.
    groups = ["mp"]
    if has_experts:
        has_bias = plan.model.linear_bias or "experts" in plan.model.biases
        groups = ["mp", "expt_tp_pp", "mp", *(["expt_tp_pp"] if has_bias else [])]
    for group in ["world"] if is_divided else groups:
        items += scalar_sum(plan)(group=group, module="gradient_norm")
    for kind in own:
        items += _muon_update(plan, [param for param in kind if param.matrix], blocks)
    for kind in own:
        others = [param for param in kind if not param.matrix]
        if others:
            count = sum(param.count for param in others)
            items.append(adam(count, "optimizer"))
            items += model_copy(plan, count, MODULE)
    if is_divided:
        items += _gathers(plan, by_rank.dense, "dp_cp")
        items += _gathers(plan, by_rank.experts, "expt_dp")
    return items


def _muon_update(
    plan: Plan, params: Sequence[Param], blocks: dict[str, Block]
) -> Iterator[Item]:
    """Yield the step of one optimizer of Muon, and the copy of its weights."""
    if not params:
        return
    by_layer = groupby(params, key=lambda param: param.place)
    bodies = (
        tuple(item for param in layer for item in _matrix_update(plan, param, blocks))
        for _, layer in by_layer
    )
    prefix = f"muon{len(blocks)}."
    yield from repeated(bodies, blocks, prefix)
    yield from model_copy(plan, sum(param.count for param in params), MODULE)


def _pieces(plan: Plan, param: Param) -> tuple[tuple[int, int], ...]:
    """Return the matrices that are orthogonalized by themselves: q, k and v apart."""
    assert param.matrix is not None
    rows, columns = param.matrix
    if param.module != _QKV or not plan.settings.muon_split_qkv:
        return ((rows, columns),)
    model = plan.model
    kv_rows = model.num_kv_heads // plan.tp * model.head_dim
    return ((rows - 2 * kv_rows, columns), (kv_rows, columns), (kv_rows, columns))


def _works(plan: Plan, param: Param) -> tuple[Orthogonalization, ...]:
    """Return the iterations over a parameter on one rank; there are none without a matrix."""
    if not param.matrix:
        return ()
    return tuple(_work(plan, param, piece) for piece in _pieces(plan, param))


def _work(plan: Plan, param: Param, piece: tuple[int, int]) -> Orthogonalization:
    steps = plan.settings.muon_num_ns_steps
    mode = plan.settings.muon_tp_mode
    if mode is MuonTpMode.BLOCKWISE or param.split is None:
        return orthogonalization(piece[0], piece[1], steps)
    if mode is MuonTpMode.DUPLICATED:
        whole = list(piece)
        whole[param.split] *= plan.tp
        return orthogonalization(whole[0], whole[1], steps)
    # The dimension that is whole on every rank is that of A, even if it is the larger one.
    rows = piece[1 - param.split]
    sums = plan.comms(
        Collective.ALL_REDUCE,
        rows * rows,
        "tp",
        Phase.OPTIM,
        MODULE,
        DType.BF16,
        redop=RedOp.SUM,
    )
    return Orthogonalization(
        rows=rows, columns=piece[param.split], steps=steps, after_gram=sums
    )


def _matrix_update(plan: Plan, param: Param, blocks: dict[str, Block]) -> Iterator[Item]:
    """Yield the step of one parameter: decay, momentum, orthogonalization, weights."""

    def kernel(name: str, num_bytes: int) -> ComputeOp:
        return computed(memory_kernel(name, num_bytes))

    size = param.count * _FP32
    yield kernel("mul", 2 * size)
    yield kernel("lerp", 3 * size)
    if plan.settings.muon_use_nesterov:
        yield kernel("lerp", 3 * size)
    pieces = _pieces(plan, param)
    if len(pieces) > 1:
        yield kernel("split", 2 * size)
    for piece, work in zip(pieces, _works(plan, param), strict=True):
        yield from _gather_momentum(plan, param, piece)
        num_elements = work.rows * work.columns
        yield kernel("norm", num_elements * _FP32)
        if work.after_gram:
            yield from scalar_sum(plan)(group="tp", module=MODULE)
        yield kernel("div", 2 * num_elements * _FP32)
        yield kernel("cast", num_elements * (_FP32 + ITEMSIZE))
        yield iterations(work, blocks)
        yield kernel("cast", num_elements * (_FP32 + ITEMSIZE))
        for _ in "scale", "extra scale":
            yield kernel("mul", 2 * piece[0] * piece[1] * _FP32)
    if len(pieces) > 1:
        yield kernel("cat", 2 * size)
    yield kernel("add", 3 * size)


def _gather_momentum(plan: Plan, param: Param, piece: tuple[int, int]) -> Iterator[Item]:
    """Yield the gather of a piece's parts of all tp ranks, where each has the whole matrix."""
    is_gathered = plan.settings.muon_tp_mode is MuonTpMode.DUPLICATED
    if not is_gathered or param.split is None or plan.tp == 1:
        return
    count = piece[0] * piece[1]
    yield from plan.comms(
        Collective.ALL_GATHER, count * plan.tp, "tp", Phase.OPTIM, MODULE, DType.FP32
    )
    yield computed(memory_kernel("cat", 2 * plan.tp * count * _FP32))


def _gathers(plan: Plan, by_rank: Sequence[Sequence[Param]], group: str) -> Iterator[Item]:
    """Yield the gather of all parameters, flat, from the ranks that updated them.

    torch.distributed.all_gather of tensors of several sizes is a broadcast from each rank
    (torch 2.13, ProcessGroupNCCL.cpp: allgather), in one group call.
    """
    sizes = [sum(param.count for param in own) for own in by_rank]
    if len(sizes) == 1 or not sum(sizes):
        return
    itemsize = plan.job.dtype.itemsize
    yield from over_parameters("flatten", max(sizes), 2 * itemsize, MODULE)
    if len(set(sizes)) == 1:
        yield from plan.comms(
            Collective.ALL_GATHER, sum(sizes), group, Phase.OPTIM, "parameters"
        )
        yield from over_parameters("output_copy", sum(sizes), 2 * itemsize, MODULE)
    else:
        for rank, size in enumerate(sizes):
            for op in plan.comms(Collective.BROADCAST, size, group, Phase.OPTIM, "parameters"):
                yield replace(op, root=rank, fused=rank > 0)
    yield from over_parameters("parameter_copy", sum(sizes) - max(sizes), 2 * itemsize, MODULE)
