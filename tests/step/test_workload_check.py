"""Parts of a workload that contradict each other are refused in one line."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.step.workload import Block, Group, Run, Stage, Workload

from .workload_samples import comm, compute, small


def of(*items: Any, group: Group | None = None, **more: Any) -> Workload:
    """One stage of eight ranks that does this."""
    return replace(
        small(),
        world_size=8,
        groups={"tp": group or Group(digits=((2, 1),))},
        blocks={"step": items} | more.pop("blocks", {}),
        stages=(Stage(step="step", **more),),
    )


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (
            of(comm("broadcast", root=2)),
            "root 2 is invalid: it must be a rank of the group, from 0 to 1",
        ),
        (of(comm("broadcast", root=-1)), "root -1"),
        (
            of(compute(after=("nothing",))),
            "after nothing is invalid: it must be the name of an operation",
        ),
        (of(compute(after=("~1",))), "after ~1"),
        (of(compute(name="a"), compute(after=("a~b",))), "after a~b"),
        (
            of(
                Run(block="inner"),
                setup="setup",
                blocks={"inner": (compute(after=("a",)),), "setup": (compute(name="a"),)},
            ),
            "after a",
        ),
        (
            of(comm(), group=Group(digits=((3, 1),))),
            "group .*3, 1.* is invalid: it must be dimensions that fit 8 ranks",
        ),
        (of(group=Group(digits=((3, 1),))), "dimensions that fit 8 ranks"),
        (of(comm(), group=Group(digits=((2, 6),))), "dimensions that fit 8 ranks"),
        (of(comm(), group=Group(digits=((2, 1), (2, 1)))), "dimensions that fit 8 ranks"),
        (of(comm(count=2**62)), "count .*less than 2\\*\\*63 bytes"),
        (
            of(Run(block="one", times=10**12), blocks={"one": (compute(), compute())}),
            "block step is invalid: it must be one that ends",
        ),
        (of(Run(block="none", times=10**13), blocks={"none": ()}), "block step"),
    ],
)
def test_contradictions_are_one_line(workload: Workload, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        workload.check()
    assert "\n" not in str(caught.value)


def test_what_is_named_in_the_same_program_may_be_waited_for() -> None:
    """Wherever it stands: a step begins with what the one before has issued."""
    later = (compute(after=("a", "a~3", "b~1")), compute(name="a"), Run(block="inner"))
    of(*later, blocks={"inner": (compute(name="b~1"),)}).check()


def test_as_many_operations_as_any_training_has() -> None:
    layer = (compute(),) * 1000
    blocks: dict[str, Block] = {"layer": layer, "pass": (Run(block="layer", times=1024),)}
    of(Run(block="pass", times=2048), blocks=blocks).check()


@pytest.mark.parametrize(("stage", "fits"), [(0, True), (1, False), (2, False), (3, True)])
def test_first_and_last_stage_may_have_a_group_of_their_own(stage: int, fits: bool) -> None:
    steps = [() if index != stage else (comm(group="ends"),) for index in range(4)]
    workload = replace(
        small(),
        world_size=8,
        groups={"ends": Group(digits=((2, 6),))},
        blocks={f"{index}": step for index, step in enumerate(steps)},
        stages=tuple(Stage(step=f"{index}") for index in range(4)),
    )
    if fits:
        workload.check()
    else:
        with pytest.raises(ConfigError, match="dimensions that fit 8 ranks"):
            workload.check()


def test_a_capture_has_the_groups_of_the_rank_that_ran() -> None:
    replace(of(comm(), group=Group(digits=((3, 1),))), rules="capture").check()


@st.composite
def spread(draw: st.DrawFn) -> tuple[int, int, int, Group]:
    """Stages, ranks of each, the stage that uses a group, and the group."""
    stages, per_stage = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    digits, stride = [], 1
    for _ in range(draw(st.integers(1, 3))):
        stride *= draw(st.integers(1, 4))
        size = draw(st.integers(1, 4))
        digits.append((size, stride))
        stride *= size
    return stages, per_stage, draw(st.integers(0, stages - 1)), Group(digits=tuple(digits))


@given(spread())
def test_a_group_is_taken_where_all_members_are_ranks(
    made: tuple[int, int, int, Group],
) -> None:
    stages, per_stage, user, group = made
    world = stages * per_stage
    ranks = range(user * per_stage, (user + 1) * per_stage)
    fits = all(max(group.members(rank)) < world for rank in ranks)
    workload = replace(
        small(),
        world_size=world,
        groups={"one": group},
        blocks={"uses": (comm(group="one"),), "none": ()},
        stages=tuple(
            Stage(step="uses" if index == user else "none") for index in range(stages)
        ),
    )
    try:
        workload.check()
    except ConfigError:
        assert not fits
    else:
        assert fits
