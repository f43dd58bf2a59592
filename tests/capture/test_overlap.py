"""What runs beside what: streams of FSDP2 and DDP, and what waits for what across them.

The expectations are those of torch 2.13's FSDP2: a forward gather is waited for by the layer it
is of; in the backward pass the next layer's gather is issued before this layer computes; a
gradient's reduction follows its computation, and the end of the backward pass waits for all.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.capture.made import made_of
from tests.capture.user_code import CASES, SMALL

from stepmark.model.collectives import Collective
from stepmark.model.ops import Gemm, Phase
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Operation

BACKWARD = (Phase.BWD, Phase.DGRAD, Phase.WGRAD)
SHARDED = ("fsdp", "fsdp_tp", "hsdp")
SCATTER = Collective.REDUCE_SCATTER


@functools.cache
def operations(case: str) -> tuple[Operation, ...]:
    return tuple(made_of(case).expand())


def waits(case: str) -> Iterator[tuple[Operation, Operation]]:
    """(an operation, one it starts after); fails where a name leads nowhere."""
    issued: dict[str, list[Operation]] = {}
    for one in operations(case):
        for reference in one.after:
            name, _, back = reference.partition("~")
            yield one, issued[name][-1 - int(back or 0)]
        if one.name:
            issued.setdefault(one.name, []).append(one)


def place(found: tuple[Operation, ...], one: Operation) -> int:
    return next(at for at, other in enumerate(found) if other is one)


def gathers(case: str) -> list[CommOp]:
    return [
        one
        for one in operations(case)
        if isinstance(one, CommOp)
        and (one.collective, one.stream) == (Collective.ALL_GATHER, "fsdp")
    ]


@pytest.mark.parametrize("case", SHARDED)
def test_each_gather_is_waited_for_by_what_it_is_of(case: str) -> None:
    waited = [
        (one, other)
        for one, other in waits(case)
        if isinstance(other, CommOp) and other.collective == Collective.ALL_GATHER
    ]
    for one, other in waited:
        assert isinstance(one, ComputeOp)
        assert (one.stream, one.name) == (COMPUTE, "copy_out")
        assert (one.module, one.layer) == (other.module, other.layer)
        assert (one.phase, one.microbatch) == (other.phase, other.microbatch)
    # The root keeps its weights after the forward pass where it is told to.
    forward = (SMALL.num_layers + 1) * SMALL.num_microbatches
    backward = SMALL.num_layers * SMALL.num_microbatches
    assert len(waited) == len(gathers(case)) == forward + backward


@pytest.mark.parametrize("case", SHARDED)
def test_a_backward_gather_is_issued_before_the_layer_above_computes(case: str) -> None:
    found = operations(case)
    products = [
        at
        for at, one in enumerate(found)
        if isinstance(one, ComputeOp) and isinstance(one.op, Gemm) and one.phase in BACKWARD
    ]
    for gather in gathers(case):
        if gather.phase is not Phase.BWD or gather.layer == SMALL.num_layers - 1:
            continue
        assert gather.layer is not None
        above = next(
            at
            for at in products
            if (found[at].layer, found[at].microbatch) == (gather.layer + 1, gather.microbatch)
        )
        assert place(found, gather) < above


@pytest.mark.parametrize("case", SHARDED)
def test_a_reduction_follows_its_gradients(case: str) -> None:
    reductions = [
        (one, other)
        for one, other in waits(case)
        if isinstance(one, CommOp) and one.collective == SCATTER
    ]
    assert len(reductions) == (SMALL.num_layers + 1) * SMALL.num_microbatches
    for one, other in reductions:
        assert one.stream == "fsdp"
        assert isinstance(other, ComputeOp)
        assert other.stream == COMPUTE
        assert other.phase in BACKWARD
        assert other.microbatch == one.microbatch


@pytest.mark.parametrize("case", SHARDED)
def test_gathers_hold_no_more_than_two_buffers(case: str) -> None:
    """A gather waits for the last copy-out in the backward pass, else for the one before."""
    after = {id(one): other for one, other in waits(case) if one.stream == "fsdp"}
    copied: list[Operation] = []
    for one in operations(case):
        if isinstance(one, ComputeOp) and one.name == "copy_out" and one.after:
            copied.append(one)
        if isinstance(one, CommOp) and one.collective == Collective.ALL_GATHER and copied:
            if one.stream != "fsdp":
                continue
            is_last = Phase.BWD in (one.phase, copied[-1].phase)
            if is_last or len(copied) > 1:
                assert after[id(one)] is copied[-1 if is_last else -2]


@pytest.mark.parametrize("case", SHARDED)
def test_a_reduction_waits_until_the_one_before_has_given_its_buffer_back(case: str) -> None:
    """The computation does, that fills the buffer; not for the sum over copies."""
    found = operations(case)
    reductions = [
        at
        for at, one in enumerate(found)
        if isinstance(one, CommOp) and (one.collective, one.stream) == (SCATTER, "fsdp")
    ]
    waiting = [(place(found, one), place(found, other)) for one, other in waits(case)]
    for first, second in pairwise(reductions):
        if found[first].microbatch == found[second].microbatch:
            assert any(first < one < second and other == first for one, other in waiting)


def test_copies_are_summed_after_their_shards() -> None:
    found = [
        (one, other)
        for one, other in waits("hsdp")
        if isinstance(one, CommOp) and one.stream == "fsdp_replicate"
    ]
    assert len(found) == (SMALL.num_layers + 1) * SMALL.num_microbatches
    for one, other in found:
        assert isinstance(other, CommOp)
        assert other.collective == SCATTER
        assert one.collective == Collective.ALL_REDUCE
        assert (one.layer, one.module) == (other.layer, other.module)
        assert one.count == other.count


@pytest.mark.parametrize("case", [*SHARDED, "ddp"])
def test_the_optimizer_waits_for_the_last_reduction(case: str) -> None:
    found = operations(case)
    last = max(
        at for at, one in enumerate(found) if isinstance(one, CommOp) and one.name == "reduced"
    )
    waiting = [place(found, one) for one, other in waits(case) if other is found[last]]
    first = next(
        at
        for at, one in enumerate(found)
        if at > last and one.phase is Phase.OPTIM and one.stream == COMPUTE
    )
    assert any(last < at <= first for at in waiting)


def test_buckets_of_ddp_are_reduced_beside_the_backward_pass() -> None:
    found = operations("ddp")
    buckets = [one for one in found if isinstance(one, CommOp) and one.stream == "dp"]
    assert len(buckets) > 1
    assert {(one.collective, one.phase) for one in buckets} == {("all_reduce", Phase.BWD)}
    for bucket in buckets[:-1]:
        later = found[place(found, bucket) + 1 :]
        assert any(isinstance(one, ComputeOp) and one.phase in BACKWARD for one in later)


@pytest.mark.parametrize("case", CASES)
def test_the_setup_waits_for_nothing_that_is_left_out_of_it(case: str) -> None:
    """As the computation of DDP's two first steps is."""
    found = list(made_of(case).expand(setup=True)) if made_of(case).stages[0].setup else []
    names = {one.name for one in found}
    assert {word.partition("~")[0] for one in found for word in one.after} <= names
    if case == "ddp":
        assert "reduced" in names


@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_pipeline_does_between_passes_is_of_no_micro_batch(stage: int) -> None:
    found = [
        one
        for one in made_of("pp_fsdp").expand(stage)
        if isinstance(one, CommOp) and one.stream == "fsdp"
    ]
    assert {one.microbatch for one in found if one.collective == SCATTER} == {None}
    assert sum(one.collective == SCATTER for one in found) == 2


@pytest.mark.parametrize("case", CASES)
def test_only_asynchronous_work_lies_on_streams_of_its_own(case: str) -> None:
    streams = Counter(
        (one.stream, type(one).__name__) for one in operations(case) if one.stream != COMPUTE
    )
    expected = {
        "fsdp": {"fsdp"},
        "fsdp_tp": {"fsdp"},
        "hsdp": {"fsdp", "fsdp_replicate"},
        "ddp": {"dp"},
        "pp_fsdp": {"fsdp"},
    }.get(case, set())
    assert {stream for stream, kind in streams if kind == "CommOp"} == expected
