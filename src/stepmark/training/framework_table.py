"""What each option of a framework's file is to `stepmark train`.

PyTorch trains the model, the ranks and axes, and the batches of any framework. It has kernels,
overlaps and buckets of its own, which a note lists. Another step is refused.
"""

from collections.abc import Mapping

from stepmark.framework_files.architecture import NAMES
from stepmark.framework_files.table import FALSE

# Options of `train`, and the options of `workload generate` that decide each.
USED: Mapping[str, tuple[str, ...]] = {
    "model": ("model", "model_name", "make_vocab_size_divisible_by", *NAMES),
    "seq_len": ("seq_len",),
    "nproc": ("world_size", "dp_shard"),
    "strategy": ("data_parallel", "stage", "use_distributed_optimizer"),
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "dp_replicate": ("dp_replicate",),
    "mbs": ("mbs",),
    "grad_accum": ("gbs", "grad_accum"),
    "pp_microbatches": ("pp_microbatches",),
    "pp_schedule": ("pp_schedule",),
    "pp_stages": ("virtual_pipeline_model_parallel_size", "pp_stages"),
    "pp_split": (
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ),
    "precision": (
        *("precision", "dtype", "param_dtype", "shard_dtype"),
        *("fp8_format", "fp4_format", "fp4_recipe"),
    ),
    "fp8_recipe": ("fp8_recipe",),
    "fp8_all_gather": ("fp8_all_gather",),
    "reduce_dtype": ("reduce_dtype", "grad_reduce_in_bf16", "communication_data_type"),
    "reshard": ("reshard_after_forward",),
    "grad_sync": ("grad_sync",),
    "bucket_mb": ("bucket_cap_mb",),
    "clip": ("clip", "gradient_clipping"),
    "optimizer": ("optimizer",),
    "ac": (
        *("recompute", "recompute_every", "recompute_granularity", "recompute_method"),
        "recompute_num_layers",
    ),
    "compile": ("compile",),
    "async_tp": ("async_tp",),
    "attention": ("attention_backend",),
}
# Kernels, buckets and overlaps: PyTorch has its own for the same model and batches.
OWN_WAY = (
    *("fuse_qkv", "sequence_parallel", "tp_comm_overlap", "tp_comm_overlap_ag"),
    *("tp_comm_overlap_rs", "overlap_grad_reduce", "overlap_param_gather"),
    *("align_grad_reduce", "align_param_gather", "ddp_bucket_size"),
    *("ddp_pad_buckets_for_high_nccl_busbw", "ddp_average_in_collective"),
    *("accumulate_allreduce_grads_in_fp32", "microbatch_group_size_per_vp_stage"),
    *("overlap_p2p_comm", "cp_comm_type", "moe_token_dispatcher_type"),
    *("moe_flex_dispatcher_backend", "hierarchical_context_parallel_sizes"),
    *("moe_router_load_balancing_type", "moe_router_dtype", "moe_aux_loss_coeff"),
    *("moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    *("attention_dropout", "hidden_dropout", "bias_swiglu_fusion", "masked_softmax_fusion"),
    *("gradient_accumulation_fusion", "cross_entropy_loss_fusion"),
    *("create_attention_mask_in_dataloader", "calculate_per_token_loss", "fp8_param_gather"),
    *("recompute_modules", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    *("allgather_bucket_size", "reduce_bucket_size", "sub_group_size", "overlap_comm"),
    *("check_grad_overflow", "contiguous_gradients", "grad_accum_dtype", "reduce_scatter"),
    *("round_robin_gradients", "use_multi_rank_bucket_allreduce", "zero_init"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_model_persistence_threshold", "stage3_param_persistence_threshold"),
    *("stage3_prefetch_bucket_size", "muon_tp_mode", "muon_num_ns_steps", "muon_split_qkv"),
    *("muon_use_nesterov", "use_precision_aware_optimizer", "main_grads_dtype"),
    *("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_offload_fraction"),
    *("overlap_cpu_optimizer_d2h_h2d", "offload_modules", "min_offloaded_tensor_size"),
)
# Options that are refused, the values that pass, and what `train` has instead.
REFUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(
        ("offload_optimizer", "offload_param"),
        (("none",), "none: train keeps weights and optimizer states on the device"),
    ),
    **dict.fromkeys(
        ("fp8_dot_product_attention", "fp8_multi_head_attention"),
        ((FALSE,), "false: train has no attention in FP8"),
    ),
    "fine_grained_activation_offloading": (
        (FALSE,),
        "false: train keeps what its modules save on the device",
    ),
    "optimizer_cpu_offload": (
        (FALSE,),
        "false: train keeps weights and optimizer states on the device",
    ),
    **dict.fromkeys(
        (
            *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
            "pipeline_model_parallel_layout",
        ),
        ((), "left out: train divides layers evenly among stages, or with embedding and head"),
    ),
    "expert_tensor_parallel_size": (("1",), "1: train divides no experts by tp"),
    "first_last_layers_bf16": ((FALSE,), "left out: train has one precision for all layers"),
    "moe_expert_capacity_factor": ((), "left out: train sends each token to all its experts"),
    "moe_pad_expert_input_to_capacity": ((FALSE,), "left out: train has no capacities"),
}
# How the step of another framework differs.
FRAMEWORKS = {
    "megatron": "PyTorch trains Megatron-LM's job: weights in fp32 under autocast, sequence "
    "parallelism with tp, FSDP for the distributed optimizer and where tp, pp or ep divide "
    "the model, no dropout",
    "deepspeed": "PyTorch trains DeepSpeed's job: weights in fp32 under autocast, FSDP for "
    "ZeRO, which below stage 3 gathers weights once a pass",
}
