"""A step of a PyTorch trainer: passes over micro-batches, then clipping and AdamW.

As bench/training/trainer.py runs them.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.module import Param
from stepmark.core.ops import Optimizer, Phase
from stepmark.core.workload import Block, ComputeOp, Group, Item, Kernel, Run, Stage, Workload
from stepmark.workload.architecture import AnyJob, OwnJob, Unit
from stepmark.workload.job import Comms, Job, check_trained
from stepmark.workload.rules.pytorch.chunk import BLOCKS, Chunk, Layer
from stepmark.workload.rules.pytorch.pipeline import Stage as PipelineStage
from stepmark.workload.rules.pytorch.schedules import order_of
from stepmark.workload.rules.pytorch.schedules import spans as spans_of
from stepmark.workload.rules.pytorch.technique import Technique, plain_settings
from stepmark.workload.rules.pytorch.units import Maker, groups_of, of_architecture

SOURCE = "PyTorch 2.13.0"


def build(job: AnyJob, how: Technique, name: str, source: str, settings: object) -> Workload:
    """The workload of a job. Raises ConfigError for what these rules do not know."""
    check_trained("dtype", job.dtype)
    groups = dict(how.sharding.comms.groups if how.sharding else groups_of(job))
    if job.parallel.ep > 1 and how.sharding is None:
        raise ConfigError("ep", job.parallel.ep, "1, or the fsdp rule, which shards experts")
    blocks: BLOCKS = {}
    stages = tuple(_stages(job, how, groups, blocks))
    used = _used(blocks, stages)
    return Workload(
        name=job.name,
        rules=name,
        source=source,
        world_size=job.parallel.world_size,
        num_microbatches=job.num_microbatches,
        model=job.config,
        settings=plain_settings(settings),
        groups={name: group for name, group in groups.items() if name in used},
        blocks=blocks,
        stages=stages,
    )


def _used(blocks: BLOCKS, stages: tuple[Stage, ...]) -> set[str]:
    """Names of groups that communicate. Blocks that no stage runs are dropped."""
    seen: set[str] = set()
    groups: set[str] = set()
    todo = [name for stage in stages for name in (stage.step, stage.setup) if name]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for item in blocks[name]:
            if isinstance(item, Run):
                todo.append(item.block)
            elif not isinstance(item, ComputeOp):
                groups.add(item.group)
    for name in set(blocks) - seen:
        del blocks[name]
    return groups


def _stages(
    job: AnyJob, how: Technique, groups: dict[str, Group], blocks: BLOCKS
) -> "list[Stage]":
    comms = Comms(groups=groups, dtype=job.dtype)
    if isinstance(job, OwnJob):
        chunks = [_own_chunk(job, how, blocks)]
        parts = [(chunks, _accumulated(job, how, chunks[0], blocks))]
    elif job.parallel.pp == 1:
        chunks = _chunks(job, how, groups, blocks, 1)
        parts = [(chunks, _accumulated(job, how, chunks[0], blocks))]
    else:
        parts = list(_pipelined(job, how, comms, blocks))
    found: list[Stage] = []
    for stage, (mine, passes) in enumerate(parts):
        name = "step" if len(parts) == 1 else f"step.{stage}"
        blocks[name] = (*passes, *update(job, how, mine, comms))
        setup = how.setup(mine[0]) if how.setup else ()
        if setup:
            blocks["setup"] = setup
        found.append(
            Stage(
                step=name,
                setup="setup" if setup else "",
                layers=tuple(one.index for chunk in mine for one in chunk.layers),
                has_embedding=any(chunk.embedding for chunk in mine),
                has_head=any(chunk.output for chunk in mine),
            )
        )
    return found


def _pipelined(
    job: Job, how: Technique, comms: Comms, blocks: BLOCKS
) -> Iterator[tuple[list[Chunk], Block]]:
    """By rank of pp its parts of the model, and its passes of all micro-batches."""
    order = order_of(job, how.schedule, how.pp_microbatches, how.pp_stages)
    chunks = _chunks(job, how, comms.groups, blocks, order.num_stages)
    times, count = job.num_microbatches // order.num_microbatches, order.num_microbatches
    for rank, spans in enumerate(spans_of(order)):
        mine = chunks[rank :: order.num_ranks]
        stage = PipelineStage(job, mine, rank, comms=comms, blocks=blocks)
        passes = (*stage.program(spans), *_collected(job, how, mine, None))
        if times > 1:
            blocks[f"pass.{rank}"] = passes
            passes = (Run(block=f"pass.{rank}", times=times, microbatch_step=count),)
        yield mine, passes


def _chunks(
    job: Job, how: Technique, groups: dict[str, Group], blocks: BLOCKS, count: int
) -> list[Chunk]:
    """As even as can be, the first ones with what is left over (bench/training/trainer.py)."""
    model = job.model
    if model.num_layers < count:
        allowed = f"at most {model.num_layers} stages, the layers of {model.name}, not {count}"
        raise ConfigError("pp", job.parallel.pp, allowed)
    if model.tied_embeddings and count > 1:
        raise ConfigError("pp", job.parallel.pp, f"1, since {model.name} ties its ends")
    lookup = how.sharding.gathered if how.sharding else how.model_weights
    maker = Maker(
        job=job,
        comms=Comms(groups=groups, dtype=job.dtype),
        lookup_dtype=lookup,
        plan=how.plan,
        apart=how.sharding is not None and job.parallel.ep > 1,
    )
    kinds: dict[bool, Unit] = {}
    for moe in (False, True):
        if (moe and model.num_moe_layers) or (not moe and model.num_dense_layers):
            kinds[moe] = maker.block(moe=moe)
    how = replace(
        how,
        marked=how.sharding is not None or job.parallel.pp > 1,
        together=how.together or model.tied_embeddings,
    )
    small, rest = divmod(model.num_layers, count)
    ends = [0, *itertools.accumulate(small + (index < rest) for index in range(count))]
    found: list[Chunk] = []
    for index, (start, stop) in enumerate(itertools.pairwise(ends)):
        units = [
            kinds[model.moe is not None and at >= model.num_dense_layers]
            for at in range(start, stop)
        ]
        is_first, is_last = index == 0, index == count - 1
        made = Chunk(
            how,
            _layers_of(how, units, start),
            blocks=blocks,
            embedding=maker.embedding() if is_first else None,
            output=maker.output(has_table=is_first) if is_last else None,
            suffix="" if count == 1 else f".{index}",
        )
        found.append(made)
    return found


def _own_chunk(job: OwnJob, how: Technique, blocks: BLOCKS) -> Chunk:
    """An architecture of the user's on one stage."""
    made = of_architecture(job.architecture)
    how = replace(
        how,
        marked=how.sharding is not None,
        together=how.together or bool(job.architecture.uses),
    )
    layers = _layers_of(how, made.layers, 0)
    return Chunk(how, layers, blocks=blocks, embedding=made.embedding, output=made.output)


