"""DeepSpeed's JSON, which names no model.

Keys and defaults are those of deepspeed/runtime/config.py, runtime/zero/config.py and
runtime/zero/offload_config.py of 0.19.8.
"""

import json
from typing import Any

from stepmark.framework_files.architecture import NAMES
from stepmark.framework_files.table import (
    ON,
    Entry,
    Keys,
    Table,
    refused,
    unmodelled,
    without_effect,
)
from stepmark.ground.errors import ConfigError

_DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_SWITCH = {"true": "true", "false": "false"}  # of a setting that has a third value, auto
_DEVICES = {"none": "none", "null": "none", "cpu": "cpu"}
_BATCHES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
ZERO = "zero_optimization"
OPEN = ("auto", "the trainer derives it (auto)")

_USED = {
    "train_batch_size": Entry(option="gbs"),
    "train_micro_batch_size_per_gpu": Entry(option="mbs"),
    "no batch size": Entry(option="mbs", asks=True),
    "gradient_accumulation_steps": Entry(option="grad_accum"),
    "world_size": Entry(option="world_size"),
    "dtype": Entry(option="dtype", values=_DTYPES, asks=True),
    "gradient_clipping": Entry(option="gradient_clipping", default="0"),
    "communication_data_type": Entry(option="communication_data_type", values=_DTYPES),
    "data_types.grad_accum_dtype": Entry(option="grad_accum_dtype", values=_DTYPES),
    "bf16.check_grad_overflow": Entry(option="check_grad_overflow", values=ON),
    f"{ZERO}.stage": Entry(option="stage", default="0"),
    f"{ZERO}.overlap_comm": Entry(option="overlap_comm", values=_SWITCH),
    f"{ZERO}.offload_optimizer.device": Entry(option="offload_optimizer", values=_DEVICES),
    f"{ZERO}.offload_param.device": Entry(option="offload_param", values=_DEVICES),
    **{
        f"{ZERO}.{name}": Entry(option=name)
        for name in (
            *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"),
            *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
            *("stage3_model_persistence_threshold", "stage3_max_live_parameters"),
            "stage3_max_reuse_distance",
        )
    },
    **{
        f"{ZERO}.{name}": Entry(option=name, values=ON)
        for name in (
            *("reduce_scatter", "contiguous_gradients", "round_robin_gradients"),
            "use_multi_rank_bucket_allreduce",
        )
    },
}
_OTHERS = {
    **without_effect(
        "logs, data and constants",
        """
        steps_per_print wall_clock_breakdown dump_state memory_breakdown
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_init
        prescale_gradients gradient_predivide_factor sparse_gradients
        disable_allgather optimizer.params scheduler tensorboard wandb csv_monitor comet
        comms_logger flops_profiler monitor_config aio autotuning checkpoint nebula seed
        dataloader_drop_last cuda_visible_devices comms_config
        seq_parallel_communication_data_type
        compile.disable compile.backend compile.offload_activation torch_autocast.dtype
        torch_autocast.lower_precision_safe_modules use_data_before_expert_parallelism
        fp16.auto_cast
        fp16.loss_scale fp16.loss_scale_window fp16.initial_scale_power fp16.hysteresis
        fp16.min_loss_scale fp16.consecutive_hysteresis
        bf16.auto_cast
        """,
    ),
    **{
        f"{ZERO}.{name}": entry
        for name, entry in without_effect(
            "the same step, or only saving",
            """
            allgather_partitions load_from_fp32_weights grad_hooks elastic_checkpoint
            ignore_unused_parameters stage3_gather_16bit_weights_on_model_save
            stage3_gather_fp16_weights_on_model_save legacy_stage1 module_granularity_threshold
            offload_optimizer.buffer_count
            offload_optimizer.fast_init offload_optimizer.nvme_path
            offload_optimizer.pipeline_read offload_optimizer.pipeline_write
            offload_param.buffer_count offload_param.buffer_size
            offload_param.max_in_cpu offload_param.nvme_path memory_efficient_linear
            override_module_apply log_trace_cache_warnings max_in_cpu
            """,
        ).items()
    },
    **unmodelled(
        "offloaded memory is pinned",
        f"{ZERO}.offload_optimizer.pin_memory {ZERO}.offload_param.pin_memory",
        "true",
    ),
    **unmodelled(
        "nothing is recomputed",
        """
        activation_checkpointing.partition_activations
        activation_checkpointing.contiguous_memory_optimization
        activation_checkpointing.cpu_checkpointing
        """,
    ),
    **without_effect(
        "only where a model recomputes",
        """
        activation_checkpointing.number_checkpoints
        activation_checkpointing.synchronize_checkpoint_boundary
        activation_checkpointing.profile
        """,
    ),
    **refused(
        "left out: it is not modelled",
        f"""
        {ZERO}.zero_quantized_weights {ZERO}.zero_quantized_gradients
        {ZERO}.zero_quantized_nontrainable_weights {ZERO}.mics_shard_size
        {ZERO}.mics_hierarchical_params_gather {ZERO}.cpu_offload_use_pin_memory
        amp.enabled compression_training sparse_attention
        communication_compression pipeline hybrid_engine compile.enabled
        compile.deepcompile torch_autocast.enabled
        fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads
        bf16.bf16_optimizer_states {ZERO}.zenflow curriculum_learning
        progressive_layer_drop elasticity data_efficiency
        """,
        "-1",
    ),
    f"{ZERO}.zero_hpz_partition_size": Entry(refused="1: it is not modelled", off=("1",)),
    f"{ZERO}.offload_optimizer.ratio": Entry(refused="1", off=("1", "1.0")),
    "tensor_parallel.autotp_size": Entry(refused="0 or 1", off=("1",)),
    "sequence_parallel_size": Entry(refused="1: it is not modelled", off=("1",)),
    "optimizer.type": Entry(
        unmodelled="the optimizer is Adam", off=("adam", "adamw", "cpuadam", "deepspeedcpuadam")
    ),
    "optimizer.type that compresses": Entry(
        unmodelled="steps are Adam's before freeze_step, which send whole gradients"
    ),
    "optimizer.type of products": Entry(refused="Adam or AdamW: Muon is not modelled"),
}
# Keys that DeepSpeed accepts without "stage3_", too (fields of DeepSpeedZeroConfig).
_SHORT = (
    *("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size"),
    *("param_persistence_threshold", "model_persistence_threshold"),
    "gather_16bit_weights_on_model_save",
)
_RENAMED = {f"{ZERO}.{name}": f"{ZERO}.stage3_{name}" for name in _SHORT}
# Optimizers that send whole gradients until freeze_step (deepspeed/runtime/fp16/onebit).
_COMPRESSING = ("onebitadam", "zerooneadam", "onebitlamb")
# Sections whose keys matter to nobody here.
_WHOLE = (
    *("optimizer.params", "scheduler", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("comms_logger", "flops_profiler", "monitor_config", "aio", "autotuning"),
    *("checkpoint", "nebula", "compression_training", "sparse_attention", "pipeline"),
    *("hybrid_engine", "communication_compression", "comms_config"),
    f"{ZERO}.zenflow",
)
# Sections that matter where their "enabled" is true.
_ENABLED = ("data_efficiency", "curriculum_learning", "progressive_layer_drop", "elasticity")


def joined_sections(keys: Keys) -> Keys:
    """Return the keys with one for each section that is not looked into."""
    joined: Keys = {}
    for name, value in keys.items():
        section = next((each for each in _WHOLE if name.startswith(f"{each}.")), "")
        joined[section or name] = "given" if section else value
    for section in _ENABLED:
        parts = [name for name in joined if name.startswith(f"{section}.")]
        if parts:
            joined[section] = joined.get(f"{section}.enabled", "false")
        for name in parts:
            del joined[name]
    return joined


def _dtype(keys: Keys) -> str:
    """Remove the switches of types, and return the type; auto is left to a trainer."""
    values = {
        name.replace("bfloat16", "bf16"): value
        for name in ("bf16", "bfloat16", "fp16")
        if (value := keys.pop(f"{name}.enabled", ""))
    }
    for word in ("true", "auto"):
        if names := [name for name, value in values.items() if value == word]:
            return " and ".join(names) if word == "true" else word
    return "fp32"


def prepare(keys: Keys) -> Keys:
    """Join keys that mean one option."""
    keys = joined_sections({_RENAMED.get(name, name): text for name, text in keys.items()})
    keys = {
        name: value
        for name, value in keys.items()
        if value != "null" and not name.startswith("_comment")
    }
    keys["dtype"] = _dtype(keys)
    optimizer = keys.get("optimizer.type", "").lower()
    if optimizer in _COMPRESSING:
        keys["optimizer.type that compresses"] = keys.pop("optimizer.type")
    elif optimizer == "muon":
        keys["optimizer.type of products"] = keys.pop("optimizer.type")
    if keys.pop(f"{ZERO}.cpu_offload", "") == "true":
        keys.setdefault(f"{ZERO}.offload_optimizer.device", "cpu")
    if keys.get(f"{ZERO}.stage", "0") == "0":
        keys = {
            name: value
            for name, value in keys.items()
            if not name.startswith((f"{ZERO}.offload", f"{ZERO}.stage3"))
        }
    for name in ("offload_optimizer", "offload_param"):
        if keys.get(f"{ZERO}.{name}.device", "none") != "none":
            is_pinned = keys.get(f"{ZERO}.{name}.pin_memory") == "true"
            keys[f"{ZERO}.{name}.pin_memory"] = "true" if is_pinned else "not pinned"
    sizes = [int(keys[name]) for name in _BATCHES if keys.get(name, "").isdecimal()]
    if len(sizes) == len(_BATCHES):
        total, micro, accumulated = sizes
        ranks, rest = divmod(total, max(1, micro * accumulated))
        if rest or not ranks:
            allowed = f"a multiple of {micro} x {accumulated} (micro-batch x accumulation)"
            raise ConfigError("train_batch_size", total, allowed)
        keys["world_size"] = str(ranks)
    elif "train_micro_batch_size_per_gpu" not in keys:
        # The micro-batch is what is left of the batch: _set_batch_related_parameters.
        keys.setdefault("gradient_accumulation_steps", "1")
    return keys


def _prepare_file(keys: Keys) -> Keys:
    """Join keys of a file that stands alone, which has a batch."""
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(keys):
        keys["no batch size"] = OPEN[0]
    return prepare(keys)


def _complete(keys: Keys) -> Keys:
    dtype = keys.pop("dtype", "bf16")
    ranks = int(keys.pop("world_size", "1"))
    micro = int(keys.get("train_micro_batch_size_per_gpu", "1"))
    if "train_batch_size" in keys:
        count = int(keys["train_batch_size"]) // (micro * ranks)
        keys["gradient_accumulation_steps"] = str(count)
    if dtype != "fp32":
        keys[f"{dtype}.enabled"] = "true"
    return keys


_WORDS = {"true": True, "false": False}


def text(keys: Keys) -> str:
    """Return the file of these keys."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        is_number = value.replace(".", "", 1).replace("e+", "").replace("e-", "").isdecimal()
        place[name] = _WORDS.get(value, json.loads(value) if is_number else value)
    return json.dumps(tree, indent=2) + "\n"


TABLE = Table(
    framework="deepspeed",
    title="DeepSpeed",
    entries=_USED | _OTHERS,
    prepare=_prepare_file,
    open=OPEN,
    complete=_complete,
    implied=(*NAMES, "seq_len", "dp_shard", "model"),
)
