"""The YAML of `accelerate config`: FSDP and DDP, or DeepSpeed. It names no model.

Keys are those of accelerate/utils/dataclasses.py and commands/config/config_args.py of 1.10.
"""

from collections.abc import Mapping

from stepmark.framework_files import deepspeed
from stepmark.framework_files.deepspeed import TABLE as DEEPSPEED_TABLE
from stepmark.framework_files.deepspeed import ZERO
from stepmark.framework_files.table import (
    Entry,
    Keys,
    Table,
    refused,
    unmodelled,
    without_effect,
)

_COMMON = {
    **without_effect(
        "how a job starts",
        """
        compute_environment machine_rank main_process_ip main_process_port
        main_training_function num_machines rdzv_backend same_network
        tpu_env tpu_use_cluster tpu_use_sudo tpu_name tpu_zone debug downcast_bf16 gpu_ids
        enable_cpu_affinity deepspeed_hostfile command_file commands mpirun_config
        ipex_config
        """,
    ),
    **refused("false: training on CPUs is not modelled", "use_cpu"),
    "num_processes": Entry(option="world_size"),
    "gradient_accumulation_steps": Entry(option="grad_accum"),
}
_FSDP = {
    **_COMMON,
    "data_parallel": Entry(option="data_parallel"),
    # Accelerator.accumulate, and Trainer: no_sync but for the last micro-batch.
    "grad_sync": Entry(option="grad_sync", default="last"),
    "dtype": Entry(option="dtype", values={"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}),
    "reduce_dtype": Entry(option="reduce_dtype"),
    "param_dtype": Entry(option="param_dtype"),
    "precision": Entry(option="precision"),
    "compile": Entry(option="compile"),
    "gradient_clipping": Entry(unmodelled="gradients are clipped by their norm"),
    "fsdp_config.fsdp_reshard_after_forward": Entry(
        option="reshard_after_forward", values={"true": "yes", "false": "no"}
    ),
    "fsdp_config.fsdp_activation_checkpointing": Entry(
        option="recompute", values={"true": "full", "false": "none"}
    ),
    "parallelism_config.parallelism_config_dp_replicate_size": Entry(option="dp_replicate"),
    "parallelism_config.parallelism_config_dp_shard_size": Entry(option="dp_shard"),
    "parallelism_config.parallelism_config_tp_size": Entry(option="tp"),
    "parallelism_config.parallelism_config_cp_size": Entry(option="cp"),
    **without_effect(
        "wrapping, loading and saving",
        """
        fsdp_config.fsdp_transformer_layer_cls_to_wrap
        fsdp_config.fsdp_cpu_ram_efficient_loading fsdp_config.fsdp_state_dict_type
        fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_use_orig_params
        fsdp_config.fsdp_min_num_params dynamo_config.dynamo_mode
        dynamo_config.dynamo_use_dynamic dynamo_config.dynamo_use_fullgraph
        parallelism_config.parallelism_config_cp_comm_strategy
        parallelism_config.parallelism_config_cp_backend
        """,
    ),
    "distributed_type": Entry(
        refused="one of FSDP, MULTI_GPU, MULTI_XPU, MULTI_NPU, NO, DEEPSPEED"
    ),
    "distributed_type of other accelerators": Entry(
        unmodelled="it is DDP, and the device is that of --device"
    ),
    "fsdp_config.fsdp_sharding_strategy": Entry(
        refused="one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2"
    ),
    "fsdp_config.fsdp_auto_wrap_policy": Entry(
        refused="TRANSFORMER_BASED_WRAP: units are blocks", off=("transformer_based_wrap",)
    ),
    **unmodelled("weights are gathered one block ahead", "fsdp_config.fsdp_forward_prefetch"),
    "fsdp_config.fsdp_backward_prefetch": Entry(
        unmodelled="weights are gathered one block ahead",
        off=("backward_pre", "backward_pre_policy"),
    ),
    "fsdp_config.fsdp_version": Entry(
        unmodelled="units are gathered and reduced as by fully_shard", off=("2",)
    ),
    **refused(
        "false: FSDP's weights, gradients and optimizer states on the host are not modelled, "
        "as DeepSpeed's are",
        "fsdp_config.fsdp_offload_params",
    ),
    **refused(
        "left out: it is not modelled",
        "parallelism_config.parallelism_config_sp_size megatron_lm_config "
        "parallelism_config.parallelism_config_sp_backend fp8_config",
        "1",
    ),
}
_STRATEGIES: Mapping[str, str] = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
    "_HYBRID_SHARD_ZERO2": "HYBRID_SHARD_ZERO2",
}
_KINDS = ("FSDP", "MULTI_GPU", "NO")
# DDP over other accelerators: DistributedType of accelerate/utils/dataclasses.py.
_OTHERS = ("XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON")


def _prepare_fsdp(keys: Keys) -> Keys:
    """Join keys that mean one option, as accelerate's FullyShardedDataParallelPlugin does."""
    keys = _joined(keys)
    kind = keys.pop("distributed_type", "NO").upper()
    if kind.removeprefix("MULTI_") in _OTHERS:
        keys["distributed_type of other accelerators"] = kind
    elif kind not in _KINDS:
        keys["distributed_type"] = kind
    strategy = _strategy(keys)
    if kind == "FSDP" and strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        keys.setdefault("fsdp_config.fsdp_reshard_after_forward", "false")
    if kind == "FSDP" and strategy.startswith("HYBRID_SHARD"):
        _divide_by_nodes(keys)
    is_sharded = kind == "FSDP" and strategy != "NO_SHARD"
    if is_sharded:
        keys.setdefault("fsdp_config.fsdp_version", "1")
    keys["data_parallel"] = "fsdp" if is_sharded else "ddp"
    precision = keys.pop("mixed_precision", "no")
    if precision == "fp8":
        keys["precision"] = "fp8"
    if is_sharded:
        # set_mixed_precision: parameters and reductions have the same type.
        keys["param_dtype"] = "fp16" if precision == "fp16" else "bf16"
        keys["reduce_dtype"] = keys["param_dtype"]
        if precision == "no":
            keys["param_dtype"] = keys["reduce_dtype"] = "fp32"
    if precision in ("fp16", "no"):
        keys["dtype"] = {"fp16": "fp16", "no": "fp32"}[precision]
    is_regional = keys.pop("dynamo_config.dynamo_use_regional_compilation", "") == "true"
    if keys.pop("dynamo_config.dynamo_backend", "no").lower() not in ("no", "eager"):
        keys["compile"] = "layers" if is_regional else "model"
    return keys


def _divide_by_nodes(keys: Keys) -> None:
    """Shard weights in a node, and replicate them over nodes, of which flags may give more."""
    nodes, ranks = keys.get("num_machines", "1"), keys.get("num_processes", "")
    if ranks.isdecimal() and nodes.isdecimal() and int(nodes) and not int(ranks) % int(nodes):
        of_node = str(int(ranks) // int(nodes))
        keys.setdefault("parallelism_config.parallelism_config_dp_shard_size", of_node)
    elif nodes != "1":
        keys.setdefault("parallelism_config.parallelism_config_dp_replicate_size", nodes)


def _strategy(keys: Keys) -> str:
    """Remove the sharding strategy and return it; an unknown one stays, to be refused."""
    reshard = keys.get("fsdp_config.fsdp_reshard_after_forward", "").upper()
    if reshard in ("", "TRUE", "FALSE"):
        word = keys.pop("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD").upper()
    else:  # of FSDP 1 the key is another word for the strategy
        word = reshard
        del keys["fsdp_config.fsdp_reshard_after_forward"]
        keys.pop("fsdp_config.fsdp_sharding_strategy", None)
    strategy = _STRATEGIES.get(word, word)
    if strategy not in _STRATEGIES.values():
        keys["fsdp_config.fsdp_sharding_strategy"] = strategy
    return strategy


_DEEPSPEED = {
    **_COMMON,
    **DEEPSPEED_TABLE.entries,
    **refused(
        "a DeepSpeed file in its folder, or left out and named by itself",
        "deepspeed_config.deepspeed_config_file",
    ),
    **without_effect(
        "loading and saving",
        """
        deepspeed_config.zero3_save_16bit_model deepspeed_config.deepspeed_multinode_launcher
        deepspeed_config.deepspeed_moe_layer_cls_names
        deepspeed_config.offload_optimizer_nvme_path
        deepspeed_config.offload_param_nvme_path fsdp_config
        """,
    ),
    **{
        f"parallelism_config.parallelism_config_{axis}_size": Entry(
            refused="1: DeepSpeed shards over data ranks alone", off=("1",)
        )
        for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    },
    "parallelism_config.parallelism_config_sp_backend": Entry(
        no_effect="only with sequence parallelism"
    ),
    "mixed_precision": Entry(refused="no, bf16 or fp16: fp8 with DeepSpeed is not modelled"),
    "dynamo_config.dynamo_backend": Entry(
        unmodelled="nothing is compiled", off=("no", "eager")
    ),
    **without_effect(
        "how graphs are compiled",
        """
        dynamo_config.dynamo_mode dynamo_config.dynamo_use_dynamic
        dynamo_config.dynamo_use_fullgraph dynamo_config.dynamo_use_regional_compilation
        """,
    ),
    "zero3_init_flag": Entry(option="zero_init", values={"true": "True", "false": "False"}),
}
_DEEPSPEED_NAMES = {
    "deepspeed_config.zero_stage": f"{ZERO}.stage",
    "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
    "deepspeed_config.gradient_clipping": "gradient_clipping",
    "deepspeed_config.offload_optimizer_device": f"{ZERO}.offload_optimizer.device",
    "deepspeed_config.offload_param_device": f"{ZERO}.offload_param.device",
    "deepspeed_config.overlap_comm": f"{ZERO}.overlap_comm",
    "deepspeed_config.reduce_bucket_size": f"{ZERO}.reduce_bucket_size",
    "deepspeed_config.allgather_bucket_size": f"{ZERO}.allgather_bucket_size",
    "deepspeed_config.zero3_init_flag": "zero3_init_flag",
}


def _deepspeed_name(name: str) -> str:
    """Return the name in DeepSpeed's own file of a key that is one of its keys there."""
    own = name.removeprefix("deepspeed_config.")
    return _DEEPSPEED_NAMES.get(name, own if own in DEEPSPEED_TABLE.entries else name)


def _prepare_deepspeed(keys: Keys) -> Keys:
    keys = _joined({_deepspeed_name(name): value for name, value in keys.items()})
    keys.pop("distributed_type", None)
    precision = keys.pop("mixed_precision", "no")
    if precision in ("bf16", "fp16"):
        keys[f"{precision}.enabled"] = "true"
    elif precision != "no":
        keys["mixed_precision"] = precision
    for name in ("bf16", "fp16"):
        if keys.get(f"{name}.enabled") == "auto":  # which accelerate fills in
            keys[f"{name}.enabled"] = "false"
    keys.setdefault(f"{ZERO}.stage", "2")  # DeepSpeedPlugin's default
    if keys[f"{ZERO}.stage"] != "3":
        keys.pop("zero3_init_flag", None)
    return deepspeed.prepare(keys)


def _joined(keys: Keys) -> Keys:
    """Return the keys without empty sections and values, and without parts of a section."""
    sections = ("tpu_env", "command_file", "commands", "fp8_config", "megatron_lm_config")
    joined: Keys = {}
    for name, value in keys.items():
        section = name.partition(".")[0]
        if value not in ("null", "", "{}"):
            joined[section if section in sections else name] = value
    return joined


FSDP_TABLE = Table(
    framework="pytorch", title="accelerate", entries=_FSDP, prepare=_prepare_fsdp
)
WITH_DEEPSPEED_TABLE = Table(
    framework="deepspeed",
    title="accelerate with DeepSpeed",
    entries=_DEEPSPEED,
    prepare=_prepare_deepspeed,
    open=deepspeed.OPEN,
)
