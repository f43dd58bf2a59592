"""Products in pieces beside their own communication: the same work, less of it exposed."""

from dataclasses import replace
from typing import Any

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.layers import DENSE as DENSE_LAYER
from stepmark.model.ops import Phase
from stepmark.predictions.simulation import simulate
from stepmark.step.workload import COMPUTE, Block, CommOp, ComputeOp, Operation, Stage, Workload
from stepmark.workloads.rules.megatron import userbuffers
from stepmark.workloads.rules.megatron.layer import leaves
from stepmark.workloads.rules.megatron.plan import Plan, make_plan
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.steps import with_deps

from .jobs import DENSE, LATENT, bus_bytes, computes, ideal_costs, make, matmul_flops

SP: dict[str, Any] = {"sequence_parallel": True}
OVERLAPPED = Megatron(sequence_parallel=True, tp_comm_overlap=True)
FLOPS_PER_S = 1e12
RATES = (1e8, 1e9, 1e10, 1e11)


@pytest.mark.parametrize("tp", [2, 4])
def test_pieces_do_the_same_work(tp: int) -> None:
    job = make(tp=tp, dp_shard=2)
    plain = workload(job, Megatron(**SP))
    overlapped = workload(job, OVERLAPPED)
    overlapped.check()
    assert matmul_flops(overlapped) == matmul_flops(plain)
    assert bus_bytes(overlapped, "tp") == bus_bytes(plain, "tp")


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("tp", [2, 4])
def test_overlap_is_never_slower_and_exposes_less(tp: int, rate: float) -> None:
    job = make(tp=tp)
    costs = ideal_costs(FLOPS_PER_S, rate)
    settings = (
        Megatron(**SP),
        Megatron(**SP, tp_comm_overlap=True, tp_comm_overlap_ag=False),
        OVERLAPPED,
    )
    plain, scattered, both = (simulate(workload(job, each), costs).step_s for each in settings)
    assert both < scattered < plain


def alone(plan: Plan, ops: tuple[Operation, ...]) -> Workload:
    block: Block = with_deps(ops)
    return Workload(
        name="one",
        rules="megatron",
        world_size=plan.tp,
        groups=plan.comms.groups,
        blocks={"step": block},
        stages=(Stage(step="step"),),
    )


def costs_of(ops: tuple[Operation, ...], plan: Plan, rate: float) -> tuple[float, float]:
    """Seconds of all computation, and of what one rank sends."""
    costs = ideal_costs(FLOPS_PER_S, rate)
    group = plan.comms.groups["tp"]
    products = (op for op in ops if isinstance(op, ComputeOp))
    compute_s = sum(sum(costs.compute(op).time_s.values()) for op in products)
    sent = (op for op in ops if isinstance(op, CommOp) and op.collective != "recv")
    return compute_s, sum(costs.comm(op, group) for op in sent)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_ring_exposes_what_a_piece_takes_longer_to_come(tp: int, rate: float) -> None:
    """tp products of p each and tp - 1 hops of h: p + (tp - 1) max(p, h)."""
    plan = make_plan(make(tp=tp), OVERLAPPED)
    leaf = leaves(plan, DENSE_LAYER)["mlp.gate_up"]
    elements = plan.tokens * plan.model.hidden_size
    ops = userbuffers.ring_gather(plan, leaf, leaf.fwd, {"elements": elements}, Phase.FWD)
    compute_s, comm_s = costs_of(ops, plan, rate)
    product, hop = compute_s / tp, comm_s / (tp - 1)
    step = simulate(alone(plan, ops), ideal_costs(FLOPS_PER_S, rate))
    assert step.step_s == pytest.approx(product + (tp - 1) * max(product, hop))


@pytest.mark.parametrize("rate", RATES)
def test_a_pipeline_exposes_its_last_part(rate: float) -> None:
    """Four products of p and scatters of s: p + 3 max(p, s) + s."""
    plan = make_plan(make(tp=4), OVERLAPPED)
    leaf = leaves(plan, DENSE_LAYER)["mlp.down"]
    ops = userbuffers.pipelined_scatter(plan, leaf, plan.tokens * plan.model.hidden_size)
    compute_s, comm_s = costs_of(ops, plan, rate)
    product, part = compute_s / 4, comm_s / 4
    step = simulate(alone(plan, ops), ideal_costs(FLOPS_PER_S, rate))
    assert step.step_s == pytest.approx(product + 3 * max(product, part) + part)


def test_switches_of_single_layers() -> None:
    """A layer in pieces has a product per rank forward: qkv, MLP, and head, which is whole."""
    job = make(tp=4, microbatches=1)

    def products(**settings: Any) -> dict[str, int]:
        program = workload(job, replace(OVERLAPPED, **settings))
        ops = [op for op in computes(program, 0) if op.phase is Phase.FWD and op.layer == 0]
        names = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
        return {
            name: sum(op.module == name and bool(op.op.flops) for op in ops) for name in names
        }

    rows, parts = 4, 4
    whole = {"attention.qkv": rows, "attention.out": parts, "mlp.gate_up": rows}
    assert products() == {**whole, "mlp.down": parts}
    assert products(tp_comm_overlap_disable_qkv=True)["attention.qkv"] == 1
    assert products(tp_comm_overlap_disable_fc1=True)["mlp.gate_up"] == 1
    assert products(tp_comm_overlap_ag=False)["mlp.gate_up"] == 1
    assert products(tp_comm_overlap_rs=False)["mlp.down"] == 1


def test_parameters_are_awaited_by_products_not_by_the_ring() -> None:
    settings = replace(
        OVERLAPPED,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        ddp_bucket_size=1_000,
    )
    program = workload(make(tp=2, dp_shard=2), settings)
    program.check()
    waiting = [op for op in program.expand(0) if any("parameters" in name for name in op.after)]
    assert waiting
    assert all(isinstance(op, ComputeOp) or op.stream == COMPUTE for op in waiting)


@pytest.mark.parametrize(
    ("settings", "model", "words"),
    [
        ({}, DENSE, "tp_comm_overlap is invalid: it works only with sequence_parallel and tp"),
        (SP, LATENT, "tp_comm_overlap.* false with latent attention"),
        (SP, replace(DENSE, hidden_size=66), "hidden size that 4 divides, not 66"),
    ],
)
def test_what_userbuffers_cannot_is_refused(settings: Any, model: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workload(make(model, tp=2), Megatron(**settings, tp_comm_overlap=True))
