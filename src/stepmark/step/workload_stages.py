"""Pipeline stages of a workload: which communicate, and what repeats in their programs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from stepmark.cases.message import RECV, SEND
from stepmark.step.workload import Block, CommOp, ComputeOp, Group, Run, Workload, pass_of


class Transfer(NamedTuple):
    """Messages from a stage to another in one direction of the model, first in, first out."""

    sender: int
    receiver: int
    phase: str


def transfer_of(workload: Workload, stage: int, op: CommOp) -> Transfer | None:
    """Return the transfer of a send or recv of a stage's ranks; None inside the stage.

    Context parallelism's ring, e.g., is inside a stage.
    """
    if op.collective not in (SEND, RECV) or len(workload.stages) == 1:
        return None
    assert op.peer is not None
    group = workload.groups[op.group]
    per_stage = workload.world_size // len(workload.stages)
    members = group.members(stage * per_stage)
    own = members.index(stage * per_stage)
    other = members[(own + op.peer) % len(members)] // per_stage
    if other == stage or not 0 <= other < len(workload.stages):
        return None
    pair = (stage, other) if op.collective == SEND else (other, stage)
    return Transfer(*pair, op.phase)


def missing_pipeline(workload: Workload) -> str:
    """Return "one of 8 stages" if the others are not in the workload, "" if it has all."""
    if len(workload.stages) != 1:
        return ""
    size = workload.settings.get("pp")  # from line 1 of SimAI's text
    sends = any(
        isinstance(op, CommOp) and op.collective in (SEND, RECV) and op.group == "pp"
        for op in workload.tally(0)
    )
    if sends:
        size = workload.groups["pp"].size
    if isinstance(size, int) and size > 1:
        return f"one of {size} stages"
    return "one of several stages" if sends else ""


def stages_of(workload: Workload, stage: int, group: Group) -> tuple[int, ...]:
    """Return the stages whose ranks are in the group of a stage's first rank."""
    if len(workload.stages) == 1:  # the groups of a capture belong to the rank that ran
        return (stage,)
    per_stage = workload.world_size // len(workload.stages)
    ranks = {group.first(stage * per_stage)}
    for size, stride in group.digits:
        step = max(1, min(size, per_stage // stride))  # ranks between are in the same stages
        places = {*range(0, size, step), size - 1}
        ranks = {rank + place * stride for rank in ranks for place in places}
    return tuple(sorted({rank // per_stage for rank in ranks}))


def shortened(workload: Workload, num_repeats: int) -> Workload:
    """Reduce the steady state to this many repeats in the stage that has the fewest.

    Every other stage loses as many repeats.
    """
    runs = steady_runs(workload)
    num_omitted = num_steady(workload) - num_repeats
    if num_omitted <= 0:
        return workload
    blocks = dict(workload.blocks)
    stages = []
    for index, (stage, run) in enumerate(zip(workload.stages, runs, strict=True)):
        name = f"{stage.step}, shortened {index}"
        blocks[name] = tuple(
            replace(run, times=run.times - num_omitted) if item is run else item
            for item in blocks[stage.step]
        )
        stages.append(replace(stage, step=name))
    return replace(workload, blocks=blocks, stages=tuple(stages))


def num_steady(workload: Workload) -> int:
    """Return repeats of the steady state in the stage that has the fewest; 0 without one."""
    return min((run.times for run in steady_runs(workload)), default=0)


def steady_runs(workload: Workload) -> tuple[Run, ...]:
    """Return the run of each stage's step that is its steady state; () where a stage has none.

    It is the longest one that repeats forwards and backwards together, and moves on by as many
    micro-batches as in every other stage, so that all stages can leave out equal messages: with
    interleaved stages a round of as many micro-batches as there are stages, and no part of it.
    A stage without layers passes on messages of both directions.
    """
    blocks = workload.blocks
    cache: _Passes = {}
    by_stage = [
        [
            item
            for item in blocks[stage.step]
            if isinstance(item, Run)
            and item.microbatch_step
            and {"forward", "backward"} <= _passes_of_run(blocks, item.block, cache)
        ]
        for stage in workload.stages
    ]
    longest_step = max((run.microbatch_step for runs in by_stage for run in runs), default=0)
    steady = [
        max(
            (run for run in runs if run.microbatch_step == longest_step),
            key=lambda run: run.times,
            default=None,
        )
        for runs in by_stage
    ]
    return tuple(run for run in steady if run) if all(steady) else ()


_Passes = dict[tuple[str, type], frozenset[str]]  # by block and kind of operation


def _passes_of_run(blocks: Mapping[str, Block], block: str, cache: _Passes) -> frozenset[str]:
    """Return the passes that a block computes, or those of its messages if it computes none."""
    computed = _passes(blocks, block, ComputeOp, cache)
    return computed or _passes(blocks, block, CommOp, cache)


def _passes(
    blocks: Mapping[str, Block], block: str, kind: type, cache: _Passes
) -> frozenset[str]:
    """Return the passes of a block's operations of one kind; mere waits do not count."""
    key = block, kind
    if key not in cache:
        passes: set[str] = set()
        for item in blocks[block]:
            if isinstance(item, Run):
                passes |= _passes(blocks, item.block, kind, cache)
            elif isinstance(item, kind) and not (isinstance(item, ComputeOp) and item.is_wait):
                passes.add(pass_of(item))
        cache[key] = frozenset(passes)
    return cache[key]
