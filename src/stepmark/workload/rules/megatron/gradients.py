"""Parameters of a rank, the buckets of their gradients, and how buckets are reduced.

Source: megatron-core 0.16.1, distributed/distributed_data_parallel.py and
param_and_grad_buffer.py (_ParamAndGradBuffer, _ParamAndGradBucketGroup), and get_model of
megatron/training/training.py. Parameters are in the order in which the local
layer specification registers them, experts' in that of grouped layers. Compared with a run of
megatron-core (tests/data/megatron).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepmark.core.collectives import Collective, RedOp
from stepmark.core.module import Module
from stepmark.core.ops import Phase
from stepmark.core.workload import COMPUTE, CommOp
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
        phase=Phase.FWD if name else Phase.OPTIM,
        module="parameters",
        stream=stream_of(bucket) if name else COMPUTE,
        name=name,
    )


def stream_of(bucket: Bucket) -> str:
    return "expt_dp" if bucket.expert else "dp"
