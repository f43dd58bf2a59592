"""DeepSpeed's ZeRO: stage 0, 1, 2 or 3 over all data ranks.

DeepSpeed 0.19.8, deepspeed/runtime: engine.py (_broadcast_model, allreduce_gradients,
_do_optimizer_sanity_check), zero/stage_1_and_2.py and zero/stage3.py (step, hooks of
gradients), bf16_optimizer.py. The order of modules is in modules and huggingface, the gathers
of stage 3 are in zero3, buckets and blocks in recorder. Every message of runs of that version
on two, three and four ranks (CPU, gloo) is compared: tests/data/deepspeed.

Parameters are one group of the optimizer, in the order of registration. A collective of a
module's hook comes after all computation of that module.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.ops import Optimizer, Phase
from stepmark.step.workload import CommOp, ComputeOp, Item, Operation, Stage, Workload
from stepmark.workloads.architecture import AnyJob, OwnJob
from stepmark.workloads.job import (
    TRAINED,
    Comms,
    Job,
    check_single,
    mesh_groups,
    plain_settings,
    refuse_first,
)
from stepmark.workloads.rules.deepspeed import huggingface, modules
from stepmark.workloads.rules.deepspeed.modules import COMPUTE, GRADS
from stepmark.workloads.rules.deepspeed.recorder import (
    Bucket,
    Message,
    Program,
    Recorder,
    all_reduce_buckets,
    reduction,
    shares,
)
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed
from stepmark.workloads.rules.deepspeed.zero3 import Fetch, Pass, persistent, steady_step

SOURCE = "deepspeedai/DeepSpeed 0.19.8: deepspeed/runtime/engine.py, zero, bf16_optimizer.py"
_STAGE_0_BUCKET = 500_000_000  # MEMORY_OPT_ALLREDUCE_SIZE, engine.py; no setting changes it


def workload(job: AnyJob, settings: DeepSpeed) -> Workload:
    """Return the third or a later step. Raises ConfigError for jobs that DeepSpeed refuses."""
    plan = _Plan(job, settings)
    program = Program()
    step_end = program.repeats([*plan.boundary(), *plan.optimizer_step()])
    program.blocks["step"] = (*plan.microbatches(program), *step_end)
    setup = program.repeats(plan.setup())
    if setup:
        program.blocks["setup"] = setup
    stage = Stage(
        step="step",
        setup="setup" if setup else "",
        layers=tuple(range(job.num_layers)),
        has_embedding=True,
        has_head=True,
    )
    step = Workload(
        name=f"{job.name} deepspeed zero-{settings.stage}",
        rules="deepspeed",
        source=SOURCE,
        world_size=job.parallel.world_size,
        num_microbatches=job.num_microbatches,
        model=job.config,
        settings=plain_settings(settings),
        groups=plan.comms.groups,
        blocks=program.blocks,
        stages=(stage,),
        notes=tuple(plan.notes()),
    )
    step.check()
    return step


class _Plan:
    """Modules, shards and messages of a job."""

    def __init__(self, job: AnyJob, settings: DeepSpeed) -> None:
        allowed = "1: DeepSpeed's ZeRO is data-parallel"
        check_single(job.parallel, ("tp", "pp", "cp", "ep"), allowed)
        self.dtype = DType.FP32 if job.dtype is DType.TF32 else job.dtype
        if self.dtype not in TRAINED:
            raise ConfigError("dtype", job.dtype, "fp32, tf32, bf16 or fp16")
        self.job, self.settings = job, settings
        groups = mesh_groups(job.parallel, {"dp": ("dp_shard", "dp_replicate")})
        self.comms = Comms(groups=groups, dtype=self.dtype)
        self.ranks = job.parallel.data_ranks
        self.sent_dtype = DType(settings.communication_data_type or self.dtype)
        self.accumulated = DType(settings.grad_accum_dtype or self.dtype)
        refuse_first(
            (
                settings.stage == 0 and self.accumulated is not self.dtype,
                "grad_accum_dtype",
                self.accumulated,
                f"{self.dtype} at stage 0, or empty",
            ),
            (
                self.flat and not settings.compute_grad_norm,
                "compute_grad_norm",
                False,
                "true at stage 1 with bf16 and fp32 accumulation",
            ),
        )
        architecture = (
            job.architecture if isinstance(job, OwnJob) else huggingface.architecture(job)
        )
        # GPT-2's layers are Conv1D, to which DeepSpeed's own linear function does not apply.
        linears = isinstance(job, OwnJob) or huggingface.is_llama(job.model)
        tree = modules.modules_of(architecture, divided=settings.stage == 3 and linears)
        self.root, self.params, self.parts = tree.root, tree.params, tree.parts
        self.recreated = tree.tied
        if settings.stage == 3 and isinstance(job, Job) and job.model.mla is None:
            self.root = modules.with_leaves(self.root)
        self.shares = shares(
            self.params, self.ranks, round_robin=settings.round_robin_gradients
        )

    @property
    def flat(self) -> bool:
        """Whether stage 1 is BF16_Optimizer: all gradients in one buffer, one all-reduce."""
        is_mixed = self.dtype is DType.BF16 and self.accumulated is DType.FP32
        return self.settings.stage == 1 and is_mixed

    def microbatches(self, program: Program) -> Iterator[Item]:
        """Yield forward and backward passes."""
        times = self.job.num_microbatches
        if self.settings.stage == 3:
            passes = steady_step(
                self.root,
                self.params,
                self.settings,
                ranks=self.ranks,
                num_microbatches=times,
            )
            recorders = [
                (self._record(events, reduces=True, follows=index > 0 or count > 1), count)
                for index, (events, count) in enumerate(passes)
            ]
        else:
            hooks = (*modules.forward(self.root), *modules.backward(self.root))
            events = tuple((event, Fetch()) for event in hooks)
            reduces = self.settings.stage == 2
            recorders = [(self._record(events, reduces=reduces), times)]
            if self.settings.stage == 1 and self.settings.overlaps and not self.flat:
                last = (self._record(events, reduces=True), 1)
                recorders = [(recorders[0][0], times - 1), last] if times > 1 else [last]
        return program.microbatches(recorders)

    def _record(self, events: Pass, *, reduces: bool, follows: bool = False) -> Recorder:
        """Record one micro-batch. reduces: hooks fill buckets. follows: it is not the first."""
        recorder = Recorder(
            parts=self.parts,
            comms=self.comms,
            overlaps=self.settings.overlaps,
            divided=self.settings.stage == 3,
            follows=follows and any(kind == GRADS for (kind, _, _), _ in events),
        )
        bucket = self._bucket()
        for (kind, module, phase), fetch in events:
            if fetch.gathers or fetch.needs is not None:
                recorder.fetch(module, phase, fetch)
            if kind == COMPUTE:
                recorder.compute(module, phase)
            elif kind == GRADS and reduces:
                for param in module.grads:
                    recorder.reduce(module, bucket.ready(param), self.sent_dtype)
        recorder.finish(bucket.flush(), self.sent_dtype)
        return recorder

    def _bucket(self) -> Bucket:
        shares = None if self.settings.stage == 3 else self.shares
        return Bucket(settings=self.settings, ranks=self.ranks, shares=shares)

    def boundary(self) -> Iterator[Operation]:
        """Yield the reductions of stages 0 and 1 after the last backward pass of a step."""
        settings, sent = self.settings, list[Message]()
        if settings.stage == 0:
            sent += all_reduce_buckets(self.params, _STAGE_0_BUCKET)
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
        """Yield the checks for overflow, the norm, the update, and the gather of weights."""
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
        parts = [param.padded(self.ranks) // self.ranks for param in self.params]
        elements = 0
        for index, part in enumerate(parts):
            elements += part
            if elements >= self.settings.sub_group_size or index == len(parts) - 1:
                yield from self._scalar("norm", DType.FP64, RedOp.SUM)
                elements = 0
        yield self._update(sum(parts))
        for param in persistent(self.params, self.settings):
            yield from self._gathered(param.padded(self.ranks))

    def _scalar(self, module: str, dtype: DType, redop: RedOp) -> tuple[CommOp, ...]:
        return self.comms(
            Collective.ALL_REDUCE, 1, "dp", Phase.OPTIM, module, dtype, redop=redop
        )

    def _update(self, num_params: int) -> ComputeOp:
        op = Optimizer(num_params=num_params, dtype=DType.FP32)
        return ComputeOp(op=op, phase=Phase.OPTIM, module="optimizer")

    def _gathered(
        self, elements: int, phase: Phase = Phase.OPTIM, module: str = "optimizer"
    ) -> tuple[CommOp, ...]:
        return self.comms(Collective.ALL_GATHER, elements, "dp", phase, module)

    def setup(self) -> Iterator[Operation]:
        """Yield deepspeed.initialize: a broadcast of rank 0's weights, divided at stage 3.

        Under zero.Init a tied head has its own weights until it is tied.
        """
        divided, early = self.settings.stage == 3, self.settings.zero_init
        send = partial(
            self.comms, group="dp", phase=Phase.FWD, module="setup", dtype=DType.UINT8
        )
        broadcast = [
            *self.params,
            *(self.recreated if early else self.params if divided else ()),
        ]
        for param in broadcast:
            size = param.numel * self.dtype.itemsize
            for op in send(Collective.BROADCAST, size):
                yield replace(op, root=0)
        if divided:
            for _ in range(3):
                yield from send(Collective.BARRIER, 0)
            for param in self.params:
                yield from self._gathered(param.padded(self.ranks), Phase.FWD, "setup")

    def notes(self) -> Iterator[str]:
        if isinstance(self.job, Job):
            family = "Llama" if huggingface.is_llama(self.job.model) else "GPT-2"
            yield f"modules and parameters in the order of Hugging Face's {family}"
        if self.settings.stage == 3:
            yield (
                "the first micro-batch of a job, not shown, gathers the weights of each module"
                " by themselves while the order of modules is traced"
            )
        if self.settings.stage == 0 and self.settings.reduce_bucket_size != _STAGE_0_BUCKET:
            yield f"reduce_bucket_size has no effect at stage 0: buckets of {_STAGE_0_BUCKET}"
