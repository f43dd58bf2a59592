"""Exchanges of experts beside computation: the same work, less of it exposed."""

from collections import Counter
from typing import Any

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Phase
from stepmark.predictions.simulation import simulate
from stepmark.step.workload import Workload
from stepmark.workloads.rules.megatron.narrow import Fp8Format
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import Dispatcher, Granularity

from .jobs import EXPERTS, LATENT, bus_bytes, comms, computes, ideal_costs, make, matmul_flops

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


TURNS: dict[str, Any] = {**SP, "overlap_moe_expert_parallel_comm": True}
VPP2: dict[str, Any] = {**SP, "virtual_pipeline_model_parallel_size": 2}
DELAYED: dict[str, Any] = {"delay_wgrad_compute": True}
SELECTIVE: dict[str, Any] = {
    "recompute_granularity": Granularity.SELECTIVE,
    "recompute_modules": "layernorm,moe_act,mla_up_proj,mlp,shared_experts,core_attn",
}


NARROW: dict[str, Any] = {"fp8_format": Fp8Format.HYBRID}  # with delayed scaling


def in_turns(model: ModelConfig, *, pp: int, **more: Any) -> tuple[Workload, Workload]:
    """A job whose passes run in turns, and the same one after the other."""
    job = make(model, tp=2, dp_shard=4, ep=4, pp=pp, microbatches=4)
    chunks = VPP2 if pp > 1 else SP
    if model.mla is None and "recompute_modules" in more:
        more["recompute_modules"] = more["recompute_modules"].replace("mla_up_proj,", "")
    same = {name: more.pop(name) for name in {**SELECTIVE, **NARROW} if name in more}
    plain = workload(job, Megatron(**{**chunks, **same}))
    program = workload(job, Megatron(**{**chunks, **TURNS, **same, **more}))
    program.check()
    return program, plain


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("model", [EXPERTS, LATENT])
@pytest.mark.parametrize(
    "more", [{}, DELAYED, SELECTIVE, {**DELAYED, **SELECTIVE}, {**NARROW, **DELAYED}]
)
def test_passes_in_turns_do_the_same_work(
    model: ModelConfig, pp: int, more: dict[str, Any]
) -> None:
    program, plain = in_turns(model, pp=pp, **more)
    assert matmul_flops(program) == matmul_flops(plain)
    assert bus_bytes(program, "ep", "tp", "pp") == bus_bytes(plain, "ep", "tp", "pp")
    assert communications(program) == communications(plain)
    assert computed(program) == computed(plain)


def communications(program: Workload) -> Counter[tuple[str, str, int]]:
    return Counter(
        (op.module, op.collective, op.count)
        for stage in range(len(program.stages))
        for op in comms(program, stage)
    )


def computed(program: Workload) -> Counter[tuple[str, Phase, int | None, int | None, bool]]:
    return Counter(
        (op.module, op.phase, op.layer, op.microbatch, op.recompute)
        for stage in range(len(program.stages))
        for op in computes(program, stage)
        if not op.is_wait
    )


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("pp", [1, 2])
def test_passes_in_turns_are_never_slower(pp: int, rate: float) -> None:
    program, plain = in_turns(LATENT, pp=pp)
    delayed, _ = in_turns(LATENT, pp=pp, **DELAYED)
    before = step_s(plain, rate)
    assert step_s(program, rate) < before
    assert step_s(delayed, rate) < before


def test_exchanges_hide_behind_the_other_pass_where_that_is_longer() -> None:
    """The first forward pass and the last backward pass run alone, as those of one batch do."""
    rate = 1e13

    def exposed_s(microbatches: int, *, in_turns: bool) -> float:
        job = make(EXPERTS, dp_shard=4, ep=4, microbatches=microbatches)
        program = workload(job, Megatron(overlap_moe_expert_parallel_comm=in_turns))
        return step_s(program, rate) - step_s(program, 1e30)

    alone = exposed_s(1, in_turns=False)
    # Counts of rows are exchanged in each pass, and awaited.
    assert exposed_s(8, in_turns=True) == pytest.approx(alone, rel=0.01)
    more = exposed_s(2, in_turns=False) - alone  # of one more micro-batch
    assert exposed_s(8, in_turns=False) == pytest.approx(alone + 7 * more)


def test_delayed_gradients_are_beside_what_the_next_layer_sends() -> None:
    """Those of experts come after the dispatch's gradient, the router's are not delayed."""
    job = make(EXPERTS, dp_shard=4, ep=4, microbatches=2)
    settings = Megatron(overlap_moe_expert_parallel_comm=True, **DELAYED)
    ops = [op for op in workload(job, settings).expand(0) if op.microbatch == 0]
    backward = [op for op in ops if op.phase is not Phase.FWD and op.layer == 6]
    names = [(op.module, op.phase) for op in backward]
    sent = names.index(("mlp.dispatch", Phase.BWD))
    assert names.index(("mlp.experts_gate_up", Phase.WGRAD)) > sent
    assert names.index(("attention.qkv", Phase.WGRAD)) > names.index(
        ("attention.norm", Phase.BWD)
    )
    assert names.index(("mlp.router", Phase.WGRAD)) < names.index(
        ("attention.out", Phase.DGRAD)
    )


@pytest.mark.parametrize(
    ("mesh", "settings", "words"),
    [
        ({}, TURNS, "only with ep > 1"),
        ({"dp_shard": 4, "ep": 4, "pp": 2}, TURNS, "only with vpp > 1 where pp > 1"),
        (
            {"dp_shard": 4, "ep": 4},
            {**TURNS, "moe_token_dispatcher_type": Dispatcher.ALLGATHER},
            "only with moe_token_dispatcher_type alltoall",
        ),
        (
            {"dp_shard": 4, "ep": 4},
            {**TURNS, "recompute_granularity": Granularity.FULL},
            "only without full recompute",
        ),
        (
            {"dp_shard": 4, "ep": 4},
            {**TURNS, **SELECTIVE, "recompute_modules": "moe"},
            "only without moe in recompute_modules",
        ),
        ({"dp_shard": 4, "ep": 4}, {**TURNS, **SHARED}, "without moe_shared_expert_overlap"),
        (
            {"dp_shard": 4, "ep": 4},
            DELAYED,
            "delay_wgrad_compute is invalid: it works only with overlap_moe_expert_parallel",
        ),
    ],
)
def test_passes_that_cannot_take_turns(mesh: Any, settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workload(make(LATENT, **mesh), Megatron(**settings))


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
