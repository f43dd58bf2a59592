"""Adam on the host: bytes of copies, states that stay on the device, refusals."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import HostCopy, Optimizer
from stepmark.model.parallel import ParallelConfig
from stepmark.step.host_memory import HOST_ADAM
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Kernel, Workload
from stepmark.step_memory.megatron_memory import stage_memories
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron.rule import workload
from stepmark.workloads.rules.megatron.settings import Megatron, StateDtype

from .jobs import DENSE

AWARE = Megatron(use_distributed_optimizer=True, use_precision_aware_optimizer=True)
OFFLOADED = replace(AWARE, optimizer_cpu_offload=True)
JOB = Job(model=DENSE, parallel=ParallelConfig(dp_shard=4), gbs=4)


def updated_count() -> int:
    plain = workload(JOB, replace(AWARE, use_precision_aware_optimizer=False))
    return sum(adam_counts(plain))


def adam_counts(made: Workload) -> list[int]:
    return [
        op.op.num_params
        for op in made.expand(0)
        if isinstance(op, ComputeOp) and isinstance(op.op, Optimizer)
    ]


def copies(made: Workload) -> list[ComputeOp]:
    made.check()
    return [
        op for op in made.expand(0) if isinstance(op, ComputeOp) and isinstance(op.op, HostCopy)
    ]


def test_gradients_come_down_and_weights_go_up_in_fp32() -> None:
    made = workload(JOB, OFFLOADED)
    sizes = {op.op.direction: op.op.num_bytes for op in copies(made)}  # type: ignore[union-attr]
    count = updated_count()
    assert sizes == {"d2h": 4 * count, "h2d": 4 * count}
    assert not adam_counts(made)
    names = Counter(
        op.op.name
        for op in made.expand(0)
        if isinstance(op, ComputeOp) and isinstance(op.op, Kernel)
    )
    assert names[HOST_ADAM] == names["parameter_cast"] == 1
    assert "parameter_copy" not in names


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_a_fraction_has_its_states_on_the_host(fraction: float) -> None:
    settings = replace(OFFLOADED, optimizer_offload_fraction=fraction)
    made = workload(JOB, settings)
    count = updated_count()
    on_host = copies(made)[0].op.num_bytes // 4  # type: ignore[union-attr]
    assert on_host == pytest.approx(fraction * count, abs=1)
    assert sum(adam_counts(made)) == count - on_host
    (memory,) = stage_memories(JOB, settings)
    assert memory.optimizer_bytes == pytest.approx(12 * (1 - fraction) * count, abs=12)
    (plain,) = stage_memories(JOB, AWARE)
    assert memory.weights_bytes == plain.weights_bytes
    assert memory.gradients_bytes == plain.gradients_bytes


def test_copies_have_streams_of_their_own_where_they_overlap() -> None:
    settings = replace(OFFLOADED, overlap_cpu_optimizer_d2h_h2d=True)
    serial, overlapped = (copies(workload(JOB, each)) for each in (OFFLOADED, settings))
    assert [op.stream for op in serial] == [COMPUTE, COMPUTE]
    assert [op.stream for op in overlapped] == ["d2h", "h2d"]
    assert [op.op for op in serial] == [op.op for op in overlapped]
    program = list(workload(JOB, settings).expand(0))
    last = max(program.index(op) for op in overlapped)
    waits = [op for op in program[last + 1 :] if op.after]
    assert set(waits[0].after) == {op.name for op in overlapped}
    # Weights that the host updates are gathered after they are back.
    gathers = [op for op in program if isinstance(op, CommOp) and op.module == "parameters"]
    assert program.index(gathers[0]) > program.index(waits[0])


def test_gradients_in_bf16_are_cast_on_the_device() -> None:
    settings = replace(OFFLOADED, main_grads_dtype=StateDtype.BF16)
    narrow, wide = (workload(JOB, each) for each in (settings, OFFLOADED))
    assert [op.op for op in copies(narrow)] == [op.op for op in copies(wide)]
    casts = [
        op.op.bytes_moved
        for op in narrow.expand(0)
        if isinstance(op, ComputeOp)
        and isinstance(op.op, Kernel)
        and op.op.name == "gradient_cast"
    ]
    assert casts == [6 * updated_count()]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_precision_aware_optimizer": False}, "only with use_precision_aware_optimizer"),
        ({"optimizer_offload_fraction": 0.0}, "optimizer_offload_fraction.*above 0"),
        ({"optimizer_offload_fraction": 1.5}, "optimizer_offload_fraction.*up to 1"),
        ({"exp_avg_dtype": StateDtype.BF16}, "exp_avg_dtype bf16.*whose states are in fp32"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workload(JOB, replace(OFFLOADED, **changes))


def test_weights_of_fp16_have_the_same_copies() -> None:
    halves = replace(JOB, dtype=DType.FP16)
    ours, others = (workload(job, OFFLOADED) for job in (halves, JOB))
    assert [op.op for op in copies(ours)] == [op.op for op in copies(others)]
