"""A step of training/trainer.py: passes over micro-batches, then clipping and AdamW.

Stages of torch.distributed.pipelining: torch 2.13, torch/distributed/pipelining/stage.py
(get_fwd_recv_ops and similar, backward_maybe_with_nosync, perform_reduce_grad) and
schedules.py. Under FSDP weights that a backward pass gathered stay until the last one, after
which all gradients are reduced. FSDP's gathers depend on the passes before, so passes are
computed one by one until nothing changes any more; the rest of a span repeats.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from stepmark.cases.message import RECV, SEND
from stepmark.cases.training import OptimizerKind
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.ops import Optimizer, Phase
from stepmark.model.parallel import PipelineSchedule, stage_layers
from stepmark.step.module import Param
from stepmark.step.workload import Block, ComputeOp, Item, Kernel, Run, Stage, Workload
from stepmark.workloads.architecture import AnyJob, OwnJob, Unit
from stepmark.workloads.job import Comms, Job, check_trained
from stepmark.workloads.pipeline import (
    COMPUTE_DONE,
    FORWARD_TRANSFERS,
    PASSES,
    SENDS,
    WITH_MICROBATCH,
    WITH_NEXT_STAGE,
    Act,
    Action,
    Span,
    Tick,
    wait,
)
from stepmark.workloads.rules.pytorch import muon, narrow_states
from stepmark.workloads.rules.pytorch.chunk import Blocks, Chunk, Layer
from stepmark.workloads.rules.pytorch.order import order_of, split_note
from stepmark.workloads.rules.pytorch.schedules import spans as spans_of
from stepmark.workloads.rules.pytorch.settings import Trainer
from stepmark.workloads.rules.pytorch.technique import Technique
from stepmark.workloads.rules.pytorch.units import UnitBuilder, groups_of, stage_ends


class PipelineStage:
    """A schedule's actions on one pp rank. chunks: the parts of the model on this rank.

    Bodies are added to `blocks` under names that begin with "stage" and the rank.
    """

    def __init__(
        self,
        job: Job,
        schedule: PipelineSchedule,
        chunks: Sequence[Chunk],
        rank: int,
        *,
        comms: Comms,
        blocks: Blocks,
    ) -> None:
        self._job = job
        self._schedule = schedule
        self._chunks = chunks
        self._rank = rank
        self._comms = comms
        self._blocks = blocks
        self._names: dict[Block, str] = {}
        self._passes: dict[tuple[Act, int], Block] = {}  # where they are always the same

    def program(self, spans: Sequence[Span]) -> Block:
        """Return one pass of micro-batches through the pipeline."""
        runs: list[Run] = []
        for span in spans:
            for run in self._runs(span):
                _add(runs, run)
        return tuple(runs)

    def _runs(self, span: Span) -> Iterator[Run]:
        ticks = [
            action for tick in span.ticks for action in tick if action.act in WITH_MICROBATCH
        ]
        base = min((action.microbatch for action in ticks), default=0)
        repeat = 0
        while repeat < span.times:
            state = self._state()
            counts = self._open_passes()
            items = tuple(item for tick in span.ticks for item in self._items(tick, base))
            more = 0
            if repeat + 1 < span.times and self._state() == state:
                more = self._skipped(counts, span.times - repeat - 1)
            if items:
                yield Run(
                    block=self._name_block("tick", items),
                    times=1 + more,
                    microbatch=base + repeat * span.step,
                    microbatch_step=span.step if more else 0,
                )
            repeat += 1 + more

    def _state(self) -> list[tuple[object, ...]]:
        return [chunk.state() for chunk in self._chunks]

    def _open_passes(self) -> list[list[int]]:
        return [chunk.open_passes() for chunk in self._chunks]

    def _skipped(self, before: list[list[int]], most: int) -> int:
        """Return how often the same repeats; forward passes without a backward run out."""
        open_passes = self._open_passes()
        changes = [
            [new - old for new, old in zip(news, olds, strict=True)]
            for news, olds in zip(open_passes, before, strict=True)
        ]
        repeats = [
            (count - 1) // -change
            for counts, changed in zip(open_passes, changes, strict=True)
            for count, change in zip(counts, changed, strict=True)
            if change < 0
        ]
        times = min([most, *repeats])
        for chunk, changed in zip(self._chunks, changes, strict=True):
            chunk.open_more([times * change for change in changed])
        return times

    def _items(self, tick: Tick, base: int) -> Iterator[Item]:
        """Yield a tick's items, micro-batches relative to base."""
        for action in tick:
            items = tuple(self._lower(action, base))
            count = self._num_compute_done(items)
            is_pass = action.act in PASSES
            for index, chunk in enumerate(self._chunks):
                if not (is_pass and index == action.chunk):  # a chunk counts its own passes
                    chunk.count_compute_done(count)
            yield from items

    def _num_compute_done(self, items: Block) -> int:
        """Count the operations that are named COMPUTE_DONE."""
        return sum(
            item.times * self._num_compute_done(self._blocks[item.block])
            if isinstance(item, Run)
            else item.name == COMPUTE_DONE
            for item in items
        )

    def _lower(self, action: Action, base: int) -> Iterator[Item]:
        chunk = self._chunks[action.chunk]
        match action.act:
            case Act.FORWARD | Act.BACKWARD | Act.BACKWARD_INPUT | Act.BACKWARD_WEIGHT:
                if items := self._pass(action):
                    name = self._name_block(f"{action.act}{action.chunk}", items)
                    yield Run(block=name, microbatch=action.microbatch - base)
            case Act.WAIT:
                yield wait(action.after, Phase.FWD, "pipeline")
            case Act.GATHER:
                yield from chunk.gather()
            case Act.RELEASE:
                chunk.release()
            case Act.REDUCE:
                yield from chunk.reduce()
            case _:
                yield from self._transfer(action, action.microbatch - base)

    def _pass(self, action: Action) -> Block:
        chunk = self._chunks[action.chunk]
        key = (action.act, action.chunk)
        if key in self._passes:
            return self._passes[key]
        match action.act:
            case Act.FORWARD:
                block = chunk.forward()
            case Act.BACKWARD_INPUT:
                block = chunk.backward_input()
            case Act.BACKWARD_WEIGHT:
                block = chunk.backward_weight()
            case _:
                block = chunk.backward(reduces=False, keeps=True)
        if not chunk.is_sharded:
            self._passes[key] = block
        return block

    def _transfer(self, action: Action, microbatch: int) -> tuple[Item, ...]:
        """Return a transfer of this rank's hidden states of a micro-batch, or their gradients.

        NCCL has a communicator for each pair; batches use that of all stages, and the stage
        waits for them at once. The next gathers wait for what a batch received, too.
        """
        job = self._job
        act = action.act
        # The second stages of a V go back from the last rank to the first.
        to_next = (act in WITH_NEXT_STAGE) is not self._schedule.goes_back(action.chunk)
        stream = "compute"
        name = "" if act in SENDS else COMPUTE_DONE
        if action.after:
            stream = "pp.next" if to_next or job.parallel.pp == 2 else "pp.prev"
            name = f"{act}.{action.chunk}"
        return self._comms(
            SEND if act in SENDS else RECV,
            job.tokens // job.parallel.tp * job.model.hidden_size,
            "pp",
            Phase.FWD if act in FORWARD_TRANSFERS else Phase.BWD,
            "pipeline",
            microbatch=microbatch,
            stream=stream,
            name=name,
            after=action.after,
            peer=1 if to_next else -1,
            fused=action.fused,
        )

    def _name_block(self, stem: str, items: Block) -> str:
        """Add a block, unless an equal one exists, and return its name."""
        if items not in self._names:
            name = f"stage{self._rank}.{stem}.{len(self._names)}"
            self._names[items] = name
            self._blocks[name] = items
        return self._names[items]


