"""Programs of ranks: what waits for what, and workloads that would not end."""

from dataclasses import replace

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Phase
from stepmark.step.rank_program import check_ends, communicators, program
from stepmark.step.workload import CommOp, ComputeOp, Group, Item, Kernel, Stage, Workload

PP, TP = Group(digits=((2, 2),)), Group(digits=((2, 1),))


def message(collective: str, peer: int | None = None, **changes: object) -> CommOp:
    op = CommOp(
        collective=collective,
        dtype=DType.BF16,
        count=8,
        group="pp",
        phase=Phase.FWD,
        module="m",
        peer=peer,
    )
    return replace(op, **changes)


def work(**changes: object) -> ComputeOp:
    op = ComputeOp(op=Kernel(name="k", flops=1, bytes_moved=1), phase=Phase.FWD, module="m")
    return replace(op, **changes)


SEND, RECV = message("send", 1), message("recv", -1)
BACK, GRADIENT = message("send", -1), message("recv", 1)


def staged(*stages: tuple[Item, ...]) -> Workload:
    """Two ranks per stage."""
    return Workload(
        name="w",
        rules="test",
        world_size=2 * len(stages),
        groups={"pp": PP, "tp": TP},
        blocks={f"s{index}": items for index, items in enumerate(stages)},
        stages=tuple(Stage(step=f"s{index}") for index in range(len(stages))),
    )


def test_a_step_waits_for_the_newest_of_a_name_or_so_many_back() -> None:
    items = (
        work(name="a"),
        work(name="a"),
        message("all_reduce", group="tp", stream="s", after=("a",)),
        message("all_reduce", group="tp", stream="s", after=("a~1", "b")),
        work(name="b", after=("a~7",)),
    )
    steps = program(staged(items), 1)
    assert [step.deps for step in steps] == [(), (), (1,), (0,), ()]
    assert [step.members for step in steps] == [(), (), (0, 1), (0, 1), ()]


def test_communicators_have_every_rank_once() -> None:
    items = (message("all_reduce", group="tp"), message("all_reduce", group="pp"))
    assert communicators(staged(items, items)) == {
        "pp": [(0, 2), (1, 3)],
        "tp": [(0, 1), (2, 3)],
    }
    # 1 would be a member of the groups of 0 and of 1.
    crossed = replace(staged(items, items), groups={"pp": PP, "tp": Group(digits=((3, 1),))})
    with pytest.raises(ConfigError, match="group tp is invalid"):
        communicators(crossed)


@pytest.mark.parametrize(
    "stages",
    [
        ((SEND, GRADIENT), (RECV, BACK)),
        # Each sends before it receives: sends end by themselves.
        ((SEND, GRADIENT), (BACK, RECV)),
        # A receive on a stream of its own holds up nothing.
        ((replace(GRADIENT, stream="s"), SEND), (RECV, BACK)),
        ((message("all_reduce"),), (work(), message("all_reduce"))),
    ],
)
def test_programs_that_end(stages: tuple[tuple[Item, ...], ...]) -> None:
    check_ends(staged(*stages))


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (((GRADIENT, SEND), (RECV, BACK)), "operation 0 of stage 0 waits on stream compute"),
        (((SEND,), (work(),)), "every send is received, unlike 8 x bf16 of m"),
        (((work(),), (RECV,)), "operation 0 of stage 1 waits"),
        (((message("send", 1, count=9),), (RECV,)), "it must be 9 x bf16"),
        (((message("all_reduce"),), (work(),)), "operation 0 of stage 0 waits"),
        (((replace(GRADIENT, name="g", stream="s"), work(after=("g",)), SEND), (RECV, BACK)),
         "stage 0"),
    ],
)  # fmt: skip
def test_programs_that_do_not_end(stages: tuple[tuple[Item, ...], ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_ends(staged(*stages))


def test_messages_around_a_ring_have_both_sides() -> None:
    ring = message("send", 1, group="tp"), message("recv", -1, group="tp")
    check_ends(staged(ring))
    with pytest.raises(ConfigError, match="stage 0 has a recv for each send"):
        check_ends(staged(ring[:1]))
    with pytest.raises(ConfigError, match="stage 0 has a send for each recv"):
        check_ends(staged((*ring, ring[1])))
