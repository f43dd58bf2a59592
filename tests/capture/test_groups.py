"""Process groups as digits of a rank's number."""

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.capture.user_code import Step
from torch.distributed.device_mesh import init_device_mesh

from stepmark.capture.messages import digits
from stepmark.capture.run import capture
from stepmark.step.workload import CommOp, Group


@given(
    st.lists(st.tuples(st.integers(2, 4), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 10**4),
)
def test_a_groups_ranks_tell_its_digits(axes: list[tuple[int, bool]], rank: int) -> None:
    """A mesh of these sizes, the fastest first; the group has the axes that are chosen."""
    chosen: list[tuple[int, int]] = []
    stride = 1
    for size, is_chosen in axes:
        if is_chosen:
            chosen.append((size, stride))
        stride *= size
    rank %= stride
    ranks = Group(digits=tuple(chosen)).members(rank)
    assert Group(digits=digits(ranks)).members(rank) == ranks


def test_axes_of_a_mesh_have_their_names() -> None:
    def build() -> Step:
        sizes, names = (2, 2, 2), ("dp", "cp", "tp")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        whole = mesh["dp", "tp"]._flatten("dp_tp")

        def step() -> None:
            for group in (mesh["cp"].get_group(), whole.get_group(), dist.group.WORLD):
                dist.all_reduce(torch.ones(4), group=group)

        return step

    made = capture(build, 8)
    sent = [one.group for one in made.expand() if isinstance(one, CommOp)]
    assert sent == ["cp", "dp_tp", "world"]
    members = {name: group.members(3) for name, group in made.groups.items()}
    assert members == {"cp": (1, 3), "dp_tp": (2, 3, 6, 7), "world": tuple(range(8))}
    assert made.notes == ()


def test_ranks_that_no_mesh_gives_are_noted() -> None:
    def build() -> Step:
        group = dist.new_group([0, 1, 3])
        return lambda: dist.all_reduce(torch.ones(4), group=group)

    made = capture(build, 8)
    (note,) = made.notes
    assert "is ranks 0, 1, 3, which no digits" in note
    assert [group.size for group in made.groups.values()] == [3]
