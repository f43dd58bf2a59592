"""Kernels of a layer against what megatron-core runs, and against published formulas.

SEEN_* have the bytes per element that operators of megatron-core 0.16.1 read and write, as
torch's dispatcher saw them on a CPU: tensor_parallel/cross_entropy.py and
transformer/dot_product_attention.py with masked_softmax_fusion off, in bf16. Small tensors,
views and the creation of the mask are left out; two operators that index logits count as what
they touch.
"""

from collections import Counter
from dataclasses import replace

import pytest

from stepmark.ground.dtypes import DType
from stepmark.model.ops import Bmm, Gemm, Phase
from stepmark.step.kernel_choice import CORE
from stepmark.step.workload import ComputeOp, Kernel, Workload
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import AttentionBackend, Granularity

from .jobs import BIASED, DENSE, comms, computes, make

LOCAL = Megatron(
    attention_backend=AttentionBackend.LOCAL,
    attention_dropout=0.1,
    hidden_dropout=0.1,
    make_vocab_size_divisible_by=64,
)
SEEN_LOSS = {
    # _to_copy, max, sub_, exp, sum, div_; mul_, _to_copy
    Phase.FWD: [2 + 4, 4, 4 + 4, 4 + 4, 4, 4 + 4],
    Phase.BWD: [4 + 4, 4 + 2],
}
SEEN_SOFTMAX = {
    # _to_copy, masked_fill_, _softmax, _to_copy; _to_copy, _softmax_backward_data, masked_fill,
    # _to_copy
    Phase.FWD: [2 + 4, 4 + 4, 4 + 4, 4 + 2],
    Phase.BWD: [2 + 4, 4 + 4 + 4, 4 + 4, 4 + 2],
}


def kernels_of(program: Workload, module: str, layer: int | None = 0) -> list[ComputeOp]:
    return [
        op
        for op in computes(program, 0)
        if (op.module, op.layer, op.microbatch) == (module, layer, 0) and not op.recompute
    ]


def bytes_per_element(ops: list[ComputeOp], phase: Phase, elements: int) -> list[float]:
    chosen = [op.op for op in ops if op.phase is phase]
    return [
        op.bytes_moved / elements for op in chosen if isinstance(op, Kernel) and op.bytes_moved
    ]


def test_the_loss_has_the_kernels_that_megatron_core_runs() -> None:
    job = make(tp=2)
    program = workload(job, Megatron(make_vocab_size_divisible_by=64))
    logits = job.tokens * 512 // 2
    for phase, seen in SEEN_LOSS.items():
        assert bytes_per_element(kernels_of(program, "loss", None), phase, logits) == seen


def test_the_unfused_softmax_has_the_kernels_that_megatron_core_runs() -> None:
    program = workload(make(tp=2), replace(LOCAL, masked_softmax_fusion=False))
    pairs = 2 * 4 * 64 * 64  # of 2 sequences and 4 heads
    for phase, seen in SEEN_SOFTMAX.items():
        ops = kernels_of(program, "attention.softmax")
        assert bytes_per_element(ops, phase, pairs) == seen


def test_a_fused_softmax_reads_what_the_mask_leaves() -> None:
    program = workload(make(tp=2), LOCAL)
    pairs = 2 * 4 * 64 * 64
    ops = kernels_of(program, "attention.softmax")
    assert bytes_per_element(ops, Phase.FWD, pairs) == [0.5 * 2 + 2]
    assert bytes_per_element(ops, Phase.BWD, pairs) == [0.5 * (2 + 2) + 2]


def test_transformer_engine_reads_all_scores_and_a_mask() -> None:
    unfused = replace(LOCAL, attention_backend=AttentionBackend.UNFUSED)
    ops = kernels_of(workload(make(tp=2), unfused), "attention.softmax")
    pairs = 2 * 4 * 64 * 64
    assert bytes_per_element(ops, Phase.FWD, pairs) == [2 + 1 + 2]
    assert bytes_per_element(ops, Phase.BWD, pairs) == [2 + 2 + 2]


def test_flash_attention_takes_sequences_one_after_the_other() -> None:
    """TransformerEngine copies q, k and v before it and the output after it."""
    job = make(tp=2)
    settings = Megatron(attention_backend=AttentionBackend.FLASH)
    ops = kernels_of(workload(job, settings), "attention.core")
    heads = [(4 + 2 + 2) * 8, 4 * 8]
    sizes = [2 * 2 * width for width in heads]  # read and written in 16 bits
    assert bytes_per_element(ops, Phase.FWD, job.tokens) == sizes
    assert bytes_per_element(ops, Phase.BWD, job.tokens) == sizes[::-1]


@pytest.mark.parametrize(
    ("backend", "seq_len", "is_fused"),
    [
        (AttentionBackend.LOCAL, 4096, True),
        (AttentionBackend.LOCAL, 4100, False),
        (AttentionBackend.LOCAL, 4094, False),  # no multiple of 4
        (AttentionBackend.UNFUSED, 8192, True),
        (AttentionBackend.UNFUSED, 8188, False),  # no multiple of 8
        (AttentionBackend.UNFUSED, 16384, False),
    ],
)
def test_a_long_sequence_has_no_fused_softmax(
    backend: AttentionBackend, seq_len: int, is_fused: bool
) -> None:
    job = make(replace(DENSE, seq_len=seq_len))
    program = workload(job, Megatron(attention_backend=backend))
    names = {
        op.op.name
        for op in kernels_of(program, "attention.softmax")
        if isinstance(op.op, Kernel)
    }
    assert ("scaled_masked_softmax" in names) is is_fused


