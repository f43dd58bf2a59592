"""One steady-state step of plain PyTorch: any of fully_shard, DDP, DTensor's tp and pipelines.

torch 2.13.0 and the trainer of `stepmark train` (training/parallelize.py); tests compare every
message with real runs of it. Where one data rank has the weights, tensor parallelism is
training/model_parallel.py's (torch/distributed/tensor/parallel/style.py).
"""

from dataclasses import replace

from stepmark.cases.training import DataParallel, OptimizerKind
from stepmark.efficiency.kernel_times import AttentionKernel
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Scaling
from stepmark.model.packing import Packing
from stepmark.model.parallel import PipelineSchedule
from stepmark.step.workload import Workload
from stepmark.workloads.architecture import AnyJob
from stepmark.workloads.job import Comms, Job, check_single, plain_settings, refuse_first
from stepmark.workloads.rules.pytorch import muon
from stepmark.workloads.rules.pytorch.ddp import Reducer
from stepmark.workloads.rules.pytorch.fsdp import sharding_of
from stepmark.workloads.rules.pytorch.settings import PyTorch, StageEnds, Trainer
from stepmark.workloads.rules.pytorch.split_backward import check_split
from stepmark.workloads.rules.pytorch.step import build
from stepmark.workloads.rules.pytorch.technique import Technique
from stepmark.workloads.rules.pytorch.units import groups_of

_VERSION = "PyTorch 2.13.0"
_BY_TENSOR = (DType.FP8_E4M3, Scaling.TENSORWISE)
# What is followed, by the rule's older names.
_FILES = {
    "fsdp": "torch/distributed/fsdp/_fully_shard",
    "ddp": "torch/nn/parallel/distributed.py, c10d/reducer.cpp",
    "tp": "torch/distributed/tensor/parallel/style.py",
    "pp": "torch/distributed/pipelining/schedules.py",
}


def _check_attention(job: AnyJob, settings: PyTorch) -> None:
    """Raise ConfigError for a kernel that does not have what the layers' attention needs."""
    kernel = settings.attention_backend
    model = job.config
    if model is not None and model.packing is not None:
        _check_packing(job, settings, model.packing)
    if model is None or kernel not in (AttentionKernel.FLASH, AttentionKernel.FLASH1):
        return
    has_window = any(layer.window or layer.chunk for layer in model.pattern)
    if has_window or model.has_sinks or model.softcap:
        allowed = (
            f"auto or flex, since {model.name} has windows, chunks, sinks or capped scores"
        )
        raise ConfigError("attention_backend", kernel, allowed)


def _check_optimizer(job: AnyJob, settings: PyTorch) -> None:
    """Raise ConfigError for a job that does not run the optimizer."""
    if settings.optimizer is OptimizerKind.ADAMW:
        return
    reason = ""
    if settings.optimizer is OptimizerKind.MUON:
        reason = muon.refusal(job.config, job.parallel, settings.data_parallel)
    if settings.trainer is not Trainer.STEPMARK:
        reason = "the kernels of --trainer llm-foundry are those of its AdamW"
    if reason:
        raise ConfigError("optimizer", settings.optimizer, f"adamw here: {reason}")


def _check_packing(job: AnyJob, settings: PyTorch, packing: Packing) -> None:
    """Raise ConfigError for what torch does not compute of packed sequences.

    FlexAttention masks them (torchtitan's block_causal), and so does varlen_attn, which is
    FlashAttention-2's kernel.
    """
    cp = job.parallel.cp
    kernel = settings.attention_backend
    is_first = kernel is AttentionKernel.FLASH1
    trainer = settings.trainer
    refuse_first(
        (cp > 1, "cp", cp, "1 with packing: torch's ring has no masks but the causal one"),
        (is_first, "attention_backend", kernel, "auto, flex or flash (varlen) with packing"),
        (
            trainer is not Trainer.STEPMARK,
            "trainer",
            trainer,
            f"{Trainer.STEPMARK} with packing ({packing.text})",
        ),
    )


