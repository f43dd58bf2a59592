"""Parameters of a rank, buckets of their gradients, and the end of a step.

Source: megatron-core 0.16.1, distributed/distributed_data_parallel.py and
param_and_grad_buffer.py (_ParamAndGradBuffer, _ParamAndGradBucketGroup), get_model of
megatron/training/training.py; distributed/finalize_model_grads.py, optimizer/optimizer.py,
clip_grads.py, distrib_optimizer.py, transformer/moe/moe_utils.py (get_updated_expert_bias);
train_step and training_log of megatron/training/training.py and utils.py of core_v0.16.1.
Parameters are in the order in which the local layer specification registers them, experts' in
that of grouped layers. Compared with a run of Megatron-LM (tests/data/megatron), which includes
the reduction of the learning rate at the start of training_log.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.layers import Layer
from stepmark.model.ops import Phase
from stepmark.step.kernel_choice import memory_kernel
from stepmark.step.module import Module
from stepmark.step.module import Param as ModuleParam
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Item, Operation
from stepmark.workloads.pipeline import wait
from stepmark.workloads.rules.megatron import adam_states, cpu_offload, narrow
from stepmark.workloads.rules.megatron.lora import adapted
from stepmark.workloads.rules.megatron.plan import Plan
from stepmark.workloads.rules.megatron.stage_partition import Chunk

# places of parameters that belong to no layer
EMBEDDING = -1
HEAD = -2
NORM = -3
# One communicator sums over the optimizer instances, for dense parameters and for experts.
INSTANCES = "instances"
_FP32 = DType.FP32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter on one rank."""

    module: str
    count: int
    whole: bool = False  # on all tp ranks, each with the gradient of its tokens
    expert: bool = False  # reduced over the ranks with the same experts
    own_bucket: bool = False  # shared by first and last stage
    is_narrow: bool = False  # an operand of narrow products, cast once per step
    place: int = 0  # layer of the chunk, or EMBEDDING, HEAD, NORM
    matrix: tuple[int, int] | None = None  # rows and columns of a hidden layer's, on this rank
    split: int | None = None  # dimension of the matrix that tp divides


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that are reduced in one call. padded: elements of the message."""

    params: tuple[Param, ...]
    padded: int
    expert: bool
    is_fp8: bool = False  # gathered in FP8

    @property
    def narrow_counts(self) -> tuple[int, ...]:
        """Elements of each weight of narrow products."""
        return tuple(param.count for param in self.params if param.is_narrow)


def layer_params(plan: Plan, layer: Layer) -> tuple[Param, ...]:
    """Return one layer's parameters: attention's output first, norms inside attention last."""
    leaves = [leaf for leaf in plan.tree.block(layer).walk() if leaf.work and leaf.params]
    places = {"attention.norm": 0, "attention.out": 1}
    places |= dict.fromkeys(("attention.q_norm", "attention.k_norm", "attention.kv_norm"), 3)

    def place(leaf: Module) -> int:
        return 4 if leaf.role.startswith("mlp.") else places.get(adapted(leaf.role), 2)

    return tuple(param for leaf in sorted(leaves, key=place) for param in _params(plan, leaf))


def _params(plan: Plan, leaf: Module) -> Iterator[Param]:
    """Yield a module's trained parameters: a norm's are one, each expert has its own."""
    weight = leaf.params[0]
    if not weight.is_trained:
        return
    is_narrow = narrow.is_narrow(leaf)
    if weight.is_expert:
        num_experts = weight.shape[0]
        is_apart = plan.job.parallel.ep > 1
        for _ in range(num_experts):
            for param in leaf.params:
                yield Param(
                    module=leaf.role,
                    count=param.numel // num_experts,
                    expert=is_apart,
                    is_narrow=is_narrow and param is weight,
                    matrix=_matrix(param.shape[1:]),
                    split=_split(leaf, param),
                )
    elif leaf.is_linear:
        for param in leaf.params:
            is_whole = param.is_partial and plan.sequence_parallel
            yield Param(
                module=leaf.role,
                count=param.numel,
                whole=is_whole,
                is_narrow=is_narrow and param is weight,
                matrix=_matrix(param.shape),
                split=_split(leaf, param),
            )
    else:
        # Norms of heads are summed over tp even without sequence parallelism: ranks have
        # different heads.
        of_heads = leaf.role in ("attention.q_norm", "attention.k_norm")
        count = sum(param.numel for param in leaf.params)
        is_whole = weight.is_partial and (of_heads or plan.sequence_parallel)
        yield Param(module=leaf.role, count=count, whole=is_whole)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int] | None:
    return (shape[0], shape[1]) if len(shape) == 2 else None


def _split(leaf: Module, param: ModuleParam) -> int | None:
    """Return the dimension of a weight that tp divides (partition_dim of its layer)."""
    if param.is_partial:
        return None
    return 1 if leaf.is_row else 0


def mtp_params(plan: Plan, layer: tuple[Param, ...]) -> tuple[Param, ...]:
    """Return the parameters of a module of multi-token prediction. layer: those inside."""
    leaves = {leaf.role: leaf for leaf in plan.tree.mtp().walk() if leaf.params}
    first = ("mtp.embedding_norm", "mtp.hidden_norm", "mtp.projection")
    before = (param for role in first for param in _params(plan, leaves[role]))
    return (*before, *layer, *_params(plan, leaves["mtp.norm"]))


def has_table_twice(plan: Plan) -> bool:
    """Return whether first and last stage both have the table of tokens, trained.

    Multi-token prediction looks tokens up on the last one (language_module.py,
    setup_embeddings_and_output_layer).
    """
    model = plan.model
    shares = model.tied_embeddings or model.num_mtp_layers > 0
    return shares and plan.job.parallel.pp > 1


def chunk_params(
    plan: Plan, chunk: Chunk, kinds: Sequence[str], of_layer: Mapping[str, tuple[Param, ...]]
) -> tuple[Param, ...]:
    """Return a chunk's parameters in the order of named_parameters.

    kinds: of the units. of_layer: parameters of each kind.
    """
    model = plan.model
    params = list[Param]()
    shared = has_table_twice(plan)
    if chunk.has_embedding or chunk.num_mtp:
        for table in plan.tree.embedding().all_params:
            if not table.is_trained:
                continue
            alone = shared and "tokens" in table.name
            is_tokens = "tokens" in table.name
            params.append(
                Param(
                    module="embedding",
                    count=table.numel,
                    place=EMBEDDING,
                    own_bucket=alone,
                    # Learned positions are not marked as an embedding (language_module.py).
                    matrix=None if is_tokens else _matrix(table.shape),
                )
            )
    norm, head, *_ = plan.tree.output().inside
    layers = [
        replace(param, place=place)
        for place, kind in enumerate(kinds)
        for param in of_layer[kind]
    ]
    num_before = sum(len(of_layer[kind]) for kind in kinds[: chunk.num_layers])
    params += layers[:num_before]
    if chunk.has_norm:
        place = NORM if model.num_mtp_layers else HEAD
        params += [replace(param, place=place) for param in _params(plan, norm)]
    params += layers[num_before:]
    if chunk.has_head and (shared or not model.tied_embeddings):
        alone = shared and model.tied_embeddings
        params += [
            replace(param, place=HEAD, own_bucket=alone, matrix=None)
            for param in _params(plan, head)
        ]
    return tuple(params)


def buckets(
    plan: Plan, params: Sequence[Param], *, split: bool, together: bool = False
) -> tuple[Bucket, ...]:
    """Return buckets of dense parameters, then of experts; the last parameters come first.

    split: several buckets, as on the first stage's first chunk if reductions overlap.
    together: in one call, as on a stage's later chunks (partition_buckets).
    """
    # Narrow parameters have buffers of their own, with their gradients. The first buffer is of
    # the type that is registered first: a layer's first parameter is narrow, the embedding is
    # not (distributed_data_parallel.py, _allocate_buffers_for_parameters).
    is_apart = plan.settings.fp8_param_gather
    types = (True, False) if is_apart else (False,)
    if is_apart and any(param.place == EMBEDDING for param in params):
        types = (False, True)
    result = list[Bucket]()
    for expert, is_narrow in product((False, True), types):
        own = [
            param
            for param in params
            if param.expert is expert and (not is_apart or param.is_narrow is is_narrow)
        ]
        cut = _cut(plan, own, split, expert)
        is_fp8 = is_narrow and narrow.gathers_fp8(plan)
        result += [
            replace(bucket, is_fp8=is_fp8) for bucket in (_as_one(cut) if together else cut)
        ]
    return tuple(result)


def _as_one(cut: Iterable[Bucket]) -> Iterator[Bucket]:
    """Yield buckets that are sent in one call as one."""
    own = list(cut)
    if own:
        params = tuple(param for bucket in own for param in bucket.params)
        padded = sum(bucket.padded for bucket in own)
        yield replace(own[0], params=params, padded=padded)


def _cut(plan: Plan, params: list[Param], split: bool, expert: bool) -> Iterator[Bucket]:
    if not params:
        return
    settings = plan.settings
    sharded = plan.settings.use_distributed_optimizer
    limit: float = math.inf
    if split and settings.overlap_grad_reduce:
        limit = settings.ddp_bucket_size or max(40_000_000, 1_000_000 * plan.size("dp_cp"))
    divisor = 1
    if sharded:
        ranks = plan.size(_owners(expert))
        busbw = 2**16 if settings.ddp_pad_buckets_for_high_nccl_busbw else 1
        divisor = math.lcm(ranks, 128, busbw)
    begin = place = 0
    members: list[Param] = []

    def close(end: int) -> Bucket:
        nonlocal begin, place
        place = _ceil(end, divisor)
        bucket = Bucket(params=tuple(members), padded=place - begin, expert=expert)
        begin = place
        members.clear()
        return bucket

    for param in reversed(params):
        place = _ceil(place, 64) if sharded else place
        alone = param.own_bucket and sharded
        if alone and members:
            yield close(place)
        place += param.count
        members.append(param)
        if place - begin >= limit or alone:
            yield close(place)
    if members:
        yield close(place)


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor


def reduce(plan: Plan, bucket: Bucket, *, overlapped: bool) -> tuple[CommOp, ...]:
    """Return one bucket's reduction; several optimizer instances need a second sum."""
    redop = RedOp.AVG if plan.settings.ddp_average_in_collective else RedOp.SUM
    stream, name = (stream_of(bucket),) * 2 if overlapped else (COMPUTE, "")
    group = "expt_dp" if bucket.expert else "dp_cp"
    kind = Collective.ALL_REDUCE
    if plan.settings.use_distributed_optimizer:
        group = _owners(bucket.expert)
        kind = Collective.REDUCE_SCATTER
    of: dict[str, Any] = {
        "phase": Phase.BWD,
        "module": "gradients",
        "dtype": plan.gradient_dtype,
        "redop": redop,
    }
    ops = plan.comms(kind, bucket.padded, group, stream=stream, name=name, **of)
    if plan.size("instances") == 1:
        return ops
    if overlapped:
        of |= {"stream": INSTANCES, "name": INSTANCES, "after": (name,) if ops else ()}
    part = bucket.padded // plan.size(group)
    return (*ops, *plan.comms(Collective.ALL_REDUCE, part, "instances", **of))


