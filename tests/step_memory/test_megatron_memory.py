"""Megatron-LM's memory against published formulas.

Activations: Korthikanti et al., arXiv:2205.05198, equations 1 to 5. Parameters:
megatron/training/theoretical_memory_usage.py, 18 bytes each, or 6 + 12 / data ranks.
"""

from dataclasses import replace
from typing import Any

import pytest

from stepmark.ground.dtypes import DType
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig
from stepmark.step_memory.megatron_memory import stage_memories
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron.narrow import Fp8Format
from stepmark.workloads.rules.megatron.settings import (
    AttentionBackend,
    Granularity,
    Megatron,
)

GPT = ModelConfig(
    name="gpt",
    num_layers=8,
    hidden_size=4096,
    ffn_hidden_size=16384,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    vocab_size=51200,
    seq_len=2048,
    activation="gelu",
    norm="layernorm",
    max_positions=2048,
    linear_bias=True,
    attention_bias=True,
    tied_embeddings=True,
)
SBH = 2048 * 2 * 4096  # of micro-batches of 2 sequences


def job(model: ModelConfig = GPT, count: int = 8, **axes: int) -> Job:
    parallel = ParallelConfig(**axes)
    return Job(model=model, parallel=parallel, mbs=2, gbs=2 * parallel.data_ranks * count)


def activations_per_layer(settings: Megatron, **axes: int) -> float:
    """Return the bytes that a layer adds, without the largest peak of a layer's own."""
    deep, shallow = (
        stage_memories(job(replace(GPT, num_layers=layers), **axes), settings)[0]
        for layers in (9, 8)
    )
    return deep.activations_bytes - shallow.activations_bytes


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_layer_keeps_34_sbh_over_t_without_the_masks(tp: int) -> None:
    kept = activations_per_layer(Megatron(sequence_parallel=tp > 1), tp=tp)
    assert kept == pytest.approx((34 - 2) * SBH / tp, rel=0.01)


def test_without_sequence_parallelism_norms_and_inputs_are_whole() -> None:
    # Equation 2, without attention's scores and the masks: 10 - 1 whole, 24 - 1 divided; the
    # inputs of the two column-parallel layers are among the 10.
    kept = activations_per_layer(Megatron(), tp=8)
    assert kept == pytest.approx((8 + 24 / 8) * SBH, rel=0.01)


STORED = Megatron(
    attention_backend=AttentionBackend.LOCAL, attention_dropout=0.1, hidden_dropout=0.1
)
SELECTIVE = replace(STORED, recompute_granularity=Granularity.SELECTIVE)
SCORES = 5 * 32 * 2048 / 4096  # 5 a s / h
STATISTICS = 2 * 2 * 4 / 4096  # fp32 means and deviations of two norms, which the paper omits


@pytest.mark.parametrize(
    ("settings", "tp", "bytes_per_element"),
    [
        (STORED, 1, 34 + SCORES),  # equation 1
        (STORED, 8, 10 + 24 / 8 + SCORES / 8),  # equation 2
        (replace(STORED, sequence_parallel=True), 8, (34 + SCORES) / 8),  # equation 4
        # Table 2: scores recomputed.
        (SELECTIVE, 8, 10 + 24 / 8),
        (replace(SELECTIVE, sequence_parallel=True), 8, 34 / 8),
    ],
)
def test_stored_scores_and_masks_are_those_of_the_paper(
    settings: Megatron, tp: int, bytes_per_element: float
) -> None:
    rows = tp if settings.sequence_parallel else 1
    exact = (bytes_per_element + STATISTICS / rows) * SBH
    kept = activations_per_layer(settings, tp=tp)
    assert kept == pytest.approx(exact, rel=1e-12)


def test_unfused_softmax_keeps_its_result_in_fp32() -> None:
    unfused = replace(STORED, masked_softmax_fusion=False)
    more = activations_per_layer(unfused) - activations_per_layer(STORED)
    assert more == 2 * 2 * 32 * 2048**2  # the other softmax's is 16-bit: a s^2 b elements


