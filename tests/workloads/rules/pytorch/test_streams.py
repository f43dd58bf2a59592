"""On which stream FSDP's messages are, and of which micro-batch."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as bounds

from stepmark.model.model import ModelConfig
from stepmark.model.ops import Phase
from stepmark.model.parallel import PipelineSchedule
from stepmark.step.workload import COMPUTE, CommOp, Operation, Workload
from stepmark.workloads.job import Job
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.rules.pytorch.fsdp_recorder import (
    COMPUTE_DONE,
    GATHER,
    REDUCE,
    REPLICATE,
)
from stepmark.workloads.rules.pytorch.settings import PyTorch, StageEnds

from .jobs import DENSE, EXPERTS, comms, generated, jobs, make


@bounds(max_examples=25, deadline=None)
@given(jobs())
def test_what_is_sent_for_all_micro_batches_is_of_none(made: tuple[Job, PyTorch]) -> None:
    """Of a pipeline the reductions; else they are of the micro-batch they come with."""
    program = rule.workload(*made)
    for stage in range(len(program.stages)):
        for one in program.expand(stage):
            stem = (one.name or getattr(getattr(one, "op", None), "name", "")).partition(".")[0]
            if stem in (REDUCE, REPLICATE, "reduce_copy_in"):
                assert (one.microbatch is None) is (made[0].parallel.pp > 1)
            elif stem == "copy_out":
                assert one.microbatch is not None


@bounds(max_examples=20, deadline=None)
@given(jobs())
def test_one_process_group_is_one_stream(made: tuple[Job, PyTorch]) -> None:
    """FSDP's gathers and reductions: NCCL runs a group's kernels one after the other."""
    program = rule.workload(*made)
    for stage in range(len(program.stages)):
        for one in comms(program, stage):
            if one.name.partition(".")[0] in (GATHER, REDUCE, REPLICATE):
                is_sum = one.group == "replicate"
                assert one.stream == ("fsdp_replicate" if is_sum else one.group)


def waits(program: Workload, stage: int) -> Iterator[tuple[Operation, list[Operation]]]:
    """Operations, and those before that each one starts after; names not yet met aside."""
    issued: dict[str, list[Operation]] = {}
    for one in map(replace, program.expand(stage)):  # each an object of its own
        found: list[Operation] = []
        for reference in one.after:
            name, _, back = reference.partition("~")
            found += issued.get(name, [])[-1 - int(back or 0) :][:1]
        yield one, found
        if one.name:
            issued.setdefault(one.name, []).append(one)


@pytest.mark.parametrize(
    ("model", "mesh", "settings", "streams"),
    [
        (DENSE, {"dp_shard": 4}, {"reshard_after_forward": "2"}, {"fsdp", "fsdp_inner"}),
        (EXPERTS, {"dp_shard": 4, "ep": 2}, {}, {"fsdp", "expert_fsdp"}),
        (
            EXPERTS,
            {"dp_shard": 8, "ep": 2},
            {"reshard_after_forward": "2"},
            {"fsdp", "fsdp_inner", "expert_fsdp", "expert_fsdp_inner"},
        ),
    ],
)
def test_gathers_and_reductions_are_in_order_over_all_groups(
    model: ModelConfig, mesh: dict[str, int], settings: dict[str, str], streams: set[str]
) -> None:
    """Torch has a stream of its own for gathers, and one for reductions."""
    program = generated(make(model, **mesh), **settings)
    found = list(waits(program, 0))
    assert {one.stream for one, _ in found if one.stream != COMPUTE} == streams
    for name in (GATHER, REDUCE):
        same = [one for one, _ in found if one.name == name]
        for first, second in pairwise(same):
            assert first.stream == second.stream or id(first) in _before(found, second)


def _before(found: list[tuple[Operation, list[Operation]]], last: Operation) -> set[int]:
    """All that has to be done before an operation starts."""
    known: set[int] = set()
    needed = {id(last)}
    lanes: set[str] = set()
    for one, after in reversed(found):
        if id(one) in needed or one.stream in lanes:
            known.add(id(one))
            lanes.add(one.stream)
            needed |= {id(other) for other in after}
    return known


@pytest.mark.parametrize("schedule", [PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE])
def test_a_stage_gathers_when_it_has_received(schedule: PipelineSchedule) -> None:
    """Its first forward pass; before, the current stream waits for the transfer."""
    job = make(DENSE, microbatches=4, dp_shard=2, pp=2)
    program = generated(
        job, pp_schedule=schedule, ends=StageEnds.ROOT, reshard_after_forward="yes"
    )
    found = list(waits(program, 1))
    received = next(one for one, _ in found if isinstance(one, CommOp))
    assert received.collective == "recv"
    gather, after = next((one, after) for one, after in found if one.name == f"{GATHER}.1")
    assert gather.module == "root"
    assert any(one is received for one in after)


@pytest.mark.parametrize("ends", StageEnds)
@pytest.mark.parametrize("reshard", ["yes", "no"])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("schedule", [PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE])
def test_the_next_gather_of_a_forward_pass_waits_for_what_was_computed_before_it(
    schedule: PipelineSchedule, pp: int, reshard: str, ends: StageEnds
) -> None:
    """Also where it is not that of the first module, whose weights are still there."""
    job = make(DENSE, microbatches=6, dp_shard=2, pp=pp)
    program = generated(job, pp_schedule=schedule, reshard_after_forward=reshard, ends=ends)
    seen = 0
    for stage in range(pp):
        newest: Operation | None = None  # computed before the pass
        before: Operation | None = None
        passing: int | None = None
        waited = True
        for one, after in waits(program, stage):
            forward = one.phase is Phase.FWD and not one.recompute and one.module != "pipeline"
            if forward and one.microbatch != passing:
                passing, before, waited = one.microbatch, newest, False
            if one.name.partition(".")[0] == GATHER and not waited:
                waited = True
                if before is None:
                    continue
                assert [id(other) for other in after if other.name == COMPUTE_DONE] == [
                    id(before)
                ]
                seen += 1
            if one.name == COMPUTE_DONE and one.stream == COMPUTE:
                newest = one
    assert seen or reshard == "no"


def test_with_several_stages_a_gather_waits_for_what_came_before_its_own_forward_pass() -> None:
    """Weights are still there for it; those of the backward pass are gathered later."""
    job = make(DENSE, microbatches=8, dp_shard=2, pp=2)
    program = generated(
        job, pp_schedule=PipelineSchedule.INTERLEAVED, reshard_after_forward="yes"
    )
    newest: Operation | None = None
    before: dict[str, Operation | None] = {}  # by stage; gone when a gather waited for it
    passing: dict[str, int | None] = {}
    seen = 0
    for one, after in waits(program, 1):
        stage = "" if one.layer is None else str(one.layer // 2)
        is_pass = one.phase is Phase.FWD and one.microbatch is not None and stage
        if is_pass and one.microbatch != passing.get(stage):
            passing[stage], before[stage] = one.microbatch, newest
        stem, _, stage = one.name.partition(".")
        expected = before.pop(stage, None) if stem == GATHER else None
        if expected and one.microbatch is not None:  # else ahead, for a pass that comes
            assert any(other is expected for other in after)
            seen += 1
        if one.name == COMPUTE_DONE:
            newest = one
    assert seen


def test_copies_in_wait_for_the_scatter_before_and_for_no_sum_over_replicas() -> None:
    """Torch records the event that frees the buffer ahead of the all-reduce."""
    for shards, waited in ((1, {()}), (2, {(REDUCE,)})):
        job = make(DENSE, dp_shard=shards, dp_replicate=4 // shards)
        made = [one for one in generated(job).expand() if one.name == "reduce_copy_in"]
        assert len(made) > 1
        assert {one.after for one in made} == waited
