"""Groups found again from their ranks; stages found again from ranks' programs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Phase
from stepmark.step.workload import Block, CommOp, Group, Operation, Stage, Workload
from stepmark.workloads.formats.ranks import (
    WORLD,
    Instances,
    disagreements,
    group_of,
    name_of,
    stages_of,
)

from .hand_made import QKV, message, op, pipeline


@st.composite
def groups(draw: st.DrawFn) -> tuple[Group, int]:
    """Some digits of a mesh's rank numbers, and how many ranks there are."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    strides = [math.prod(sizes[:at]) for at in range(len(sizes))]
    chosen = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    digits = zip(sizes, strides, chosen, strict=True)
    kept = tuple((size, stride) for size, stride, is_in in digits if is_in)
    return Group(digits=kept or ((1, 1),)), math.prod(sizes)


@given(groups())
def test_a_group_is_found_from_the_ranks_of_any_member(made: tuple[Group, int]) -> None:
    group, world = made
    for rank in {0, world // 2, world - 1}:
        ranks = group.members(rank)
        found = group_of(ranks, "x")
        assert found.size == group.size
        assert found.members(rank) == tuple(sorted(ranks))
        assert group.first(rank) == min(ranks)
    assert (name_of(group, world) == WORLD) is (group.size == world)


def test_first_and_last_stage_have_no_instances_in_between() -> None:
    """Embedding groups of four stages of two ranks: no other rank is a member of any."""
    workload = Workload(
        name="ends", rules="x", world_size=8, groups={"ends": Group(digits=((2, 6),))}
    )
    instances = Instances(workload)
    assert list(instances.members()) == [(0, "ends", (0, 6)), (1, "ends", (1, 7))]
    assert [instances.number("ends", rank) for rank in (0, 1, 6, 7)] == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match="group ends: 'rank 2'"):
        instances.number("ends", 2)


@pytest.mark.parametrize("ranks", [(0, 1, 3), (1, 2), (0, 0), (0, 1, 2, 4, 5, 7)])
def test_ranks_that_are_no_grid_are_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="a regular grid"):
        group_of(ranks, "x")


@given(groups())
def test_every_rank_is_in_one_communicator_of_a_group(made: tuple[Group, int]) -> None:
    group, world = made
    workload = Workload(name="w", rules="r", world_size=world, groups={"g": group})
    instances = Instances(workload)
    members = list(instances.members())
    assert [number for number, _, _ in members] == list(range(len(members)))
    if group.size == 1:
        assert not members
        return
    seen = sorted(rank for _, _, ranks in members for rank in ranks)
    assert seen == list(range(world))
    for number, name, ranks in members:
        assert all(instances.number(name, rank) == number for rank in ranks)


def test_stages_are_equally_large_and_have_equal_programs() -> None:
    one, two = [message("all_reduce")], [op(QKV, Phase.FWD, "x", layer=4)]
    stages, blocks = stages_of([one, one, two, two])
    assert stages == (Stage(step="step 0"), Stage(step="step 1", layers=(4,)))
    assert blocks["step 0"] == tuple(one)
    assert len(stages_of([one, two, two, two])[0]) == 4
    assert len(stages_of([one, one, two, two, two, two, one, one])[0]) == 4
    assert len(stages_of([one, two, one, two])[0]) == 4


def test_repeats_are_folded() -> None:
    program = list(pipeline(microbatches=64, layers=4).expand())
    stages, blocks = stages_of([program])
    found = Workload(
        name="w", rules="r", groups=pipeline().groups, blocks=blocks, stages=stages
    )
    assert list(found.expand()) == program
    assert sum(len(block) for block in blocks.values()) < len(program) / 10


def test_members_of_a_group_that_do_not_agree_are_noted() -> None:
    """Two stages of one rank: an all_reduce of both, and a transfer from the first."""
    together = message("all_reduce", group="all")
    sent, received = message("send", peer=1, group="all"), message("recv", peer=-1, group="all")

    def notes(first: tuple[Operation, ...], second: tuple[Operation, ...]) -> tuple[str, ...]:
        workload = Workload(
            name="two",
            rules="x",
            world_size=2,
            groups={"all": Group(digits=((2, 1),))},
            blocks={"first": first, "second": second},
            stages=(Stage(step="first"), Stage(step="second")),
        )
        return disagreements(workload)

    assert notes((together, sent), (received, together)) == ()
    assert "1 times all_reduce" in notes((together, sent), (received,))[0]
    assert "2 times send" in notes((together, sent, sent), (received, together))[0]
    assert "1 times recv" in notes((together,), (received, together))[0]


@given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 3))
def test_two_ranks_that_send_have_one_communicator_and_the_same_everywhere(
    stages: int, columns: int, first: int
) -> None:
    workload = pipeline_of(stages, columns)
    instances = Instances(workload, first)
    numbers = [number for number, _, _ in instances.members()]
    assert numbers == list(range(first, first + len(numbers)))
    ranks_of = {number: ranks for number, _, ranks in instances.members()}
    assert len(set(ranks_of.values())) == len(ranks_of)
    for rank in range(columns * (stages - 1)):
        pair = rank, rank + columns
        assert ranks_of[instances.of_pair("pp", *pair)] == pair
        assert instances.of_pair("pp", *reversed(pair)) == instances.of_pair("pp", *pair)


def pipeline_of(stages: int, columns: int) -> Workload:
    """Each stage sends to the next."""

    def passed(kind: str, peer: int) -> CommOp:
        return CommOp(
            collective=kind,
            dtype=DType.FP32,
            count=1,
            group="pp",
            phase=Phase.FWD,
            module="pipeline",
            peer=peer,
        )

    blocks: dict[str, Block] = {}
    for stage in range(stages):
        received = () if stage == 0 else (passed(RECV, -1),)
        sent = () if stage == stages - 1 else (passed(SEND, 1),)
        blocks[f"step {stage}"] = (*received, *sent)
    return Workload(
        name="p",
        rules="r",
        world_size=stages * columns,
        groups={"pp": Group(digits=((stages, columns),))},
        blocks=blocks,
        stages=tuple(Stage(step=name) for name in blocks),
    )
