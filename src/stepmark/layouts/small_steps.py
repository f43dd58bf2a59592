"""Steps of one stage with few layers, from which those of a layout are composed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stepmark.cases.training import DataParallel, GradSync, Recompute
from stepmark.layouts.candidate import Candidate
from stepmark.model.layers import Layer
from stepmark.model.parallel import PipelineSchedule
from stepmark.workloads.rules.megatron.settings import Granularity


def without_data_ranks(candidate: Candidate) -> Candidate:
    """Return the layout by whose stage micro-batches are compared, with few data ranks.

    A stage of a PyTorch pipeline gathers its weights once a step; without a pipeline they are
    gathered in each micro-batch, over all ranks.
    """
    parallel = candidate.parallel
    settings = candidate.settings
    if not candidate.is_megatron:
        if parallel.pp == 1:
            return candidate
        if parallel.cp > 1 or parallel.ep > 1:  # whose ranks share weights
            candidate = replace(candidate, is_gathered=True)
        else:
            settings = replace(settings, data_parallel=DataParallel.NONE)
    own = replace(parallel, dp_shard=parallel.ep, dp_replicate=1)
    count = candidate.job.num_microbatches
    job = replace(candidate.job, parallel=own, gbs=candidate.job.mbs * own.data_ranks * count)
    return replace(candidate, job=job, settings=settings)


def without_pipeline(candidate: Candidate) -> Candidate:
    """Return the layout with all layers in one stage, on the ranks of that stage."""
    job = replace(candidate.job, parallel=replace(candidate.parallel, pp=1))
    changes: dict[str, Any]
    if candidate.is_megatron:
        changes = {
            "virtual_pipeline_model_parallel_size": 1,
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
        }
    else:
        changes = {
            "pp_schedule": PipelineSchedule.ONE_F_ONE_B,
            "pp_stages": 2,
            "pp_microbatches": 0,
        }
    return replace(candidate, job=job, settings=replace(candidate.settings, **changes))


def one_stage(
    candidate: Candidate, counts: Mapping[Layer, int], again: bool, num_microbatches: int
) -> Candidate:
    """Return the job of one stage with so many layers of each kind."""
    has_pipeline = candidate.parallel.pp > 1
    candidate = without_pipeline(candidate)
    job = candidate.job
    layers = Counter(counts).elements()
    pattern = tuple(sorted(layers, key=lambda layer: layer.has_experts))
    moe = job.model.moe and replace(job.model.moe, first_dense_layers=0)
    model = replace(job.model, num_layers=len(pattern), pattern=pattern, moe=moe)
    gbs = job.mbs * job.parallel.data_ranks * num_microbatches
    own = replace(job, model=model, gbs=gbs)
    settings = candidate.settings
    changes: dict[str, Any]
    if candidate.is_megatron:
        is_full = settings.recompute_granularity is Granularity.FULL
        changes = {"recompute_method": "uniform", "recompute_num_layers": 1}
        if is_full and not again:
            changes["recompute_granularity"] = Granularity.NONE
    else:
        changes = {"recompute_some": 1, "recompute_every": 1}
        if settings.recompute is Recompute.BLOCKS:
            changes["recompute"] = Recompute.FULL if again else Recompute.NONE
        if has_pipeline:
            changes["grad_sync"] = GradSync.LAST
            if not settings.reshard_after_forward:
                changes["reshard_after_forward"] = "no"
    return replace(candidate, job=own, settings=replace(settings, **changes))