def gather(plan: Plan, bucket: Bucket, *, name: str = "") -> tuple[CommOp, ...]:
    """Return one bucket's gather of parameters. name: of an asynchronous gather."""
    return plan.comms(
        Collective.ALL_GATHER,
        bucket.padded,
        _owners(bucket.expert),
        Phase.FWD if name else Phase.OPTIM,
        "parameters",
        DType.UINT8 if bucket.is_fp8 else None,
        stream=stream_of(bucket) if name else COMPUTE,
        name=name,
    )


def stream_of(bucket: Bucket) -> str:
    return "expt_dp" if bucket.expert else "dp"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParams:
    """A stage's parameters and buckets by model chunk. moe_layers: layers with experts."""

    params: tuple[tuple[Param, ...], ...]
    buckets: tuple[tuple[Bucket, ...], ...]
    is_first: bool
    is_last: bool
    moe_layers: int = 0

    @property
    def all_buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for chunk in self.buckets for bucket in chunk)


def names_of(plan: Plan, buckets: Iterable[Bucket]) -> tuple[str, ...]:
    """Return the names of these buckets' overlapped reductions."""
    sent = (op.name for bucket in buckets for op in reduce(plan, bucket, overlapped=True))
    return tuple(sorted(set(sent)))


def end_of_step(plan: Plan, stage: StageParams, updated: Sequence[Item]) -> tuple[Item, ...]:
    """Return the operations from the end of the last backward pass to the end of the step.

    updated: those of the optimizer.
    """
    scalar = scalar_sum(plan)
    largest = partial(scalar, group="mp", redop=RedOp.MAX)
    return (
        *_grad_finalize(plan, stage),
        *_buffer_kernels(plan, stage),
        *updated,
        # The messages of train_step and training_log.
        *scalar(group="mp", module="success", dtype=DType.INT32, redop=RedOp.MIN),
        *largest(module="gradient_norm"),
        *(scalar(group="dp_cp", module="loss", elements=2) if stage.is_last else ()),
        *largest(module="learning_rate"),
    )