def _add(runs: list[Run], run: Run) -> None:
    """Append a run, or repeat the last one once more."""
    if runs and runs[-1].block == run.block and run.times == 1:
        last = runs[-1]
        step = last.microbatch_step if last.times > 1 else run.microbatch - last.microbatch
        if run.microbatch == last.microbatch + last.times * step and step >= 0:
            runs[-1] = replace(last, times=last.times + 1, microbatch_step=step)
            return
    runs.append(run)


def build(job: AnyJob, technique: Technique) -> Workload:
    """Return the workload of a job. Raises ConfigError for a job that is not supported."""
    check_trained("dtype", job.dtype)
    if job.config is not None:
        job.parallel.check(job.config)
    groups = dict(technique.sharding.comms.groups if technique.sharding else groups_of(job))
    if job.parallel.ep > 1 and technique.sharding is None:
        raise ConfigError("ep", job.parallel.ep, "1, or fsdp, which shards experts")
    blocks: Blocks = {}
    stages = tuple(_stages(job, technique, Comms(groups=groups, dtype=job.dtype), blocks))
    used_groups = _prune(blocks, stages)
    return Workload(
        name=job.name,
        rules="pytorch",
        world_size=job.parallel.world_size,
        num_microbatches=job.num_microbatches,
        model=job.config,
        groups={name: group for name, group in groups.items() if name in used_groups},
        blocks=blocks,
        stages=stages,
        notes=_notes(job, technique),
    )


