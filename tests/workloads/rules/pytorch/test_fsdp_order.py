"""Events of FSDP's order: what is gathered is copied out once, and all is freed in time."""

from collections import Counter

from hypothesis import given
from hypothesis import settings as bounds
from hypothesis import strategies as st

from stepmark.model.ops import Phase
from stepmark.workloads.rules.pytorch.fsdp_order import (
    FsdpEvents,
    FsdpGroups,
    FsdpOrder,
    ParamGroup,
    group_params,
)

Group = ParamGroup[str]


class Log(FsdpEvents[str]):
    """Receiver that checks each event against the ones before it."""

    def __init__(self) -> None:
        self.buffers: list[Group] = []
        self.whole: list[Group] = []
        self.reductions: Counter[str] = Counter()
        self.most_buffers = 0

    def gather(self, group: Group, phase: Phase | None) -> None:
        assert group not in self.buffers + self.whole
        self.buffers.append(group)
        self.most_buffers = max(self.most_buffers, len(self.buffers))

    def copy_out(self, group: Group, phase: Phase) -> None:
        assert group in self.buffers
        self.whole.append(group)

    def free_buffer(self, group: Group) -> None:
        self.buffers.remove(group)

    def reshard(self, group: Group) -> None:
        if group in self.whole:
            self.whole.remove(group)

    def collect_grads(self, group: Group, *, reduces: bool) -> None:
        self.reductions.update(group.params if reduces else ())


@st.composite
def wrapped(draw: st.DrawFn) -> FsdpGroups[str]:
    """A model of named parameters, with or without ends and experts of their own."""
    experts = draw(st.booleans())
    count = draw(st.integers(1, 5))
    return group_params(
        [
            ([f"block{index}"], [f"experts{index}"] if experts else None)
            for index in range(count)
        ],
        embedding=["table"] if draw(st.booleans()) else None,
        output=["head"] if draw(st.booleans()) else None,
        reshard=draw(st.sampled_from([0, None, 2])),
        prefetch=draw(st.integers(1, 3)),
        blocks_per_group=draw(st.integers(1, 3)),
        root_has_ends=draw(st.booleans()),
        regathers_table=draw(st.booleans()),
    )


def modules(groups: FsdpGroups[str]) -> list[list[Group]]:
    """Groups in the order of the forward pass, a block's with those of experts inside."""
    nested: list[list[Group]] = []
    for group in groups.all:
        if group.module == "experts":
            nested[-1].append(group)
        elif group is not groups.root:
            nested.append([group])
    return nested


def forward(order: FsdpOrder[str], groups: FsdpGroups[str], log: Log) -> None:
    """Run one pass, in which every group has its weights when its module computes."""
    order.wait_for_unshard(Phase.FWD)
    order.pre_forward(groups.root)
    for outer, *inner in modules(groups):
        order.pre_forward(outer)
        for group in inner:
            order.pre_forward(group)
            assert {outer, group} <= set(log.whole)
            order.post_forward(group)
        assert outer in log.whole
        order.post_forward(outer)
    order.post_forward(groups.root)
    order.end_forward()


def backward(
    order: FsdpOrder[str], groups: FsdpGroups[str], log: Log, *, reduces: bool, keeps: bool
) -> None:
    order.wait_for_unshard(Phase.BWD)
    order.pre_backward(groups.root)
    for outer, *inner in reversed(modules(groups)):
        order.pre_backward(outer)
        for group in reversed(inner):
            order.pre_backward(group)
            assert {outer, group} <= set(log.whole)
            order.post_backward(group, reduces=reduces, keeps=keeps)
        assert outer in log.whole or not outer.in_backward
        order.post_backward(outer, reduces=reduces, keeps=keeps)
    order.post_backward(groups.root, reduces=reduces, keeps=keeps)


@bounds(max_examples=100)
@given(wrapped(), st.booleans())
def test_a_step_leaves_nothing_behind(groups: FsdpGroups[str], reduces: bool) -> None:
    log = Log()
    order = FsdpOrder(groups, log)
    for _ in range(2):
        forward(order, groups, log)
        assert all(group.is_pending for group in log.buffers)
        backward(order, groups, log, reduces=reduces, keeps=False)
        order.finalize(reduces=reduces)
        assert log.buffers == log.whole == []
    names = [name for group in groups.all for name in group.params]
    assert log.reductions == (dict.fromkeys(names, 2) if reduces else {})


@bounds(max_examples=100)
@given(wrapped(), st.integers(1, 3))
def test_a_pipeline_keeps_weights_until_its_gradients_are_reduced(
    groups: FsdpGroups[str], passes: int
) -> None:
    log = Log()
    order = FsdpOrder(groups, log)
    order.unshard()
    assert log.buffers == list(groups.all)
    for _ in range(passes):
        forward(order, groups, log)
    for _ in range(passes):
        backward(order, groups, log, reduces=False, keeps=True)
        assert all(group in log.whole for group in groups.all if group.in_backward)
    assert not log.reductions
    for group in order.groups:
        order.post_backward(group)
    order.finalize()
    assert log.buffers == log.whole == []
    assert set(log.reductions.values()) <= {1}


def test_the_buffer_of_a_gather_that_nothing_waits_for_is_freed_at_the_end() -> None:
    """As of a module that has no backward pass (finalize_backward)."""
    groups = group_params([(["first"], None), (["last"], None)], embedding=None, output=None)
    log = Log()
    order = FsdpOrder(groups, log)
    forward(order, groups, log)
    order.pre_backward(groups.blocks[1])
    order.post_backward(groups.blocks[1])
    assert log.buffers == [groups.blocks[0]]
    order.finalize()
    assert log.buffers == []


def test_no_more_than_two_buffers_without_explicit_prefetching() -> None:
    """Torch gathers the next group while it copies out of the buffer of this one."""
    blocks = [([f"block{index}"], None) for index in range(4)]
    for prefetch, most in ((1, 2), (2, 3), (3, 4)):
        groups = group_params(blocks, embedding=["table"], output=["head"], prefetch=prefetch)
        log = Log()
        order = FsdpOrder(groups, log)
        forward(order, groups, log)
        backward(order, groups, log, reduces=True, keeps=False)
        assert log.most_buffers == most
