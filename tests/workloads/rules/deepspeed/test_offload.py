"""ZeRO-Offload: bytes between device and host, and what no longer runs on the device."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.device import load_devices
from stepmark.model.ops import Copy, HostCopy, Optimizer, Phase
from stepmark.step.roofline import roofline_time
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Workload
from stepmark.workloads.rules.deepspeed.rule import workload
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed, Offload

from .test_laws import PARAMS, job, zero

RANKS = 4
SHARD = PARAMS // RANKS  # every tensor divides


def offloaded(stage: int, *, micro: int = 1, weights: bool = False) -> Workload:
    offload = Offload.CPU if weights else Offload.NONE
    settings = replace(zero(stage), offload_optimizer=Offload.CPU, offload_param=offload)
    return workload(job(micro=micro), settings)


def copied(made: Workload) -> Counter[tuple[str, str]]:
    """Bytes of a step by direction and module."""
    found: Counter[tuple[str, str]] = Counter()
    for op, times in made.tally().items():
        if isinstance(op, ComputeOp) and isinstance(op.op, HostCopy):
            found[op.op.direction, op.module] += times * op.op.num_bytes
    return found


# Bytes per parameter of a rank: the fp32 gradient, bf16 weights; and sums of micro-batches in
# bf16, read and written once each, which stage 3 does with a single one, too.
@pytest.mark.parametrize(
    ("stage", "micro", "down", "up"),
    [(1, 1, 4, 0), (2, 1, 4, 0), (2, 3, 4 + 3 * 2, 2 * 2), (3, 1, 4 + 2, 2), (3, 3, 4 + 6, 6)],
)
def test_a_rank_copies_the_gradients_and_weights_of_its_shard(
    stage: int, micro: int, down: int, up: int
) -> None:
    found = copied(offloaded(stage, micro=micro))
    assert found["d2h", "gradients"] == down * SHARD
    assert found["h2d", "gradients"] == up * SHARD
    assert found["h2d", "optimizer"] == 2 * SHARD


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adam_runs_on_the_host_and_messages_stay(stage: int) -> None:
    made, plain = offloaded(stage), workload(job(), zero(stage))
    kinds = [
        [(op.collective, op.count, op.group) for op in each.expand() if isinstance(op, CommOp)]
        for each in (made, plain)
    ]
    assert kinds[0] == kinds[1]
    computed = [op.op for op in made.expand() if isinstance(op, ComputeOp)]
    assert not any(isinstance(op, Optimizer) for op in computed)
    (adam,) = [op for op in computed if isinstance(op, Kernel) and op.name == "cpu_adam"]
    assert (adam.flops, adam.bytes_moved) == (None, None)


def test_offloaded_weights_are_copied_before_each_gather() -> None:
    made = offloaded(3, weights=True)
    found = copied(made)
    gathers = [
        op
        for op in made.expand()
        if isinstance(op, CommOp)
        and op.collective == "all_gather"
        and op.phase is not Phase.OPTIM
    ]
    assert found["h2d", "weights"] == sum(op.call_bytes() for op in gathers)
    assert found["h2d", "weights"] >= 2 * 2 * SHARD  # of both passes, in bf16
    assert found["h2d", "optimizer"] == 0
    ops = list(made.expand())
    before = [a for a, b in itertools.pairwise(ops) if b in gathers]
    assert all(isinstance(op, ComputeOp) and isinstance(op.op, HostCopy) for op in before)


def test_weights_alone_on_the_host_are_updated_on_the_device() -> None:
    settings = replace(zero(3), offload_param=Offload.CPU)
    made = workload(job(), settings)
    both = copied(offloaded(3, weights=True))
    assert copied(made) == {
        ("h2d", "weights"): both["h2d", "weights"],
        ("d2h", "optimizer"): 4 * SHARD,  # in fp32: the host waits for the copy, and casts
    }
    computed = [op.op for op in made.expand() if isinstance(op, ComputeOp)]
    (adam,) = [op for op in computed if isinstance(op, Optimizer)]
    assert adam.num_params == SHARD


def test_the_norm_of_gradients_on_the_host_is_fp32() -> None:
    norms = [
        op.dtype
        for op in offloaded(3).expand()
        if isinstance(op, CommOp) and op.module == "norm"
    ]
    assert norms == [DType.FP32]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"stage": 0, "offload_optimizer": Offload.CPU}, "only with stage 1, 2 or 3"),
        (
            {"stage": 2, "offload_optimizer": Offload.CPU, "offload_param": Offload.CPU},
            "only with stage 3",
        ),
        (
            {"stage": 1, "offload_optimizer": Offload.CPU, "grad_accum_dtype": "fp32"},
            "whose optimizer is not offloaded",
        ),
    ],
)
def test_what_deepspeed_does_not_offload_is_refused(
    settings: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        workload(job(), DeepSpeed(**settings))  # type: ignore[arg-type]


def test_a_copy_to_the_host_crosses_its_link() -> None:
    device = load_devices()["h100-sxm"]
    assert roofline_time(Copy(num_bytes=2**30), device) is not None
    # 64 GB/s per direction, as the data sheet has it (PCIe 5.0 x16).
    assert roofline_time(HostCopy(num_bytes=2**30), device) == 2**30 / 64e9
