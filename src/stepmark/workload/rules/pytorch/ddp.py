"""DistributedDataParallel: whole copies of a model, whose gradients are all-reduced in buckets.

torch 2.13.0: nn/parallel/distributed.py (_BucketCapacityConfig, _ddp_init_helper) and
torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size, rebuild_buckets,
mark_bucket_ready). A step that is described is a steady one: the first step reduces all
gradients in one bucket at its end, the second one has buckets in the order in which gradients
became ready. With find_unused_parameters they stay in the order of the modules, and which
ones were used is reduced as well. The first bucket holds 1 MiB only where no size is given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.module import Param
from stepmark.core.ops import Phase
from stepmark.core.training import GradSync, Recompute
from stepmark.core.workload import DDP, Block, ComputeOp, Item, Kernel, Run, Workload
from stepmark.workload.architecture import AnyJob, Unit
from stepmark.workload.job import Comms, not_below, setting
from stepmark.workload.pipeline import wait
from stepmark.workload.rules.pytorch.chunk import Chunk, folded
from stepmark.workload.rules.pytorch.step import SOURCE, build
from stepmark.workload.rules.pytorch.technique import ahead, checked, technique
from stepmark.workload.rules.pytorch.units import groups_of


def closed(sizes: Sequence[int], itemsize: int, limits: tuple[int, ...]) -> Iterator[list[int]]:
    """Places of tensors by bucket: each is closed by the tensor that reaches its limit.

    limits: of the first ones in bytes; the last stands for all others
    (compute_bucket_assignment_by_size).
    """
    bucket: list[int] = []
    held, closed = 0, 0
    for at, size in enumerate(sizes):
        bucket.append(at)
        held += size * itemsize
        if held >= limits[min(closed, len(limits) - 1)]:
            yield bucket
            bucket, held = [], 0
            closed += 1
    if bucket:
        yield bucket


def filled(
    params: Sequence[Param], itemsize: int, limits: tuple[int, ...]
) -> Iterator[list[Param]]:
    for bucket in closed([one.numel for one in params], itemsize, limits):
        yield [params[at] for at in bucket]


Placed = tuple[int, Param]  # number of its unit


def completed(
    ready: Sequence[Placed], buckets: Sequence[Sequence[Placed]]
) -> dict[int, list[tuple[Param, int]]]:
    """Which gradient, ready in this order, lets which buckets go."""
    place = {(number, one.name): at for at, (number, one) in enumerate(ready)}
    found: dict[int, list[tuple[Param, int]]] = {}
    latest = -1
    for bucket in buckets:
        latest = max(latest, *(place[number, one.name] for number, one in bucket))
        number, param = ready[latest]
        elements = sum(one.numel for _, one in bucket)
        found.setdefault(number, []).append((param, elements))
    return found


def ready_order(params: tuple[Param, ...], *, autocast: bool) -> tuple[Param, ...]:
    """Parameters as their gradients become ready, the last module's first.

    Nodes of autograd run newest first; of one node's parameters the order is that of
    torch 2.13: bias before weight of a linear layer, weight before bias of a norm, and the
    other way round under autocast, whose casts are nodes of their own.
    """
    by_module: dict[str, list[Param]] = {}
    for one in params:
        if one.is_trained:
            by_module.setdefault(one.name.rpartition(".")[0], []).append(one)
    found: list[Param] = []
    for members in reversed(by_module.values()):
        in_order = members[0].is_norm is not autocast and not members[0].is_expert
        found += members if in_order else reversed(members)
    return tuple(found)


MIB = 2**20
_FIRST, _DEFAULT_MB = MIB, 25
_BUFFER_BYTES = 250 * MIB  # of the broadcast of parameters
_BUCKET, _READY = "bucket", "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """DistributedDataParallel's settings by their own names, and how a step runs."""

    param_dtype: DType = setting(DType.FP32, "dtype of weights and gradients")
    autocast: bool = setting(True, "bf16 products with fp32 weights")
    masters: bool = setting(False, "keep fp32 master weights for the optimizer")
    compress_bf16: bool = setting(False, "send gradients in bf16 (bf16_compress_hook)")
    bucket_cap_mb: int = setting(0, "MiB per gradient bucket; 0: 25, the first one 1")
    find_unused_parameters: bool = setting(False, "reduce which parameters were used as well")
    gradient_as_bucket_view: bool = setting(False, "gradients are views of buckets")
    init_sync: bool = setting(True, "broadcast rank 0's weights at the start")
    grad_sync: GradSync = setting(GradSync.EVERY, "reduce every micro-batch or the last one")
    clip: bool = setting(True, "clip gradients by their norm")
    recompute: Recompute = setting(Recompute.NONE, "checkpointing: none, full, blocks or ops")
    recompute_some: int = setting(1, "with blocks: checkpointed blocks in each cycle")
    recompute_every: int = setting(1, "with blocks: blocks per cycle")

    def __post_init__(self) -> None:
        not_below(self, 0, "bucket_cap_mb")
        checked(self)

    @property
    def limits(self) -> tuple[int, int]:
        """Bytes of the first bucket and of the others."""
        if self.bucket_cap_mb == 0:
            return _FIRST, _DEFAULT_MB * MIB
        return self.bucket_cap_mb * MIB, self.bucket_cap_mb * MIB


