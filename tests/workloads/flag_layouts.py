"""Jobs in which the flags of `workload generate` and `train` matter, and values to try."""

from typing import Any

from stepmark.model.packing import Packing

DENSE = {
    "model": "llama-3.1-8b",
    **{"num_layers": 8, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2},
    **{"ffn_hidden_size": 128, "vocab_size": 512, "seq_len": 64},
}
EXPERTS = {
    **DENSE,
    **{"model": "qwen3-30b-a3b", "num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 64},
}
WIDE = {"hidden_size": 256, "head_dim": 16}  # rows that DeepEP takes across hosts
SHALLOW = DENSE | {"num_layers": 2}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
STAGE3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
SLICED = {"use_multi_rank_bucket_allreduce": False}
ACCOUNTS = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
OFFLOADED = {
    "fine_grained_activation_offloading": True,
    "offload_modules": "core_attn",
    "min_offloaded_tensor_size": 1,
}
BLOCKS = {"recompute": "blocks", "recompute_every": 3}

# By framework: jobs, of which each setting changes at least one.
JOBS: dict[str, list[dict[str, Any]]] = {
    "megatron": [
        DENSE | {"world_size": 8, "tp": 2, "gbs": 8},
        DENSE | {"world_size": 8, "tp": 2, "pp": 2, "gbs": 16} | SHARDED,
        *(
            DENSE | {"world_size": 8, "pp": 2, "gbs": 16, "num_layers": 7, name: True}
            for name in ACCOUNTS
        ),
        DENSE | {"world_size": 8, "pp": 4, "gbs": 16} | {"decoder_last_pipeline_num_layers": 2},
        DENSE
        | {"world_size": 8, "pp": 4, "gbs": 16, "virtual_pipeline_model_parallel_size": 2}
        | {**SHARDED, "overlap_param_gather": True},
        DENSE | {"world_size": 8, "gbs": 16, "recompute_granularity": "full"},
        DENSE
        | {"world_size": 8, "gbs": 16, "recompute_granularity": "full"}
        | {"recompute_method": "block"},
        DENSE | {"world_size": 8, "tp": 2, "gbs": 16, "recompute_granularity": "selective"},
        EXPERTS | {"world_size": 8, "tp": 2, "cp": 2, "ep": 2, "sequence_parallel": True},
        DENSE
        | {"world_size": 4, "cp": 4, "cp_comm_type": "a2a+p2p"}
        | {"hierarchical_context_parallel_sizes": "2,2"},
        DENSE
        | {"world_size": 8, "tp": 2}
        | {"sequence_parallel": True, "tp_comm_overlap": True},
        DENSE | {"world_size": 8, "tp": 2, "lora_rank": 4},
        EXPERTS | {"world_size": 8, "ep": 4, "shared_experts": 1},
        EXPERTS
        | {"world_size": 8, "ep": 4, "gbs": 16, "overlap_moe_expert_parallel_comm": True},
        EXPERTS | {"world_size": 8, "ep": 4, "moe_expert_capacity_factor": 1.5},
        EXPERTS
        | {"world_size": 8, "ep": 4, "tp": 2, "sequence_parallel": True}
        | {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1},
        EXPERTS
        | {"world_size": 8, "ep": 4, "tp": 2, "sequence_parallel": True}
        | {"moe_router_load_balancing_type": "global_aux_loss"},
        EXPERTS | {"world_size": 8, "ep": 4, "moe_token_dispatcher_type": "flex"} | WIDE,
        DENSE | {"world_size": 8, "tp": 2, "gbs": 8, "fp8_format": "hybrid"} | SHARDED,
        DENSE
        | {"world_size": 8, "gbs": 8, "fp8_format": "e4m3", "fp8_recipe": "tensorwise"}
        | {"first_last_layers_bf16": True},
        DENSE | {"world_size": 8, "gbs": 8, "attention_backend": "local"},
        DENSE | {"world_size": 8, "gbs": 8, "dtype": "fp16"},
        DENSE | {"world_size": 8, "tp": 2, "gbs": 8, "optimizer": "muon"},
        DENSE | {"world_size": 8, "gbs": 8, "use_precision_aware_optimizer": True} | SHARDED,
        DENSE
        | {"world_size": 8, "gbs": 8, "use_precision_aware_optimizer": True}
        | {**SHARDED, "optimizer_cpu_offload": True},
        DENSE | {"world_size": 8, "pp": 2, "gbs": 32} | OFFLOADED,
    ],
    "deepspeed": [
        SHALLOW | {"world_size": 4, "stage3_prefetch_bucket_size": 10_000} | STAGE3,
        *(SHALLOW | {"world_size": 4, "gbs": 8, "stage": stage} for stage in range(4)),
        SHALLOW | {"world_size": 4, "stage": 0, "dtype": "fp32"},
        SHALLOW | {"world_size": 4, "stage": 2} | SLICED,
        SHALLOW | {"world_size": 4, "offload_optimizer": "cpu"} | STAGE3,
        SHALLOW | {"world_size": 4, "stage": 1, "gradient_clipping": 0.0},
    ],
    "pytorch": [
        DENSE | {"world_size": 8, "lora_rank": 8},
        DENSE | {"world_size": 8, "gbs": 32},
        DENSE | {"world_size": 8, "tp": 2, "dp_replicate": 2, "gbs": 32},
        DENSE | {"world_size": 8, "pp": 4, "gbs": 32},
        DENSE | {"world_size": 8, "pp": 2, "gbs": 32, "pp_schedule": "interleaved"},
        DENSE | {"world_size": 8} | BLOCKS,
        DENSE | {"world_size": 8, "precision": "fp8"},
        DENSE | {"dp_replicate": 8, "gbs": 32},
        DENSE | {"dp_replicate": 8, "param_dtype": "bf16"},
        {"model": "gpt2-124m", "dp_replicate": 8},
        DENSE | {"world_size": 2, "tp": 2, "param_dtype": "bf16"},
    ],
    "fsdp": [
        DENSE | {"world_size": 8, "lora_rank": 8},
        DENSE | {"world_size": 8, "gbs": 32},
        DENSE | {"world_size": 8, "tp": 2, "dp_replicate": 2, "gbs": 32},
        DENSE | {"world_size": 8, "pp": 4, "gbs": 32},
        DENSE | {"world_size": 8, "pp": 2, "gbs": 32, "pp_schedule": "interleaved"},
        DENSE | {"world_size": 8, "ends": "apart"},
        DENSE | {"world_size": 8, "precision": "fp8"},
        DENSE | {"world_size": 8} | BLOCKS,
    ],
    "ddp": [
        DENSE | {"world_size": 8, "lora_rank": 8},
        DENSE | {"world_size": 8, "gbs": 32},
        DENSE | {"world_size": 8, "param_dtype": "bf16"},
        DENSE | {"world_size": 8} | BLOCKS,
        {"model": "gpt2-124m", "world_size": 8},
    ],
    "tp": [
        DENSE | {"lora_rank": 8},
        DENSE | {"world_size": 2, "tp": 2},
        DENSE | {"world_size": 2, "tp": 2, "param_dtype": "bf16"},
        DENSE | {"world_size": 2, "tp": 2} | BLOCKS,
    ],
    "pp": [
        DENSE | {"mbs": 2},
        DENSE | {"world_size": 2, "pp": 2, "gbs": 8, "lora_rank": 8},
        DENSE | {"world_size": 8, "tp": 2, "pp": 4, "gbs": 8},
        DENSE | {"world_size": 2, "pp": 2, "gbs": 8, "pp_schedule": "interleaved"},
        DENSE | {"world_size": 2, "pp": 2, "gbs": 8, "param_dtype": "bf16"},
        DENSE | {"world_size": 2, "pp": 2, "gbs": 8} | BLOCKS,
    ],
    "dlrm": [
        {"world_size": 2, "mini_batch_size": 4},
        {"world_size": 2, "mini_batch_size": 4, "arch_mlp_bot": "4-3-4"}
        | {"arch_sparse_feature_size": 4},
    ],
}
# Values to try of settings whose type does not tell them.
VALUES: dict[str, tuple[Any, ...]] = {
    "lora_rank": (4,),
    "muon_num_ns_steps": (10,),
    "optimizer_offload_fraction": (0.5,),
    "lora_targets": ("linear_qkv", "gate,up"),
    "hierarchical_context_parallel_sizes": ("2,2",),
    "microbatch_group_size_per_vp_stage": (8,),
    "pipeline_model_parallel_layout": ("Et*2|t*2|t*2|t*2L",),
    "stage": (0, 1, 2),
    "expert_tensor_parallel_size": (1,),
    "moe_aux_loss_coeff": (0.1,),
    "attention_dropout": (0.1,),
    "hidden_dropout": (0.1,),
    "gradient_clipping": (0.0,),
    "moe_expert_capacity_factor": (0.5,),
    "moe_deepep_gpus_per_host": (2,),
    "recompute_some": (2,),
    "recompute_every": (2,),
    "allgather_bucket_size": (20_000,),
    "stage3_max_reuse_distance": (0,),
    "reshard_after_forward": ("no", "2"),
    "recompute_modules": ("mlp",),
    "recompute_method": ("block",),
    "offload_modules": ("core_attn,attn_proj",),
    "min_offloaded_tensor_size": (1500,),
    "grad_accum_dtype": ("fp32",),
    "communication_data_type": ("fp32",),
    "arch_embedding_size": ("8-6",),
    "arch_mlp_bot": ("4-3-3-2",),
    "arch_mlp_top": ("4-3-1",),
    "arch_sparse_feature_size": (4,),
}
# Settings that change no job, and why they are accepted.
WITHOUT_EFFECT = {
    "allgather_bucket_size": "DeepSpeed 0.19.8 gathers all weights in one call; help says so",
    "account_for_loss_in_pipeline_split": "a last stage has one layer less without it, too",
    "fp4_recipe": "there is one",
    "moe_flex_dispatcher_backend": "there is one whose messages are modelled",
}
# Settings of PyTorch's rules that change times by data sheet: predictions/test_costs.py.
OF_TIMES = ("attention_backend", "compile")
# Options of any framework: the job, and a value of each.
MEGATRON = {"framework": "megatron", "world_size": 8, "gbs": 32}
HOPS = MEGATRON | WIDE | {"ep": 8, "moe_token_dispatcher_type": "flex"}
HOPS |= {"moe_deepep_gpus_per_host": 2}
OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "model": (DENSE | MEGATRON, "qwen3-8b"),
    "scale": (MEGATRON | {"model": "llama-3.1-8b"}, "1/4"),
    "seq_len": (DENSE | MEGATRON, 128),
    "packing": (DENSE | {"framework": "fsdp", "world_size": 8}, Packing(mean=8, longest=32)),
    "model_size": (MEGATRON | {"vocab_size": 512}, "7"),
    "num_layers": (DENSE | MEGATRON, 4),
    "hidden_size": (DENSE | MEGATRON, 128),
    "ffn_hidden_size": (DENSE | MEGATRON, 256),
    "num_heads": (DENSE | MEGATRON, 8),
    "num_kv_heads": (DENSE | MEGATRON, 4),
    "vocab_size": (DENSE | MEGATRON, 1024),
    "make_vocab_size_divisible_by": (DENSE | MEGATRON, 1000),
    "max_positions": (MEGATRON | {"model": "gpt-13b"}, 8192),
    "swiglu": (DENSE | MEGATRON, False),
    "head_dim": (DENSE | MEGATRON, 32),
    "norm": (DENSE | MEGATRON, "layernorm"),
    "qkv_bias": (DENSE | MEGATRON, True),
    "qk_norm": (DENSE | MEGATRON, True),
    "linear_bias": (DENSE | MEGATRON, True),
    "untied": (DENSE | MEGATRON, False),
    "num_mtp_layers": (DENSE | MEGATRON, 1),
    "num_experts": (EXPERTS | MEGATRON, 16),
    "top_k": (EXPERTS | MEGATRON, 4),
    "moe_ffn_hidden_size": (EXPERTS | MEGATRON, 128),
    "dense_layers": (EXPERTS | MEGATRON | {"ffn_hidden_size": 64}, 2),
    "shared_experts": (EXPERTS | MEGATRON, 1),
    "shared_ffn_hidden_size": (EXPERTS | MEGATRON, 64),
    "router_bias": (EXPERTS | MEGATRON, True),
    "expert_groups": (EXPERTS | HOPS | {"top_groups": 1, "expert_groups": 2}, 4),
    "top_groups": (EXPERTS | HOPS | {"expert_groups": 4}, 1),
    "q_lora_rank": (MEGATRON | {"model": "deepseek-v3", "num_layers": 4}, 64),
    "kv_lora_rank": (MEGATRON | {"model": "deepseek-v3", "num_layers": 4}, 64),
    "qk_rope_head_dim": (MEGATRON | {"model": "deepseek-v3", "num_layers": 4}, 32),
    "qk_nope_head_dim": (MEGATRON | {"model": "deepseek-v3", "num_layers": 4}, 64),
    "v_head_dim": (MEGATRON | {"model": "deepseek-v3", "num_layers": 4}, 64),
    "tp": (DENSE | MEGATRON, 2),
    "pp": (DENSE | MEGATRON, 2),
    "cp": (DENSE | MEGATRON, 2),
    "ep": (EXPERTS | MEGATRON, 2),
    "dp_replicate": (DENSE | MEGATRON | {"use_distributed_optimizer": True}, 2),
    "world_size": (DENSE | MEGATRON, 16),
    "dp_shard": (DENSE | {"framework": "fsdp", "world_size": 8}, 4),
    "gbs": (DENSE | MEGATRON, 64),
    "mbs": (DENSE | MEGATRON, 2),
    "dtype": (DENSE | MEGATRON, "fp16"),
    "precision": (DENSE | MEGATRON, "fp8"),
    "imbalance": (EXPERTS | MEGATRON | {"ep": 4}, 1.5),
    "framework": (DENSE | {"world_size": 8}, "fsdp"),
}
OUTPUT = {
    "model_name": "names the workload",
    "config": "a file with values of the others, tests/framework_files",
    "to": "format of the file",
    "out": "where it is written",
    "rank": "part of the workload that is written",
    "pp_rank": "part of the workload that is written or shown",
    "pipeline_stage": "part of the workload that is written or shown",
    "distinct": "a table",
    "json": "where tables are written",
    "csv": "where tables are written",
    "compute_from": "times, which tests/cli/test_workload_times.py compares",
    "comp_filepath": "times, which tests/cli/test_workload_times.py compares",
    "moe_enable": "AICB's word, refused for a model without experts",
}