def _grad_finalize(plan: Plan, stage: StageParams) -> list[Operation]:
    """Return the operations of finalize_model_grads."""
    settings = plan.settings
    ops = list[Operation]()
    if settings.overlap_grad_reduce:
        if names := names_of(plan, stage.all_buckets):
            ops.append(wait(names, Phase.BWD, "gradients"))
    else:
        for bucket in stage.all_buckets:
            ops += reduce(plan, bucket, overlapped=False)
    kind = plan.gradient_dtype
    phase = Phase.BWD
    num_whole = sum(param.count for chunk in stage.params for param in chunk if param.whole)
    summed = partial(plan.comms, Collective.ALL_REDUCE)
    if num_whole:
        ops += summed(num_whole, "tp", phase, "gradients.norms", kind)
    is_tied = has_table_twice(plan) and plan.lora is None
    if is_tied and (stage.is_first or stage.is_last):
        table = plan.model.vocab_size // plan.tp * plan.model.hidden_size
        ops += summed(table, "embd", phase, "gradients.embedding", kind)
    moe = plan.model.moe
    if moe is not None and moe.router_bias and stage.moe_layers:
        loads = stage.moe_layers * moe.num_experts
        # The count is a buffer of the model, which is cast to 16 bits with its weights.
        ops += summed(loads, "tp_dp_cp", phase, "expert_bias", plan.job.dtype)
    if settings.calculate_per_token_loss:
        ops += plan.comms(Collective.BROADCAST, 1, "pp", phase, "tokens", DType.INT32)
        ops += summed(1, "dp_cp", phase, "tokens", DType.INT32)
    return ops


