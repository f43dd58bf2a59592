"""Layers of a layout's stages, by kind: which layer, recomputed or not."""

from collections import Counter
from typing import NamedTuple

from stepmark.cases.training import Recompute
from stepmark.layouts.candidate import Candidate
from stepmark.model.layers import Layer
from stepmark.model.parallel import stage_layers
from stepmark.workloads.rules.megatron.plan import make_plan
from stepmark.workloads.rules.megatron.settings import Granularity
from stepmark.workloads.rules.megatron.stage_partition import partition
from stepmark.workloads.rules.pytorch.order import order_of
from stepmark.workloads.rules.pytorch.units import groups_of


class Kind(NamedTuple):
    """Kind of a layer."""

    layer: Layer
    is_recomputed: bool


def stages_of(candidate: Candidate) -> list["Counter[Kind]"]:
    """Return the layers of each stage, by kind. Raises ConfigError."""
    return [sum(chunks, Counter()) for chunks in chunks_of(candidate)]


def chunks_of(candidate: Candidate) -> list[list["Counter[Kind]"]]:
    """Return the layers of each model chunk of each stage, by kind. Raises ConfigError."""
    model = candidate.job.model
    if candidate.is_megatron:
        plan = make_plan(candidate.job, candidate.settings)
        chunks_by_stage, _ = partition(plan)
        chunks = [[chunk.layers for chunk in chunks] for chunks in chunks_by_stage]
        settings = candidate.settings
        assert plan.pipeline  # its micro-batches are checked
        is_full = settings.recompute_granularity is Granularity.FULL
        is_block = settings.recompute_method == "block"
        most = settings.recompute_num_layers if is_block else model.num_layers

        def is_again(index: int, layer: int) -> bool:
            return bool(is_full and index < most)
    else:
        pp = candidate.parallel.pp
        num_chunks = candidate.num_chunks
        settings = candidate.settings
        groups_of(candidate.job)  # its axes are checked
        if pp > 1:  # and its micro-batches
            counts = settings.pp_microbatches, num_chunks
            order_of(candidate.job, settings.pp_schedule, *counts)
        parts = stage_layers(model.num_layers, pp * num_chunks, settings.pp_split)
        chunks = [
            [parts[stage] for stage in settings.pp_schedule.stages(rank, pp, num_chunks)]
            for rank in range(pp)
        ]
        recompute = settings.recompute
        some, every = settings.recompute_some, settings.recompute_every

        def is_again(index: int, layer: int) -> bool:
            is_some = bool(layer % every < some)
            return is_some if recompute is Recompute.BLOCKS else recompute is not Recompute.NONE

    of_model = model.layers
    return [
        [
            Counter(
                Kind(of_model[layer], is_again(index, layer))
                for index, layer in enumerate(layers)
            )
            for layers in own
        ]
        for own in chunks
    ]