# Layouts of `stepmark train`, in which a flag that is accepted changes the step.
TRAINED: dict[str, dict[str, Any]] = {
    "single": {"nproc": "1"},
    "ddp": {"nproc": "2", "strategy": "ddp", "grad_accum": "4"},
    "fsdp": {"nproc": "4", "strategy": "fsdp", "grad_accum": "4"},
    "hsdp": {"nproc": "4", "strategy": "fsdp", "dp_replicate": "2"},
    "tp": {"nproc": "2", "strategy": "tp"},
    "pp": {"nproc": "2", "strategy": "pp", "mbs": "4"},
    "interleaved": {
        **{"nproc": "2", "strategy": "pp", "mbs": "8"},
        "pp_schedule": "interleaved",
    },
    "pp of 4": {"nproc": "4", "strategy": "pp", "mbs": "8"},
    "cp": {"nproc": "2", "strategy": "cp", "grad_accum": "4"},
    "fsdp pp": {"nproc": "4", "strategy": "fsdp", "pp": "2", "mbs": "4", "grad_accum": "4"},
    "fsdp tp": {"nproc": "4", "strategy": "fsdp", "tp": "2", "grad_accum": "4"},
    "experts": {"nproc": "4", "strategy": "fsdp", "models": ["qwen3-30b-a3b"]},
}
# Flags that change messages, computation or memory of a step, with values.
OF_STEP: dict[str, tuple[Any, ...]] = {
    "scale": ("tiny",),
    "num_layers": ("8",),
    "seq_len": ("128",),
    "strategy": ("ddp", "fsdp", "tp"),
    "nproc": ("8",),
    "tp": ("2",),
    "pp": ("2",),
    "cp": ("2",),
    "ep": ("2",),
    "dp_replicate": ("2",),
    "mbs": ("8",),
    "grad_accum": ("2",),
    "grad_sync": ("last",),
    "clip": ("0",),
    "optimizer": ("muon", "adamw8bit"),
    "precision": ("master", "bf16", "fp32", "mxfp8", "nvfp4"),
    "reduce_dtype": ("bf16", "fp32"),
    "fp8": (True,),
    "ac": ("full", "selective", "1/2"),
    "sac_freq": ("1/2",),
    "compile": (True,),
    "loss_chunks": ("4",),
    "reshard": ("no", "2"),
    "prefetch": ("2",),
    "blocks_per_group": ("2",),
    "bucket_mb": ("1",),
    "embedding_in_backward": (False,),
    "bucket_view": (True,),
    "tp_plan": ("whole",),
    "pp_split": ("even",),
    "pp_schedule": ("interleaved", "gpipe", "zb1p", "zbv", "dualpipev"),
    "pp_stages": ("4",),
    "pp_microbatches": ("8",),
}
UNDERIVED: tuple[str, ...] = ()  # whose messages PyTorch's rules refuse to derive
# Flags that change how a step is computed or measured: the layout, and a value.
OF_PLAN: dict[str, tuple[dict[str, Any], Any]] = {
    "models": ({"nproc": "1"}, ["gpt2-1.5b"]),
    "model": ({"nproc": "1", "models": None, "model": "gpt2-125m"}, "gpt2-1.5b"),
    "device": ({"nproc": "1"}, "cpu"),
    "text": ({"nproc": "1"}, True),
    "text_file": ({"nproc": "1"}, __file__),
    "workers": ({"nproc": "1"}, "3"),
    "seed": ({"nproc": "1"}, "7"),
    "schedule": ({"nproc": "1"}, "micro"),
    "lr": ({"nproc": "1"}, "0.1"),
    "fp8_recipe": ({"nproc": "1", "fp8": True}, "rowwise"),
    "fp8_head": ({"nproc": "1", "fp8": True}, True),
    "fp8_all_gather": ({"nproc": "4", "strategy": "fsdp", "fp8": True}, False),
    "compile_scope": ({"nproc": "1", "compile": True}, "model"),
    "compile_mode": ({"nproc": "1", "compile": True}, "max-autotune-no-cudagraphs"),
    "compile_fallback": ({"nproc": "1", "compile": True}, True),
    "attention": ({"nproc": "1"}, "flash"),
    "cuda_graph": ({"nproc": "1"}, True),
    "async_tp": ({"nproc": "2", "strategy": "tp", "compile": True}, True),
    "steps": ({"nproc": "1"}, "7"),
    "launches": ({"nproc": "1"}, "2"),
    "find_batch": ({"nproc": "1"}, True),
    "profile": ({"nproc": "1"}, True),
    "profile_ranks": ({"nproc": "2", "strategy": "ddp", "profile": True}, "1"),
    "messages": ({"nproc": "1"}, True),
    "budget": ({"nproc": "1"}, "5s"),
    "timeout": ({"nproc": "1"}, "5s"),
}
TRAIN_OUTPUT = {
    "out": "where the run is written",
    "dry_run": "prints the plan",
    "resume": "takes the plan of a run",
    "force": "with --resume",
    "json": "where rows are written",
    "csv": "where rows are written",
    "config": "a framework's file, whose options are those of the others",
}
