"""Parameters of a rank, buckets of their gradients, and what follows the last backward pass.

Source: megatron-core 0.16.1, distributed/distributed_data_parallel.py and
param_and_grad_buffer.py (_ParamAndGradBuffer, _ParamAndGradBucketGroup), get_model of
megatron/training/training.py; distributed/finalize_model_grads.py, optimizer/optimizer.py,
clip_grads.py, distrib_optimizer.py, transformer/moe/moe_utils.py (get_updated_expert_bias);
train_step and training_log of megatron/training/training.py and utils.py of core_v0.16.1.
Parameters are in the order in which the local layer specification registers them, experts' in
that of grouped layers. Compared with a run of Megatron-LM (tests/data/megatron), the learning
rate's reduction as training_log begins with.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stepmark.core.collectives import Collective, RedOp
from stepmark.core.dtypes import DType
from stepmark.core.module import Module
from stepmark.core.ops import Optimizer, Phase
from stepmark.core.workload import COMPUTE, CommOp, ComputeOp, Operation
from stepmark.workload.pipeline import wait
from stepmark.workload.rules.megatron.settings import Plan
from stepmark.workload.rules.megatron.split import Chunk

EMBEDDING, HEAD = -1, -2  # places of parameters that belong to no layer
# One communicator sums over the optimizer instances, of dense parameters and experts alike.
INSTANCES = "instances"


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter on one rank."""

    module: str
    count: int
    whole: bool = False  # all tp ranks hold it, each with the gradient of its tokens
    expert: bool = False  # reduced among the ranks that have the same experts
    own_bucket: bool = False  # shared by first and last stage
    place: int = 0  # layer of the chunk, or EMBEDDING, HEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What is reduced in one call. padded: elements that travel."""

    params: tuple[Param, ...]
    padded: int
    expert: bool

    @property
    def count(self) -> int:
        return sum(param.count for param in self.params)


def layer_params(plan: Plan, *, moe: bool) -> tuple[Param, ...]:
    """Parameters of one layer: attention's output first, norms inside attention last."""
    found = [leaf for leaf in plan.tree.block(moe=moe).walk() if leaf.work and leaf.params]
    places = {"attention.norm": 0, "attention.out": 1}
    inner = ("attention.q_norm", "attention.k_norm", "attention.kv_norm")

    def place(leaf: Module) -> int:
        if leaf.role.startswith("mlp."):
            return 4
        return 3 if leaf.role in inner else places.get(leaf.role, 2)

    return tuple(one for leaf in sorted(found, key=place) for one in _params(plan, leaf))


