"""FSDP2: fully_shard on every block and on the root, optionally with tp, cp, ep and pp.

Follows torch 2.13.0, torch/distributed/fsdp/_fully_shard, and the trainer of `stepmark train`
(training/parallelize.py). Tests compare every message with real runs of it.
"""

from dataclasses import dataclass
from enum import StrEnum

from stepmark.cases.training import GradSync, Recompute
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.parallel import StageSplit, TpPlan
from stepmark.step.workload import Group, Workload
from stepmark.workloads.architecture import AnyJob
from stepmark.workloads.job import Comms, check_at_least, refuse_first, setting
from stepmark.workloads.rules.pytorch.fsdp_recorder import Sharding
from stepmark.workloads.rules.pytorch.schedules import Schedule
from stepmark.workloads.rules.pytorch.step import SOURCE, build
from stepmark.workloads.rules.pytorch.technique import check_settings, technique
from stepmark.workloads.rules.pytorch.units import groups_of


class StageEnds(StrEnum):
    """The module that wraps the embedding, the final norm and the head."""

    # The embedding, and norm and head (torchtitan, distributed/fsdp.py).
    APART = "apart"
    ROOT = "root"  # the model itself, gathered once a pass: torch's tutorial


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp:
    """fully_shard and MixedPrecisionPolicy by their own names, and how a step runs."""

    param_dtype: DType = setting(DType.BF16, "dtype of gathered weights")
    reduce_dtype: DType = setting(DType.FP32, "dtype of reduced gradients")
    shard_dtype: DType = setting(DType.FP32, "dtype of the shards that the optimizer updates")
    reshard_after_forward: str = setting(
        "", "yes, no, or a number of ranks to reshard over [yes; no with --pp]"
    )
    prefetch: int = setting(1, "groups gathered ahead; 1: as torch does by itself")
    blocks_per_group: int = setting(1, "transformer blocks per FSDP group")
    ends: StageEnds = setting(StageEnds.APART, "who wraps embedding and output: apart or root")
    embedding_in_backward: bool = setting(
        True, "with --ends apart: set_unshard_in_backward of the embedding"
    )
    tp_plan: TpPlan = setting(TpPlan.TORCHTITAN, "embedding and loss: torchtitan or whole")
    fuse_qkv: bool = setting(True, "q, k and v are one product, as in `stepmark train`")
    grad_sync: GradSync = setting(GradSync.EVERY, "reduce every micro-batch or the last one")
    clip: bool = setting(True, "clip gradients by their norm")
    recompute: Recompute = setting(Recompute.NONE, "checkpointing: none, full, blocks or ops")
    recompute_some: int = setting(1, "with blocks: checkpointed blocks in each cycle")
    recompute_every: int = setting(1, "with blocks: blocks per cycle")
    pp_schedule: Schedule = setting(Schedule.ONE_F_ONE_B, "1f1b, interleaved or gpipe")
    pp_microbatches: int = setting(0, "micro-batches per pass through the pipeline; 0: all")
    pp_stages: int = setting(2, "with --pp-schedule interleaved: stages per rank")
    pp_split: StageSplit = setting(StageSplit.TORCHTITAN, "layers by stage: torchtitan or even")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prefetch", "blocks_per_group")
        check_settings(self)


def workload(job: AnyJob, settings: Fsdp) -> Workload:
    """Return a step with sharded weights, gradients and optimizer. Raises ConfigError."""
    groups = groups_of(job)
    shards = groups["fsdp"].size
    default = "yes" if job.parallel.pp == 1 else "no"
    reshard = _reshard(settings.reshard_after_forward or default, shards)
    if reshard:
        groups |= _inner(job, groups, reshard)
    layers = -(-job.num_layers // job.parallel.pp)
    syncs_last = settings.grad_sync is GradSync.LAST
    refuse_first(
        (
            settings.blocks_per_group > layers,
            "blocks_per_group",
            settings.blocks_per_group,
            f"at most {layers} layers of a stage",
        ),
        (  # stage.py, backward_maybe_with_nosync and perform_reduce_grad
            syncs_last and job.parallel.pp > 1,
            "grad_sync",
            GradSync.LAST,
            "every with a pipeline, whose schedule reduces once per pass through it",
        ),
    )
    sharding = Sharding(
        comms=Comms(groups=groups, dtype=job.dtype),
        gathered=settings.param_dtype,
        reduced=settings.reduce_dtype,
        reshard=reshard,
        prefetch=settings.prefetch,
        accumulates=(syncs_last and job.num_microbatches > 1) or job.parallel.pp > 1,
    )
    technique_ = technique(
        settings,
        weights=settings.shard_dtype,
        model_weights=settings.shard_dtype,
        sharding=sharding,
        regathers_table=settings.embedding_in_backward,
        root_has_ends=settings.ends is StageEnds.ROOT,
        blocks_per_group=settings.blocks_per_group,
        syncs_last=syncs_last,
    )
    source = f"{SOURCE}, torch/distributed/fsdp/_fully_shard"
    return build(job, technique_, "fsdp", source, settings)


def _reshard(text: str, shards: int) -> int | None:
    """Return the ranks to reshard over. 0: all shards; None: no resharding."""
    if text in ("yes", "no"):
        return 0 if text == "yes" else None
    smaller = [n for n in range(2, shards) if shards % n == 0]
    if not text.isdecimal() or int(text) not in smaller:
        allowed = ", ".join(map(str, ("yes", "no", *smaller)))
        raise ConfigError(
            "reshard_after_forward", text, f"one of {allowed} for {shards} shards"
        )
    return int(text)


def _inner(job: AnyJob, groups: dict[str, Group], reshard: int) -> dict[str, Group]:
    """Return groups of consecutive ranks from which resharded weights are gathered."""
    axes = job.parallel
    inner = {"fsdp_inner": Group(digits=((reshard, axes.tp),))}
    same = groups["expert_fsdp"].size
    if axes.ep > 1:
        if same % reshard:
            raise ConfigError(
                "reshard_after_forward", reshard, f"a divisor of {same} shards of experts"
            )
        inner["expert_fsdp_inner"] = Group(digits=((reshard, axes.tp * axes.ep),))
    return inner
