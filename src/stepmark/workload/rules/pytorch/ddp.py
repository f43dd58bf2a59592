"""DistributedDataParallel: whole copies of a model, whose gradients are all-reduced in buckets.

torch 2.13.0: nn/parallel/distributed.py (_BucketCapacityConfig, _ddp_init_helper) and
torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size, rebuild_buckets,
mark_bucket_ready). A step that is described is a steady one: the first step reduces all
gradients in one bucket at its end, the second one has buckets in the order in which gradients
became ready. The first bucket holds 1 MiB only where no size is given.
"""

from dataclasses import dataclass, replace

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.ops import Phase
from stepmark.core.training import GradSync, Recompute
from stepmark.core.workload import Block, CommOp, ComputeOp, Item, Operation, Run, Workload
from stepmark.workload.architecture import AnyJob
from stepmark.workload.job import Comms
from stepmark.workload.rules.pytorch.chunk import Chunk, folded
from stepmark.workload.rules.pytorch.fsdp import said, setting
from stepmark.workload.rules.pytorch.fsdp_order import wait
from stepmark.workload.rules.pytorch.params import ready_order
from stepmark.workload.rules.pytorch.step import SOURCE, Rule, Technique, build
from stepmark.workload.rules.pytorch.units import groups_of
from stepmark.workload.units import Param, Unit

MIB = 2**20
_FIRST, _DEFAULT_MB = MIB, 25
_BUFFER_BYTES = 250 * MIB  # of the broadcast of parameters
_STREAM, _BUCKET, _READY = "dp", "bucket", "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """DistributedDataParallel's settings by their own names, and how a step runs."""

    param_dtype: DType = setting(DType.FP32, "type of weights, and so of gradients")
    autocast: bool = setting(True, "products in bf16 though weights are fp32")
    masters: bool = setting(False, "fp32 weights for the optimizer beside the model's")
    compress_bf16: bool = setting(False, "bf16_compress_hook: gradients travel as bf16")
    bucket_cap_mb: int = setting(0, "MiB of a bucket; 0: 25 after a first one of 1")
    init_sync: bool = setting(True, "rank 0's weights are broadcast at the start")
    grad_sync: GradSync = setting(GradSync.EVERY, "reduce with every micro-batch or the last")
    clip: bool = setting(True, "gradients are clipped by their norm")
    recompute: Recompute = setting(Recompute.NONE, "activation checkpointing: none, full, ...")
    recompute_some: int = setting(1, "checkpointed blocks, with blocks")
    recompute_every: int = setting(1, "of so many, with blocks")

    def __post_init__(self) -> None:
        if self.bucket_cap_mb < 0:
            raise ConfigError("bucket_cap_mb", self.bucket_cap_mb, "0 or more")

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

    technique = Technique(
        weights=DType.FP32 if settings.masters else settings.param_dtype,
        model_weights=settings.param_dtype,
        holds=settings.grad_sync is GradSync.LAST,
        clips=settings.clip,
        recompute=settings.recompute,
        recompute_blocks=(settings.recompute_some, settings.recompute_every),
        buckets=reducing,
    )
    source = f"{SOURCE}, torch/nn/parallel/distributed.py, c10d/reducer.cpp"
    rule = Rule(name="ddp", source=source, settings=said(settings))
    return build(job, technique, rule)


class Reducing:
    """A backward pass in which each bucket is reduced once its last gradient is there."""

    def __init__(self, chunk: Chunk, settings: Ddp, comms: Comms) -> None:
        self._chunk, self._settings, self._comms = chunk, settings, comms

    def __call__(self) -> Block:
        chunk = self._chunk
        layers = [(one.unit, one.index, one.is_checkpointed) for one in chunk.layers]
        ends = [[(one, None, False)] if one else [] for one in (chunk.output, chunk.embedding)]
        units = [*ends[0], *layers[::-1], *ends[1]]
        full = self._full([unit for unit, _, _ in units])
        segments: list[tuple[Block, int]] = []
        for number, (unit, layer, is_checkpointed) in enumerate(units):
            items: list[Item] = [Run(block=f"{unit.name}.again")] if is_checkpointed else []
            body, done = unit.bwd[0], 0
            for param, elements in full.get(number, ()):
                place = max(done, _ready_at(body, param))
                items += body[done:place]
                if items and isinstance(items[-1], ComputeOp):
                    items[-1] = replace(items[-1], name=_READY)
                items += self._reduced(elements, unit, layer)
                done = place
            whole = Run(block=f"{unit.name}.bwd")
            items += body[done:] if done else (whole,)
            segments.append((tuple(items), layer or 0))
        segments.append(((wait((_BUCKET,), Phase.BWD),), 0))
        return folded(segments, chunk.blocks, "bwd")

    def _full(self, units: list[Unit]) -> dict[int, list[tuple[Param, int]]]:
        """By number of a unit the parameters that complete a bucket, and its elements."""
        found: dict[int, list[tuple[Param, int]]] = {}
        limit, following = self._settings.limits
        elements = 0
        last: tuple[int, Param] | None = None
        for number, unit in enumerate(units):
            for param in ready_order(unit.params, autocast=self._settings.autocast):
                elements += param.numel
                last = number, param
                if elements * self._settings.param_dtype.itemsize >= limit:
                    found.setdefault(number, []).append((param, elements))
                    elements, limit = 0, following
        if elements and last:
            found.setdefault(last[0], []).append((last[1], elements))
        return found

    def _reduced(self, elements: int, unit: Unit, layer: int | None) -> tuple[CommOp, ...]:
        settings = self._settings
        return self._comms(
            Collective.ALL_REDUCE,
            elements,
            "ddp",
            phase=Phase.BWD,
            module=unit.name,
            dtype=DType.BF16 if settings.compress_bf16 else settings.param_dtype,
            layer=None if layer is None else 0,
            microbatch=0,
            stream=_STREAM,
            name=_BUCKET,
            after=(_READY,),
        )


def _ready_at(body: tuple[Operation, ...], param: Param) -> int:
    """Behind the last operation of the parameter's module."""
    places = [at for at, one in enumerate(body, 1) if one.module == param.part]
    return places[-1] if places else len(body)
