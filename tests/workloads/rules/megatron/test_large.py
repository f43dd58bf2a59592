"""Models and clusters of full size: what they hold, and what generating them costs."""

import time
from collections import Counter
from collections.abc import Callable

import pytest

from stepmark.model.model_tables import find_model
from stepmark.model.ops import Gemm, GroupedGemm, Phase
from stepmark.step import native
from stepmark.step.layout import model_as
from stepmark.step.workload import Workload
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import Granularity

from .jobs import comms, computes, make, matmul_flops

SHARDED = Megatron(
    sequence_parallel=True,
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)


def fastest(function: Callable[[], Workload], times: int = 3) -> tuple[float, Workload]:
    """Seconds of this process's own work, whatever else the machine does."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        made = function()
        found.append(time.process_time() - begin)
    return min(found), made


def test_gpt_175b_is_generated_and_written_in_a_moment() -> None:
    """96 layers and 512 micro-batches without pipeline stages."""
    model = model_as("megatron", find_model("gpt-175b"), 8)
    job = make(model, mbs=1, microbatches=512, tp=8, dp_shard=16)
    written: list[bytes] = []

    def generate() -> Workload:
        made = workload(job, Megatron(sequence_parallel=True, use_distributed_optimizer=True))
        written.append(native.encode(made))
        return made

    seconds, made = fastest(generate)
    assert seconds < 0.05
    assert len(written[0]) < 1e6
    assert made.num_microbatches == 512
    assert made.num_operations() > 1e6


def test_llama_405b_on_more_than_100000_ranks() -> None:
    mesh = {"tp": 8, "pp": 16, "dp_shard": 1024}
    job = make(find_model("llama-3.1-405b"), mbs=1, microbatches=16, **mesh)
    settings = Megatron(
        sequence_parallel=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        virtual_pipeline_model_parallel_size=8,
    )
    seconds, made = fastest(lambda: workload(job, settings), 2)
    assert made.world_size == 131_072
    assert len(made.stages) == 16
    assert seconds < 1


@pytest.fixture(scope="module")
def deepseek() -> Workload:
    job = make(find_model("deepseek-v3"), mbs=1, microbatches=2, tp=2, ep=64, dp_shard=128)
    return workload(job, SHARDED)


def test_deepseek_v3_has_its_true_widths(deepseek: Workload) -> None:
    """Output and input features of each linear layer, tp 2 and 64 ranks of experts."""
    shapes: dict[str, set[tuple[int, int]]] = {}
    for op in computes(deepseek, 0):
        if isinstance(op.op, Gemm | GroupedGemm) and op.phase is Phase.FWD:
            shapes.setdefault(op.module, set()).add((op.op.n, op.op.k))
    assert shapes == {
        "attention.q_down": {(1536, 7168)},
        "attention.q_up": {(128 * 192 // 2, 1536)},
        "attention.kv_down": {(512 + 64, 7168)},
        "attention.kv_up": {(128 * 256 // 2, 512)},
        "attention.out": {(7168, 128 * 128 // 2)},
        "mlp.gate_up": {(2 * 18432 // 2, 7168)},
        "mlp.down": {(7168, 18432 // 2)},
        "mlp.router": {(256, 7168)},
        "mlp.experts_gate_up": {(2 * 2048 // 2, 7168)},
        "mlp.experts_down": {(7168, 2048 // 2)},
        "mlp.shared_gate_up": {(2 * 2048 // 2, 7168)},
        "mlp.shared_down": {(7168, 2048 // 2)},
        "head": {(129280 // 2, 7168)},
    }


def test_deepseek_v3_computes_what_its_active_parameters_say(deepseek: Workload) -> None:
    model = deepseek.model
    assert model is not None
    tokens = 2 * model.seq_len
    expected = 2 * tokens * model.num_active_matmul_params
    assert matmul_flops(deepseek)[Phase.FWD] * 2 == expected
    layers: Counter[str] = Counter()
    for op in computes(deepseek, 0):
        if op.phase is Phase.FWD and op.microbatch == 0 and not op.recompute:
            layers[op.module] += 1
    assert layers["mlp.gate_up"] == 3  # dense layers
    assert layers["mlp.router"] == layers["mlp.experts_down"] == 58


def test_deepseek_v3_reduces_all_its_parameters(deepseek: Workload) -> None:
    """671 billion less the router's biases, which no gradient reaches, over tp 2 and ep 64."""
    model = deepseek.model
    assert model is not None
    moe = model.moe
    assert moe is not None
    reduced: Counter[str] = Counter()
    for op in comms(deepseek, 0, "gradients"):
        reduced[op.group] += op.count * deepseek.groups[op.group].size
    ranks_of_experts = deepseek.groups["tp_ep"].size
    assert ranks_of_experts == 128
    experts = 3 * moe.num_experts * moe.ffn_hidden_size * model.hidden_size * 58
    assert experts <= reduced["intra_expt_dp"] * ranks_of_experts < experts * 1.001
    dense = model.num_params - experts - moe.num_experts * 58
    whole = dense - sum(_divided(deepseek))
    mine = whole + sum(_divided(deepseek)) // 2
    assert mine <= reduced["intra_dp_cp"] < mine * 1.001


def _divided(program: Workload) -> list[int]:
    """Parameters that tp divides: up projections, outputs, MLPs, tables."""
    model = program.model
    assert model is not None
    assert model.mla is not None
    assert model.moe is not None
    heads, mla, hidden = model.num_heads, model.mla, model.hidden_size
    up = (mla.q_lora_rank or 0) * heads * model.d_qk
    up += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    out = heads * mla.v_head_dim * hidden
    shared = 3 * model.moe.shared_ffn_hidden_size * hidden
    return [
        61 * (up + out),
        3 * 3 * hidden * model.ffn_hidden_size,
        58 * shared,
        2 * model.vocab_size * hidden,
    ]


def test_deepseek_v3_over_stages_with_everything_on() -> None:
    mesh = {"tp": 2, "pp": 16, "ep": 64, "dp_shard": 64}
    job = make(find_model("deepseek-v3"), mbs=1, microbatches=32, **mesh)
    settings = Megatron(
        sequence_parallel=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        expert_tensor_parallel_size=1,
        decoder_first_pipeline_num_layers=3,
        decoder_last_pipeline_num_layers=2,
        recompute_granularity=Granularity.SELECTIVE,
        recompute_modules="core_attn,mla_up_proj,moe_act,layernorm",
    )
    made = workload(job, settings)
    made.check()
    assert [len(stage.layers) for stage in made.stages] == [3, *[4] * 14, 2]
    assert matmul_flops(made)[Phase.FWD] * 2 == (
        2 * job.tokens * 32 * job.model.num_active_matmul_params
    )
