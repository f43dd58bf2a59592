"""Folding loses nothing, and what layers and micro-batches repeat is written once."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.ops import Phase
from stepmark.step.fold_items import fold
from stepmark.step.workload import (
    Block,
    CommOp,
    ComputeOp,
    Group,
    Kernel,
    Operation,
    Stage,
    Workload,
)


def work(name: str, layer: int | None = None, microbatch: int | None = None) -> ComputeOp:
    phase = Phase.BWD if name.startswith("d") else Phase.FWD
    kernel = Kernel(name=name)
    return ComputeOp(op=kernel, phase=phase, module=name, layer=layer, microbatch=microbatch)


def send(layer: int | None = None, microbatch: int | None = None) -> CommOp:
    return CommOp(
        collective=Collective.ALL_REDUCE,
        dtype=DType.FP32,
        count=8,
        group="world",
        phase=Phase.FWD,
        module="sum",
        layer=layer,
        microbatch=microbatch,
    )


def workload(blocks: dict[str, Block]) -> Workload:
    made = Workload(
        name="folded",
        rules="test",
        groups={"world": Group(digits=((1, 1),))},
        blocks=blocks,
        stages=(Stage(step="step"),),
    )
    made.check()
    return made


def unfolded(blocks: dict[str, Block]) -> list[Operation]:
    return list(workload(blocks).expand())


def num_items(blocks: dict[str, Block]) -> int:
    return sum(map(len, blocks.values()))


def step(num_layers: int, num_microbatches: int) -> list[Operation]:
    """As a decoder's: table, layers, head, layers backward; the last backward differs."""
    found: list[Operation] = []
    for microbatch in range(num_microbatches):
        found += [work("table", None, microbatch)]
        for layer in range(num_layers):
            found += [work(name, layer, microbatch) for name in ("qkv", "scores", "out")]
            found += [send(layer, microbatch), work("up", layer, microbatch)]
        found += [work("head", None, microbatch), work("dhead", None, microbatch)]
        for layer in reversed(range(num_layers)):
            found += [work(name, layer, microbatch) for name in ("dup", "dout", "dscores")]
            found += [work("dqkv", layer, microbatch), work("dqkv", layer, microbatch)]
        found += [work("dtable", None, microbatch)]
    return [*found, send(), work("adamw")]


places = st.none() | st.integers(0, 3)
operations = st.builds(work, st.sampled_from("abd"), places, places) | st.builds(
    send, places, places
)


@given(st.lists(operations, max_size=60))
def test_folding_loses_nothing(items: list[Operation]) -> None:
    blocks = fold(items, "step")
    assert unfolded(blocks) == items
    assert workload(blocks).num_operations() == len(items)
    assert num_items(blocks) <= len(items)


@given(st.lists(operations, min_size=1, max_size=8), st.integers(2, 6), st.integers(-2, 2))
def test_repeats_with_a_step_of_layers_lose_nothing(
    body: list[Operation], times: int, by: int
) -> None:
    items = [
        one if one.layer is None else replace(one, layer=one.layer + by * turn)
        for turn in range(times)
        for one in body
    ]
    assert unfolded(fold(items, "step")) == items


@pytest.mark.parametrize("num_microbatches", [1, 2, 7, 32])
@pytest.mark.parametrize("num_layers", [2, 3, 8, 80])
def test_a_decoders_step_loses_nothing(num_layers: int, num_microbatches: int) -> None:
    items = step(num_layers, num_microbatches)
    assert unfolded(fold(items, "step")) == items


@pytest.mark.parametrize(
    ("shape", "other"), [((8, 4), (80, 4)), ((8, 4), (8, 64)), ((8, 4), (40, 16))]
)
def test_size_does_not_grow_with_layers_or_microbatches(
    shape: tuple[int, int], other: tuple[int, int]
) -> None:
    few, many = (fold(step(*one), "step") for one in (shape, other))
    assert few.keys() == many.keys()
    assert num_items(few) == num_items(many) < 30


def test_blocks_are_named_by_what_they_repeat() -> None:
    blocks = fold(step(8, 4), "step")
    assert {"step", "step.layer.fwd", "step.layer.bwd", "step.microbatch"} == blocks.keys()
    assert [len(blocks[name]) for name in ("step.layer.fwd", "step.layer.bwd")] == [5, 5]


def test_equal_bodies_share_a_block() -> None:
    """Layers of two kinds of micro-batch, apart from each other."""
    layers: Sequence[Operation] = [
        work(name, layer) for layer in range(6) for name in ("qkv", "scores", "out")
    ]
    items = [*layers, work("between"), *layers]
    blocks = fold(items, "step")
    assert unfolded(blocks) == items
    assert len(blocks) == 2


def test_what_does_not_pay_is_left_alone() -> None:
    items: list[Operation] = [work("a"), work("a"), work("b"), work("b")]
    assert fold(items, "step") == {"step": tuple(items)}
    assert fold([], "step") == {"step": ()}


def test_time_is_linear() -> None:
    """Half a million operations of a step; and as many without any repeat."""
    began = time.process_time()
    assert num_items(fold(step(80, 64), "step")) < 30
    fold([work(f"{number % 997}{number * number % 991}") for number in range(50_000)], "step")
    assert time.process_time() - began < 8
