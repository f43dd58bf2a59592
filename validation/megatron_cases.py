"""Cases of megatron_messages.py: small models with various meshes and settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stepmark.ground.dtypes import DType
from stepmark.model.layers import MlaConfig, MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.parallel import ParallelConfig
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron.settings import (
    Balancing,
    Dispatcher,
    Granularity,
    MegatronOptimizer,
    MuonTpMode,
    RouterDtype,
)

LLAMA = ModelConfig(
    name="small",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=512,
    seq_len=32,
)
GPT = replace(
    LLAMA,
    num_kv_heads=4,
    ffn_hidden_size=256,
    activation="gelu",
    norm="layernorm",
    tied_embeddings=True,
    linear_bias=True,
    max_positions=32,
)
EXPERTS = replace(
    LLAMA, ffn_hidden_size=0, moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=96)
)
LATENT = replace(
    LLAMA,
    num_layers=3,
    num_kv_heads=4,
    head_dim=24,
    moe=MoeConfig(
        num_experts=4,
        top_k=2,
        ffn_hidden_size=32,
        num_shared_experts=1,
        shared_ffn_hidden_size=32,
        first_dense_layers=1,
        router_bias=True,
    ),
    mla=MlaConfig(
        q_lora_rank=32,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """mesh: fields of ParallelConfig. settings: fields of Megatron that are not defaults."""

    model: ModelConfig = LLAMA
    mesh: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 2
    dtype: DType = DType.BF16
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        parallel = ParallelConfig(**self.mesh)
        return Job(
            model=self.model,
            parallel=parallel,
            mbs=2,
            gbs=2 * self.microbatches * parallel.data_ranks,
            dtype=self.dtype,
        )


def deep(model: ModelConfig, num_layers: int) -> ModelConfig:
    return replace(model, num_layers=num_layers)


def predicting(model: ModelConfig, num_mtp_layers: int = 1) -> ModelConfig:
    return replace(model, num_mtp_layers=num_mtp_layers)


SP = {"sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True}
REDUCED = {"overlap_grad_reduce": True, "ddp_bucket_size": 20_000}
BOTH = {**SHARDED, **REDUCED, "overlap_param_gather": True}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
TP2, PP2, DP2, EP2 = {"tp": 2}, {"pp": 2}, {"dp_shard": 2}, {"ep": 2, "dp_shard": 2}
TIED = replace(LLAMA, tied_embeddings=True)
MUON = {"optimizer": MegatronOptimizer.MUON}
DIST_MUON = {"optimizer": MegatronOptimizer.DIST_MUON}

CASES: dict[str, Case] = {
    "tp2": Case(mesh=TP2),
    "tp2-sp": Case(mesh=TP2, settings=SP),
    "tp2-gpt": Case(model=GPT, mesh=TP2),
    "tp2-sp-gpt": Case(model=GPT, mesh=TP2, settings=SP),
    "tp4-sp-bias": Case(
        model=replace(LLAMA, num_kv_heads=4, qkv_bias=True), mesh={"tp": 4}, settings=SP
    ),
    "tp4-sp-shared-kv": Case(model=replace(LLAMA, qk_norm=True), mesh={"tp": 4}, settings=SP),
    "tp4-shared-kv": Case(model=replace(LLAMA, num_kv_heads=1), mesh={"tp": 4}),
    "tp2-qk-norm": Case(model=replace(LLAMA, qk_norm=True), mesh=TP2),
    "tp2-fused-loss": Case(mesh=TP2, settings={"cross_entropy_loss_fusion": True}),
    "tp2-fp16": Case(mesh=TP2, dtype=DType.FP16),
    "tp2-fp32": Case(mesh=TP2, dtype=DType.FP32),
    "tp2-no-mask": Case(mesh=TP2, settings={"create_attention_mask_in_dataloader": False}),
    "tp2-sp-full": Case(
        model=deep(LLAMA, 3),
        mesh=TP2,
        settings={**SP, "recompute_granularity": Granularity.FULL},
    ),
    "tp2-sp-full2": Case(
        model=deep(LLAMA, 4),
        mesh=TP2,
        settings={**SP, "recompute_granularity": Granularity.FULL, "recompute_num_layers": 2},
    ),
    "tp2-sp-full-block": Case(
        model=deep(LLAMA, 3),
        mesh=TP2,
        settings={**SP, "recompute_granularity": Granularity.FULL, "recompute_method": "block"},
    ),
    "tp2-sp-selective": Case(
        mesh=TP2, settings={**SP, "recompute_granularity": Granularity.SELECTIVE}
    ),
    "tp2-sp-selective-mlp": Case(
        mesh=TP2,
        settings={
            **SP,
            "recompute_granularity": Granularity.SELECTIVE,
            "recompute_modules": "core_attn,layernorm,mlp",
        },
    ),
    "dp2": Case(mesh=DP2),
    "dp2-bf16": Case(mesh=DP2, settings={"grad_reduce_in_bf16": True}),
    "dp2-sharded": Case(mesh=DP2, settings=SHARDED),
    "dp2-padded": Case(
        mesh=DP2, settings={**BOTH, "ddp_pad_buckets_for_high_nccl_busbw": True}
    ),
    "dp2-overlap-reduce": Case(mesh=DP2, settings=REDUCED),
    "dp2-overlap": Case(model=deep(LLAMA, 3), mesh=DP2, settings=BOTH),
    "dp2-overlap-gpt": Case(model=deep(GPT, 3), mesh=DP2, settings=BOTH),
    "dp2-per-token": Case(mesh=DP2, settings={**SHARDED, "calculate_per_token_loss": True}),
    "dp4-instances2": Case(mesh={"dp_shard": 2, "dp_replicate": 2}, settings=SHARDED),
    "dp4-instances2-overlap": Case(
        mesh={"dp_shard": 2, "dp_replicate": 2}, settings=BOTH
    ),
    "cp2": Case(mesh={"cp": 2}, settings=SHARDED),
    "cp2-tp2-sp": Case(mesh={"cp": 2, "tp": 2}, settings=SP),
    "tp2-sp-dp2": Case(mesh={"tp": 2, "dp_shard": 2}, settings={**SP, **SHARDED}),
    "tp2-sp-dp2-overlap": Case(
        mesh={"tp": 2, "dp_shard": 2},
        settings={**SP, **BOTH, "recompute_granularity": Granularity.FULL},
    ),
    "pp2": Case(mesh=PP2, microbatches=4),
    "pp2-one": Case(mesh=PP2, microbatches=1),
    "pp2-tied": Case(model=TIED, mesh=PP2, microbatches=3),
    "pp4": Case(model=deep(LLAMA, 4), mesh={"pp": 4}, microbatches=6),
    "pp4-few": Case(model=deep(LLAMA, 4), mesh={"pp": 4}, microbatches=2),
    "pp4-uneven": Case(
        model=deep(LLAMA, 7),
        mesh={"pp": 4},
        microbatches=4,
        settings={
            "decoder_first_pipeline_num_layers": 1,
            "decoder_last_pipeline_num_layers": 2,
        },
    ),
    "pp2-per-token": Case(mesh=PP2, settings={"calculate_per_token_loss": True}),
    "pp2-dp2-tied": Case(
        model=TIED,
        mesh={"pp": 2, "dp_shard": 2},
        microbatches=3,
        settings={**SHARDED, **REDUCED},
    ),
    "pp2-dp2-overlap": Case(
        model=deep(GPT, 4), mesh={"pp": 2, "dp_shard": 2}, microbatches=3, settings=BOTH
    ),
    "pp2-dp2-unaligned": Case(
        mesh={"pp": 2, "dp_shard": 2},
        microbatches=3,
        settings={**BOTH, "align_grad_reduce": False},
    ),
    "tp2-sp-pp2": Case(mesh={"tp": 2, "pp": 2}, settings=SP),
    "pp2-vpp2": Case(model=deep(LLAMA, 4), mesh=PP2, microbatches=4, settings=VPP2),
    "pp2-vpp2-few": Case(model=deep(LLAMA, 4), mesh=PP2, microbatches=2, settings=VPP2),
    "tp2-sp-pp2-vpp2": Case(
        model=deep(LLAMA, 4),
        mesh={"tp": 2, "pp": 2},
        microbatches=4,
        settings={**SP, **VPP2},
    ),
    "pp4-vpp2": Case(
        model=deep(LLAMA, 8), mesh={"pp": 4}, microbatches=12, settings=VPP2
    ),
    "pp4-vpp2-batched": Case(
        model=deep(LLAMA, 8),
        mesh={"pp": 4},
        microbatches=8,
        settings={**VPP2, "overlap_p2p_comm": False},
    ),
    "pp2-vpp2-ends": Case(
        model=deep(LLAMA, 6),
        mesh=PP2,
        microbatches=4,
        settings={
            **VPP2,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    ),
    "pp2-vpp2-groups": Case(
        model=deep(LLAMA, 4),
        mesh=PP2,
        microbatches=8,
        settings={**VPP2, "microbatch_group_size_per_vp_stage": 3},
    ),
    "pp4-vpp2-groups-batched": Case(
        model=deep(LLAMA, 8),
        mesh={"pp": 4},
        microbatches=10,
        settings={
            **VPP2,
            "microbatch_group_size_per_vp_stage": 6,
            "overlap_p2p_comm": False,
        },
    ),
    "pp2-vpp3-layout": Case(
        model=deep(LLAMA, 5),
        mesh=PP2,
        microbatches=4,
        settings={
            "virtual_pipeline_model_parallel_size": 3,
            "pipeline_model_parallel_layout": "Et|(tt|)*2|,|L",
        },
    ),
    "pp2-vpp2-dp2-reduce": Case(
        model=deep(LLAMA, 4),
        mesh={"pp": 2, "dp_shard": 2},
        microbatches=4,
        settings={**VPP2, **REDUCED},
    ),
    "pp2-vpp2-dp2-overlap": Case(
        model=deep(LLAMA, 4),
        mesh={"pp": 2, "dp_shard": 2},
        microbatches=4,
        settings={**VPP2, **BOTH},
    ),
    "pp2-vpp2-dp2-unaligned": Case(
        model=deep(LLAMA, 4),
        mesh={"pp": 2, "dp_shard": 2},
        microbatches=4,
        settings={**VPP2, **BOTH, "align_grad_reduce": False, "align_param_gather": False},
    ),
    "ep2": Case(model=EXPERTS, mesh=EP2, settings=SHARDED),
    "ep2-allreduce": Case(model=EXPERTS, mesh=EP2),
    "ep2-dp4-overlap": Case(
        model=deep(EXPERTS, 3), mesh={"ep": 2, "dp_shard": 4}, settings=BOTH
    ),
    "ep2-allgather": Case(
        model=EXPERTS, mesh=EP2, settings={"moe_token_dispatcher_type": Dispatcher.ALLGATHER}
    ),
    "ep2-full": Case(
        model=EXPERTS,
        mesh=EP2,
        settings={**SHARDED, "recompute_granularity": Granularity.FULL},
    ),
    "ep2-instances2": Case(
        model=EXPERTS, mesh={"ep": 2, "dp_shard": 2, "dp_replicate": 2}, settings=BOTH
    ),
    "cp2-ep2": Case(model=EXPERTS, mesh={"cp": 2, "ep": 2}, settings=SHARDED),
    "ep2-capacity": Case(
        model=EXPERTS, mesh=EP2, settings={"moe_expert_capacity_factor": 1.0}
    ),
    "ep2-padded": Case(
        model=EXPERTS,
        mesh=EP2,
        settings={
            "moe_expert_capacity_factor": 1.5,
            "moe_pad_expert_input_to_capacity": True,
        },
    ),
    "ep2-router-fp32": Case(
        model=EXPERTS,
        mesh=EP2,
        settings={
            "moe_router_dtype": RouterDtype.FP32,
            "moe_aux_loss_coeff": 0.01,
            "moe_router_load_balancing_type": Balancing.GLOBAL_AUX_LOSS,
        },
    ),
    "tp2-sp-ep2": Case(
        model=EXPERTS, mesh={"tp": 2, **EP2}, settings={**SP, "moe_aux_loss_coeff": 0.01}
    ),
    "tp2-sp-ep2-allgather": Case(
        model=EXPERTS,
        mesh={"tp": 2, **EP2},
        settings={**SP, "moe_token_dispatcher_type": Dispatcher.ALLGATHER},
    ),
    "tp2-sp-ep4-etp1": Case(
        model=EXPERTS,
        mesh={"tp": 2, "ep": 4, "dp_shard": 2},
        settings={
            **SP,
            "expert_tensor_parallel_size": 1,
            "moe_aux_loss_coeff": 0.01,
            "moe_router_load_balancing_type": Balancing.SEQ_AUX_LOSS,
        },
    ),
    "tp2-sp-ep2-recompute": Case(
        model=EXPERTS,
        mesh={"tp": 2, **EP2},
        settings={
            **SP,
            "recompute_granularity": Granularity.SELECTIVE,
            "recompute_modules": "layernorm,moe",
        },
    ),
    "latent-dp2": Case(model=LATENT, mesh=EP2, settings=BOTH),
    "latent-tp2-sp": Case(
        model=LATENT, mesh={"tp": 2, **EP2}, settings={**SP, **SHARDED}
    ),
    "latent-recompute": Case(
        model=LATENT,
        mesh={"tp": 2, **EP2},
        settings={
            **SP,
            "recompute_granularity": Granularity.SELECTIVE,
            "recompute_modules": "mla_up_proj,shared_experts",
        },
    ),
    "latent-shared-overlap": Case(
        model=LATENT,
        mesh={"tp": 2, **EP2},
        settings={**SP, **SHARDED, "moe_shared_expert_overlap": True},
    ),
    "ep2-combined": Case(
        model=deep(EXPERTS, 3),
        mesh=EP2,
        microbatches=3,
        settings={**SHARDED, "overlap_moe_expert_parallel_comm": True},
    ),
    "latent-pp2-vpp2-combined": Case(
        model=deep(LATENT, 8),
        mesh={"pp": 2, **EP2},
        microbatches=4,
        settings={**SHARDED, **VPP2, "overlap_moe_expert_parallel_comm": True},
    ),
    "latent-pp2-dense": Case(
        model=deep(LATENT, 2), mesh={"pp": 2, **EP2}, microbatches=2, settings=SHARDED
    ),
    "latent-pp2-dense-allreduce": Case(
        model=deep(LATENT, 2), mesh={"pp": 2, **EP2}, microbatches=2
    ),
    "latent-pp2-dense-overlap": Case(
        model=deep(LATENT, 2), mesh={"pp": 2, **EP2}, microbatches=2, settings=BOTH
    ),
    "latent-pp2-dense-fp16": Case(
        model=deep(LATENT, 2), mesh={"pp": 2, **EP2}, microbatches=2, dtype=DType.FP16
    ),
    "latent-pp2": Case(
        model=deep(LATENT, 4), mesh={"pp": 2, **EP2}, microbatches=3, settings=SHARDED
    ),
    "pp2-vpp2-tied": Case(
        model=deep(TIED, 4), mesh={**PP2, **DP2}, microbatches=4, settings={**VPP2, **SHARDED}
    ),
    "pp2-vpp2-tied-overlap": Case(
        model=deep(TIED, 4), mesh={**PP2, **DP2}, microbatches=4, settings={**VPP2, **BOTH}
    ),
    "mtp-tp2": Case(model=predicting(LLAMA), mesh=TP2),
    "mtp-tp2-sp": Case(model=predicting(LLAMA), mesh=TP2, settings=SP),
    "mtp-dp2-tied-overlap": Case(model=predicting(TIED), mesh=DP2, settings=BOTH),
    "mtp-pp2": Case(model=predicting(LLAMA), mesh=PP2, microbatches=3),
    "mtp-pp2-dp2-overlap": Case(model=predicting(LLAMA), mesh={**PP2, **DP2}, settings=BOTH),
    "mtp2-pp2-tp2-sp-full": Case(
        model=predicting(LLAMA, 2),
        mesh={"pp": 2, "tp": 2},
        settings={**SP, "recompute_granularity": Granularity.FULL},
    ),
    "mtp-pp2-vpp2": Case(
        model=predicting(deep(LLAMA, 4)),
        mesh={**PP2, **DP2},
        microbatches=4,
        settings={**VPP2, **SHARDED},
    ),
    "mtp-pp2-alone": Case(
        model=predicting(LLAMA),
        mesh={**PP2, **DP2},
        settings={**BOTH, "pipeline_model_parallel_layout": "Ett|mL"},
    ),
    "mtp-latent-pp2": Case(
        model=predicting(deep(LATENT, 4)), mesh={"pp": 2, **EP2}, settings=SHARDED
    ),
    "mtp-latent-tp2-sp": Case(
        model=predicting(LATENT), mesh={"tp": 2, **EP2}, settings={**SP, **BOTH}
    ),
    "tp2-muon": Case(mesh=TP2, settings=MUON),
    "tp2-sp-muon-duplicated": Case(
        mesh=TP2, settings={**SP, **MUON, "muon_tp_mode": MuonTpMode.DUPLICATED}
    ),
    "tp2-muon-distributed": Case(
        mesh=TP2, settings={**MUON, "muon_tp_mode": MuonTpMode.DISTRIBUTED}
    ),
    "tp2-muon-whole-qkv": Case(
        model=GPT,
        mesh=TP2,
        settings={
            **MUON,
            "muon_split_qkv": False,
            "muon_use_nesterov": True,
            "muon_num_ns_steps": 10,
            "muon_tp_mode": MuonTpMode.DISTRIBUTED,
        },
    ),
    "pp2-dp2-muon": Case(mesh={**PP2, **DP2}, settings=MUON),
    "ep2-muon": Case(model=EXPERTS, mesh=EP2, settings=MUON),
    "dp2-dist-muon": Case(mesh=DP2, settings=DIST_MUON),
    "dp4-dist-muon": Case(model=deep(LLAMA, 3), mesh={"dp_shard": 4}, settings=DIST_MUON),
    "pp2-dp2-dist-muon-tied": Case(
        model=deep(TIED, 4), mesh={**PP2, **DP2}, settings=DIST_MUON
    ),
    "ep2-dp4-dist-muon": Case(
        model=EXPERTS, mesh={"dp_shard": 4, "ep": 2}, settings=DIST_MUON
    ),
    "latent-dp2-dist-muon": Case(model=LATENT, mesh=DP2, settings=DIST_MUON),
    "tp2-dist-muon-fp32": Case(mesh=TP2, dtype=DType.FP32, settings=DIST_MUON),
}  # fmt: skip
