"""The pipeline's drawing: order, waits and idle time against closed formulas."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import DType
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Gemm, Phase
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.step.workload import CommOp, ComputeOp, Group, Item, Kernel, Stage, Workload
from stepmark.step.workload_stages import num_steady, shortened
from stepmark.workloads import workload_page, workload_pipeline
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.megatron import rule as megatron
from stepmark.workloads.rules.megatron.settings import Megatron
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.workload_pipeline import Chart, chart_of
from stepmark.workloads.workload_pipeline import spans as spans_of

GEMM = Gemm(m=8, n=8, k=8, dtype=DType.BF16)
ALL = 10**6


def job(pp: int, gbs: int, vpp: int = 1) -> Workload:
    model = find_model("llama-3.1-405b").tiny()
    model = replace(model, num_layers=2 * pp * vpp)
    asked = Megatron(virtual_pipeline_model_parallel_size=vpp)
    return megatron.workload(Job(model=model, parallel=ParallelConfig(pp=pp), gbs=gbs), asked)


def drawn(workload: Workload, most: int = ALL) -> Chart:
    found = chart_of(workload, most)
    assert isinstance(found, Chart), found
    return found


@settings(max_examples=25)
@given(pp=st.integers(2, 6), groups=st.integers(1, 5), vpp=st.integers(1, 3))
def test_idle_time_is_that_of_the_paper(pp: int, groups: int, vpp: int) -> None:
    """(p - 1) / (v m + p - 1) of the step: arXiv 2104.04473, section 2.2."""
    micro = pp * groups
    found = drawn(job(pp, micro, vpp))
    assert found.idle_percent == pytest.approx(100 * (pp - 1) / (vpp * micro + pp - 1))


@settings(max_examples=25)
@given(pp=st.integers(2, 5), micro=st.integers(1, 12), vpp=st.integers(1, 2))
def test_each_micro_batch_goes_forward_and_backward_once_in_order(
    pp: int, micro: int, vpp: int
) -> None:
    micro = micro if vpp == 1 else micro * pp
    found = drawn(job(pp, micro, vpp))
    at: dict[tuple[int, str, int | None, int | None], int] = {}
    for slot in found.timeline:
        key = (slot.rank, slot.kind, slot.microbatch, slot.layer)
        assert key not in at
        at[key] = slot.start_ns
        assert slot.end_ns - slot.start_ns == (2 if slot.kind == "backward" else 1)
    for stage in range(pp):
        own = [slot for slot in found.timeline if slot.rank == stage]
        assert len(own) == 2 * micro * vpp + 1
        assert all(one.end_ns <= two.start_ns for one, two in pairwise(own))
    # Layer by layer a forward comes after the one before it, a backward before.
    when = {(kind, index, layer): start for (_, kind, index, layer), start in at.items()}
    for (kind, index, layer), start in when.items():
        if layer is None:
            continue
        before = layer - 2 if kind == "forward" else layer + 2
        assert when.get((kind, index, before), -1) < start


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (3, 2)])
def test_repeats_left_out_change_no_idle_time(pp: int, vpp: int) -> None:
    workload = job(pp, 20 * pp, vpp)
    whole, few = drawn(workload), drawn(workload, 0)
    assert few.left_out > 0
    assert whole.left_out == 0
    assert len(few.timeline) < len(whole.timeline)
    assert few.idle_percent == pytest.approx(whole.idle_percent)
    cut = shortened(workload, 7)
    assert num_steady(cut) == 7
    assert spans_of(cut)


def test_1f1b_on_two_stages() -> None:
    assert workload_pipeline.lines(job(2, 3)) == [
        "stage 0  f0 f1 .. .. b0 b0 f2 b1 b1 .. b2 b2 o",
        "stage 1  .. f0 b0 b0 f1 b1 b1 f2 b2 b2 o  .. ..",
        "f forward 1 unit, b backward 2, o optimizer; the number is the micro-batch; "
        "idle 25.0 %",
    ]


def test_nothing_is_drawn_of_one_stage() -> None:
    assert workload_pipeline.lines(job(1, 4)) == []


def test_what_is_too_wide_is_left_to_the_page() -> None:
    (line,) = workload_pipeline.lines(job(6, 6, 3))
    assert "too wide for text: --html draws it; idle " in line


def test_the_figure_has_a_bar_per_slot() -> None:
    found = drawn(job(4, 8, 2))
    series = workload_page.pipeline(found).series
    assert [each.name for each in series] == ["forward", "backward", "optimizer"]
    assert [len(each.x) for each in series] == [4 * 8 * 2, 4 * 8 * 2, 4]
    spans = {
        (stage, start, start + float(str(x)))
        for each in series
        for stage, start, x in zip(each.y, each.starts, each.x, strict=True)
    }
    assert spans == {(f"stage {one.rank}", one.start_ns, one.end_ns) for one in found.timeline}
    assert len(set(series[0].colour)) == 2  # a shade per chunk


def pair(first: tuple[Item, ...], second: tuple[Item, ...]) -> Workload:
    return Workload(
        name="pair",
        rules="by hand",
        world_size=2,
        groups={"pp": Group(digits=((2, 1),))},
        blocks={"one": first, "two": second},
        stages=(Stage(step="one"), Stage(step="two")),
    )


def moved(collective: str, name: str = "") -> CommOp:
    return CommOp(
        collective=collective,
        dtype=DType.BF16,
        count=8,
        group="pp",
        phase=Phase.FWD,
        module="pipeline",
        peer=1,
        name=name,
        stream="pp" if name else "compute",
    )


def worked(microbatch: int, *after: str, kernel: Kernel | None = None) -> ComputeOp:
    return ComputeOp(
        op=kernel or GEMM, phase=Phase.FWD, module="mlp", microbatch=microbatch, after=after
    )


def test_stages_that_wait_for_each_other_are_not_drawn() -> None:
    both = (moved(RECV), worked(0), moved(SEND))
    assert chart_of(pair(both, both), ALL) == (
        "not drawn: by their order of transfers, stages wait for each other"
    )


def test_transfers_within_a_stage_are_no_transfers_between_stages() -> None:
    """A ring of context-parallel ranks passes keys and values on in every layer."""
    model = replace(find_model("llama-3.1-8b").tiny(), num_layers=4)
    ranks = ParallelConfig(pp=2, cp=2)
    ring = megatron.workload(Job(model=model, parallel=ranks, gbs=3), Megatron())
    assert any(isinstance(one, CommOp) and one.group == "cp" for one in ring.tally(0))
    assert workload_pipeline.lines(ring) == workload_pipeline.lines(job(2, 3))


def test_what_follows_the_last_backward_pass_is_no_other_one() -> None:
    model = replace(find_model("llama-3.1-8b").tiny(), num_layers=4)
    ranks = ParallelConfig(pp=2, dp_shard=2)
    sharded = rule.workload(Job(model=model, parallel=ranks, gbs=6), RULES["fsdp"].make())
    assert workload_pipeline.lines(sharded) == workload_pipeline.lines(job(2, 3))
    both = tuple(replace(worked(0), microbatch=one) for one in (None, 0, 1))
    alone = drawn(pair((*both, moved(SEND), replace(worked(0), microbatch=None)), (worked(0),)))
    assert [(one.rank, one.microbatch) for one in alone.timeline] == [(0, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize("per_pass", [0, 4])
@pytest.mark.parametrize(
    "schedule", [each for each in PipelineSchedule if each is not PipelineSchedule.DUALPIPE_V]
)
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"dp_shard": 2, "dp_replicate": 2, "tp": 2}])
def test_shards_change_nothing_of_a_pipelines_figure(
    schedule: PipelineSchedule, per_pass: int, axes: dict[str, int]
) -> None:
    """Gathers and reductions take no unit; gradients are reduced behind the last pass."""
    model = replace(find_model("llama-3.1-8b").tiny(), num_layers=8)
    asked: dict[str, Any] = {"pp_schedule": schedule, "pp_microbatches": per_pass}
    ranks = ParallelConfig(pp=4, **axes)
    shards = Job(model=model, parallel=ranks, gbs=8 * ranks.data_ranks)
    sharded = drawn(rule.workload(shards, RULES["fsdp"].make(**asked)))
    whole = Job(model=model, parallel=ParallelConfig(pp=4), gbs=8)
    alone = drawn(rule.workload(whole, RULES["pp"].make(**asked)))
    assert [*sharded.timeline] == [*alone.timeline]
    assert sharded.idle_percent == alone.idle_percent
    if schedule in (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE):
        micro = per_pass or 8
        assert alone.idle_percent == pytest.approx(100 * 3 / (micro + 3))


def test_a_receipt_is_waited_for_where_its_name_is() -> None:
    """And a kernel of nothing, which stands for waiting, is no work."""
    sender = (worked(0), worked(1), moved(SEND))
    wait = Kernel(name="wait", flops=0, bytes_moved=0)
    receiver = (moved(RECV, "in"), worked(7), worked(8, "in", kernel=wait), worked(9))
    found = drawn(pair(sender, receiver))
    assert [(s.rank, s.microbatch, s.start_ns, s.end_ns) for s in found.timeline] == [
        (0, 0, 0, 1),
        (0, 1, 1, 2),
        (1, 7, 0, 1),
        (1, 9, 2, 3),
    ]
