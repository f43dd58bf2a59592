"""Memory of ranks that run PyTorch's rules: that of the same case of `stepmark train`."""

from collections.abc import Sequence
from functools import lru_cache

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, Fp8, Precision
from stepmark.ground.dtypes import DType
from stepmark.model.ops import Scaling
from stepmark.step.tree import stage_of_case
from stepmark.step_memory import memory
from stepmark.step_memory.rank_memory import RankMemory
from stepmark.step_memory.step_memory import StepMemory
from stepmark.workloads.job import Job
from stepmark.workloads.rules.pytorch.settings import PyTorch


def stage_memories(job: Job, settings: PyTorch) -> Sequence[RankMemory]:
    """Return that of a rank of the first stage, the last, and the one with most layers."""
    return memory.stage_estimates(case_of(job, settings))


@lru_cache(maxsize=256)  # layouts share layers
def saved_by_layer(job: Job, settings: PyTorch) -> int:
    """Return the bytes that a layer keeps of a micro-batch. job: of one layer in one stage."""
    case = case_of(job, settings)
    return StepMemory(case, 0, stage_of_case(case, 0)).saved_bytes


def case_of(job: Job, settings: PyTorch) -> TrainCase:
    """Return the case of `stepmark train` with the same tensors as a job."""
    settings = settings.resolved(job.parallel)
    axes = job.parallel
    parts = 1
    if axes.pp > 1:
        parts = settings.pp_microbatches or job.num_microbatches
    assert settings.data_parallel is not None
    has_buckets = settings.bucket_cap_mb > 0
    return TrainCase(
        model=job.model,
        mbs=job.mbs * parts,
        parallel=axes,
        data_parallel=settings.data_parallel,
        grad_accum=job.num_microbatches // parts,
        precision=_precision(job, settings),
        optimizer=settings.optimizer,
        recompute=settings.recompute,
        recompute_blocks=(settings.recompute_some, settings.recompute_every),
        reduce_dtype=DType.BF16 if settings.compress_bf16 else settings.reduce_dtype,
        reshard=settings.resharding(axes.pp),
        prefetch=settings.prefetch,
        blocks_per_group=settings.blocks_per_group,
        embedding_in_backward=settings.embedding_in_backward,
        grad_sync=settings.grad_sync,
        tp_plan=settings.tp_plan,
        bucket_view=settings.gradient_as_bucket_view,
        bucket_mb=settings.bucket_cap_mb or 25,
        small_first_bucket=not has_buckets,
        async_tp=settings.async_tp,
        compile=settings.compile,
        loss_chunks=settings.loss_chunks,
        fp8=_fp8(job),
        fp8_all_gather=settings.fp8_all_gather,
        pp_schedule=settings.pp_schedule,
        pp_stages=settings.pp_stages,
        pp_microbatches=parts if axes.pp > 1 else 0,
        pp_split=settings.pp_split,
        imbalance=job.imbalance,
    )


def _fp8(job: Job) -> Fp8:
    """Return the recipe of products with the sizes of the job's."""
    if job.products is None:
        return Fp8.NONE
    by_type = {DType.MXFP8: Fp8.MXFP8, DType.NVFP4: Fp8.NVFP4}
    of_rows = Fp8.ROWWISE if job.products.scaling is Scaling.ROWWISE else Fp8.TENSORWISE
    return by_type.get(job.products.dtype, of_rows)


def _precision(job: Job, settings: PyTorch) -> Precision:
    """Return the precision; fp16 has the sizes of bf16."""
    if settings.masters:
        return Precision.MASTER
    if settings.model_weights.itemsize < DType.FP32.itemsize:
        return Precision.BF16
    computes = job.dtype
    if settings.data_parallel is DataParallel.FSDP:
        computes = settings.param_dtype or job.dtype
    elif settings.data_parallel is DataParallel.DDP and not settings.autocast:
        computes = DType.FP32
    return Precision.FP32 if computes is DType.FP32 else Precision.AMP
