"""A captured file is as small for many layers as for few, and lacks nothing."""

from collections.abc import Iterable

import pytest
from tests.capture.example import Config, build
from tests.capture.user_code import Step

from stepmark.capture import run
from stepmark.capture.run import capture
from stepmark.model.ops import Optimizer
from stepmark.step import native
from stepmark.step.fold_items import fold
from stepmark.step.workload import Block, ComputeOp, Operation, Workload


def llama(num_layers: int, num_microbatches: int) -> Step:
    return build(
        Config(
            num_layers=num_layers,
            hidden_size=32,
            ffn_hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            vocab_size=64,
            seq_len=8,
            tp=2,
            num_microbatches=num_microbatches,
        )
    )


Shape = tuple[int, int]
FEW, MANY = (6, 3), (8, 4)  # layers and micro-batches


@pytest.fixture(scope="module")
def made() -> dict[Shape, tuple[Workload, list[Operation]]]:
    """Workloads, and the operations of the step before they were folded."""
    found = {}
    seen: dict[str, list[Operation]] = {}

    def noted(operations: Iterable[Operation], name: str) -> dict[str, Block]:
        seen[name] = list(operations)
        return fold(seen[name], name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "fold", noted)
        for shape in (FEW, MANY):
            workload = capture(lambda shape=shape: llama(*shape), 4)  # type: ignore[misc]
            found[shape] = workload, seen["step"]
    return found


@pytest.mark.parametrize("shape", [FEW, MANY])
def test_expanding_gives_what_was_recorded(
    shape: Shape, made: dict[Shape, tuple[Workload, list[Operation]]]
) -> None:
    workload, recorded = made[shape]
    assert list(workload.expand()) == recorded
    assert workload.num_operations() == len(recorded)
    assert len(recorded) > 100 * shape[0] * shape[1]
    assert workload.stages[0].layers == tuple(range(shape[0]))
    assert workload.num_microbatches == shape[1]


def test_the_file_does_not_grow_with_layers_or_microbatches(
    made: dict[Shape, tuple[Workload, list[Operation]]],
) -> None:
    few, many = (len(native.encode(made[shape][0])) for shape in (FEW, MANY))
    assert many < 60_000
    # Only numbers have more digits, and the optimizer's lists are longer.
    assert abs(many - few) < 0.02 * few, (few, many)


def test_the_optimizers_step_is_there_once(
    made: dict[Shape, tuple[Workload, list[Operation]]],
) -> None:
    for workload, _ in made.values():
        steps = [
            one
            for one in workload.expand()
            if isinstance(one, ComputeOp) and isinstance(one.op, Optimizer)
        ]
        assert len(steps) == 1


def test_a_captured_file_reads_back(
    made: dict[Shape, tuple[Workload, list[Operation]]],
) -> None:
    workload, _ = made[FEW]
    assert native.decode(native.encode(workload)) == workload