def test_shared_key_heads_are_copied_for_stored_scores() -> None:
    model = replace(GPT, num_kv_heads=8)
    plain = replace(STORED, attention_dropout=0.0)
    size = 2 * 2 * 2048  # bytes of an element of each token
    for settings, heads in ((plain, 32), (replace(SELECTIVE, attention_dropout=0.0), 8)):
        deep, shallow = (
            stage_memories(job(replace(model, num_layers=layers)), settings)[0]
            for layers in (9, 8)
        )
        kept = deep.activations_bytes - shallow.activations_bytes
        whole = stage_memories(job(replace(GPT, num_layers=9)), settings)[0]
        whole_before = stage_memories(job(replace(GPT, num_layers=8)), settings)[0]
        difference = whole.activations_bytes - whole_before.activations_bytes - kept
        assert difference == 2 * (32 - heads) * 128 * size


def test_a_recomputed_layer_keeps_its_input() -> None:
    settings = Megatron(sequence_parallel=True, recompute_granularity=Granularity.FULL)
    assert activations_per_layer(settings, tp=4) == 2 * SBH / 4


def test_parameters_have_18_bytes_or_6_and_12_over_the_data_ranks() -> None:
    for sharded, each in ((False, 18), (True, 6 + 12 / 4)):
        settings = Megatron(use_distributed_optimizer=sharded)
        (memory,) = stage_memories(job(dp_shard=4), settings)
        held = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
        assert held == pytest.approx(each * GPT.num_params, rel=0.001)
    halved = replace(settings, grad_reduce_in_bf16=True)
    (less,) = stage_memories(job(dp_shard=4), halved)
    assert less.gradients_bytes == memory.gradients_bytes / 2


def test_fp16_gradients_are_cast_to_fp32_as_well() -> None:
    """20 bytes a parameter, or 4 + 16 / ranks (docs of the distributed optimizer)."""
    for sharded, each in ((False, 20), (True, 4 + 16 / 4)):
        settings = Megatron(
            use_distributed_optimizer=sharded, accumulate_allreduce_grads_in_fp32=False
        )
        (memory,) = stage_memories(replace(job(dp_shard=4), dtype=DType.FP16), settings)
        kept = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
        assert kept == pytest.approx(each * GPT.num_params, rel=0.001)


def test_eager_swiglu_keeps_the_result_of_silu() -> None:
    model = replace(GPT, activation="swiglu")
    eager, fused = (
        stage_memories(job(model), Megatron(bias_swiglu_fusion=is_fused))[0]
        for is_fused in (False, True)
    )
    added = eager.activations_bytes - fused.activations_bytes
    assert added == 8 * 2 * 2 * 2048 * 16384  # layers, bytes, tokens, width
    clamped = stage_memories(
        job(replace(model, activation="clamped_swiglu")), Megatron(bias_swiglu_fusion=False)
    )[0]
    # The clamped gate, up + 1, their product and the sigmoid.
    assert clamped.activations_bytes - fused.activations_bytes == 4 * added


def test_a_stage_keeps_as_many_micro_batches_as_stages_follow() -> None:
    memories = stage_memories(job(pp=4, count=16), Megatron())
    inner = memories[1].activations_bytes / 3
    assert [memory.stage for memory in memories] == [0, 1, 2, 3]
    assert memories[0].activations_bytes == pytest.approx(4 * inner)
    assert memories[2].activations_bytes == pytest.approx(2 * inner)
    few = stage_memories(job(pp=4, count=2), Megatron())  # fewer micro-batches than stages
    assert few[0].activations_bytes == pytest.approx(2 * inner)
    assert memories[3].head_bytes == 6 * 2 * 2048 * 51200  # in 16 and in 32 bits


