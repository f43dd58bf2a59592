"""The workload of a training case, from the PyTorch rule and settings that describe it."""

from dataclasses import replace
from functools import lru_cache

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, DataParallel, Fp8, Precision
from stepmark.efficiency.kernel_times import AttentionKernel
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.parallel import PipelineSchedule
from stepmark.model.product_precision import Recipe, by_recipe
from stepmark.step.workload import Workload
from stepmark.workloads.job import Job, refuse_first
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.rules.pytorch.settings import PyTorch

COMPILED = "compiled: kernels are fused, communication is that of eager code"


def of_case(case: TrainCase) -> Workload:
    """Return one optimizer step of `stepmark train`. Raises ConfigError if not derived."""
    is_sharded = case.data_parallel is DataParallel.FSDP
    refuse_first(
        (
            case.precision is Precision.MASTER and is_sharded,
            "precision",
            case.precision,
            "amp with fsdp: its shards are fp32",
        ),
    )
    workload = _workload(job_of(case), settings_of(case))
    if case.compile is not CompileScope.NONE:
        workload = replace(workload, notes=(*workload.notes, COMPILED))
    return workload


@lru_cache(maxsize=8)  # several options make no difference to it
def _workload(job: Job, settings: PyTorch) -> Workload:
    return rule.workload(job, settings)


_RECIPES = {
    Fp8.TENSORWISE: Recipe.TENSORWISE,
    Fp8.ROWWISE: Recipe.ROWWISE,
    Fp8.TE: Recipe.DELAYED,
    Fp8.MXFP8: Recipe.MXFP8,
    Fp8.NVFP4: Recipe.NVFP4,
}


def job_of(case: TrainCase) -> Job:
    """Return the job of a case, whose micro-batches a pipeline divides further."""
    parts = case.num_microbatches
    if case.mbs % parts:
        rule = f"a multiple of {parts}, because it counts all microbatches of a pipeline"
        raise ConfigError("mbs", case.mbs, rule)
    products = None
    if case.fp8 is not Fp8.NONE:
        # `train` leaves experts in bf16.
        recipe = _RECIPES[case.fp8]
        products = by_recipe(recipe, has_head=case.fp8_head, has_experts=False)
    return Job(
        model=case.model,
        parallel=case.parallel,
        mbs=case.mbs // parts,
        gbs=case.mbs * case.parallel.data_ranks * case.grad_accum,
        dtype=DType.FP32 if case.precision is Precision.FP32 else DType.BF16,
        products=products,
    )


def settings_of(case: TrainCase) -> PyTorch:
    """Return the settings with which `stepmark train` runs the case."""
    is_amp = case.precision is Precision.AMP
    is_half = case.precision in (Precision.BF16, Precision.MASTER)
    weight_dtype = DType.BF16 if is_half else DType.FP32
    is_sharded = case.data_parallel is DataParallel.FSDP
    halved = case.reduce_dtype is not DType.FP32
    return PyTorch(
        data_parallel=case.data_parallel,
        param_dtype=DType.BF16 if is_amp and is_sharded else weight_dtype,
        reduce_dtype=case.reduce_dtype,
        shard_dtype=weight_dtype,
        reshard_after_forward=case.reshard,
        prefetch=case.prefetch,
        blocks_per_group=case.blocks_per_group,
        fp8_all_gather=case.fp8_all_gather,
        embedding_in_backward=case.embedding_in_backward,
        tp_plan=case.tp_plan,
        async_tp=case.async_tp,
        attention_backend=AttentionKernel.FLASH
        if case.attention == AttentionKernel.FLASH
        else AttentionKernel.AUTO,
        compile=case.compile,
        autocast=is_amp,
        masters=case.precision is Precision.MASTER,
        compress_bf16=halved and case.precision in (Precision.AMP, Precision.FP32),
        bucket_cap_mb=0 if case.small_first_bucket else case.bucket_mb,
        gradient_as_bucket_view=case.bucket_view,
        init_sync=False,
        grad_sync=case.grad_sync,
        loss_chunks=case.loss_chunks,
        clip=case.clip > 0,
        optimizer=case.optimizer,
        recompute=case.recompute,
        recompute_some=case.recompute_blocks[0],
        recompute_every=case.recompute_blocks[1],
        pp_schedule=PipelineSchedule(case.pp_schedule),
        pp_stages=case.pp_stages,
        pp_microbatches=case.num_microbatches,
        pp_split=case.pp_split,
    )
