"""Small jobs for the laws, and what is summed over their ranks."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from stepmark.cases.message import RECV
from stepmark.model.layers import DeltaConfig, Layer, MambaConfig, MlaConfig, MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Gemm, GroupedGemm, Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import CommOp, ComputeOp, Group, Workload
from stepmark.timeline.ledger import Work
from stepmark.timeline.step_cost import Costs, OpCost
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron.rule import Megatron
from stepmark.workloads.rules.megatron.settings import AttentionBackend, CpComm

DENSE = ModelConfig(
    name="small",
    hidden_size=64,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    ffn_hidden_size=96,
    vocab_size=512,
    seq_len=64,
)
BIASED = replace(
    DENSE,
    num_kv_heads=8,
    activation="gelu",
    norm="layernorm",
    linear_bias=True,
    tied_embeddings=True,
    max_positions=64,
)
EXPERTS = replace(
    DENSE,
    moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=32, first_dense_layers=3),
)
LATENT = replace(
    DENSE,
    num_kv_heads=8,
    head_dim=24,
    mla=MlaConfig(
        q_lora_rank=32,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    moe=MoeConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=32,
        num_shared_experts=1,
        shared_ffn_hidden_size=32,
        first_dense_layers=1,
    ),
)

SLIDING = replace(
    DENSE,
    pattern=(Layer(window=16), Layer(window=16), Layer(has_rope=False)),
    norm_placement="both",
    activation="geglu",
    qk_norm=True,
    softcap=50.0,
    logit_softcap=30.0,
    embedding_multiplier=8.0,
)
SINKS = replace(
    DENSE,
    pattern=(Layer(window=16), Layer()),
    attention_bias=True,
    biases=("experts", "router"),
    has_sinks=True,
    moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=32),
)
HYBRID = replace(
    DENSE,
    activation="relu2",
    pattern=(
        Layer(mixer="mamba", ffn=""),
        Layer(mixer="", ffn="experts"),
        Layer(ffn="", has_rope=False),
        Layer(mixer="", ffn="dense"),
    ),
    mamba=MambaConfig(num_heads=8, head_dim=8, num_groups=8, state_dim=8, chunk=32),
    moe=MoeConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=32,
        num_shared_experts=1,
        shared_ffn_hidden_size=32,
        latent_size=32,
    ),
)
GATED = replace(
    DENSE,
    gate="element",
    qk_norm=True,
    rotary_dim=4,
    pattern=(*(Layer(mixer="delta"),) * 3, Layer()),
    delta=DeltaConfig(num_key_heads=8, num_value_heads=16, key_dim=8, value_dim=8),
    moe=MoeConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=32,
        num_shared_experts=1,
        shared_ffn_hidden_size=32,
        shared_gate=True,
    ),
)
PREDICTING = replace(LATENT, num_mtp_layers=2)
PATTERNS = (SLIDING, SINKS, HYBRID, GATED, PREDICTING)


def make(
    model: ModelConfig = DENSE, *, mbs: int = 2, microbatches: int = 2, **mesh: int
) -> Job:
    parallel = ParallelConfig(**mesh)
    gbs = mbs * microbatches * parallel.data_ranks
    return Job(model=model, parallel=parallel, mbs=mbs, gbs=gbs)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, Megatron]:
    """Any of the models over any mesh that fits, with any settings that Megatron-LM takes."""
    model = draw(st.sampled_from((DENSE, BIASED, EXPERTS, LATENT, *PATTERNS)))
    mesh = {axis: draw(st.sampled_from((1, 2))) for axis in ("cp", "dp_shard")}
    is_masked = model in (SLIDING, SINKS)
    if model in PATTERNS and not is_masked:
        mesh["cp"] = 1  # of a state
    by_heads = is_masked and mesh["cp"] == 2  # which divides the KV heads again
    # 8: more than KV heads
    mesh["tp"] = draw(st.sampled_from((1, 2) if by_heads else (1, 2, 4, 8)))
    mesh["pp"] = draw(st.sampled_from((1, 2, 4)))
    chunks = draw(st.sampled_from((1, 2))) if mesh["pp"] > 1 else 1
    if model.moe is not None and mesh["dp_shard"] == 2:
        mesh["ep"] = draw(st.sampled_from((1, 2)))
    sharded = draw(st.booleans())
    reduced = draw(st.booleans())
    backends = [*AttentionBackend] if mesh["cp"] == 1 else [AttentionBackend.AUTO]
    settings: dict[str, Any] = {
        "cp_comm_type": CpComm.A2A if by_heads else CpComm.P2P,
        "attention_backend": draw(st.sampled_from(backends)),
        "attention_dropout": draw(st.sampled_from((0.0, 0.1))),
        "hidden_dropout": draw(st.sampled_from((0.0, 0.1))),
        "bias_swiglu_fusion": draw(st.booleans()),
        "gradient_accumulation_fusion": draw(st.booleans()),
        # Without it there are no experts over tp, and tp ranks repeat latent attention's parts.
        "sequence_parallel": model.moe is not None or draw(st.booleans()),
        "use_distributed_optimizer": sharded,
        "overlap_grad_reduce": reduced,
        "overlap_param_gather": sharded and reduced and draw(st.booleans()),
        "align_grad_reduce": draw(st.booleans()),
        "align_param_gather": draw(st.booleans()),
        "ddp_bucket_size": draw(st.sampled_from((None, 10_000, 40_000))),
        "virtual_pipeline_model_parallel_size": chunks,
        "make_vocab_size_divisible_by": 64,  # with which 512 needs no padding
    }
    microbatches = mesh["pp"] * draw(st.sampled_from((1, 2, 3)))
    return make(model, microbatches=microbatches, **mesh), Megatron(**settings)


def computes(workload: Workload, stage: int) -> Iterator[ComputeOp]:
    return (op for op in workload.expand(stage) if isinstance(op, ComputeOp))


def comms(workload: Workload, stage: int, *modules: str) -> Iterator[CommOp]:
    for op in workload.expand(stage):
        if isinstance(op, CommOp) and (not modules or op.module in modules):
            yield op


def matmul_flops(workload: Workload) -> Counter[Phase]:
    """Of linear layers, over all stages on one rank each; what is recomputed apart as STEP."""
    found: Counter[Phase] = Counter()
    for stage in range(len(workload.stages)):
        for op in computes(workload, stage):
            if isinstance(op.op, Gemm | GroupedGemm):
                found[Phase.STEP if op.recompute else op.phase] += op.op.flops
    return found


def ideal_costs(flops_per_s: float, bytes_per_s: float) -> Costs:
    """Costs by FLOPs and by bytes over a link alone: pieces take as long as the whole."""

    def compute(op: ComputeOp) -> OpCost:
        time_s = (op.op.flops or 0) / flops_per_s
        return OpCost(time_s={Work.MATMUL: time_s}, num_kernels=1, host_s=0.0)

    def comm(op: CommOp, group: Group) -> float:
        return op.bus_bytes(group) / bytes_per_s

    return Costs(compute=compute, comm=comm)


def bus_bytes(workload: Workload, *groups: str) -> Counter[tuple[str, bool]]:
    """Bytes over a rank's link by group, in the forward pass or not; all stages.

    What a rank sends in a ring and what it receives go over its link at the same time.
    """
    found: Counter[tuple[str, bool]] = Counter()
    for stage in range(len(workload.stages)):
        for op in comms(workload, stage):
            if op.group in groups and op.collective != RECV:
                is_forward = op.phase is Phase.FWD and not op.recompute
                found[op.group, is_forward] += round(op.bus_bytes(workload.groups[op.group]))
    return found