def test_multi_token_prediction_has_a_table_and_logits_of_its_own() -> None:
    """The first stage is as without; the last one has 18 bytes of each parameter more."""
    model = replace(GPT, max_positions=0, tied_embeddings=False)
    plain = stage_memories(job(model, pp=2, count=4), Megatron())
    memories = stage_memories(job(replace(model, num_mtp_layers=1), pp=2, count=4), Megatron())
    assert memories[0] == plain[0]
    added = 18 * (replace(model, num_mtp_layers=1).mtp_params() + model.head_params)
    states = [one.weights_bytes + one.gradients_bytes + one.optimizer_bytes for one in
              (plain[1], memories[1])]  # fmt: skip
    assert states[1] - states[0] == added
    assert memories[1].head_bytes == (4 + 6) * 2 * 2048 * 51200
    layer = plain[0].activations_bytes / (2 * 4)  # micro-batches, layers
    more = memories[1].activations_bytes - plain[1].activations_bytes
    rows = 2 * 2 * 2048 * 4096
    # Inputs of three norms, of the joint projection (two) and of the logits.
    assert more == pytest.approx(layer + 6 * rows, rel=0.01)


def test_interleaved_stages_keep_more() -> None:
    """Activations of the first stage grow by 1 + (p - 1) / (p m) (section 4.2.3)."""
    plain = stage_memories(job(pp=4, count=16), Megatron())[0]
    settings = Megatron(virtual_pipeline_model_parallel_size=2)
    interleaved = stage_memories(job(pp=4, count=16), settings)[0]
    ratio = interleaved.activations_bytes / plain.activations_bytes
    assert ratio == pytest.approx(1 + 3 / 8, rel=0.01)


def test_narrow_products_keep_narrow_inputs_and_two_copies_of_weights() -> None:
    wide, narrow = (
        stage_memories(job(dp_shard=4), Megatron(**settings))[0]
        for settings in ({}, {"fp8_format": Fp8Format.HYBRID})
    )
    products = GPT.num_layers * 12 * 4096**2
    assert narrow.weights_bytes - wide.weights_bytes == 2 * products
    # Inputs of qkv and of both products of the MLP have half the bytes; attention's output is
    # kept in bf16 for itself.
    less = (1 + 1 + 4 - 1) * SBH * GPT.num_layers
    assert wide.activations_bytes - narrow.activations_bytes == less
    assert narrow.optimizer_bytes == wide.optimizer_bytes


def test_adapters_leave_weights_without_gradients() -> None:
    model = find_model("llama-3.1-8b")
    full, lora = (
        stage_memories(job(model), Megatron(**settings))[0]
        for settings in ({}, {"lora_rank": 16})
    )
    adapters = lora.optimizer_bytes / 12
    # One beside qkv, out, gate_up and down each.
    widths = (4096 + 6144) + (4096 + 4096) + (4096 + 2 * 14336) + (14336 + 4096)
    assert adapters == 32 * 16 * widths
    assert lora.weights_bytes == full.weights_bytes + 2 * adapters
    assert lora.gradients_bytes == 4 * adapters


def test_modules_that_are_recomputed_keep_their_input_only() -> None:
    model = find_model("deepseek-v3")
    big = Job(model=model, parallel=ParallelConfig(dp_shard=64, ep=64), mbs=1, gbs=64)
    chosen = {"recompute_granularity": Granularity.SELECTIVE}

    def kept(**settings: Any) -> int:
        return stage_memories(big, Megatron(**settings))[0].activations_bytes

    everything = kept()
    for words in ("mla_up_proj", "moe_act", "layernorm", "mlp", "moe"):
        assert kept(**chosen, recompute_modules=words) < everything, words
    both = kept(**chosen, recompute_modules="mla_up_proj,moe_act")
    apart = [kept(**chosen, recompute_modules=word) for word in ("mla_up_proj", "moe_act")]
    assert everything - both == sum(everything - each for each in apart)


def test_passes_in_turns_keep_one_more_forward_pass() -> None:
    """overlap_moe_expert_parallel_comm: each stage is one forward pass further ahead."""
    model = find_model("qwen3-30b-a3b")
    parallel = ParallelConfig(pp=2, dp_shard=8, ep=8)
    job = Job(model=replace(model, num_layers=8), parallel=parallel, gbs=64)
    chunks = Megatron(virtual_pipeline_model_parallel_size=2)
    ahead = replace(chunks, overlap_moe_expert_parallel_comm=True)
    plain, turns = (stage_memories(job, each)[1] for each in (chunks, ahead))

    assert turns.activations_bytes > plain.activations_bytes
    assert turns.weights_bytes == plain.weights_bytes