def _params(plan: Plan, leaf: Module) -> Iterator[Param]:
    """As Megatron-LM registers them: a norm's are one here, each expert's are apart."""
    weight = leaf.params[0]
    if weight.is_expert:
        own, apart = weight.shape[0], plan.job.parallel.ep > 1
        for _ in range(own):
            yield Param(module=leaf.role, count=weight.numel // own, expert=apart)
    elif leaf.is_linear:
        for one in leaf.params:
            whole = one.is_partial and plan.sequence_parallel
            yield Param(module=leaf.role, count=one.numel, whole=whole)
    else:
        # Of heads summed over tp even without sequence parallelism: ranks have other heads.
        of_heads = leaf.role in ("attention.q_norm", "attention.k_norm")
        count = sum(one.numel for one in leaf.params)
        yield Param(module=leaf.role, count=count, whole=of_heads or plan.sequence_parallel)


def chunk_params(plan: Plan, chunk: Chunk, is_moe: Sequence[bool]) -> tuple[Param, ...]:
    """Of a model chunk, in the order of named_parameters. is_moe: of its layers."""
    model, found = plan.model, list[Param]()
    shared = model.tied_embeddings and plan.job.parallel.pp > 1
    if chunk.has_embedding:
        for one in plan.tree.embedding().all_params:
            alone = shared and "tokens" in one.name
            made = Param(module="embedding", count=one.numel, place=EMBEDDING, own_bucket=alone)
            found.append(made)
    kinds = {kind: layer_params(plan, moe=kind) for kind in set(is_moe)}
    for place, kind in enumerate(is_moe):
        found += [replace(param, place=place) for param in kinds[kind]]
    if chunk.has_head:
        norm, head, _ = plan.tree.output().inside
        listed = [norm, head] if shared or not model.tied_embeddings else [norm]
        for leaf in listed:
            alone = shared and leaf is head
            found += [replace(one, place=HEAD, own_bucket=alone) for one in _params(plan, leaf)]
    return tuple(found)


def buckets(plan: Plan, params: Iterable[Param], *, split: bool) -> tuple[Bucket, ...]:
    """Those of the dense parameters, then those of experts; last parameters first.

    split: not all in one, as on the first stage's first chunk where reductions overlap.
    """
    listed = tuple(params)
    dense = [param for param in listed if not param.expert]
    apart = [param for param in listed if param.expert]
    return (*_cut(plan, dense, split, False), *_cut(plan, apart, split, True))


def _cut(plan: Plan, params: list[Param], split: bool, expert: bool) -> Iterator[Bucket]:
    if not params:
        return
    settings, sharded = plan.settings, plan.settings.use_distributed_optimizer
    limit: float = math.inf
    if split and settings.overlap_grad_reduce:
        limit = settings.ddp_bucket_size or max(40_000_000, 1_000_000 * plan.size("dp_cp"))
    divisor = 1
    if sharded:
        ranks = plan.size("intra_expt_dp" if expert else "intra_dp_cp")
        busbw = 2**16 if settings.ddp_pad_buckets_for_high_nccl_busbw else 1
        divisor = math.lcm(ranks, 128, busbw)
    begin = place = 0
    held: list[Param] = []

    def close(end: int) -> Bucket:
        nonlocal begin, place
        place = _ceil(end, divisor)
        made = Bucket(params=tuple(held), padded=place - begin, expert=expert)
        begin = place
        held.clear()
        return made

    for param in reversed(params):
        place = _ceil(place, 64) if sharded else place
        alone = param.own_bucket and sharded
        if alone and held:
            yield close(place)
        place += param.count
        held.append(param)
        if place - begin >= limit or alone:
            yield close(place)
    if held:
        yield close(place)


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor


def reduce(plan: Plan, bucket: Bucket, *, overlapped: bool) -> tuple[CommOp, ...]:
    """One bucket's gradients; with several optimizer instances the sum over them too."""
    redop = RedOp.AVG if plan.settings.ddp_average_in_collective else RedOp.SUM
    stream, name = (stream_of(bucket),) * 2 if overlapped else (COMPUTE, "")
    dense, experts = "dp_cp", "expt_dp"
    kind = Collective.ALL_REDUCE
    if plan.settings.use_distributed_optimizer:
        dense, experts, kind = "intra_dp_cp", "intra_expt_dp", Collective.REDUCE_SCATTER
    group = experts if bucket.expert else dense
    of: dict[str, Any] = {
        "phase": Phase.BWD,
        "module": "gradients",
        "dtype": plan.gradient_dtype,
        "redop": redop,
    }
    made = plan.comms(kind, bucket.padded, group, stream=stream, name=name, **of)
    if plan.size("instances") == 1:
        return made
    if overlapped:
        of |= {"stream": INSTANCES, "name": INSTANCES, "after": (name,) if made else ()}
    part = bucket.padded // plan.size(group)
    return (*made, *plan.comms(Collective.ALL_REDUCE, part, "instances", **of))


def gather(plan: Plan, bucket: Bucket, *, name: str = "") -> tuple[CommOp, ...]:
    """One bucket's parameters after the optimizer; with a name beside the computation."""
    group = "intra_expt_dp" if bucket.expert else "intra_dp_cp"
    return plan.comms(
        Collective.ALL_GATHER,
        bucket.padded,
        group,
        Phase.FWD if name else Phase.OPTIM,
        "parameters",
        stream=stream_of(bucket) if name else COMPUTE,
        name=name,
    )


def stream_of(bucket: Bucket) -> str:
    return "expt_dp" if bucket.expert else "dp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """What a stage holds, by model chunk. moe_layers: how many layers have experts."""

    params: tuple[tuple[Param, ...], ...]
    buckets: tuple[tuple[Bucket, ...], ...]
    is_first: bool
    is_last: bool
    moe_layers: int = 0

    @property
    def all_buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for chunk in self.buckets for bucket in chunk)


def names_of(plan: Plan, listed: Iterable[Bucket]) -> tuple[str, ...]:
    """By which overlapped reductions of these buckets are waited for."""
    sent = (op.name for bucket in listed for op in reduce(plan, bucket, overlapped=True))
    return tuple(sorted(set(sent)))


def finish(plan: Plan, owned: Owned) -> tuple[Operation, ...]:
    """From the end of the last backward pass to that of the step."""
    return (*_gradients(plan, owned), *_update(plan, owned), *_reports(plan, owned))


def _gradients(plan: Plan, owned: Owned) -> list[Operation]:
    """finalize_model_grads."""
    settings, found = plan.settings, list[Operation]()
    if settings.overlap_grad_reduce:
        if names := names_of(plan, owned.all_buckets):
            found.append(wait(names, Phase.BWD, "gradients"))
    else:
        for bucket in owned.all_buckets:
            found += reduce(plan, bucket, overlapped=False)
    kind, phase = plan.gradient_dtype, Phase.BWD
    whole = sum(one.count for chunk in owned.params for one in chunk if one.whole)
    summed = partial(plan.comms, Collective.ALL_REDUCE)
    if whole:
        found += summed(whole, "tp", phase, "gradients.norms", kind)
    if plan.model.tied_embeddings and (owned.is_first or owned.is_last):
        table = plan.model.vocab_size // plan.tp * plan.model.hidden_size
        found += summed(table, "embd", phase, "gradients.embedding", kind)
    moe = plan.model.moe
    if moe is not None and moe.router_bias and owned.moe_layers:
        loads = owned.moe_layers * moe.num_experts
        # The count is a buffer of the model, which is turned to 16 bits with its weights.
        found += summed(loads, "tp_dp_cp", phase, "expert_bias", plan.job.dtype)
    if settings.calculate_per_token_loss:
        found += plan.comms(Collective.BROADCAST, 1, "pp", phase, "tokens", DType.INT32)
        found += summed(1, "dp_cp", phase, "tokens", DType.INT32)
    return found


def _update(plan: Plan, owned: Owned) -> list[Operation]:
    """ChainedOptimizer.step: one optimizer of dense parameters, one of experts' with ep."""
    sharded = plan.settings.use_distributed_optimizer
    kinds = sorted({bucket.expert for bucket in owned.all_buckets})
    norm_groups = ["expt_tp_pp" if expert else "mp" for expert in kinds]
    if sharded:
        norm_groups = ["intra_dist_opt" for _ in kinds]
    found: list[Operation] = []
    if plan.job.dtype is DType.FP16:
        for group in norm_groups:
            found += _small(plan, group, "overflow", redop=RedOp.MAX)
    for group in dict.fromkeys(norm_groups):
        found += _small(plan, group, "gradient_norm")
    gathers = sharded and not plan.settings.overlap_param_gather
    for expert in kinds:
        found.append(_adam(plan, owned, expert))
        # Each optimizer gathers all buckets of the chunks, those of the other one too.
        for bucket in owned.all_buckets if gathers else ():
            found += gather(plan, bucket)
    return found


def _adam(plan: Plan, owned: Owned, expert: bool) -> ComputeOp:
    """Over this rank's share of parameters, in fp32."""
    held = [bucket for bucket in owned.all_buckets if bucket.expert is expert]
    count = sum(bucket.count for bucket in held)
    if plan.settings.use_distributed_optimizer:
        ranks = plan.size("intra_expt_dp" if expert else "intra_dp_cp")
        count = sum(bucket.padded for bucket in held) // ranks
    return ComputeOp(
        op=Optimizer(num_params=max(1, count), kind="adamw", dtype=DType.FP32),
        phase=Phase.OPTIM,
        module="optimizer.experts" if expert else "optimizer",
    )


def _reports(plan: Plan, owned: Owned) -> list[Operation]:
    """train_step and training_log: success, gradient norm, loss, learning rate."""
    worst = partial(_small, plan, "mp", redop=RedOp.MAX)
    loss = _small(plan, "dp_cp", "loss", 2) if owned.is_last else ()
    success = _small(plan, "mp", "success", dtype=DType.INT32, redop=RedOp.MIN)
    return [*success, *worst("gradient_norm"), *loss, *worst("learning_rate")]


def _small(
    plan: Plan,
    group: str,
    module: str,
    count: int = 1,
    dtype: DType = DType.FP32,
    redop: RedOp = RedOp.SUM,
) -> tuple[CommOp, ...]:
    kind, phase = Collective.ALL_REDUCE, Phase.OPTIM
    return plan.comms(kind, count, group, phase, module, dtype, redop=redop)
