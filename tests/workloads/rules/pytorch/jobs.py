"""Small jobs for the laws of PyTorch's rules, and what is summed over their programs."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from stepmark.cases.training import CompileScope, GradSync, Recompute
from stepmark.ground.dtypes import DType
from stepmark.model.layers import DeltaConfig, Layer, MambaConfig, MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Gemm, GroupedGemm, Phase
from stepmark.model.parallel import ParallelConfig, PipelineSchedule, StageSplit
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.rules.pytorch.settings import PyTorch, StageEnds

# Settings of one kind of data parallelism.
FSDP = RULES["fsdp"].make
DDP = RULES["ddp"].make
ALONE = RULES["pp"].make

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
    DENSE, moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=32, first_dense_layers=1)
)
FP32: dict[str, Any] = {"param_dtype": DType.FP32, "reduce_dtype": DType.FP32}

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
HYBRID = replace(
    DENSE,
    activation="relu2",
    pattern=(
        Layer(mixer="mamba", ffn=""),
        Layer(mixer="", ffn="experts"),
        Layer(ffn="", has_rope=False),
        Layer(mixer="attention+mamba", ffn="dense"),
    ),
    has_sinks=True,
    biases=("experts", "router", "out", "head"),
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
    rotary_dim=4,
    pattern=(
        *(Layer(mixer="delta"), Layer(mixer="lightning"), Layer(mixer="conv")),
        Layer(chunk=32),
    ),
    conv_width=3,
    conv_bias=True,
    delta=DeltaConfig(num_key_heads=8, num_value_heads=16, key_dim=8, value_dim=8),
    norm_placement="shared",
    is_parallel=True,
    moe=MoeConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=32,
        num_shared_experts=1,
        shared_ffn_hidden_size=32,
        shared_gate=True,
        router_bias=True,
    ),
)
# Gemma 4: tied, with experts, and not divided by tp or pp.
PER_LAYER = replace(
    SLIDING,
    tied_embeddings=True,
    pattern=(
        Layer(window=16),
        Layer(shares_kv=True, head_dim=16, num_kv_heads=4),
        Layer(window=16, has_kv=False, ffn="dense", ffn_hidden_size=96),
    ),
    v_norm=True,
    layer_scale=True,
    per_layer_width=16,
    moe=MoeConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=32,
        num_shared_experts=1,
        shared_ffn_hidden_size=64,
        has_norms=True,
    ),
)
PATTERNS = (SLIDING, HYBRID, GATED, PER_LAYER)


def make(
    model: ModelConfig = DENSE, *, mbs: int = 2, microbatches: int = 1, **mesh: int
) -> Job:
    parallel = ParallelConfig(**mesh)
    gbs = mbs * microbatches * parallel.data_ranks
    return Job(model=model, parallel=parallel, mbs=mbs, gbs=gbs)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, PyTorch]:
    """Any of the models over any mesh that fits, with any settings of the fsdp rule."""
    model = draw(st.sampled_from((DENSE, BIASED, EXPERTS, *PATTERNS)))
    mesh = {axis: draw(st.sampled_from((1, 2))) for axis in ("cp", "dp_replicate")}
    if model in PATTERNS:
        mesh["cp"] = 1  # of a window or a state
    mesh["dp_shard"] = draw(st.sampled_from((1, 2, 4)))
    if model.moe is None:
        mesh["tp"] = draw(st.sampled_from((1, 2)))
    elif mesh["dp_shard"] > 1:
        mesh["ep"] = draw(st.sampled_from((1, 2)))
    if not model.tied_embeddings:
        mesh["pp"] = draw(st.sampled_from((1, 2, 4)))
    schedule = draw(st.sampled_from(PipelineSchedule))
    count = draw(st.sampled_from((4, 8, 12)))
    settings = FSDP(
        reshard_after_forward=draw(st.sampled_from(("yes", "no"))),
        prefetch=draw(st.sampled_from((1, 2))),
        blocks_per_group=draw(st.sampled_from((1, 2))),
        ends=draw(st.sampled_from(StageEnds)),
        # torch's schedules reduce once per pass; the rule refuses anything else.
        grad_sync=draw(
            st.sampled_from(GradSync if mesh.get("pp", 1) == 1 else [GradSync.EVERY])
        ),
        recompute=draw(st.sampled_from(Recompute)),
        async_tp=draw(st.booleans()),
        pp_schedule=schedule,
        pp_microbatches=draw(st.sampled_from((0, count))),
        pp_split=draw(st.sampled_from(StageSplit)),
    )
    if mesh.get("pp", 1) > 1 and schedule.splits_backward:
        # What torch computes in two parts: whole weights, nothing recomputed or compiled.
        assume(not model.has_sinks and not any(layer.scan for layer in model.pattern))
        assume(schedule is not PipelineSchedule.DUALPIPE_V or count >= 2 * mesh["pp"])
        settings = replace(
            settings,
            reshard_after_forward="no",
            recompute=Recompute.NONE,
            async_tp=False,
            compile=CompileScope.NONE,
        )
    return make(model, microbatches=count, **mesh), settings


def generated(job: Job, **settings: Any) -> Workload:
    made = rule.workload(job, FSDP(**settings))
    made.check()
    return made


Wanted = Callable[[CommOp], bool]


def comms(made: Workload, stage: int = 0) -> Iterator[CommOp]:
    return (one for one in made.expand(stage) if isinstance(one, CommOp))


def bus_bytes(made: Workload, wanted: Wanted = lambda one: True) -> float:
    """Of weights and gradients: what one rank sends in forward and backward passes."""
    return sum(
        one.bus_bytes(made.groups[one.group])
        for one in comms(made)
        if one.phase is not Phase.OPTIM and wanted(one)
    )


def matmul_flops(made: Workload) -> Counter[Phase]:
    """Over the stages, of one rank each; what is computed again is left out."""
    found: Counter[Phase] = Counter()
    for stage in range(len(made.stages)):
        for one in made.expand(stage):
            is_product = isinstance(one, ComputeOp) and isinstance(one.op, Gemm | GroupedGemm)
            if is_product and not one.recompute:
                assert isinstance(one, ComputeOp)
                assert one.op.flops is not None
                found[one.phase] += one.op.flops
    return found
