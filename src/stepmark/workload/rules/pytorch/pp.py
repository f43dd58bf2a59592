"""Pipelines of torch.distributed.pipelining without data parallelism (torch 2.13.0).

With data ranks beside it, it is the fsdp rule. The schedules are in pipeline.
"""

from dataclasses import dataclass

from stepmark.core.dtypes import DType
from stepmark.core.training import Recompute
from stepmark.core.workload import Workload
from stepmark.workload.job import Job
from stepmark.workload.rules.pytorch.fsdp import checked, said, setting
from stepmark.workload.rules.pytorch.schedules import Schedule
from stepmark.workload.rules.pytorch.step import SOURCE, Rule, build
from stepmark.workload.rules.pytorch.technique import Pipelined, Technique
from stepmark.workload.rules.pytorch.tp import alone
from stepmark.workload.rules.pytorch.units import TpPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Pp:
    """Types, techniques and the schedule of a step."""

    param_dtype: DType = setting(DType.FP32, "type of the model's weights; fp32 is autocast")
    masters: bool = setting(False, "fp32 weights for the optimizer beside the model's")
    tp_plan: TpPlan = setting(TpPlan.TORCHTITAN, "embedding and loss: torchtitan or whole")
    clip: bool = setting(True, "gradients are clipped by their norm")
    recompute: Recompute = setting(Recompute.NONE, "activation checkpointing: none, full, ...")
    recompute_some: int = setting(1, "checkpointed blocks, with blocks")
    recompute_every: int = setting(1, "of so many, with blocks")
    pp_schedule: Schedule = setting(Schedule.ONE_F_ONE_B, "1f1b, interleaved or gpipe")
    pp_microbatches: int = setting(0, "of one pass through the pipeline; 0: all")
    pp_stages: int = setting(2, "stages of a rank, with interleaved")

    def __post_init__(self) -> None:
        checked(self)


def workload(job: Job, settings: Pp) -> Workload:
    """A step of one data rank over pipeline stages, and tp ranks. Raises ConfigError."""
    alone(job)
    technique = Technique(
        weights=DType.FP32 if settings.masters else settings.param_dtype,
        model_weights=settings.param_dtype,
        plan=settings.tp_plan,
        clips=settings.clip,
        recompute=settings.recompute,
        recompute_blocks=(settings.recompute_some, settings.recompute_every),
        pipelined=Pipelined(
            schedule=settings.pp_schedule,
            num_microbatches=settings.pp_microbatches,
            num_chunks=settings.pp_stages,
        ),
    )
    source = f"{SOURCE}, torch/distributed/pipelining/schedules.py"
    return build(job, technique, Rule(name="pp", source=source, settings=said(settings)))
