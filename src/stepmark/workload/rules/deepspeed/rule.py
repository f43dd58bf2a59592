"""A decoder trained with DeepSpeed's ZeRO: stage 0, 1, 2 or 3 over all data ranks.

DeepSpeed 0.19.8, deepspeed/runtime: engine.py (_broadcast_model, allreduce_gradients,
_do_optimizer_sanity_check), zero/stage_1_and_2.py and zero/stage3.py (step, hooks of
gradients), bf16_optimizer.py, zero/config.py (names and defaults). modules says in
which order modules run, buckets when gradients go, zero3 what stage 3
gathers, tape how passes become blocks. Every message of runs of that version on two
and three ranks (CPU, gloo) is one of these, in this order: tests/data/deepspeed.

Parameters are one group of the optimizer, in the order of registration. A collective of a
module's hook comes after all computation of that module. Over 250 lines because of the
settings.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from stepmark.core.collectives import Collective, RedOp
from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.ops import Optimizer, Phase
from stepmark.core.workload import CommOp, ComputeOp, Item, Operation, Stage, Workload
from stepmark.workload.job import Comms, Job, mesh_groups
from stepmark.workload.rules.deepspeed import modules
from stepmark.workload.rules.deepspeed.buckets import Bucket, Message, all_reduced, shares
from stepmark.workload.rules.deepspeed.modules import COMPUTE, GRADS
from stepmark.workload.rules.deepspeed.tape import Program, Tape, reduction
from stepmark.workload.rules.deepspeed.zero3 import Fetch, Limits, Pass, persistent, steady_step

SOURCE = "deepspeedai/DeepSpeed 0.19.8: deepspeed/runtime/engine.py, zero, bf16_optimizer.py"
_STAGE_0_BUCKET = 500_000_000  # MEMORY_OPT_ALLREDUCE_SIZE, engine.py; no setting changes it
_MOST = 2**63 - 1


class Switch(StrEnum):
    """auto: what DeepSpeed chooses by the stage."""

    AUTO = "auto"
    TRUE = "true"
    FALSE = "false"


def _setting(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed:
    """Settings under DeepSpeed's names, with its defaults. Sizes are elements."""

    stage: int = _setting(3, "what is divided: 0 nothing, 1 optimizer, 2 gradients, 3 weights")
    reduce_bucket_size: int = _setting(500_000_000, "gradients reduced at a time (stages 1-3)")
    allgather_bucket_size: int = _setting(
        500_000_000, "no effect: stages 1 and 2 gather all weights in one call"
    )
    overlap_comm: Switch = _setting(
        Switch.AUTO, "reduce beside the backward pass; auto: stage 3 alone"
    )
    reduce_scatter: bool = _setting(True, "false: gradients are all-reduced at stage 3 as well")
    contiguous_gradients: bool = _setting(True, "gradients copied into one buffer")
    use_multi_rank_bucket_allreduce: bool = _setting(
        True, "stages 1 and 2: all-reduce a bucket; false: reduce each slice to its owner"
    )
    round_robin_gradients: bool = _setting(False, "stages 1 and 2: parameters dealt to ranks")
    compute_grad_norm: bool = _setting(True, "false: stages 1 and 2 take no norm")
    gradient_clipping: float = _setting(1.0, "0: stage 0 in fp32 takes no norm")
    check_grad_overflow: bool = _setting(True, "bf16 at stages 1 and 2: look for infinities")
    grad_accum_dtype: str = _setting("", "fp32, bf16, fp16; empty: that of the weights")
    communication_data_type: str = _setting("", "of gradients; empty: that of the weights")
    sub_group_size: int = _setting(1_000_000_000, "stage 3: elements of a rank per norm")
    stage3_prefetch_bucket_size: int = _setting(50_000_000, "weights gathered ahead of use")
    stage3_param_persistence_threshold: int = _setting(
        100_000, "parameters up to this stay whole"
    )
    stage3_model_persistence_threshold: int = _setting(_MOST, "as many as these together")
    stage3_max_live_parameters: int = _setting(1_000_000_000, "no prefetch beyond these")
    stage3_max_reuse_distance: int = _setting(
        1_000_000_000, "weights used again within these are kept"
    )
    zero_init: bool = _setting(False, "stage 3: the model is built under deepspeed.zero.Init")

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3) or isinstance(self.stage, bool):
            raise ConfigError("stage", self.stage, "0, 1, 2 or 3")
        for name in _SIZES:
            value, low = getattr(self, name), name == "reduce_bucket_size"
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not low <= value <= _MOST:
                raise ConfigError(name, value, f"a whole number of {int(low)} or more")
        if not 0 <= self.gradient_clipping < float("inf"):
            raise ConfigError("gradient_clipping", self.gradient_clipping, "0 or more")
        if self.allgather_bucket_size % 2:
            raise ConfigError("allgather_bucket_size", self.allgather_bucket_size, "even")
        for name in ("grad_accum_dtype", "communication_data_type"):
            if getattr(self, name) not in ("", *_TRAINED):
                raise ConfigError(name, getattr(self, name), "fp32, bf16, fp16 or empty")
        if not self.compute_grad_norm and (self.stage not in (1, 2) or self.gradient_clipping):
            raise ConfigError(
                "compute_grad_norm", False, "stage 1 or 2 with gradient_clipping of 0"
            )

    @property
    def overlaps(self) -> bool:
        if self.overlap_comm is Switch.AUTO:
            return self.stage == 3
        return self.overlap_comm is Switch.TRUE

    @property
    def limits(self) -> Limits:
        return Limits(
            prefetch_bucket_size=self.stage3_prefetch_bucket_size,
            param_persistence_threshold=self.stage3_param_persistence_threshold,
            model_persistence_threshold=self.stage3_model_persistence_threshold,
            max_live_parameters=self.stage3_max_live_parameters,
            max_reuse_distance=self.stage3_max_reuse_distance,
        )


