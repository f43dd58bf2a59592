"""Programs are small, and say the same walked and counted; groups partition the world."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.step.workload import CommOp, Group, Operation, Run, Stage, Workload

from .workload_samples import comm, compute, small, workloads


def stripped(op: Operation) -> Operation:
    return replace(
        op,
        layer=None if op.layer is None else 0,
        microbatch=None if op.microbatch is None else 0,
    )


@settings(max_examples=50)
@given(workloads())
def test_counting_is_walking_without_places(workload: Workload) -> None:
    workload.check()
    for stage, setup in itertools.product(range(len(workload.stages)), (False, True)):
        walked = Counter(stripped(op) for op in workload.expand(stage, setup=setup))
        counted: Counter[Operation] = Counter()
        for op, times in workload.tally(stage, setup=setup).items():
            counted[stripped(op)] += times
        assert walked == counted
    assert workload.num_operations() == sum(1 for _ in workload.expand())


@given(st.integers(1, 5), st.integers(1, 5))
def test_each_layer_of_each_microbatch_runs_once(microbatches: int, layers: int) -> None:
    workload = small(microbatches, layers)
    for stage in range(2):
        seen = [
            (op.microbatch, op.layer) for op in workload.expand(stage) if op.module == "mlp.up"
        ]
        assert seen == list(itertools.product(range(microbatches), range(layers)))


def test_a_program_does_not_grow_with_repeats() -> None:
    assert small(2).blocks.keys() == small(2048).blocks.keys()
    assert small(2048, 96).num_operations() == 2048 * (96 * 2 + 1)


def test_places_add_up_along_nested_runs() -> None:
    step = Run(block="outer", times=2, layer=10, layer_step=5, microbatch=1, microbatch_step=3)
    workload = Workload(
        name="nested",
        rules="test",
        blocks={
            "step": (step,),
            "outer": (Run(block="inner", times=2, layer=2, layer_step=1), compute(layer=None)),
            "inner": (compute(layer=1),),
        },
        stages=(Stage(step="step"),),
    )
    places = [(op.layer, op.microbatch) for op in workload.expand()]
    assert places == [(13, 1), (14, 1), (None, 1), (18, 4), (19, 4), (None, 4)]


@st.composite
def meshes(draw: st.DrawFn) -> tuple[int, Group]:
    """A world, and a group over some of the axes that it is the product of."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    digits, stride = [], 1
    for size in sizes:
        digits.append((size, stride))
        stride *= size
    chosen = [digit for digit in digits if draw(st.booleans())]
    return stride, Group(digits=tuple(draw(st.permutations(chosen))))


@given(meshes())
def test_groups_partition_the_world(mesh: tuple[int, Group]) -> None:
    world, group = mesh
    found = {group.members(rank) for rank in range(world)}
    for rank in range(world):
        members = group.members(rank)
        assert rank in members
        assert len(members) == len(set(members)) == group.size
    assert sorted(itertools.chain(*found)) == list(range(world))


def test_the_first_digit_of_a_group_varies_fastest() -> None:
    assert Group(digits=((2, 1), (2, 4))).members(6) == (2, 3, 6, 7)
    assert Group(digits=((2, 4), (2, 1))).members(6) == (2, 6, 3, 7)


@pytest.mark.parametrize("collective", Collective)
@pytest.mark.parametrize("size", [2, 5, 8])
def test_bus_bytes_of_an_all_reduce_are_those_of_its_halves(
    collective: Collective, size: int
) -> None:
    group = Group(digits=((size, 1),))
    op = comm(str(collective), 3 * size)
    assert op.call_bytes() == 3 * size * 2
    assert op.bus_bytes(group) <= 2 * op.message_bytes(group)
    whole = comm("all_reduce", 3 * size).bus_bytes(group)
    halves = [comm(one, 3).bus_bytes(group) for one in ("reduce_scatter", "all_gather")]
    assert math.isclose(whole, sum(halves))


def test_a_transfer_moves_its_buffer_once() -> None:
    op = comm("send", 10, peer=1)
    group = Group(digits=((4, 1),))
    assert (op.message_bytes(group), op.bus_bytes(group)) == (20, 20.0)


def test_stages_are_the_slowest_digit() -> None:
    assert [small().stage_of(rank) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": ()}, "stages"),
        ({"stages": (Stage(step="layer"),) * 3}, "divisor of world_size"),
        ({"stages": (Stage(step="missing"),)}, "missing"),
        ({"blocks": {**small().blocks, "layer": (Run(block="step 0"),)}}, "run itself"),
        ({"blocks": {**small().blocks, "layer": (Run(block="nowhere"),)}}, "nowhere"),
        ({"blocks": {**small().blocks, "layer": (comm(group="ep"),)}}, "one of tp, pp"),
        ({"world_size": 2}, "at most 2 ranks"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(change: dict[str, object], words: str) -> None:
    groups = {**small().groups, "wide": Group(digits=((4, 1),))}
    with pytest.raises(ConfigError, match=words):
        replace(small(), groups=groups, **change).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"collective": "allreduce"},
        {"dtype": DType.TF32},
        {"count": -1},
        {"peer": 1},
        {"collective": "send"},
    ],
)
def test_bad_communication_is_refused(change: dict[str, object]) -> None:
    good: CommOp = comm()
    with pytest.raises(ConfigError):
        replace(good, **change)  # type: ignore[arg-type]


def test_bad_groups_and_runs_are_refused() -> None:
    with pytest.raises(ConfigError):
        Group(digits=((0, 1),))
    with pytest.raises(ConfigError):
        Run(block="a", times=0)