def _notes(job: AnyJob, technique: Technique) -> tuple[str, ...]:
    notes: list[str] = []
    moe = job.config.moe if job.config else None
    if moe and technique.sharding:
        shards = technique.sharding.comms.groups["expert_fsdp"].size
        count = moe.num_experts // job.parallel.ep
        padded = Param(name="experts", shape=(count,)).padded(shards)
        if shards <= count < padded:
            notes.append(
                f"{count} experts over {shards} shards: torch pads them to {padded}, so that "
                "their messages, and memory where there are most, are "
                f"{padded / count:.2f} x as large"
            )
    if job.parallel.pp == 1:
        return tuple(notes)
    chunks = technique.schedule.num_chunks(technique.settings.pp_stages)
    layers = stage_layers(job.num_layers, job.parallel.pp * chunks, technique.settings.pp_split)
    return (*notes, *split_note(list(map(len, layers)), technique.settings.pp_split))


def _prune(blocks: Blocks, stages: tuple[Stage, ...]) -> set[str]:
    """Drop blocks that no stage runs, and return the names of groups that communicate."""
    reached: set[str] = set()
    groups: set[str] = set()
    pending = [name for stage in stages for name in (stage.step, stage.setup) if name]
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached.add(name)
        for item in blocks[name]:
            if isinstance(item, Run):
                pending.append(item.block)
            elif not isinstance(item, ComputeOp):
                groups.add(item.group)
    for name in set(blocks) - reached:
        del blocks[name]
    return groups


def _stages(job: AnyJob, technique: Technique, comms: Comms, blocks: Blocks) -> Iterator[Stage]:
    if isinstance(job, Job) and job.parallel.pp > 1:
        parts = list(_pipelined(job, technique, comms, blocks))
    else:
        if isinstance(job, OwnJob):
            chunk = _own_chunk(job, technique, blocks)
        else:
            (chunk,) = _chunks(job, technique, comms, blocks, 1)
        parts = [([chunk], _accumulated(job, technique, chunk, blocks))]
    for stage, (chunks, passes) in enumerate(parts):
        name = "step" if len(parts) == 1 else f"step.{stage}"
        blocks[name] = (*passes, *update(job, technique, chunks, comms, blocks))
        setup = technique.setup(chunks[0]) if technique.setup else ()
        if setup:
            blocks["setup"] = setup
        yield Stage(
            step=name,
            setup="setup" if setup else "",
            layers=tuple(layer.index for chunk in chunks for layer in chunk.layers),
            has_embedding=any(chunk.embedding for chunk in chunks),
            has_head=any(chunk.output for chunk in chunks),
        )


def _pipelined(
    job: Job, technique: Technique, comms: Comms, blocks: Blocks
) -> Iterator[tuple[list[Chunk], Block]]:
    """Yield for each pp rank its chunks of the model, and its passes of all micro-batches."""
    order = order_of(
        job,
        technique.schedule,
        technique.settings.pp_microbatches,
        technique.settings.pp_stages,
    )
    chunks = _chunks(job, technique, comms, blocks, order.num_stages)
    times = job.num_microbatches // order.num_microbatches
    count = order.num_microbatches
    for rank, spans in enumerate(spans_of(order)):
        local_chunks = [chunks[order.stage(rank, chunk)] for chunk in range(order.num_chunks)]
        stage = PipelineStage(
            job, order.schedule, local_chunks, rank, comms=comms, blocks=blocks
        )
        passes = (*stage.program(spans), *_collected(job, technique, local_chunks, None))
        if times > 1:
            blocks[f"pass.{rank}"] = passes
            passes = (Run(block=f"pass.{rank}", times=times, microbatch_step=count),)
        yield local_chunks, passes


