"""Exchanges of experts beside computation: the same work, less of it exposed."""

from typing import Any

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.predictions.simulation import simulate
from stepmark.step.workload import Workload
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import Dispatcher, Granularity

from .jobs import LATENT, bus_bytes, ideal_costs, make, matmul_flops

SP: dict[str, Any] = {"sequence_parallel": True}
SHARED: dict[str, Any] = {**SP, "moe_shared_expert_overlap": True}
FLOPS_PER_S = 1e12
RATES = (1e8, 1e9, 1e10, 1e11)


def step_s(program: Workload, rate: float) -> float:
    return simulate(program, ideal_costs(FLOPS_PER_S, rate)).step_s


@pytest.mark.parametrize("tp", [1, 2])
def test_shared_experts_beside_exchanges_do_the_same_work(tp: int) -> None:
    job = make(LATENT, tp=tp, dp_shard=4, ep=4)
    plain = workload(job, Megatron(**SP))
    beside = workload(job, Megatron(**SHARED))
    beside.check()
    assert matmul_flops(beside) == matmul_flops(plain)
    assert bus_bytes(beside, "ep") == bus_bytes(plain, "ep")
    # The first product keeps its gathered input, so the backward pass does not gather it.
    gathers = bus_bytes(plain, "tp")["tp", False] - bus_bytes(beside, "tp")["tp", False]
    layers = LATENT.num_layers - 1
    one = job.tokens * LATENT.hidden_size * 2 * (tp - 1) // tp
    assert gathers == 2 * layers * one


@pytest.mark.parametrize("rate", RATES)
def test_shared_experts_beside_exchanges_are_never_slower(rate: float) -> None:
    job = make(LATENT, tp=2, dp_shard=4, ep=4)
    plain = step_s(workload(job, Megatron(**SP)), rate)
    assert step_s(workload(job, Megatron(**SHARED)), rate) < plain


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {**SHARED, "moe_token_dispatcher_type": Dispatcher.ALLGATHER},
            "moe_shared_expert_overlap.* only with moe_token_dispatcher_type alltoall",
        ),
        (
            {
                **SHARED,
                "recompute_granularity": Granularity.SELECTIVE,
                "recompute_modules": "shared_experts",
            },
            "moe_shared_expert_overlap.* only without shared_experts in recompute_modules",
        ),
    ],
)
def test_overlaps_that_megatron_refuses(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workload(make(LATENT, tp=2, dp_shard=4, ep=4), Megatron(**settings))
