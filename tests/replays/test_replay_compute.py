"""What a replay runs in the place of a computation."""

from dataclasses import replace

import pytest

from stepmark.cases.replay_case import Compute
from stepmark.ground.dtypes import DType
from stepmark.ground.units import GIB
from stepmark.model.ops import Attention, Copy, CrossEntropy, Gemm, Op, Optimizer, Phase
from stepmark.model.ops.backends import Capabilities
from stepmark.replays.replay_compute import (
    backend_of,
    count_computes,
    parts_of,
    replay_compute,
)
from stepmark.step.workload import ComputeOp, Kernel, Stage, Workload

CPU = Capabilities(
    device_type="cpu",
    capability=(0, 0),
    is_rocm=False,
    has_compiler=False,
    modules=frozenset(),
)
GEMM = Gemm(m=8, n=8, k=8, dtype=DType.FP32)
FP8 = Gemm(m=16, n=16, k=16, dtype=DType.FP8_E4M3, out_dtype=DType.BF16)


def work(op: Op | Kernel, time_s: float | None = None) -> ComputeOp:
    return ComputeOp(op=op, phase=Phase.FWD, module="m", time_s=time_s)


@pytest.mark.parametrize(
    ("op", "compute", "expected"),
    [
        (work(GEMM, 1.0), Compute.NONE, None),
        (work(GEMM, 1.0), Compute.SLEEP, 1.0),
        (work(GEMM), Compute.SLEEP, None),
        (work(GEMM, 1.0), Compute.REAL, GEMM),
        (work(FP8, 1.0), Compute.REAL, 1.0),  # no FP8 on a CPU: busy for its time
        (work(FP8), Compute.REAL, Copy(num_bytes=FP8.bytes_moved // 8 * 4)),
        (work(Kernel(name="k", bytes_moved=100)), Compute.REAL, Copy(num_bytes=48)),
        (work(Kernel(name="k", bytes_moved=100), 2.0), Compute.REAL, 2.0),
        (work(Kernel(name="k")), Compute.REAL, None),
        # It only waits.
        (work(Kernel(name="k", flops=0, bytes_moved=0), 1.0), Compute.REAL, None),
    ],
)
def test_what_runs(op: ComputeOp, compute: Compute, expected: object) -> None:
    assert replay_compute(op, compute, CPU) == expected


def test_every_distinct_computation_is_counted_once() -> None:
    wait = work(Kernel(name="w", flops=0, bytes_moved=0))
    items = (work(GEMM), work(GEMM), work(FP8, 1.0), work(Kernel(name="k")), wait)
    copied = work(Kernel(name="c", bytes_moved=64))
    workload = Workload(
        name="w", rules="r", blocks={"a": items, "b": (copied,)}, stages=(Stage(step="a"),)
    )
    counts = {"operator": 1, "busy": 1, "nothing": 1, "copy": 1}
    assert count_computes(workload, Compute.REAL, CPU) == counts


@pytest.mark.parametrize(
    "op",
    [
        Optimizer(num_params=1923125248, kind="adamw", dtype=DType.FP32),
        Copy(num_bytes=7692500992),
        CrossEntropy(tokens=8192, vocab=128256, dtype=DType.BF16),
        Gemm(m=8192, n=128256, k=4096),
        Optimizer(num_params=1009, kind="adamw", dtype=DType.FP32),
    ],
)
def test_parts_move_as_many_bytes_as_the_whole(op: Op) -> None:
    part, number = parts_of(op)
    assert number * part.bytes_moved == op.bytes_moved
    assert number * part.flops == op.flops
    if number > 1:
        assert part.memory_bytes <= GIB // 2


def test_a_number_of_parameters_without_a_divisor_stays_whole() -> None:
    prime = Optimizer(num_params=2_147_483_647, kind="adamw", dtype=DType.FP32)
    assert parts_of(prime) == (prime, 1)


def test_attention_runs_on_the_first_backend_that_is_not_for_comparison() -> None:
    attention = Attention(
        batch=1, seq_q=8, seq_kv=8, heads=2, kv_heads=2, head_dim_qk=8, head_dim_v=8
    )
    assert backend_of(replace(attention, dtype=DType.FP32), CPU) == "flash"
    assert backend_of(replace(attention, dtype=DType.FP32, window=4), CPU) == "math"
