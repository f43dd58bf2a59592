"""Tensor and sequence parallelism through DTensor alone, on one data rank (torch 2.13.0).

With data ranks beside it, it is the fsdp rule. The plan and its collectives are in
units: bench/training/model_parallel.py, torch/distributed/tensor/parallel/style.py.
"""

from dataclasses import dataclass

from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.training import Recompute
from stepmark.core.workload import Workload
from stepmark.workload.job import Job
from stepmark.workload.rules.pytorch.fsdp import checked, said, setting
from stepmark.workload.rules.pytorch.step import SOURCE, Rule, build
from stepmark.workload.rules.pytorch.technique import Technique
from stepmark.workload.rules.pytorch.units import TpPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Tp:
    """Types and techniques of a step."""

    param_dtype: DType = setting(DType.FP32, "type of the model's weights; fp32 is autocast")
    masters: bool = setting(False, "fp32 weights for the optimizer beside the model's")
    tp_plan: TpPlan = setting(TpPlan.TORCHTITAN, "embedding and loss: torchtitan or whole")
    clip: bool = setting(True, "gradients are clipped by their norm")
    recompute: Recompute = setting(Recompute.NONE, "activation checkpointing: none, full, ...")
    recompute_some: int = setting(1, "checkpointed blocks, with blocks")
    recompute_every: int = setting(1, "of so many, with blocks")

    def __post_init__(self) -> None:
        checked(self)


def workload(job: Job, settings: Tp) -> Workload:
    """A step of one data rank over tp ranks, or of one rank. Raises ConfigError."""
    alone(job)
    if job.parallel.pp > 1:
        raise ConfigError("pp", job.parallel.pp, "1, or the pp rule")
    technique = Technique(
        weights=DType.FP32 if settings.masters else settings.param_dtype,
        model_weights=settings.param_dtype,
        plan=settings.tp_plan,
        clips=settings.clip,
        recompute=settings.recompute,
        recompute_blocks=(settings.recompute_some, settings.recompute_every),
    )
    source = f"{SOURCE}, torch/distributed/tensor/parallel/style.py"
    return build(job, technique, Rule(name="tp", source=source, settings=said(settings)))


def alone(job: Job) -> None:
    """Raises ConfigError where gradients of several ranks would have to be reduced."""
    axes = job.parallel
    for name in ("dp_shard", "dp_replicate", "cp"):
        if getattr(axes, name) > 1:
            flag = name.replace("_", "-")
            raise ConfigError(flag, getattr(axes, name), "1, or the fsdp rule")
