"""Adapters train, the model is frozen: products, gradients and messages of Megatron-Bridge."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Optimizer, Phase
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import Granularity

from .jobs import BIASED, DENSE, EXPERTS, LATENT, comms, computes, make, matmul_flops

RANK = 16
BLOCK = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}


def num_adapter_params(model: ModelConfig, targets: set[str] = BLOCK) -> int:
    """rank x (width + rows) of each adapted layer, arXiv:2106.09685."""
    width = model.num_heads * model.head_dim
    gated = 2 if model.activation == "swiglu" else 1
    sizes = {
        "linear_qkv": model.hidden_size + width + 2 * model.num_kv_heads * model.head_dim,
        "linear_proj": width + model.hidden_size,
        "linear_fc1": model.hidden_size + gated * model.ffn_hidden_size,
        "linear_fc2": model.ffn_hidden_size + model.hidden_size,
    }
    return model.num_layers * RANK * sum(sizes[name] for name in targets)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("model", [DENSE, BIASED])
@pytest.mark.parametrize("targets", [BLOCK, {"linear_qkv", "linear_proj"}])
def test_only_adapters_are_reduced_and_updated(
    model: ModelConfig, targets: set[str], sharded: bool
) -> None:
    settings = Megatron(
        lora_rank=RANK,
        lora_targets=",".join(sorted(targets)),
        use_distributed_optimizer=sharded,
    )
    program = workload(make(model, dp_shard=2), settings)
    program.check()
    expected = num_adapter_params(model, targets)
    parts = 2 if sharded else 1
    (reduced,) = comms(program, 0, "gradients")
    assert reduced.count * parts == expected
    updates = [op.op for op in computes(program, 0) if isinstance(op.op, Optimizer)]
    assert sum(update.num_params for update in updates) * parts == expected
    assert not list(comms(program, 0, "gradients.embedding", "gradients.norms"))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_weights_have_no_weight_gradient(tp: int, sequence_parallel: bool) -> None:
    """2 FLOPs a weight and token: of all forward and of data, of adapters alone of weights."""
    job = make(DENSE, tp=tp)
    settings = Megatron(
        lora_rank=RANK, sequence_parallel=sequence_parallel, make_vocab_size_divisible_by=64
    )
    flops = matmul_flops(workload(job, settings))
    tokens = 2 * job.mbs * DENSE.seq_len
    adapters = num_adapter_params(DENSE)
    weights = DENSE.num_active_matmul_params
    assert flops[Phase.WGRAD] * tp == 2 * tokens * adapters
    assert flops[Phase.FWD] * tp == 2 * tokens * (weights + adapters)
    assert flops[Phase.DGRAD] * tp == 2 * tokens * (weights + adapters)


def messages(settings: Megatron, tp: int) -> Counter[tuple[str, str, int]]:
    """Messages of adapters of one layer: collective, role of the product, elements in all."""
    program = workload(make(DENSE, tp=tp, microbatches=1), settings)
    found: Counter[tuple[str, str, int]] = Counter()
    for op in comms(program, 0):
        if ".lora_" in op.module and op.layer == 0:
            split = op.collective in ("all_gather", "reduce_scatter")
            found[op.collective, op.module, op.count * (tp if split else 1)] += 1
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages_of_parallel_linear_adapters(sequence_parallel: bool) -> None:
    """As the layers of ParallelLinearAdapter: gather_output, the sum of RowParallelLinear, the
    sum of a ColumnParallelLinear's input gradient, the scatter to the sequence."""
    tokens = 2 * DENSE.seq_len
    hidden = DENSE.hidden_size
    expected: Counter[tuple[str, str, int]] = Counter()
    for role in ("attention.qkv", "mlp.gate_up"):
        expected["all_gather", f"{role}.lora_a", tokens * RANK] += 1
        expected["all_reduce", f"{role}.lora_b", tokens * RANK] += 1
        if not sequence_parallel:  # disable_grad_reduce is for sequence parallelism
            expected["all_reduce", f"{role}.lora_a", tokens * hidden] += 1
    for role in ("attention.out", "mlp.down"):
        expected["all_reduce", f"{role}.lora_a", tokens * RANK] += 1
        expected["all_gather", f"{role}.lora_b", tokens * hidden] += 1
        expected["all_reduce", f"{role}.lora_b", tokens * RANK] += 1
        if sequence_parallel:
            expected["all_gather", f"{role}.lora_b", tokens * hidden] += 1
    settings = Megatron(lora_rank=RANK, sequence_parallel=sequence_parallel)
    assert messages(settings, tp=2) == expected


def test_a_frozen_layer_does_not_gather_its_input_again() -> None:
    job = make(DENSE, tp=2, microbatches=1)

    def gathers(**more: Any) -> int:
        program = workload(job, Megatron(sequence_parallel=True, **more))
        found = comms(program, 0, "attention.qkv", "mlp.gate_up", "head", "embedding")
        return sum(op.collective == "all_gather" and op.phase is not Phase.FWD for op in found)

    assert gathers() == 2 * DENSE.num_layers + 2  # and head, and embedding's gradient
    assert gathers(lora_rank=RANK) == 0


def test_a_recomputed_mlp_has_its_adapters() -> None:
    settings = Megatron(
        lora_rank=RANK,
        recompute_granularity=Granularity.SELECTIVE,
        recompute_modules="mlp",
    )
    program = workload(make(DENSE, microbatches=1), settings)
    again = {op.module for op in computes(program, 0) if op.recompute}
    assert {"mlp.gate_up.lora_a", "mlp.down.lora_b"} <= again
    assert not any(module.startswith("attention") for module in again)


@pytest.mark.parametrize(
    ("model", "mesh", "settings", "words"),
    [
        (DENSE, {"tp": 2}, {"lora_rank": 3}, "lora_rank 3 .* a multiple of tp \\(2\\)"),
        (EXPERTS, {}, {"lora_rank": 4}, "lora_rank 4 .* left out for a model with experts"),
        (replace(LATENT, moe=None), {}, {"lora_rank": 4}, "left out for latent attention"),
        (
            DENSE,
            {"tp": 2},
            {"lora_rank": 4, "sequence_parallel": True, "tp_comm_overlap": True},
            "tp_comm_overlap.* false with lora_rank",
        ),
        (DENSE, {}, {"lora_rank": 0}, "lora_rank 0 is invalid"),
        (DENSE, {}, {"lora_rank": 4, "lora_targets": "q_proj"}, "lora_targets.*linear_qkv"),
    ],
)
def test_adapters_that_are_not_modelled_are_refused(
    model: ModelConfig, mesh: dict[str, int], settings: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        workload(make(model, **mesh), Megatron(**settings))
