"""Muon's laws: shares of data ranks, FLOPs of tensor parallelism's modes, states."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Gemm, Optimizer, Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.step_memory.megatron_memory import stage_memories
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron import muon
from stepmark.workloads.rules.megatron.gradients import Param
from stepmark.workloads.rules.megatron.plan import make_plan
from stepmark.workloads.rules.megatron.rule import workload
from stepmark.workloads.rules.megatron.settings import (
    Megatron,
    MegatronOptimizer,
    MuonTpMode,
)

from .jobs import DENSE, EXPERTS, HYBRID, LATENT

MUON = Megatron(optimizer=MegatronOptimizer.MUON)
DIST_MUON = Megatron(optimizer=MegatronOptimizer.DIST_MUON)
DUPLICATED = replace(MUON, muon_tp_mode=MuonTpMode.DUPLICATED)
DISTRIBUTED = replace(MUON, muon_tp_mode=MuonTpMode.DISTRIBUTED)


def job_of(model: ModelConfig = DENSE, dtype: str = "bf16", **axes: int) -> Job:
    parallel = ParallelConfig(**axes)
    return Job(model=model, parallel=parallel, gbs=parallel.data_ranks, dtype=DType(dtype))


def update_of(made: Workload) -> Iterator[Any]:
    made.check()
    return (op for op in made.expand(0) if op.phase is Phase.OPTIM)


def flops_of(made: Workload) -> int:
    return sum(
        op.op.flops
        for op in update_of(made)
        if isinstance(op, ComputeOp) and isinstance(op.op, Gemm)
    )


def iterations(rows: int, columns: int) -> int:
    small, large = sorted((rows, columns))
    return 5 * (4 * small**2 * large + 2 * small**3)


def test_each_matrix_of_a_layer_is_orthogonalized_q_k_and_v_apart() -> None:
    hidden, kv = 64, 32
    shapes = ((hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden))
    layer = sum(iterations(*shape) for shape in (*shapes, (192, hidden), (hidden, 96)))
    assert flops_of(workload(job_of(), MUON)) == DENSE.num_layers * layer
    whole = workload(job_of(), replace(MUON, muon_split_qkv=False))
    split = sum(iterations(*shape) for shape in shapes[:3])
    joined = layer - split + iterations(hidden + 2 * kv, hidden)
    assert flops_of(whole) == DENSE.num_layers * joined


def test_twice_the_iterations_are_twice_the_flops() -> None:
    twice = workload(job_of(), replace(MUON, muon_num_ns_steps=10))
    assert flops_of(twice) == 2 * flops_of(workload(job_of(), MUON))


def test_each_tp_rank_duplicates_what_one_rank_does() -> None:
    alone = flops_of(workload(job_of(), MUON))
    assert flops_of(workload(job_of(tp=2), DUPLICATED)) == alone
    assert flops_of(workload(job_of(tp=2), MUON)) < alone / 2  # blocks are smaller matrices


def test_tp_ranks_together_divide_the_contracted_dimension() -> None:
    """Products of A and of X are divided, b A + c A A is not."""
    one, two = (flops_of(workload(job_of(tp=tp), DISTRIBUTED)) for tp in (1, 2))
    assert one / 2 < two < one


def test_bytes_of_tensor_parallelism() -> None:
    """Gathered: every divided matrix in fp32. Summed: A of each iteration in bf16."""
    sent = [op for op in update_of(workload(job_of(tp=2), DUPLICATED)) if op.module == "muon"]
    gathers = [op for op in sent if isinstance(op, CommOp)]
    assert {op.collective for op in gathers} == {Collective.ALL_GATHER}
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64
    assert sum(op.count for op in gathers) * 2 == DENSE.num_layers * layer
    summed = [
        op
        for op in update_of(workload(job_of(tp=2), DISTRIBUTED))
        if isinstance(op, CommOp) and op.module == "muon"
    ]
    grams = [op for op in summed if op.dtype is DType.BF16]
    assert len(grams) == 5 * 6 * DENSE.num_layers
    assert {op.count for op in grams} == {64 * 64}  # the hidden size is not divided


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_shares_have_every_parameter_once(ranks: int) -> None:
    plan = make_plan(job_of(dp_shard=ranks), DIST_MUON)
    params = [
        Param(module="mlp.up", count=size, place=place, matrix=(1, size))
        for place, size in enumerate((4, 4, 9, 1, 16, 25, 2, 3, 8))
    ]
    shares = muon.shares(plan, params).dense
    assert len(shares) == ranks
    dealt = [param.place for share in shares for param in share]
    assert sorted(dealt) == list(range(len(params)))
    # There and back: the smallest to the first rank, the next after the last to the last.
    smallest = sorted(param.count for param in params)
    assert [share[0].count for share in shares] == smallest[:ranks]
    assert shares[-1][1].count == smallest[ranks]


@pytest.mark.parametrize(("model", "axes"), [(DENSE, {}), (EXPERTS, {"ep": 2})])
def test_gathers_have_every_parameter_once(model: ModelConfig, axes: dict[str, int]) -> None:
    made = workload(job_of(model, dp_shard=4, **axes), DIST_MUON)
    sent = [
        op for op in update_of(made) if isinstance(op, CommOp) and op.module == "parameters"
    ]
    numel = sum(op.message_bytes(made.groups[op.group]) // op.dtype.itemsize for op in sent)
    experts = 0
    if model.moe:
        experts = model.num_moe_layers * 8 * 3 * 64 * 32
    assert numel == model.num_params - experts // 2 * (axes.get("ep", 1) - 1)
    roots = [op.root for op in sent if op.group == "dp_cp" and op.collective == "broadcast"]
    assert roots in ([], [0, 1, 2, 3])


@pytest.mark.parametrize("settings", [MUON, DIST_MUON])
def test_adam_updates_what_is_no_matrix_of_a_layer(settings: Megatron) -> None:
    made = workload(job_of(), settings)
    count = sum(
        op.op.num_params
        for op in update_of(made)
        if isinstance(op, ComputeOp) and isinstance(op.op, Optimizer)
    )
    norms = (2 * DENSE.num_layers + 1) * 64
    assert count == 2 * DENSE.vocab_size * 64 + norms


def test_a_matrix_has_four_bytes_less_of_states() -> None:
    matrices = DENSE.num_params - 2 * DENSE.vocab_size * 64 - (2 * DENSE.num_layers + 1) * 64
    adam, with_muon = (stage_memories(job_of(), each)[0] for each in (Megatron(), MUON))
    assert adam.optimizer_bytes - with_muon.optimizer_bytes == 4 * matrices
    assert adam.weights_bytes == with_muon.weights_bytes
    shares = [stage_memories(job_of(dp_shard=n), DIST_MUON)[0] for n in (1, 2, 4)]
    assert shares[0].optimizer_bytes == with_muon.optimizer_bytes
    for memory, ranks in zip(shares, (1, 2, 4), strict=True):
        # At worst one rank has both tables besides its part of all else.
        tables = 2 * 12 * DENSE.vocab_size * 64
        even = with_muon.optimizer_bytes / ranks
        assert even <= memory.optimizer_bytes <= even + tables
        assert memory.gradients_bytes == shares[0].gradients_bytes  # all-reduced


@pytest.mark.parametrize(
    ("model", "axes", "settings", "words"),
    [
        (DENSE, {}, {"use_distributed_optimizer": True}, "use_distributed_optimizer.*false"),
        (DENSE, {}, {"overlap_grad_reduce": True}, "overlap_grad_reduce.*false"),
        (DENSE, {}, {"muon_num_ns_steps": 7}, "muon_num_ns_steps.*7.*multiple of 5"),
        (DENSE, {}, {"lora_rank": 4}, "optimizer.*without lora_rank"),
        (HYBRID, {}, {}, "optimizer.*attention layers"),
        (DENSE, {"tp": 8}, {}, "muon_split_qkv.*false where tp does not divide"),
        (LATENT, {"tp": 2}, {"muon_tp_mode": "duplicated"}, "muon_tp_mode.*latent attention"),
        (EXPERTS, {"tp": 2}, {"muon_tp_mode": "distributed"}, "muon_tp_mode.*with experts"),
    ],
)
def test_what_is_refused(
    model: ModelConfig, axes: dict[str, int], settings: dict[str, Any], words: str
) -> None:
    if mode := settings.get("muon_tp_mode"):
        settings["muon_tp_mode"] = MuonTpMode(mode)
    with pytest.raises(ConfigError, match=words):
        workload(job_of(model, **axes), replace(MUON, sequence_parallel=True, **settings))


def test_fp16_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.*without fp16"):
        workload(job_of(dtype="fp16"), MUON)