def test_products_have_the_flops_of_the_paper() -> None:
    """72 b l s h^2 (1 + s / 6 h + v / 12 l h): arXiv:2205.05198, appendix A, equation 7."""
    model = replace(BIASED, ffn_hidden_size=4 * 64, num_kv_heads=8)
    job = make(model, tp=2)
    program = workload(job, LOCAL)
    flops = sum(op.op.flops for op in computes(program, 0) if isinstance(op.op, Gemm | Bmm))
    h, s, v = model.hidden_size, model.seq_len, model.vocab_size
    sequences = job.mbs * job.num_microbatches
    # l (1 + s / 6 h + v / 12 l h) x 12 h, which is whole
    whole = model.num_layers * (12 * h + 2 * s) + v
    assert flops * 2 == 6 * sequences * s * h * whole


def test_selective_recompute_runs_the_stored_scores_again() -> None:
    settings = replace(LOCAL, recompute_granularity=Granularity.SELECTIVE)
    program = workload(make(tp=2), settings)
    ops = [op for op in computes(program, 0) if op.layer == 0 and op.microbatch == 0]
    again = Counter((op.module, op.op) for op in ops if op.recompute)
    forward = [op for op in ops if op.phase is Phase.FWD and not op.recompute]
    assert again == Counter((op.module, op.op) for op in forward if op.module in CORE)
    assert {module for module, _ in again} == set(CORE) - {"attention.core"}


def test_dropout_reads_and_writes_a_mask_of_bytes() -> None:
    job = make(tp=2)
    without = replace(LOCAL, attention_dropout=0.0, hidden_dropout=0.0)
    dropped, plain = (
        sum(
            op.op.bytes_moved or 0
            for op in computes(workload(job, settings), 0)
            if op.layer == 0 and op.microbatch == 0
        )
        for settings in (LOCAL, without)
    )
    pairs = 2 * 4 * 64 * 64
    rows = job.tokens * DENSE.hidden_size
    # Probabilities: read, written and masked in both passes. Rows: a mask forward, a kernel
    # backward, before each of two residuals.
    assert dropped - plain == 2 * 5 * pairs + 2 * (1 + 5) * rows


def test_gradients_that_are_not_fused_are_added_by_kernels() -> None:
    job = make()
    settings = replace(LOCAL, gradient_accumulation_fusion=False)

    def added_bytes(settings: Megatron) -> int:
        kernels = (op.op for op in computes(workload(job, settings), 0) if op.microbatch == 0)
        return sum(
            kernel.bytes_moved or 0
            for kernel in kernels
            if isinstance(kernel, Kernel) and kernel.name == "gradient_add"
        )

    table = 512 * 64
    matrices = DENSE.num_params - table - DENSE.num_layers * 2 * 64 - 64
    assert added_bytes(LOCAL) == 10 * table
    assert added_bytes(settings) == 10 * (table + matrices)


def test_the_update_goes_over_the_parameters_of_the_rank() -> None:
    job = make(dp_shard=2)
    program = workload(job, Megatron(use_distributed_optimizer=True, sequence_parallel=False))
    planes = {
        op.op.name: (op.op.bytes_moved or 0) / DENSE.num_params
        for op in computes(program, 0)
        if op.phase is Phase.OPTIM and isinstance(op.op, Kernel)
    }
    expected = {
        # fp32 gradients whole, then 1 of 2 shards
        "gradient_check": 4,
        "gradient_scale": 8,
        "gradient_zero": 4,
        "gradient_norm": 4 / 2,
        "parameter_copy": (4 + 2) / 2,
    }
    assert planes == pytest.approx(expected, rel=0.01)


def test_fp16_gradients_are_cast_and_unscaled_for_the_update() -> None:
    job = replace(make(dp_shard=2), dtype=DType.FP16)
    settings = Megatron(accumulate_allreduce_grads_in_fp32=False)
    program = workload(job, settings)
    planes = {
        op.op.name: round((op.op.bytes_moved or 0) / DENSE.num_params)
        for op in computes(program, 0)
        if op.phase is Phase.OPTIM and isinstance(op.op, Kernel)
    }
    assert planes == {
        "gradient_scale": 4,
        "gradient_zero": 2,
        "gradient_cast": 2 + 4,
        "gradient_unscale": 8,
        "gradient_norm": 4,
        "parameter_copy": 4 + 2,
    }
    reduced = {op.dtype for op in comms(program, 0) if op.module == "gradients"}
    assert reduced == {DType.FP16}


def test_bias_gradients_are_sums_over_rows() -> None:
    job = make(BIASED, tp=2)
    program = workload(job, replace(LOCAL, sequence_parallel=True))
    sums = {
        op.module: op.op.bytes_moved
        for op in computes(program, 0)
        if isinstance(op.op, Kernel) and op.op.name == "bias_gradient"
    }
    rows = 2 * job.tokens
    assert sums == {
        "attention.qkv": rows * 3 * 64 // 2,
        "attention.out": rows // 2 * 64,
        "mlp.up": rows * 96 // 2,
        "mlp.down": rows // 2 * 64,
    }