def _buffer_kernels(plan: Plan, stage: StageParams) -> Iterator[ComputeOp]:
    """Yield the kernels over whole gradient buffers.

    Megatron-LM checks the norm of each bucket (check_for_nan_in_grad), divides by data ranks
    unless the collective or the loss does, and sets gradients to zero before the next step
    (param_and_grad_buffer.py: start_grad_sync; distributed_data_parallel.py: zero_grad_buffer).
    Here all are in one place behind the reductions; the first two come before them there.
    """
    num_bytes = sum(bucket.padded for bucket in stage.all_buckets)
    num_bytes *= plan.gradient_dtype.itemsize
    settings = plan.settings
    averages = settings.ddp_average_in_collective or settings.calculate_per_token_loss
    planes = {"gradient_check": 1, "gradient_scale": 2, "gradient_zero": 1}
    if averages or plan.size("dp_cp") == 1:
        del planes["gradient_scale"]
    if plan.job.dtype is DType.FP16:  # the scaler of the loss looks for overflows instead
        del planes["gradient_check"]
    for name, count in planes.items():
        yield ComputeOp(
            op=memory_kernel(name, count * num_bytes), phase=Phase.OPTIM, module="gradients"
        )


def update(plan: Plan, stage: StageParams) -> list[Item]:
    """Return ChainedOptimizer.step: optimizers of dense parameters and, with ep, of experts.

    A stage without experts has an optimizer of none, since all ranks have the same groups of
    parameters (core/optimizer/__init__.py, _get_param_groups).
    """
    sharded = plan.settings.use_distributed_optimizer
    has_experts = plan.model.num_moe_layers and plan.job.parallel.ep > 1
    kinds = (False, True) if has_experts else (False,)
    norm_groups = ["expt_tp_pp" if expert else "mp" for expert in kinds]
    if sharded:
        norm_groups = ["intra_dist_opt" for _ in kinds]
    ops: list[Item] = []
    scalar = scalar_sum(plan)
    buckets_of = {
        expert: [bucket for bucket in stage.all_buckets if bucket.expert is expert]
        for expert in kinds
    }
    counts = {
        expert: sum(own_count(plan, bucket) for bucket in own)
        for expert, own in buckets_of.items()
    }
    total = sum(counts.values())
    gradient_size = plan.gradient_dtype.itemsize
    # FusedAdam and the host's optimizer read gradients of any type.
    is_offloaded = plan.settings.optimizer_cpu_offload
    is_fused = adam_states.has_fused_weights(plan) or is_offloaded
    if gradient_size < _FP32 and not is_fused:
        ops += over_parameters("gradient_cast", total, gradient_size + _FP32)
        gradient_size = _FP32
    if plan.job.dtype is DType.FP16:
        ops += over_parameters("gradient_unscale", total, 2 * gradient_size)
        for group in norm_groups:
            ops += scalar(group=group, module="overflow", redop=RedOp.MAX)
    ops += over_parameters("gradient_norm", total, gradient_size)
    for group in dict.fromkeys(norm_groups):
        ops += scalar(group=group, module="gradient_norm")
    gathers = sharded and not plan.settings.overlap_param_gather
    for expert, own in buckets_of.items():
        count = counts[expert]
        if own:
            module = "optimizer.experts" if expert else "optimizer"
            if is_offloaded:
                ops += cpu_offload.update(plan, max(1, count), module)
            elif plan.settings.use_precision_aware_optimizer:
                ops += adam_states.update_kernels(plan, max(1, count), module)
            else:
                ops.append(adam_states.adam(max(1, count), module))
            if not is_fused:
                ops += model_copy(plan, count, module)
            narrow_counts = [size for bucket in own for size in bucket.narrow_counts]
            ops += narrow.weight_casts(plan, narrow_counts, _owners(expert))
        # Each optimizer gathers all buckets of the chunks, including the other's.
        for bucket in stage.all_buckets if gathers else ():
            ops += gather(plan, bucket)
    return ops