def _chunks(
    job: Job, technique: Technique, comms: Comms, blocks: Blocks, count: int
) -> list[Chunk]:
    """Return the parts of the model by pipeline stage."""
    model = job.model
    lookup = (
        technique.sharding.gathered if technique.sharding else technique.settings.model_weights
    )
    builder = UnitBuilder(
        job=job,
        comms=comms,
        lookup_dtype=lookup,
        settings=technique.settings,
        apart=technique.sharding is not None and job.parallel.ep > 1,
    )
    kinds = builder.blocks()
    technique = replace(
        technique,
        names_ends=technique.sharding is not None or job.parallel.pp > 1,
        root_has_ends=technique.root_has_ends or model.tied_embeddings,
    )
    chunks: list[Chunk] = []
    for index, layers in enumerate(
        stage_layers(model.num_layers, count, technique.settings.pp_split)
    ):
        units = [kinds[layer] for layer in model.layers[layers.start : layers.stop]]
        is_first = index == 0
        if is_first and units and technique.settings.lora:
            units[0] = builder.first_block(units[0])
        is_last = index == count - 1
        chunk = Chunk(
            technique,
            _layers_of(technique, units, layers.start),
            blocks=blocks,
            embedding=builder.embedding() if is_first else None,
            output=builder.output(has_table=is_first) if is_last else None,
            suffix="" if count == 1 else f".{index}",
        )
        chunks.append(chunk)
    return chunks


def _own_chunk(job: OwnJob, technique: Technique, blocks: Blocks) -> Chunk:
    """Return a user-defined architecture on one stage."""
    ends = stage_ends(job.architecture)
    technique = replace(
        technique,
        names_ends=technique.sharding is not None,
        root_has_ends=technique.root_has_ends or bool(job.architecture.uses),
    )
    layers = _layers_of(technique, ends.layers, 0)
    return Chunk(technique, layers, blocks=blocks, embedding=ends.embedding, output=ends.output)


def _layers_of(technique: Technique, units: Sequence[Unit], first: int) -> list[Layer]:
    return [
        Layer(unit=unit, index=index, is_checkpointed=technique.is_checkpointed(index))
        for index, unit in enumerate(units, first)
    ]


def _accumulated(job: AnyJob, technique: Technique, chunk: Chunk, blocks: Blocks) -> Block:
    """Return the passes of all micro-batches, one after the other."""
    count = job.num_microbatches
    items: list[Item] = []
    if technique.syncs_last and count > 1:
        blocks["micro.held"] = (*chunk.forward(), *chunk.backward(reduces=False))
        items.append(Run(block="micro.held", times=count - 1, microbatch_step=1))
    forward = chunk.forward()
    backward = technique.backward(chunk) if technique.backward else chunk.backward()
    blocks["micro"] = (*forward, *backward, *_collected(job, technique, [chunk], 0))
    first, times = (count - 1, 1) if items else (0, count)
    items.append(
        Run(block="micro", times=times, microbatch=first, microbatch_step=int(times > 1))
    )
    return tuple(items)


def _collected(
    job: AnyJob, technique: Technique, chunks: list[Chunk], microbatch: int | None
) -> Block:
    """Return sums over tp of partial gradients, which fp32 masters need.

    microbatch: None: after all micro-batches.
    """
    if not technique.has_masters or technique.sharding:
        return ()
    reduce = partial(
        Comms(groups=groups_of(job), dtype=technique.settings.model_weights),
        Collective.ALL_REDUCE,
        microbatch=microbatch,
    )
    return tuple(
        op
        for chunk in chunks
        for param in chunk.params
        if param.is_partial
        for op in reduce(param.numel, "tp", Phase.BWD, param.part)
    )


