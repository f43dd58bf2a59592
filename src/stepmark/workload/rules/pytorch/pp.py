"""Pipelines of torch.distributed.pipelining without data parallelism (torch 2.13.0).

With data ranks beside it, it is the fsdp rule. The schedules are in pipeline.
"""

from dataclasses import dataclass

from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.training import Recompute
from stepmark.core.workload import Workload
from stepmark.workload.job import Job
from stepmark.workload.rules.pytorch.fsdp import said, setting
from stepmark.workload.rules.pytorch.step import SOURCE, Rule, Technique, build
from stepmark.workload.rules.pytorch.tp import alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Pp:
    """Types, techniques and the schedule of a step."""

    param_dtype: DType = setting(DType.FP32, "type of the model's weights; fp32 is autocast")
    masters: bool = setting(False, "fp32 weights for the optimizer beside the model's")
    clip: bool = setting(True, "gradients are clipped by their norm")
    recompute: Recompute = setting(Recompute.NONE, "activation checkpointing: none, full, ...")
    recompute_some: int = setting(1, "checkpointed blocks, with blocks")
    recompute_every: int = setting(1, "of so many, with blocks")
    pp_schedule: str = setting("1f1b", "1f1b or interleaved, two stages a rank")
    pp_microbatches: int = setting(0, "of one pass through the pipeline; 0: all")

    def __post_init__(self) -> None:
        if self.pp_schedule not in ("1f1b", "interleaved"):
            raise ConfigError("pp_schedule", self.pp_schedule, "1f1b or interleaved")


def workload(job: Job, settings: Pp) -> Workload:
    """A step of one data rank over pipeline stages, and tp ranks. Raises ConfigError."""
    alone(job)
    technique = Technique(
        weights=DType.FP32 if settings.masters else settings.param_dtype,
        model_weights=settings.param_dtype,
        clips=settings.clip,
        recompute=settings.recompute,
        recompute_blocks=(settings.recompute_some, settings.recompute_every),
        interleaved=settings.pp_schedule == "interleaved",
        pp_microbatches=settings.pp_microbatches,
    )
    source = f"{SOURCE}, torch/distributed/pipelining/schedules.py"
    return build(job, technique, Rule(name="pp", source=source, settings=said(settings)))
