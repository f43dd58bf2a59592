"""Prepare a model for training, in this order: FP8, TP, CP, recomputation, compile, DP."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, DataParallel, Precision, Recompute
from stepmark.training import model_parallel, precision
from stepmark.training.model_parallel import Meshes
from stepmark.training.transformer import Transformer, init_weights, tie

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelized:
    """A model on this rank's device.

    hold_gradients is the context of a micro-step whose gradients are not reduced yet.
    """

    model: Transformer
    call: nn.Module  # the model, compiled and wrapped
    hold_gradients: Context


def parallelize(
    case: TrainCase, meshes: Meshes, device: torch.device, stage: int = 0
) -> Parallelized:
    """Build this pipeline stage of the model on `device`."""
    with torch.device("meta"), _default_dtype(precision.WEIGHTS[case.precision]):
        model = Transformer(
            case.model,
            layers=case.stage_layers[stage],
            has_embedding=stage == 0,
            has_output=stage == case.num_stages - 1,
            attention=case.attention,
            loss_chunks=case.loss_chunks,
        )
        precision.apply_fp8(model, case)
    if (mesh := meshes.axis("tp")) is not None:
        model_parallel.apply_tensor(model, case, mesh)
    if (mesh := meshes.axis("cp")) is not None:
        model_parallel.apply_context(model, mesh)
    if case.parallel.ep > 1:
        model_parallel.apply_experts(model, meshes)
    _checkpoint(model.blocks, case)
    call: nn.Module = model
    match case.compile:
        case CompileScope.BLOCK | CompileScope.LAYERS | CompileScope.LOSS:
            _compile_parts(model, case)
        case CompileScope.MODEL if case.data_parallel is not DataParallel.FSDP:
            call = _compiled(model, case)
    match case.data_parallel:
        case DataParallel.NONE:
            _materialize(model, case, device)
            return Parallelized(model=model, call=call, hold_gradients=contextlib.nullcontext)
        case DataParallel.DDP:
            _materialize(model, case, device)
            wrapped = _ddp(call, case, meshes, device)
            return Parallelized(model=model, call=wrapped, hold_gradients=wrapped.no_sync)
        case DataParallel.FSDP:
            _fsdp(model, case, meshes)
            _materialize(model, case, device)
            if case.compile is CompileScope.MODEL:
                call = _compiled(model, case)
            return Parallelized(
                model=model, call=call, hold_gradients=lambda: _fsdp_holds(model)
            )


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _materialize(model: Transformer, case: TrainCase, device: torch.device) -> None:
    model.to_empty(device=device)
    tie(model)
    init_weights(model, case.seed)


def _compile_parts(model: Transformer, case: TrainCase) -> None:
    """Compile blocks, which share one graph, so that it takes the time of one; and the head."""
    for blocks in (model.blocks, model.mtp) if case.compile.has_blocks else ():
        for name, block in list(blocks.items()):
            blocks[name] = _compiled(block, case)
    if model.output is None or not case.compile.has_head:
        return
    if case.loss_chunks > 1:
        model.output.compile(**_how(case))
    else:
        model.output = _compiled(model.output, case)


def _compiled(module: nn.Module, case: TrainCase) -> Any:
    return torch.compile(module, **_how(case))


def _how(case: TrainCase) -> dict[str, Any]:
    mode = None if case.compile_mode == "default" else case.compile_mode
    return {"mode": mode, "dynamic": False}


def _ddp(
    call: nn.Module, case: TrainCase, meshes: Meshes, device: torch.device
) -> DistributedDataParallel:
    ids = [device.index] if device.type == "cuda" else None
    with warnings.catch_warnings():
        # torch 2.13 has two flags for it, torch 2.11 only this one.
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
        wrapped = DistributedDataParallel(
            call,
            device_ids=ids,
            process_group=meshes.replicas(),
            gradient_as_bucket_view=case.bucket_view,
            bucket_cap_mb=None if case.small_first_bucket else case.bucket_mb,
            init_sync=False,  # every rank has initialized the same weights and tables
            broadcast_buffers=False,
        )
    if case.reduce_dtype != "fp32" and case.precision in (Precision.AMP, Precision.FP32):
        wrapped.register_comm_hook(meshes.replicas(), bf16_compress_hook)
    return wrapped


def _fsdp(model: Transformer, case: TrainCase, meshes: Meshes) -> None:
    """Shard in groups: embedding, every blocks_per_group blocks, output; tied tables as one."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if case.precision is Precision.AMP else None,
        reduce_dtype=precision.REDUCED[case.reduce_dtype],
        cast_forward_inputs=False,  # the rotary tables stay fp32
    )
    reshard: bool | int = {"yes": True, "no": False}.get(case.reshard) or (
        int(case.reshard) if case.reshard.isdecimal() else False
    )
    options: dict[str, Any] = {"mesh": meshes.data(), "mp_policy": policy}
    blocks = [*model.blocks.values(), *model.mtp.values()]
    if case.parallel.ep > 1:
        model_parallel.shard_experts(
            model, case, meshes, mp_policy=policy, reshard_after_forward=reshard
        )
    groups: list[Any] = []
    embedding = model.embedding
    output = model.output
    if embedding is not None and output is not None and case.model.tied_embeddings:
        fully_shard([embedding, output], reshard_after_forward=False, **options)
    elif embedding is not None:
        table: Any = fully_shard(embedding, reshard_after_forward=reshard, **options)
        if not case.embedding_in_backward:
            table.set_unshard_in_backward(False)
    for first in range(0, len(blocks), case.blocks_per_group):
        group = blocks[first : first + case.blocks_per_group]
        fully_shard(
            group[0] if len(group) == 1 else group,
            reshard_after_forward=reshard,
            shard_placement_fn=model_parallel.shard_placement(group, case),
            **options,
        )
        groups.append(group[0])
    if output is not None and not case.model.tied_embeddings:
        # Its backward pass comes first, so resharding would be undone at once.
        fully_shard(output, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    _prefetch(groups, case.prefetch)


def _prefetch(groups: list[FSDPModule], ahead: int) -> None:
    """Set how many groups are gathered ahead; torch's own default is one."""
    if ahead <= 1:
        return
    for index, group in enumerate(groups):
        if following := groups[index + 1 : index + 1 + ahead]:
            group.set_modules_to_forward_prefetch(following)
        if before := groups[max(0, index - ahead) : index][::-1]:
            group.set_modules_to_backward_prefetch(before)


@contextlib.contextmanager
def _fsdp_holds(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


_PRODUCTS = ("mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")


def _checkpoint(blocks: nn.ModuleDict, case: TrainCase) -> None:
    """Wrap the blocks that case.is_checkpointed names, in place."""
    for name, block in list(blocks.items()):
        if not case.is_checkpointed[int(name)]:
            continue
        options: dict[str, Any] = (
            {"context_fn": _selective} if case.recompute is Recompute.OPS else {}
        )
        blocks[name] = checkpoint_wrapper(block, preserve_rng_state=False, **options)


def _selective() -> Any:
    """Return contexts that save attention, communication and every second product.

    This is the policy of torchtitan's selective checkpointing: save the results that are most
    expensive per byte.
    """
    counts = {False: 0, True: 0}  # products in the forward pass and in its repetition

    def policy(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name, _, overload = str(op).partition(".")[2].partition(".")
        namespace = str(op).partition(".")[0]
        keep = namespace in ("c10d", "_c10d_functional") or "attention" in name
        if name in _PRODUCTS and overload in ("default", ""):
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
