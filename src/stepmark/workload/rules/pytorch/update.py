"""The end of a step: gradients are clipped by their norm, AdamW steps on what a rank holds.

As bench/training/optimizer.py runs them (torch 2.13: nn/utils/clip_grad.py get_total_norm over
DTensors, optim/adamw.py).
"""

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.module import Param
from stepmark.core.ops import Optimizer, Phase
from stepmark.core.workload import Block, ComputeOp, Item, Kernel
from stepmark.workload.architecture import AnyJob
from stepmark.workload.job import Comms
from stepmark.workload.rules.pytorch.chunk import Chunk
from stepmark.workload.rules.pytorch.technique import Technique


def update(job: AnyJob, how: Technique, chunks: list[Chunk], comms: Comms) -> Block:
    """Clipping by the norm of all gradients, then AdamW on what this rank updates."""
    every = [one for chunk in chunks for one in chunk.params]
    trained = [one for one in every if one.is_trained and not one.is_copy]
    # Without masters or FSDP, norms of a sequence's parts still have gradients that are parts.
    partial = [one for one in trained if one.is_partial]
    if how.sharding or how.weights is not how.model_weights:
        partial = []

    def summed(module: str) -> Block:
        return tuple(
            made
            for one in partial
            for made in comms(
                Collective.ALL_REDUCE,
                one.numel,
                "tp",
                phase=Phase.OPTIM,
                module=module,
                dtype=how.weights,
            )
        )

    size = sum(_held(one, how) for one in trained)
    found: list[Item] = []
    if how.clips:
        found += [*summed("clip"), *_norms(job, how, trained, comms)]
        moved = 2 * size * how.weights.itemsize
        found.append(_computed("clip", Kernel(name="scale", flops=0, bytes_moved=moved)))
    found += summed("update")
    adam = Optimizer(num_params=max(1, size), kind="adamw", dtype=how.weights)
    return (*found, _computed("update", adam))


def _held(one: Param, how: Technique) -> int:
    if how.sharding is None:
        return one.numel
    group = "expert_fsdp" if one.is_expert and "ep" in how.sharding.comms.groups else "fsdp"
    return one.shard(how.sharding.comms.groups[group].size)


def _norms(job: AnyJob, how: Technique, trained: list[Param], comms: Comms) -> list[Item]:
    """One number per tensor is summed over the ranks that its gradient is divided over."""
    apart = job.parallel.ep > 1
    plain = [one for one in trained if not (apart and one.is_expert)]
    moved = sum(_held(one, how) for one in trained) * how.weights.itemsize
    squared = Kernel(name="norms", flops=0, bytes_moved=moved)
    found: list[Item] = [_computed("clip", squared)]
    groups = ["fsdp_tp" if how.sharding else "tp"]
    sets = [(len(plain), groups)]
    if apart:
        sets.append((len(trained) - len(plain), ["expert_fsdp", "ep"]))
    for count, over in sets:
        for group in over:
            found += comms(
                Collective.ALL_REDUCE,
                count,
                group,
                phase=Phase.OPTIM,
                module="clip",
                dtype=how.weights,
            )
    found += comms(
        Collective.ALL_REDUCE, 1, "pp", phase=Phase.OPTIM, module="clip", dtype=DType.FP32
    )
    return found


def _computed(module: str, op: Kernel | Optimizer) -> ComputeOp:
    return ComputeOp(op=op, phase=Phase.OPTIM, module=module)