def _layers_of(how: Technique, units: Sequence[Unit], first: int) -> list[Layer]:
    return [
        Layer(unit=unit, index=at, is_checkpointed=how.is_checkpointed(at))
        for at, unit in enumerate(units, first)
    ]


def _accumulated(job: AnyJob, how: Technique, chunk: Chunk, blocks: BLOCKS) -> Block:
    """Micro-batch after micro-batch."""
    count = job.num_microbatches
    reducing = how.buckets(chunk) if how.buckets else chunk.backward
    collected = _collected(job, how, [chunk], 0)
    found: list[Item] = []
    if how.holds and count > 1:
        held = chunk.forward(), chunk.backward(reduces=False)
        blocks["micro.held"] = (*held[0], *held[1])
        found.append(Run(block="micro.held", times=count - 1, microbatch_step=1))
    blocks["micro"] = (*chunk.forward(), *reducing(), *collected)
    first, times = (count - 1, 1) if found else (0, count)
    found.append(
        Run(block="micro", times=times, microbatch=first, microbatch_step=int(times > 1))
    )
    return tuple(found)


def _collected(
    job: AnyJob, how: Technique, chunks: list[Chunk], microbatch: int | None
) -> Block:
    """Of fp32 masters: gradients that are parts of a sum over tp are summed when taken.

    microbatch: None where they are taken after all.
    """
    if how.weights is how.model_weights or how.sharding:
        return ()
    comms = Comms(groups=groups_of(job), dtype=how.model_weights)
    return tuple(
        made
        for chunk in chunks
        for one in chunk.params
        if one.is_partial
        for made in comms(
            Collective.ALL_REDUCE, one.numel, "tp", Phase.BWD, one.part, microbatch=microbatch
        )
    )


def update(job: AnyJob, how: Technique, chunks: list[Chunk], comms: Comms) -> Block:
    """Clipping by the norm of all gradients, then AdamW on what this rank updates.

    As bench/training/optimizer.py runs them (torch 2.13: nn/utils/clip_grad.py get_total_norm
    over DTensors, optim/adamw.py).
    """
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
                Collective.ALL_REDUCE, one.numel, "tp", Phase.OPTIM, module, how.weights
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
                Collective.ALL_REDUCE, count, group, Phase.OPTIM, "clip", how.weights
            )
    found += comms(Collective.ALL_REDUCE, 1, "pp", Phase.OPTIM, "clip", DType.FP32)
    return found


def _computed(module: str, op: Kernel | Optimizer) -> ComputeOp:
    return ComputeOp(op=op, phase=Phase.OPTIM, module=module)
