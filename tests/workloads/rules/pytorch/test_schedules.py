"""Schedules of torch's pipelines: what is done, in which order, and how much is held."""

from collections import Counter
from collections.abc import Iterator

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Phase
from stepmark.model.parallel import PipelineSchedule, StageSplit, stage_layers
from stepmark.workloads.pipeline import WITH_MICROBATCH, Act, Action
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.rules.pytorch.order import Order
from stepmark.workloads.rules.pytorch.schedules import spans

from .jobs import ALONE, FSDP, make


def actions(order: Order, rank: int) -> Iterator[tuple[Act, int]]:
    """Every call of a rank with its micro-batch."""

    def numbered(action: Action, number: int) -> tuple[Act, int]:
        return action.act, action.microbatch + number if action.act in WITH_MICROBATCH else 0

    for span in spans(order)[rank]:
        for time in range(span.times):
            for tick in span.ticks:
                yield from (numbered(action, time * span.step) for action in tick)


def test_a_schedule_by_its_name_is_the_same() -> None:
    order = Order(schedule="gpipe", num_ranks=2, num_microbatches=3)  # type: ignore[arg-type]
    assert order.schedule is PipelineSchedule.GPIPE


@pytest.mark.parametrize("schedule", [PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_micro_batches_go_forward_and_back_once_and_in_order(
    schedule: PipelineSchedule, ranks: int, more: int
) -> None:
    count = ranks + more
    order = Order(schedule=schedule, num_ranks=ranks, num_microbatches=count)
    for rank in range(ranks):
        done = list(actions(order, rank))
        for act in (Act.FORWARD, Act.BACKWARD):
            assert [number for one, number in done if one is act] == list(range(count))
        held, most = 0, 0
        for act, _ in done:
            held += (act is Act.FORWARD) - (act is Act.BACKWARD)
            most = max(most, held)
        is_gpipe = schedule is PipelineSchedule.GPIPE
        assert most == (count if is_gpipe else min(count, ranks - rank))


@pytest.mark.parametrize("layers", [1, 4, 32, 61, 126])
@pytest.mark.parametrize("stages", [2, 3, 4, 8, 16])
def test_layers_are_split_as_torchtitan_does(layers: int, stages: int) -> None:
    """Its own loop: modules go to stages in order, the remainder to the first ones."""
    modules = ["embedding", *map(str, range(layers)), "head"]
    if stages > len(modules):
        with pytest.raises(
            ConfigError, match=f"stages: '{stages}' is invalid: .* {layers + 2} "
        ):
            stage_layers(layers, stages, StageSplit.TORCHTITAN)
        return
    least, more = divmod(layers + 2, stages)
    wanted = []
    for stage in range(stages):
        part = [modules.pop(0) for _ in range(least + (stage < more))]
        wanted.append(sum(name.isdecimal() for name in part))
    assert not modules
    assert [len(own) for own in stage_layers(layers, stages, StageSplit.TORCHTITAN)] == wanted
    assert sum(map(len, stage_layers(layers, min(stages, layers), StageSplit.EVEN))) == layers


def test_stages_of_fsdp_have_torchtitans_layers_and_say_so() -> None:
    """Of 8 layers over 4 stages the ends have fewer; over 2 stages all are equal."""
    workload = rule.workload(make(dp_shard=2, pp=4, microbatches=4), FSDP())
    assert [len(stage.layers) for stage in workload.stages] == [2, 3, 2, 1]
    (note,) = workload.notes
    assert note.startswith("layers of the 4 pipeline stages: 2, 3, 2, 1: embedding and head")
    even = rule.workload(make(dp_shard=2, pp=4, microbatches=4), FSDP(pp_split=StageSplit.EVEN))
    assert [len(stage.layers) for stage in even.stages] == [2, 2, 2, 2]
    assert even.notes == rule.workload(make(pp=2, microbatches=2), FSDP()).notes == ()


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_fewer_micro_batches_than_stages_are_taken_where_torch_takes_them(
    schedule: PipelineSchedule,
) -> None:
    """schedules.py: Schedule1F1B raises, GPipe does not, flex_pp has one round."""
    job = make(pp=4, microbatches=3)
    if schedule is PipelineSchedule.ONE_F_ONE_B:
        with pytest.raises(ConfigError, match=r"gbs 6 .* 8 or more.*interleaved or gpipe"):
            rule.workload(job, ALONE(pp_schedule=schedule))
        return
    if schedule is PipelineSchedule.DUALPIPE_V:
        with pytest.raises(
            ConfigError, match=r"pp_microbatches 3 .* at least the stages \(8\)"
        ):
            rule.workload(job, ALONE(pp_schedule=schedule))
        return
    made = rule.workload(job, ALONE(pp_schedule=schedule, pp_stages=2))
    made.check()
    for index, stage in enumerate(made.stages):
        cores = Counter(
            (op.layer, op.microbatch)
            for op in made.expand(index)
            if op.module == "attention.core" and op.phase is Phase.FWD
        )
        assert cores == Counter((layer, micro) for layer in stage.layers for micro in range(3))
