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
    """Of one layer."""
    norm = plan.model.norm_params
    return (
        Param(module="attention.norm", count=norm, whole=plan.sequence_parallel),
        *_attention(plan),
        Param(module="mlp.norm", count=norm, whole=plan.sequence_parallel),
        *(_experts(plan) if moe else _mlp(plan)),
    )


def chunk_params(plan: Plan, chunk: Chunk, is_moe: Sequence[bool]) -> tuple[Param, ...]:
    """Of a model chunk, in the order of named_parameters. is_moe: of its layers."""
    model, found = plan.model, list[Param]()
    table = model.vocab_size // plan.tp * model.hidden_size
    shared = model.tied_embeddings and plan.job.parallel.pp > 1
    if chunk.has_embedding:
        found.append(Param(module="embedding", count=table, place=EMBEDDING, own_bucket=shared))
        if model.max_positions:
            positions = model.max_positions * model.hidden_size
            found.append(Param(module="embedding", count=positions, place=EMBEDDING))
    kinds = {kind: layer_params(plan, moe=kind) for kind in set(is_moe)}
    for place, kind in enumerate(is_moe):
        found += [replace(param, place=place) for param in kinds[kind]]
    if chunk.has_head:
        whole = plan.sequence_parallel
        found.append(
            Param(module="head.norm", count=model.norm_params, place=HEAD, whole=whole)
        )
        if shared or not model.tied_embeddings:
            found.append(Param(module="head", count=table, place=HEAD, own_bucket=shared))
    return tuple(found)


def _attention(plan: Plan) -> Iterator[Param]:
    model, tp, whole = plan.model, plan.tp, plan.sequence_parallel
    hidden, heads = model.hidden_size, model.num_heads // tp
    yield Param(module="attention.out", count=heads * model.d_v * hidden)
    if model.linear_bias:
        yield Param(module="attention.out", count=hidden, whole=whole)
    if (mla := model.mla) is None:
        width = (heads + 2 * model.num_kv_heads // tp) * model.head_dim
        yield Param(module="attention.qkv", count=width * hidden)
        if model.linear_bias or model.qkv_bias:
            yield Param(module="attention.qkv", count=width)
        if model.qk_norm:
            for name in ("attention.q_norm", "attention.k_norm"):
                # Summed over tp even without sequence parallelism: ranks have other heads.
                yield Param(module=name, count=model.head_dim, whole=True)
        return
    latent, ranked = mla.kv_lora_rank, mla.q_lora_rank
    if ranked is None:
        yield Param(module="attention.q", count=hidden * heads * model.d_qk)
    else:
        yield Param(module="attention.q_down", count=hidden * ranked, whole=whole)
        yield Param(module="attention.q_up", count=ranked * heads * model.d_qk)
    down = hidden * (latent + mla.qk_rope_head_dim)
    yield Param(module="attention.kv_down", count=down, whole=whole)
    up = latent * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield Param(module="attention.kv_up", count=up)
    if ranked is not None:
        yield Param(module="attention.q_norm", count=ranked, whole=True)
    yield Param(module="attention.kv_norm", count=latent, whole=whole)


def _up_name(plan: Plan) -> tuple[str, int]:
    return ("gate_up", 2) if plan.model.activation == "swiglu" else ("up", 1)


def _mlp(plan: Plan) -> Iterator[Param]:
    model, (up, gates) = plan.model, _up_name(plan)
    width = model.ffn_hidden_size // plan.tp
    yield Param(module=f"mlp.{up}", count=gates * width * model.hidden_size)
    if model.linear_bias:
        yield Param(module=f"mlp.{up}", count=gates * width)
    yield Param(module="mlp.down", count=width * model.hidden_size)
    if model.linear_bias:
        yield Param(module="mlp.down", count=model.hidden_size, whole=plan.sequence_parallel)


def _experts(plan: Plan) -> Iterator[Param]:
    """Router, this rank's experts, shared ones."""
    model, moe, (up, gates) = plan.model, plan.model.moe, _up_name(plan)
    assert moe is not None
    router = moe.num_experts * model.hidden_size
    yield Param(module="mlp.router", count=router, whole=plan.sequence_parallel)
    own, width = moe.num_experts // plan.job.parallel.ep, moe.ffn_hidden_size // plan.etp
    apart = plan.job.parallel.ep > 1
    matrix = width * model.hidden_size
    for name, count in ((f"experts_{up}", gates * matrix), ("experts_down", matrix)):
        yield from (Param(module=f"mlp.{name}", count=count, expert=apart) for _ in range(own))
    if moe.shared_ffn_hidden_size:
        matrix = moe.shared_ffn_hidden_size // plan.tp * model.hidden_size
        yield Param(module=f"mlp.shared_{up}", count=gates * matrix)
        yield Param(module="mlp.shared_down", count=matrix)


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