_TRAINED = (DType.FP32, DType.BF16, DType.FP16)
_SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)


def workload(job: Job, settings: DeepSpeed) -> Workload:
    """One step, the third or later one of a job. Raises ConfigError where DeepSpeed would."""
    plan = _Plan(job, settings)
    program = Program()
    ends = program.repeats([*plan.boundary(), *plan.optimizer_step()])
    program.blocks["step"] = (*plan.microbatches(program), *ends)
    setup = program.repeats(plan.setup())
    if setup:
        program.blocks["setup"] = setup
    stage = Stage(
        step="step",
        setup="setup" if setup else "",
        layers=tuple(range(job.model.num_layers)),
        has_embedding=True,
        has_head=True,
    )
    made = Workload(
        name=f"{job.model.name} deepspeed zero-{settings.stage}",
        rules="deepspeed",
        source=SOURCE,
        world_size=job.parallel.world_size,
        num_microbatches=job.num_microbatches,
        model=job.model,
        settings={name: _plain(value) for name, value in asdict(settings).items()},
        groups=plan.comms.groups,
        blocks=program.blocks,
        stages=(stage,),
        notes=tuple(plan.notes()),
    )
    made.check()
    return made


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, StrEnum) else value


class _Plan:
    """What a job and its settings come to."""

    def __init__(self, job: Job, settings: DeepSpeed) -> None:
        for axis in ("tp", "pp", "cp", "ep"):
            size = getattr(job.parallel, axis)
            if size != 1:
                raise ConfigError(axis, size, "1: DeepSpeed's ZeRO is data-parallel")
        self.dtype = DType.FP32 if job.dtype is DType.TF32 else job.dtype
        if self.dtype not in _TRAINED:
            raise ConfigError("dtype", job.dtype, "fp32, tf32, bf16 or fp16")
        self.job, self.settings = job, settings
        groups = mesh_groups(job.parallel, {"dp": ("dp_shard", "dp_replicate")})
        self.comms = Comms(groups=groups, dtype=self.dtype)
        self.ranks = job.parallel.data_ranks
        self.sent_dtype = DType(settings.communication_data_type or self.dtype)
        self.accumulated = DType(settings.grad_accum_dtype or self.dtype)
        self._check_accumulation()
        self.root, self.params = modules.modules_of(
            job.model, weights_first=settings.stage == 3 and settings.zero_init
        )
        self.parts = modules.parts_of(job)
        self.shares = shares(
            self.params, self.ranks, round_robin=settings.round_robin_gradients
        )

    def _check_accumulation(self) -> None:
        stage = self.settings.stage
        if stage == 0 and self.accumulated is not self.dtype:
            raise ConfigError(
                "grad_accum_dtype", self.accumulated, f"{self.dtype} at stage 0, or empty"
            )
        if self.flat and not self.settings.compute_grad_norm:
            raise ConfigError(
                "compute_grad_norm", False, "true at stage 1 with bf16 and fp32 accumulation"
            )

    @property
    def flat(self) -> bool:
        """Stage 1 is then BF16_Optimizer: all gradients in one buffer, one all-reduce."""
        is_mixed = self.dtype is DType.BF16 and self.accumulated is DType.FP32
        return self.settings.stage == 1 and is_mixed

    def microbatches(self, program: Program) -> Iterator[Item]:
        """Forward and backward passes, with what happens inside them."""
        times = self.job.num_microbatches
        if self.settings.stage == 3:
            passes = steady_step(
                self.root,
                self.params,
                self.settings.limits,
                ranks=self.ranks,
                num_microbatches=times,
            )
            tapes = [(self._record(one, reduces=True), count) for one, count in passes]
        else:
            events = (*modules.forward(self.root), *modules.backward(self.root))
            one = tuple((event, Fetch()) for event in events)
            reduces = self.settings.stage == 2
            tapes = [(self._record(one, reduces=reduces), times)]
            if self.settings.stage == 1 and self.settings.overlaps and not self.flat:
                last = (self._record(one, reduces=True), 1)
                tapes = [(tapes[0][0], times - 1), last] if times > 1 else [last]
        return program.microbatches(tapes)

    def _record(self, one: Pass, *, reduces: bool) -> Tape:
        """One micro-batch. reduces: hooks of gradients fill buckets."""
        tape = Tape(
            parts=self.parts,
            comms=self.comms,
            overlaps=self.settings.overlaps,
            holds=self.settings.stage < 3,
        )
        bucket = self._bucket()
        for (kind, module, phase), fetch in one:
            if fetch.gathers or fetch.needs is not None:
                tape.fetch(module, phase, fetch)
            if kind == COMPUTE:
                tape.compute(module, phase)
            elif kind == GRADS and reduces:
                for param in module.grads:
                    tape.reduce(module, bucket.ready(param), self.sent_dtype)
        tape.finish(bucket.flush(), self.sent_dtype)
        return tape

    def _bucket(self) -> Bucket:
        settings = self.settings
        return Bucket(
            size=settings.reduce_bucket_size,
            ranks=self.ranks,
            shares=None if settings.stage == 3 else self.shares,
            scatter=settings.reduce_scatter,
            contiguous=settings.contiguous_gradients,
            multi_rank=settings.use_multi_rank_bucket_allreduce,
        )

    def boundary(self) -> Iterator[Operation]:
        """Stages 0 and 1: what is reduced after the last backward pass of a step."""
        settings, sent = self.settings, list[Message]()
        if settings.stage == 0:
            sent += all_reduced(self.params, _STAGE_0_BUCKET)
        elif self.flat:
            sent.append(Message(collective=Collective.ALL_REDUCE, elements=self.shares.total))
        elif settings.stage == 1 and not settings.overlaps:
            bucket = self._bucket()
            for param in self.params:
                sent += bucket.ready(param)
            sent += bucket.flush()
        for message in sent:
            yield from reduction(self.comms, message, self.sent_dtype)

    def optimizer_step(self) -> Iterator[Operation]:
        """Infinities, norm, update, and weights made whole."""
        stage = self.settings.stage
        if stage == 0:
            if self.dtype is DType.FP32 and self.settings.gradient_clipping:
                yield from self._scalar("norm", DType.FP32, RedOp.SUM)
            yield self._update(sum(param.numel for param in self.params))
        elif stage == 3:
            yield from self._stage_3_step()
        else:
            checks = self.settings.check_grad_overflow and self.dtype is DType.BF16
            if (checks or self.dtype is DType.FP16) and not self.flat:
                yield from self._scalar("overflow", DType.UINT8, RedOp.MAX)
            if self.settings.compute_grad_norm and not self.flat:
                yield from self._scalar("norm", DType.FP32, RedOp.SUM)
            yield self._update(self.shares.share)
            yield from self._gathered(self.shares.total)

    def _stage_3_step(self) -> Iterator[Operation]:
        if self.dtype is DType.FP16:
            yield from self._scalar("overflow", DType.UINT8, RedOp.MAX)
        parts = [-(-param.numel // self.ranks) for param in self.params]
        held = 0
        for index, part in enumerate(parts):
            held += part
            if held >= self.settings.sub_group_size or index == len(parts) - 1:
                yield from self._scalar("norm", DType.FP64, RedOp.SUM)
                held = 0
        yield self._update(sum(parts))
        for param in persistent(self.params, self.settings.limits):
            yield from self._gathered(-(-param.numel // self.ranks) * self.ranks)

    def _scalar(self, module: str, dtype: DType, redop: RedOp) -> tuple[CommOp, ...]:
        return self.comms(
            Collective.ALL_REDUCE,
            1,
            "dp",
            phase=Phase.OPTIM,
            module=module,
            dtype=dtype,
            redop=redop,
        )

    def _update(self, num_params: int) -> ComputeOp:
        op = Optimizer(num_params=num_params, dtype=DType.FP32)
        return ComputeOp(op=op, phase=Phase.OPTIM, module="optimizer")

    def _gathered(
        self, elements: int, phase: Phase = Phase.OPTIM, module: str = "optimizer"
    ) -> tuple[CommOp, ...]:
        return self.comms(Collective.ALL_GATHER, elements, "dp", phase=phase, module=module)

    def setup(self) -> Iterator[Operation]:
        """deepspeed.initialize: weights of rank 0 to all, as bytes; stage 3 divides them."""
        rounds = 2 if self.settings.stage == 3 and not self.settings.zero_init else 1
        for _ in range(rounds):
            for param in self.params:
                for sent in self.comms(
                    Collective.BROADCAST,
                    param.numel * self.dtype.itemsize,
                    "dp",
                    phase=Phase.FWD,
                    module="setup",
                    dtype=DType.UINT8,
                ):
                    yield replace(sent, root=0)
        if self.settings.stage == 3:
            for _ in range(3):
                yield from self.comms(
                    Collective.BARRIER,
                    0,
                    "dp",
                    phase=Phase.FWD,
                    module="setup",
                    dtype=DType.UINT8,
                )
            for param in self.params:
                whole = -(-param.numel // self.ranks) * self.ranks
                yield from self._gathered(whole, Phase.FWD, "setup")

    def notes(self) -> Iterator[str]:
        family = "Llama" if self.job.model.activation == "swiglu" else "GPT-2"
        yield f"modules and parameters in the order of Hugging Face's {family}"
        if self.settings.stage == 3:
            yield (
                "the first micro-batch of a job, not shown, gathers the weights of each module"
                " by themselves while the order of modules is traced"
            )
        if self.settings.stage == 0 and self.settings.reduce_bucket_size != _STAGE_0_BUCKET:
            yield f"reduce_bucket_size has no effect at stage 0: buckets of {_STAGE_0_BUCKET}"