def workload(job: AnyJob, settings: PyTorch, alias: str = "") -> Workload:
    """Return a step of the job, for one of the rule's names. Raises ConfigError."""
    settings = settings.resolved(job.parallel)
    _check_attention(job, settings)
    check_split(job, settings)
    _check_optimizer(job, settings)
    if settings.fp8_all_gather:
        job = _with_cast_weights(job)
    kind = settings.data_parallel
    is_pipelined = job.parallel.pp > 1
    technique = Technique(
        settings=settings,
        schedule=settings.pp_schedule if is_pipelined else PipelineSchedule.ONE_F_ONE_B,
        root_has_ends=settings.ends is StageEnds.ROOT,
        tp_pieces=job.parallel.tp if settings.async_tp else 1,
    )
    if settings.loss_chunks > 1:
        _check_chunks(job, settings)
    if settings.lora:
        _check_adapters(job)
    if kind is DataParallel.FSDP:
        followed = "fsdp"
        technique = replace(technique, sharding=sharding_of(job, settings))
    elif kind is DataParallel.DDP:
        followed = "ddp"
        check_single(job.parallel, ("tp", "pp", "ep"), "1 with ddp; fsdp divides models, too")
        if isinstance(job, Job) and not settings.autocast:
            # Products have the type of the weights.
            job = replace(job, dtype=settings.model_weights)
        comms = Comms(groups=groups_of(job), dtype=job.dtype)
        technique = replace(
            technique,
            backward=lambda chunk: Reducer(chunk, settings, comms).backward(),
            setup=lambda chunk: Reducer(chunk, settings, comms).setup(),
        )
    else:
        followed = alias or ("pp" if job.parallel.pp > 1 else "tp")
        # Gradients of several ranks would have to be reduced.
        allowed = "1 without data parallelism; fsdp has data ranks"
        check_single(job.parallel, ("dp_shard", "dp_replicate", "cp"), allowed)
        if alias == "tp":
            check_single(job.parallel, ("pp",), "1, or the pp rule")
    return replace(
        build(job, technique),
        rules=alias or "pytorch",
        source=f"{_VERSION}, {_FILES[followed]}",
        settings=plain_settings(settings),
    )


def _with_cast_weights(job: AnyJob) -> AnyJob:
    """Return the job whose weights are cast before they are gathered. Raises ConfigError."""
    products = job.products
    if products is None or (products.dtype, products.scaling) != _BY_TENSOR:
        # torchao 0.18, float8/config.py: Float8LinearConfig.__post_init__.
        allowed = "it works only with fp8 products with a scale per tensor (--precision fp8)"
        raise ConfigError("fp8_all_gather", "yes", allowed)
    return replace(job, products=replace(products, casts_weights=False))


def _check_chunks(job: AnyJob, settings: PyTorch) -> None:
    """Raise ConfigError for a job whose loss is not in so many chunks, as `train` has it."""
    chunks = settings.loss_chunks
    has_head = job.products is not None and job.products.has_head
    is_adapted = settings.lora is not None and settings.lora.adapts("head")
    refuse_first(
        (not isinstance(job, Job), "loss_chunks", chunks, "1 for a model of one's own"),
        (job.parallel.pp > 1, "loss_chunks", chunks, "1 with a pipeline"),
        (job.parallel.tp > 1, "loss_chunks", chunks, "1 with tp"),
        (has_head, "loss_chunks", chunks, "1 with a head in fp8"),
        (is_adapted, "loss_chunks", chunks, "1 with an adapted head"),
        (settings.kernels.loss_metrics, "loss_chunks", chunks, "1 with metrics of a trainer"),
        (
            isinstance(job, Job) and job.tokens % chunks,
            "loss_chunks",
            chunks,
            f"a divisor of {job.tokens if isinstance(job, Job) else 0} tokens",
        ),
    )


def _check_adapters(job: AnyJob) -> None:
    """Raise ConfigError for a job whose layers cannot have adapters."""
    if not isinstance(job, Job):
        raise ConfigError("lora_rank", job.name, "left out for a model of one's own")
    # A style of DTensor registers a layer's parameters by name, and an adapter's have a dot
    # (torch/distributed/tensor/parallel/style.py, ColwiseParallel._partition_linear_fn).
    check_single(job.parallel, ("tp",), "1 with lora_rank: DTensor's plans divide no adapters")
