"""DistributedDataParallel: model replicas whose gradients are all-reduced in buckets.

torch 2.13.0: nn/parallel/distributed.py (_BucketCapacityConfig, _ddp_init_helper) and
torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size, rebuild_buckets,
mark_bucket_ready). The step is a steady one: the first step reduces all gradients in one
bucket at its end, the second one has buckets in the order in which gradients became ready.
With find_unused_parameters buckets stay in the order of the modules, and the set of used
parameters is reduced as well. The first bucket has 1 MiB only if no size is given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stepmark.ground.dtypes import DType
from stepmark.ground.units import MIB
from stepmark.model.collectives import Collective
from stepmark.model.ops import Phase
from stepmark.step.module import Param
from stepmark.step.workload import (
    DDP,
    Block,
    CommOp,
    ComputeOp,
    Item,
    Kernel,
    Operation,
    Run,
)
from stepmark.workloads.architecture import Unit
from stepmark.workloads.job import Comms
from stepmark.workloads.pipeline import wait
from stepmark.workloads.rules.pytorch.chunk import Chunk, folded
from stepmark.workloads.rules.pytorch.settings import PyTorch
from stepmark.workloads.rules.pytorch.technique import before_recompute


def assign_buckets(
    sizes: Sequence[int], itemsize: int, limits: tuple[int, ...]
) -> Iterator[list[int]]:
    """Yield the indices of each bucket's tensors; the one that reaches the limit is the last.

    limits: bytes of the first buckets; the last limit applies to all others
    (compute_bucket_assignment_by_size).
    """
    bucket: list[int] = []
    num_bytes = 0
    count = 0
    for index, size in enumerate(sizes):
        bucket.append(index)
        num_bytes += size * itemsize
        if num_bytes >= limits[min(count, len(limits) - 1)]:
            yield bucket
            bucket = []
            num_bytes = 0
            count += 1
    if bucket:
        yield bucket


Placed = tuple[int, Param]  # number of its unit


def completed_buckets(
    ready: Sequence[Placed], buckets: Sequence[Sequence[Placed]]
) -> dict[int, list[tuple[Param, int]]]:
    """Return by unit the gradients that complete buckets, and the sizes of these buckets."""
    place = {(number, param.name): index for index, (number, param) in enumerate(ready)}
    completions: dict[int, list[tuple[Param, int]]] = {}
    latest = -1
    for bucket in buckets:
        latest = max(latest, *(place[number, param.name] for number, param in bucket))
        number, param = ready[latest]
        elements = sum(param.numel for _, param in bucket)
        completions.setdefault(number, []).append((param, elements))
    return completions


def ready_order(params: tuple[Param, ...], *, autocast: bool) -> tuple[Param, ...]:
    """Return parameters in the order in which their gradients become ready.

    Autograd runs the newest node first; the order of one node's parameters is that of torch
    2.13: bias before weight of a linear layer, weight before bias of a norm, and the reverse
    under autocast, whose casts are nodes themselves.
    """
    by_module: dict[str, list[Param]] = {}
    for param in params:
        if param.is_trained:
            by_module.setdefault(param.name.rpartition(".")[0], []).append(param)
    order: list[Param] = []
    for members in reversed(by_module.values()):
        in_order = members[0].is_norm is not autocast and not members[0].is_expert
        order += members if in_order else reversed(members)
    return tuple(order)


_BUFFER_BYTES = 250 * MIB  # of the broadcast of parameters
_BUCKET = "bucket"
_READY = "ready"
_SCALE = "bucket_scale"
_COPY_OUT = "bucket_copy_out"


def is_of_reducer(op: Operation) -> bool:
    """Return whether the reducer issues an operation as a bucket becomes full."""
    if isinstance(op, CommOp):
        return op.stream == DDP
    return isinstance(op.op, Kernel) and op.op.name in (_SCALE, _COPY_OUT)


class Reducer:
    """Passes of a chunk whose gradients are reduced in buckets as they become ready."""

    def __init__(self, chunk: Chunk, settings: PyTorch, comms: Comms) -> None:
        self._chunk = chunk
        self._settings = settings
        self._comms = comms
        layers = [(layer.unit, layer.index, layer.is_checkpointed) for layer in chunk.layers]
        first, last = (
            [(unit, None, False)] if unit else [] for unit in (chunk.embedding, chunk.output)
        )
        # In forward order, with the layer and whether it is checkpointed.
        self._units: list[tuple[Unit, int | None, bool]] = [*first, *layers, *last]
        self._params = [param for unit, _, _ in self._units for param in unit.params]
        self._casts = settings.autocast and settings.model_weights is not comms.dtype

    def backward(self) -> Block:
        full = self._full_buckets()
        segments: list[tuple[Block, int]] = []
        for number, (unit, layer, is_checkpointed) in reversed(list(enumerate(self._units))):
            items: list[Item] = [Run(block=f"{unit.name}.again")] if is_checkpointed else []
            body = unit.bwd[0]
            if not body:
                continue
            skipped = before_recompute(unit) if is_checkpointed else 0
            done = skipped
            for param, elements in full.get(number, ()):
                # After the last operation of the parameter's module.
                ends = [index for index, op in enumerate(body, 1) if op.module == param.part]
                place = max(done, ends[-1] if ends else len(body))
                items += body[done:place]
                items += self._reduced(elements, unit, layer)
                done = place
            run = Run(block=f"{unit.name}.rest" if is_checkpointed else f"{unit.name}.bwd")
            items += body[done:] if done > skipped else (run,)
            segments.append((tuple(items), layer or 0))
        segments.append((tuple(self._end()), 0))
        return folded(segments, self._chunk.blocks, "bwd")

    def setup(self) -> Block:
        """Return the comparison of shapes with rank 0's, and the broadcast of its weights.

        torch/csrc/distributed/c10d/reducer.cpp: verify_params_across_processes;
        torch/distributed/utils.py: _sync_module_states. Buffers are left out.
        """
        if not self._settings.init_sync:
            return ()
        ranks = self._comms.groups["ddp"].size
        # Shapes and strides.
        shapes = sum(2 * len(param.shape) for param in self._params if param.is_trained)
        sizes = [param.numel for param in self._params]
        dtype = self._settings.model_weights
        messages = [
            (Collective.ALL_GATHER, ranks, DType.INT64),
            (Collective.BROADCAST, shapes, DType.INT64),
            *(
                (Collective.BROADCAST, sum(sizes[index] for index in bucket), dtype)
                for bucket in assign_buckets(sizes, dtype.itemsize, (_BUFFER_BYTES,))
            ),
        ]
        return tuple(
            replace(op, root=0) if kind is Collective.BROADCAST else op
            for kind, elements, wire in messages
            for op in self._comms(kind, elements, "ddp", Phase.OPTIM, "parameters", wire)
        )

    def _full_buckets(self) -> dict[int, list[tuple[Param, int]]]:
        """Return by unit the parameters that complete a bucket, and its elements.

        A bucket is reduced after the ones before it.
        """
        units = [unit for unit, _, _ in self._units]
        ready = [
            (number, param)
            for number, unit in reversed(list(enumerate(units)))
            for param in ready_order(unit.params, autocast=self._casts)
        ]
        order = ready
        if self._settings.find_unused_parameters:  # buckets are not rebuilt
            order = [
                (number, param)
                for number, unit in enumerate(units)
                for param in unit.params
                if param.is_trained
            ]
        size = self._settings.model_weights.itemsize
        sizes = [param.numel for _, param in order]
        buckets = [
            [order[index] for index in bucket]
            for bucket in assign_buckets(sizes, size, self._settings.bucket_limits)
        ]
        if self._settings.find_unused_parameters:
            buckets.reverse()
        return completed_buckets(ready, buckets)

    def _reduced(self, elements: int, unit: Unit, layer: int | None) -> tuple[Item, ...]:
        """Return a bucket's reduction, before which its gradients are divided by the ranks."""
        settings = self._settings
        wire = DType.BF16 if settings.compress_bf16 else settings.model_weights
        where: dict[str, Any] = {
            "module": unit.name,
            "layer": None if layer is None else 0,
            "microbatch": 0,
        }
        ops = self._comms(
            Collective.ALL_REDUCE,
            elements,
            "ddp",
            phase=Phase.BWD,
            dtype=wire,
            stream=DDP,
            name=_BUCKET,
            after=(_READY,),
            **where,
        )
        if not ops:
            return ()
        num_bytes = elements * (settings.model_weights.itemsize + wire.itemsize)
        scale = Kernel(name=_SCALE, flops=elements, bytes_moved=num_bytes)
        return (ComputeOp(op=scale, phase=Phase.BWD, name=_READY, **where), *ops)

    def _end(self) -> Iterator[Item]:
        """Yield finalize_backward: the wait for all buckets, copies where they are no views."""
        settings = self._settings
        params = [param for param in self._params if param.is_trained]
        if self._comms.groups["ddp"].size == 1:
            return
        if settings.find_unused_parameters:
            yield from self._comms(
                Collective.ALL_REDUCE,
                len(params),
                "ddp",
                Phase.BWD,
                "used",
                DType.INT32,
                microbatch=0,
                stream=DDP,
                name=_BUCKET,
            )
        yield wait((_BUCKET,), Phase.BWD)
        if settings.compress_bf16 or not settings.gradient_as_bucket_view:
            read = 2 if settings.compress_bf16 else settings.model_weights.itemsize
            elements = sum(param.numel for param in params)
            num_bytes = elements * (read + settings.model_weights.itemsize)
            copy = Kernel(name=_COPY_OUT, flops=0, bytes_moved=num_bytes)
            yield ComputeOp(op=copy, phase=Phase.BWD, module="gradients", microbatch=0)
