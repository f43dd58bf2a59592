"""FSDP's tensors against the operations of the workload, and pipelines of any length."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, GradSync, Recompute
from stepmark.model.collectives import Collective
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.step.tree import stage_of_case
from stepmark.step.workload import CommOp
from stepmark.step_memory import step_memory
from stepmark.step_memory.fsdp_memory import FsdpMemory
from stepmark.step_memory.step_memory import StepMemory
from stepmark.workloads.pipeline import Span
from stepmark.workloads.rules.pytorch.case import of_case
from stepmark.workloads.rules.pytorch.order import Order
from stepmark.workloads.rules.pytorch.schedules import spans

GPT, LLAMA, MIXTRAL = (
    dataclasses.replace(find_model(name), num_layers=8, vocab_size=512)
    for name in ("gpt2-1.5b", "llama-3.1-8b", "mixtral-8x7b")
)
Event = tuple[str, str]  # what, and the module whose weights or gradients it is of


def case(model: Any = LLAMA, **more: Any) -> TrainCase:
    axes = {"dp_shard": 4} | more.pop("axes", {})
    return TrainCase(
        model=model,
        data_parallel=DataParallel.FSDP,
        parallel=ParallelConfig(**axes),
        **({"mbs": 8} | more),
    )


CASES = [
    case(),
    case(GPT),
    case(reshard="no"),
    case(reshard="2"),
    case(prefetch=2),
    case(prefetch=3, blocks_per_group=2),
    case(GPT, prefetch=2, recompute=Recompute.FULL),
    case(MIXTRAL, axes={"ep": 2}),
    case(MIXTRAL, axes={"ep": 2}, prefetch=2, blocks_per_group=2),
    case(grad_accum=2),
    case(grad_accum=2, grad_sync=GradSync.LAST),
    case(axes={"pp": 2}),
    case(axes={"pp": 4}, reshard="no"),
    case(axes={"pp": 2}, pp_schedule=PipelineSchedule.INTERLEAVED),
    case(axes={"pp": 4}, pp_schedule=PipelineSchedule.INTERLEAVED, blocks_per_group=2),
    case(axes={"pp": 2}, pp_schedule=PipelineSchedule.INTERLEAVED, pp_stages=3, mbs=6),
    case(MIXTRAL, axes={"pp": 2, "ep": 2}, pp_schedule=PipelineSchedule.INTERLEAVED),
    case(axes={"pp": 2}, pp_schedule=PipelineSchedule.ZB1P, reshard="no"),
    case(axes={"pp": 2}, pp_schedule=PipelineSchedule.ZBV, reshard="no", mbs=8),
    case(axes={"pp": 2}, pp_schedule=PipelineSchedule.DUALPIPE_V, reshard="no", mbs=8),
]


def operations(case: TrainCase, stage: int) -> Iterator[Event]:
    for op in of_case(case).expand(stage):
        name = op.name.partition(".")[0]
        if name == "copy_out":
            yield name, op.module
        elif isinstance(op, CommOp) and op.collective == Collective.ALL_GATHER:
            if name == "fsdp":
                yield "gather", op.module
        elif name == "fsdp_reduce":
            yield "reduce", op.module


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Gathers, copies and reductions of memory, which are checked against what is whole."""
    found: list[Event] = []

    def noting(name: str, what: str) -> None:
        method = getattr(FsdpMemory, name)

        def noted(memory: FsdpMemory, group: Any, *args: Any, **more: Any) -> None:
            if more.get("reduces", True):
                found.append((what, group.module))
            method(memory, group, *args, **more)
            for other, tensors in memory._tensors.items():
                assert bool(tensors.whole) is (
                    other.is_whole or (other is group and what == "copy_out")
                )

        monkeypatch.setattr(FsdpMemory, name, noted)

    noting("gather", "gather")
    noting("copy_out", "copy_out")
    noting("collect_grads", "reduce")
    return found


@pytest.mark.parametrize("case", CASES)
def test_memory_gathers_and_reduces_what_the_workload_does(
    case: TrainCase, events: list[Event]
) -> None:
    """In the same order, on the first and the last stage."""
    for stage in {0, case.parallel.pp - 1}:
        memory = StepMemory(case, stage, stage_of_case(case, stage))
        memory.steps(1)
        again = len(events)
        memory.steps(1)
        assert events[again:] == events[:again] == list(operations(case, stage))
        events.clear()


@pytest.mark.parametrize("case", CASES)
def test_a_step_frees_all_but_the_state(case: TrainCase) -> None:
    memory = StepMemory(case, 0, stage_of_case(case, 0))
    sizes = []
    for _ in range(3):
        memory.steps(1)
        sizes.append(memory.heap.allocated)
    assert len(set(sizes)) == 1
    assert memory.heap._requested["gathered"] == 0


@pytest.mark.parametrize(
    "schedule", [each for each in PipelineSchedule if each is not PipelineSchedule.GPIPE]
)
@pytest.mark.parametrize("shards", [1, 2])
def test_passes_that_are_left_out_need_no_more_memory(
    schedule: PipelineSchedule, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All passes of a schedule allocate as much as those that are replayed."""
    long = case(
        axes={"pp": 4, "dp_shard": shards}, pp_schedule=schedule, mbs=20, pp_microbatches=20
    )
    if shards == 1:
        long = dataclasses.replace(long, data_parallel=DataParallel.NONE)
    replayed = step_memory._actions(long, 0)

    def unrolled(order: Order) -> list[tuple[Span, ...]]:
        return [
            tuple(
                dataclasses.replace(span, times=1) for span in rank for _ in range(span.times)
            )
            for rank in spans(order)
        ]

    def most(stage: int) -> int:
        memory = StepMemory(long, stage, stage_of_case(long, stage))
        memory.steps(2)
        return memory.heap.peak_allocated

    few = most(0), most(3)
    monkeypatch.setattr(step_memory, "spans", unrolled)
    assert len(step_memory._actions(long, 0)) > len(replayed)
    assert (most(0), most(3)) == few


def test_a_smaller_shard_is_kept_until_its_weights_are_whole_again() -> None:
    """FSDPParam.to_sharded_post_forward makes it, FSDPParam.to_unsharded frees it."""
    plain = case(reshard="2")
    memory = StepMemory(plain, 0, stage_of_case(plain, 0))
    units, fsdp = memory._stages[0]
    [block] = units[1].begins
    whole = 2 * sum(weight.numel for weight in block.params)
    gathered = []
    for hook in (fsdp.order.pre_forward, fsdp.order.post_forward):
        hook(block)
        fsdp.order.end_forward()
        gathered.append(memory.heap._requested["gathered"])
    fsdp.order.pre_backward(block)
    assert [*gathered, memory.heap._requested["gathered"]] == [whole, whole // 2, whole]