def own_count(plan: Plan, bucket: Bucket) -> int:
    """Return the parameters of a bucket that this rank updates, in fp32."""
    sharded = plan.settings.use_distributed_optimizer
    return bucket.padded // (plan.size(_owners(bucket.expert)) if sharded else 1)


def _owners(expert: bool) -> str:
    """Return the group over which the distributed optimizer divides parameters."""
    return "intra_expt_dp" if expert else "intra_dp_cp"


def model_copy(plan: Plan, count: int, module: str) -> tuple[ComputeOp, ...]:
    """Return the copy of updated fp32 weights to the model's."""
    size = plan.job.dtype.itemsize
    if size == _FP32:
        return ()
    return over_parameters("parameter_copy", count, _FP32 + size, module)


def over_parameters(
    name: str, count: int, num_bytes: int, module: str = "optimizer"
) -> tuple[ComputeOp, ...]:
    """Return a kernel over the parameters that this rank updates. num_bytes: of one of them."""
    op = memory_kernel(name, count * num_bytes)
    return (ComputeOp(op=op, phase=Phase.OPTIM, module=module),) if count else ()


def scalar_sum(plan: Plan) -> "partial[tuple[CommOp, ...]]":
    """Return the all-reduce of one fp32 number."""
    return partial(
        plan.comms, Collective.ALL_REDUCE, elements=1, phase=Phase.OPTIM, dtype=DType.FP32
    )