def update(
    job: AnyJob, technique: Technique, chunks: list[Chunk], comms: Comms, blocks: Blocks
) -> Block:
    """Return clipping by the norm of all gradients, then the optimizer on this rank's shards.

    As training/optimizer.py runs them (torch 2.13: nn/utils/clip_grad.py get_total_norm
    over DTensors, optim/adamw.py, optim/_muon.py).
    """
    params = [param for chunk in chunks for param in chunk.params]
    trained = [param for param in params if param.is_trained and not param.is_copy]
    reduce = partial(
        comms, Collective.ALL_REDUCE, phase=Phase.OPTIM, dtype=technique.settings.weights
    )
    # Without masters or FSDP, norms of a part of the sequence still have partial gradients.
    no_partial = technique.sharding or technique.has_masters
    partial_sizes = [param.numel for param in trained if param.is_partial and not no_partial]

    def summed(module: str) -> Block:
        return tuple(op for size in partial_sizes for op in reduce(size, "tp", module=module))

    size = sum(_local_numel(param, technique) for param in trained)
    num_bytes = size * technique.settings.weights.itemsize
    items: list[Item] = []
    if technique.settings.clip:
        items += summed("clip")
        items.append(_computed("clip", Kernel(name="norms", flops=0, bytes_moved=num_bytes)))
        # One number per tensor is summed over the ranks among which its gradient is divided.
        num_experts = sum(param.is_expert for param in trained) if job.parallel.ep > 1 else 0
        others = len(trained) - num_experts
        counts = [("fsdp", others)] if technique.sharding else []
        counts += [("tp", others)]
        if job.parallel.ep > 1:
            counts += [("expert_fsdp", num_experts), ("ep", num_experts)]
        for group, count in counts:
            items += reduce(count, group, module="clip") if count else ()
        items += reduce(1, "pp", module="clip", dtype=DType.FP32)
        items.append(
            _computed("clip", Kernel(name="scale", flops=0, bytes_moved=2 * num_bytes))
        )
    items += summed("update")
    if technique.settings.optimizer is OptimizerKind.MUON:
        matrices = muon.matrices_of(chunks)
        items += muon.updates(matrices, technique.settings.weights, blocks)
        size -= sum(param.numel for layer in matrices for param in layer)
    if technique.settings.optimizer is OptimizerKind.ADAMW8BIT:
        shards = [_local_numel(param, technique) for param in trained]
        moved = narrow_states.update_bytes(shards, technique.settings.weights.itemsize)
        kernel = Kernel(name="adamw8bit", flops=0, bytes_moved=moved)
        items.append(_computed("update", kernel))
    else:
        items += _updates(max(1, size), technique)
    return (*items, *_scales(technique, trained, reduce))


# Kernels of torch's loop over parameters (DecoupledAdamW of Composer 0.16.3), and the planes of
# parameters that each reads and writes: moments, their corrected quotient, weights.
_ADAMW = (
    *(("mul", 2), ("add", 3), ("mul", 2), ("addcmul", 3)),
    *(("sqrt", 2), ("div", 2), ("add", 2), ("addcdiv", 4)),
)


def _updates(size: int, technique: Technique) -> Iterator[Item]:
    """Yield the kernels of AdamW over so many parameters."""
    if technique.settings.trainer is Trainer.STEPMARK:
        adam = Optimizer(num_params=size, kind="adamw", dtype=technique.settings.weights)
        yield _computed("update", adam)
        return
    for name, planes in _ADAMW:
        num_bytes = planes * size * technique.settings.weights.itemsize
        yield _computed("update", Kernel(name=name, flops=0, bytes_moved=num_bytes))


def _scales(
    technique: Technique, params: list[Param], reduce: Callable[..., Block]
) -> Iterator[Item]:
    """Yield the largest magnitudes of the weights that the next step gathers in fp8.

    torchao 0.18, float8/fsdp_utils.py: precompute_float8_dynamic_scale_for_fsdp.
    """
    if technique.sharding is None or technique.sharding.narrow is None:
        return
    narrow = [param for param in params if param.is_narrow]
    if not narrow:
        return
    size = sum(_local_numel(param, technique) for param in narrow)
    num_bytes = size * technique.settings.weights.itemsize
    yield _computed("scales", Kernel(name="amax", flops=0, bytes_moved=num_bytes))
    for group in ("fsdp", "tp"):
        yield from reduce(len(narrow), group, module="scales", redop=RedOp.MAX)


def _local_numel(param: Param, technique: Technique) -> int:
    if technique.sharding is None:
        return param.numel
    group = "expert_fsdp" if param.is_expert else "fsdp"
    return param.shard(technique.sharding.comms.groups[group].size)


def _computed(module: str, op: Kernel | Optimizer) -> ComputeOp:
    return ComputeOp(op=op, phase=Phase.OPTIM, module=module)
