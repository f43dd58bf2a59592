"""One data rank: tensor and sequence parallelism through DTensor, pipelines (torch 2.13.0).

The fsdp rule combines them with data ranks. The plan of tensor parallelism and its collectives
are in units: training/model_parallel.py, torch/distributed/tensor/parallel/style.py;
schedules of torch.distributed.pipelining in schedules.
"""

from dataclasses import dataclass

from stepmark.cases.training import Recompute
from stepmark.ground.dtypes import DType
from stepmark.model.parallel import StageSplit, TpPlan
from stepmark.step.workload import Workload
from stepmark.workloads.job import Job, check_single, setting
from stepmark.workloads.rules.pytorch.schedules import Schedule
from stepmark.workloads.rules.pytorch.step import SOURCE, build
from stepmark.workloads.rules.pytorch.technique import check_settings, technique


@dataclass(frozen=True, slots=True, kw_only=True)
class Tp:
    """Types and techniques of a step."""

    param_dtype: DType = setting(DType.FP32, "dtype of the model's weights; fp32: autocast")
    masters: bool = setting(False, "keep fp32 master weights for the optimizer")
    tp_plan: TpPlan = setting(TpPlan.TORCHTITAN, "embedding and loss: torchtitan or whole")
    fuse_qkv: bool = setting(True, "q, k and v are one product, as in `stepmark train`")
    clip: bool = setting(True, "clip gradients by their norm")
    recompute: Recompute = setting(Recompute.NONE, "checkpointing: none, full, blocks or ops")
    recompute_some: int = setting(1, "with blocks: checkpointed blocks in each cycle")
    recompute_every: int = setting(1, "with blocks: blocks per cycle")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pp(Tp):
    """The same, and the schedule of a step."""

    pp_schedule: Schedule = setting(Schedule.ONE_F_ONE_B, "1f1b, interleaved or gpipe")
    pp_microbatches: int = setting(0, "micro-batches per pass through the pipeline; 0: all")
    pp_stages: int = setting(2, "with --pp-schedule interleaved: stages per rank")
    pp_split: StageSplit = setting(StageSplit.TORCHTITAN, "layers by stage: torchtitan or even")


def workload(job: Job, settings: Tp) -> Workload:
    """Return a step of one data rank over tp, and with Pp over stages. Raises ConfigError."""
    # Gradients of several ranks would have to be reduced.
    check_single(job.parallel, ("dp_shard", "dp_replicate", "cp"), "1, or the fsdp rule")
    name = "pp"
    file = "torch/distributed/pipelining/schedules.py"
    if not isinstance(settings, Pp):
        name = "tp"
        file = "torch/distributed/tensor/parallel/style.py"
        check_single(job.parallel, ("pp",), "1, or the pp rule")
    return build(job, technique(settings), name, f"{SOURCE}, {file}", settings)