def workload(job: AnyJob, settings: Ddp) -> Workload:
    """A steady step; the start as setup. Raises ConfigError."""
    for name in ("tp", "pp", "ep"):
        if getattr(job.parallel, name) > 1:
            raise ConfigError(name, getattr(job.parallel, name), "1, or the fsdp rule")
    comms = Comms(groups=groups_of(job), dtype=job.dtype)

    def reducing(chunk: Chunk) -> "Reducing":
        return Reducing(chunk, settings, comms)

    how = technique(
        settings,
        holds=settings.grad_sync is GradSync.LAST,
        buckets=reducing,
        setup=(lambda chunk: reducing(chunk).setup()) if settings.init_sync else None,
    )
    source = f"{SOURCE}, torch/nn/parallel/distributed.py, c10d/reducer.cpp"
    return build(job, how, "ddp", source, settings)


class Reducing:
    """A backward pass in which each bucket is reduced once its last gradient is there."""

    def __init__(self, chunk: Chunk, settings: Ddp, comms: Comms) -> None:
        self._chunk, self._settings, self._comms = chunk, settings, comms

    @property
    def _units(self) -> list[tuple[Unit, int | None, bool]]:
        """In the order of the forward pass, with layer and whether it is checkpointed."""
        chunk = self._chunk
        layers = [(one.unit, one.index, one.is_checkpointed) for one in chunk.layers]
        first, last = (
            [(one, None, False)] if one else [] for one in (chunk.embedding, chunk.output)
        )
        return [*first, *layers, *last]

    def __call__(self) -> Block:
        full = self._full()
        segments: list[tuple[Block, int]] = []
        for number, (unit, layer, is_checkpointed) in reversed(list(enumerate(self._units))):
            items: list[Item] = [Run(block=f"{unit.name}.again")] if is_checkpointed else []
            early = ahead(unit) if is_checkpointed else 0
            body, done = unit.bwd[0], early
            for param, elements in full.get(number, ()):
                # Behind the last operation of the parameter's module.
                ends = [at for at, one in enumerate(body, 1) if one.module == param.part]
                place = max(done, ends[-1] if ends else len(body))
                items += body[done:place]
                items += self._reduced(elements, unit, layer)
                done = place
            whole = Run(block=f"{unit.name}.rest" if is_checkpointed else f"{unit.name}.bwd")
            items += body[done:] if done > early else (whole,)
            segments.append((tuple(items), layer or 0))
        segments.append((tuple(self._end()), 0))
        return folded(segments, self._chunk.blocks, "bwd")

    def setup(self) -> Block:
        """Shapes are compared with rank 0's, whose weights are broadcast.

        torch/csrc/distributed/c10d/reducer.cpp: verify_params_across_processes;
        torch/distributed/utils.py: _sync_module_states. Buffers are left out.
        """
        params = [one for unit, _, _ in self._units for one in unit.params]
        ranks = self._comms.groups["ddp"].size
        shapes = sum(2 * len(one.shape) for one in params if one.is_trained)  # and strides
        sent = [(Collective.ALL_GATHER, ranks, DType.INT64)]
        sent.append((Collective.BROADCAST, shapes, DType.INT64))
        dtype = self._settings.param_dtype
        for bucket in filled(params, dtype.itemsize, (_BUFFER_BYTES,)):
            elements = sum(one.numel for one in bucket)
            sent.append((Collective.BROADCAST, elements, dtype))
        return tuple(
            replace(made, root=0) if kind is Collective.BROADCAST else made
            for kind, elements, one in sent
            for made in self._comms(kind, elements, "ddp", Phase.OPTIM, "parameters", one)
        )

    def _full(self) -> dict[int, list[tuple[Param, int]]]:
        """By number of a unit the parameters that complete a bucket, and its elements.

        A bucket is reduced when the ones before it are.
        """
        units = [unit for unit, _, _ in self._units]
        ready = [
            (number, one)
            for number, unit in reversed(list(enumerate(units)))
            for one in ready_order(unit.params, autocast=self._settings.autocast)
        ]
        order = ready
        if self._settings.find_unused_parameters:  # buckets are not made anew
            order = [
                (number, one)
                for number, unit in enumerate(units)
                for one in unit.params
                if one.is_trained
            ]
        size = self._settings.param_dtype.itemsize
        sizes = [one.numel for _, one in order]
        buckets = [
            [order[at] for at in bucket]
            for bucket in closed(sizes, size, self._settings.limits)
        ]
        if self._settings.find_unused_parameters:
            buckets.reverse()
        return completed(ready, buckets)

    def _reduced(self, elements: int, unit: Unit, layer: int | None) -> tuple[Item, ...]:
        """Gradients are divided by the ranks on their way into the bucket."""
        settings = self._settings
        wire = DType.BF16 if settings.compress_bf16 else settings.param_dtype
        where: dict[str, Any] = {
            "module": unit.name,
            "layer": None if layer is None else 0,
            "microbatch": 0,
        }
        made = self._comms(
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
        if not made:
            return ()
        moved = elements * (settings.param_dtype.itemsize + wire.itemsize)
        scale = Kernel(name="bucket_scale", flops=elements, bytes_moved=moved)
        return (ComputeOp(op=scale, phase=Phase.BWD, name=_READY, **where), *made)

    def _end(self) -> Iterator[Item]:
        """finalize_backward: all buckets are waited for, and copied where they are no views."""
        settings = self._settings
        params = [one for unit, _, _ in self._units for one in unit.params if one.is_trained]
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
            read = 2 if settings.compress_bf16 else settings.param_dtype.itemsize
            elements = sum(one.numel for one in params)
            moved = elements * (read + settings.param_dtype.itemsize)
            copy = Kernel(name="bucket_copy_out", flops=0, bytes_moved=moved)
            yield ComputeOp(op=copy, phase=Phase.BWD, module="gradients", microbatch=0)
