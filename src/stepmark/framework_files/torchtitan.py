"""torchtitan's TOML, of its newer layout ([parallelism]) and of the older one.

Keys and defaults are those of torchtitan/config/job_config.py before TOML was given up
(9810191bbb03, 23 February 2026), and of the layouts of June and December 2024; flavors those of
torchtitan/models/*/__init__.py.
"""

import math
from collections.abc import Mapping

from stepmark.framework_files.architecture import NAMES, widths_of
from stepmark.framework_files.table import (
    ON,
    Entry,
    Keys,
    Options,
    Table,
    refused,
    unmodelled,
    without_effect,
)
from stepmark.ground.errors import ConfigError
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import PipelineSchedule

_FAMILIES = ("llama2", "llama3", "deepseek_v3", "qwen3")
# Flavors that are models of ours; others have widths of their own.
_BUILT_IN = {
    "llama2 7B": "llama-2-7b",
    "llama2 70B": "llama-2-70b",
    "llama3 8B": "llama-3.1-8b",
    "llama3 8B_flex": "llama-3.1-8b",
    "llama3 8B_varlen": "llama-3.1-8b",
    "llama3 70B": "llama-3.1-70b",
    "llama3 405B": "llama-3.1-405b",
    "deepseek_v3 16B": "deepseek-v2-lite",
    "deepseek_v3 236B": "deepseek-v2",
    "deepseek_v3 671B": "deepseek-v3",
    "qwen3 8B": "qwen3-8b",
    "qwen3 32B": "qwen3-32b",
    "qwen3 30B-A3B": "qwen3-30b-a3b",
}


def _decoder(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int
) -> Options:
    """Return the widths of a dense decoder with Llama's layers."""
    widths = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "ffn_hidden_size": ffn,
        "vocab_size": vocabulary,
        "max_positions": 0,
    }
    return {name: str(value) for name, value in widths.items()} | {
        "swiglu": "True",
        "norm": "rmsnorm",
        "linear_bias": "False",
        "qkv_bias": "False",
        "qk_norm": "False",
        "untied": "True",
    }


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, *, untied: bool) -> Options:
    own = {"head_dim": "128", "qk_norm": "True", "untied": str(untied)}
    return _decoder(layers, hidden, heads, 8, ffn, 151936) | own


def _experts(experts: int, top_k: int, ffn: int) -> Options:
    widths = {"num_experts": experts, "top_k": top_k, "moe_ffn_hidden_size": ffn}
    return {name: str(value) for name, value in widths.items()} | {
        "dense_layers": "0",
        "router_bias": "False",
    }


_FLAVORS: Mapping[str, Options] = {
    "llama2 13B": _decoder(40, 5120, 40, 40, 13824, 32000),
    "llama3 debugmodel": _decoder(6, 256, 16, 16, 768, 2048),
    "llama3 debugmodel_flex_attn": _decoder(6, 256, 16, 16, 768, 2048),
    "llama3 debugmodel_varlen_attn": _decoder(6, 256, 16, 16, 768, 2048),
    "qwen3 debugmodel": _qwen3(8, 256, 16, 3072, untied=False) | {"vocab_size": "2048"},
    "qwen3 debugmodel_moe": _qwen3(8, 256, 16, 3072, untied=True)
    | {"vocab_size": "2048"}
    | _experts(64, 8, 768),
    "qwen3 235B-A22B": _qwen3(94, 4096, 64, 12288, untied=True)
    | {"num_kv_heads": "4"}
    | _experts(128, 8, 1536),
    "deepseek_v3 debugmodel": _decoder(6, 256, 16, 16, 1024, 2048)
    | _experts(8, 3, 256)
    | {"dense_layers": "1", "shared_ffn_hidden_size": "512", "router_bias": "True"}
    | {"q_lora_rank": "0", "kv_lora_rank": "512", "qk_nope_head_dim": "128"}
    | {"qk_rope_head_dim": "64", "v_head_dim": "128"},
    "qwen3 0.6B": _qwen3(28, 1024, 16, 3072, untied=False),
    "qwen3 1.7B": _qwen3(28, 2048, 16, 6144, untied=False),
    "qwen3 4B": _qwen3(36, 2560, 32, 9728, untied=False),
    "qwen3 14B": _qwen3(40, 5120, 40, 17408, untied=True),
}
_RENAMED = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_split_points": (
        "parallelism.pipeline_parallel_split_points"
    ),
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "float8.enable_fsdp_float8_all_gather": (
        "quantize.linear.float8.enable_fsdp_float8_all_gather"
    ),
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
    "float8.filter_fqns": "quantize.linear.float8.filter_fqns",
    "mx.filter_fqns": "quantize.linear.mx.filter_fqns",
    "mx.recipe_name": "quantize.linear.mx.recipe_name",
}
# Older layouts give the number of micro-batches, else it is the number of stages.
_OLDER_PP = ("training.pipeline_parallel_degree", "experimental.pipeline_parallel_degree")
_OLDER_COUNTS = (
    "experimental.pipeline_parallel_microbatches",
    "parallelism.pipeline_parallel_microbatches",
)
_DDP_BUCKET = "100"  # MiB: apply_ddp of models/llama3/infra/parallelize.py
_MODE = "activation_checkpoint.mode"
_EVERY = "activation_checkpoint.selective_ac_option"
_PP = "parallelism.pipeline_parallel_degree"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_MICRO_BATCH = "parallelism.pipeline_parallel_microbatch_size"
_LAYERS_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_BATCH = "training.local_batch_size"
_CONVERTERS = "model.converters"
_FILTERS = {
    "float8": "quantize.linear.float8.filter_fqns",
    "mx": "quantize.linear.mx.filter_fqns",
}
_FLOAT8_GATHER = "quantize.linear.float8.enable_fsdp_float8_all_gather"
# Keys that are not torchtitan's: `_prepare` makes them of others, `_complete` the others.
_SCOPE = "compile.scope"
_MASKS = "attention of the flavor"
_COUNT = "pipeline.microbatches"
_STAGES = "pipeline.stages"
# Of schedules in which it is no choice (distributed/pipeline_parallel.py: pipeline_llm).
_STAGES_PER_RANK = {
    each.torch_name: range(each.num_chunks(0), each.num_chunks(0) + 1)
    for each in PipelineSchedule
    if not each.has_stages
}
_BUCKET = "replicate.bucket_cap_mb"
_CP = "parallelism.context_parallel_degree"
_REPLICATED = "parallelism.data_parallel_replicate_degree"
_SHARDED = "parallelism.data_parallel_shard_degree"
_PARAM_DTYPE = "training.mixed_precision_param"
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}

_USED = {
    "model.flavor": Entry(option="model"),
    "flavor.name": Entry(option="model_name"),
    **{f"flavor.{name}": Entry(option=name) for name in NAMES},
    "training.seq_len": Entry(option="seq_len", default="2048"),
    _BATCH: Entry(option="mbs", default="8"),
    "training.global_batch_size": Entry(option="gbs"),
    _PARAM_DTYPE: Entry(option="param_dtype", values=_DTYPES),
    "training.mixed_precision_reduce": Entry(option="reduce_dtype", values=_DTYPES),
    "training.dtype": Entry(option="shard_dtype", values=_DTYPES),
    "training.max_norm": Entry(option="clip"),
    _REPLICATED: Entry(option="dp_replicate"),
    _SHARDED: Entry(option="dp_shard"),
    _BUCKET: Entry(option="bucket_cap_mb"),
    "parallelism.fsdp_reshard_after_forward": Entry(
        option="reshard_after_forward", values={"always": "yes", "never": "no"}
    ),
    "parallelism.tensor_parallel_degree": Entry(option="tp"),
    "parallelism.enable_async_tensor_parallel": Entry(option="async_tp", values=ON),
    _PP: Entry(option="pp"),
    _SCHEDULE: Entry(
        option="pp_schedule",
        values={each.torch_name: each.value for each in PipelineSchedule},
    ),
    _COUNT: Entry(option="pp_microbatches"),
    _STAGES: Entry(option="pp_stages"),
    _CP: Entry(option="cp"),
    "parallelism.expert_parallel_degree": Entry(option="ep"),
    _MODE: Entry(
        option="recompute",
        values={"none": "none", "full": "full", "selective": "ops", "blocks": "blocks"},
        default="blocks",
    ),
    _EVERY: Entry(option="recompute_every"),
    _SCOPE: Entry(
        option="compile", values={"block": "block", "layers": "layers", "loss": "loss"}
    ),
    _CONVERTERS: Entry(option="precision", values={"float8": "fp8", "mx": "mxfp8"}),
    _FLOAT8_GATHER: Entry(option="fp8_all_gather", values=ON),
    # q, k and v are three products in all of its models.
    "model.fused_qkv": Entry(option="fuse_qkv", values=ON, default="False"),
}
_IDLE = {
    **without_effect(
        "files, logs and checkpoints",
        """
        job.config_file job.dump_folder job.description job.print_config job.print_args
        job.save_config_file job.custom_config_module job.use_for_integration_test
        profiling.enable_profiling profiling.save_traces_folder profiling.profile_freq
        profiling.profiler_active profiling.profiler_warmup
        profiling.enable_memory_snapshot profiling.save_memory_snapshot_folder
        metrics.log_freq metrics.enable_tensorboard metrics.disable_color_printing
        metrics.enable_color_printing metrics.save_tb_folder metrics.save_for_all_ranks
        metrics.rank_0_only metrics.enable_wandb model.hf_assets_path model.tokenizer_path
        model.print_after_conversion checkpoint.enable checkpoint.enable_checkpoint
        checkpoint.enable_ft_dataloader_checkpoints checkpoint.folder checkpoint.interval
        checkpoint.interval_type checkpoint.initial_load_path
        checkpoint.initial_load_model_only checkpoint.initial_load_in_hf
        checkpoint.initial_load_in_hf_quantized checkpoint.last_save_model_only
        checkpoint.last_save_in_hf checkpoint.export_dtype checkpoint.async_mode
        checkpoint.keep_latest_k checkpoint.load_step checkpoint.exclude_from_loading
        checkpoint.enable_first_step_checkpoint checkpoint.create_seed_checkpoint
        checkpoint.load_only checkpoint.model_weights_only comm.init_timeout_seconds
        comm.train_timeout_seconds comm.trace_buf_size comm.save_traces_folder
        comm.save_traces_file_prefix comm.mode memory_estimation.enable
        memory_estimation.enabled memory_estimation.disable_fake_mode
        experimental.custom_import experimental.custom_args_module
        experimental.custom_model_path compile.backend hf_transformers.model
        """,
    ),
    **without_effect(
        "data, validation and rates",
        """
        training.dataset training.dataset_path training.steps training.warmup_steps
        training.gc_freq training.gc_debug training.seed training.deterministic
        training.dataloader.num_workers training.dataloader.persistent_workers
        training.dataloader.pin_memory training.dataloader.prefetch_factor
        optimizer.lr optimizer.eps optimizer.weight_decay optimizer.beta1 optimizer.beta2
        lr_scheduler.warmup_steps lr_scheduler.total_steps lr_scheduler.decay_ratio
        lr_scheduler.decay_type lr_scheduler.min_lr_factor lr_scheduler.lr_min
        validation.enable validation.enabled validation.dataset validation.dataset_path
        validation.local_batch_size validation.seq_len validation.freq validation.steps
        debug.seed debug.deterministic debug.deterministic_warn_only
        debug.moe_force_load_balance fault_tolerance.process_group
        fault_tolerance.process_group_timeout_ms fault_tolerance.replica_id
        fault_tolerance.group_size fault_tolerance.min_replica_size
        fault_tolerance.sync_steps fault_tolerance.semi_sync_method
        """,
    ),
    **without_effect(
        "only with an option that is off, or the same kernels",
        """
        activation_checkpoint.memory_budget activation_checkpoint.preserve_rng_state
        activation_checkpoint.visualize_memory_budget_pareto
        activation_checkpoint.determinism_check activation_checkpoint.debug
        activation_checkpoint.early_stop model.norm_type
        parallelism.pipeline_parallel_expert_parallel_overlap
        quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
        quantize.grouped_mm.float8.fqns quantize.grouped_mm.mx.fqns
        quantize.grouped_mm.mx.recipe_name quantize.linear.mx.recipe_name
        float8.precompute_float8_dynamic_scale_for_fsdp
        float8.force_recompute_fp8_weight_in_bwd float8.scaling_type_input
        float8.scaling_type_weight float8.scaling_type_grad_output float8.moe_fqns_prototype
        mx.use_fp8_dim1_cast_triton_kernel
        mx.mxfp8_dim1_cast_kernel_choice mx.moe_fqns_prototype
        """,
    ),
    **unmodelled(
        "it runs as with its default",
        """
        parallelism.disable_loss_parallel parallelism.enable_compiled_autograd
        activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
        """,
    ),
    "optimizer.implementation": Entry(
        unmodelled="the optimizer is one fused kernel", off=("fused",)
    ),
    "optimizer.fused": Entry(unmodelled="the optimizer is one fused kernel", off=("true",)),
    "parallelism.context_parallel_rotate_method": Entry(
        unmodelled="keys and values are gathered", off=("allgather",)
    ),
    "parallelism.context_parallel_load_balancer": Entry(
        unmodelled="sequences are divided head to tail", off=("headtail",)
    ),
    "parallelism.expert_parallel_comm_backend": Entry(
        unmodelled="tokens are exchanged by NCCL's all-to-all", off=("standard",)
    ),
    "quantize.linear.float8.recipe_name": Entry(
        unmodelled="scales are of whole tensors", off=("tensorwise",)
    ),
    **refused(
        "left out: it is not modelled",
        """
        optimizer.early_step_in_backward
        parallelism.pipeline_parallel_split_points parallelism.module_fqns_per_model_part
        parallelism.pipeline_parallel_schedule_csv fault_tolerance.enable
        quantize.linear.float8.emulate float8.emulate
        """,
    ),
    **refused(
        "false: FSDP's weights, gradients and optimizer states on the host are not modelled",
        "training.enable_cpu_offload",
    ),
    **{
        name: Entry(refused='["output"] or []: other layers that stay in bf16 are not modelled')
        for name in _FILTERS.values()
    },
    # Of 2025; later flavors say both.
    "model.attn_mask_type": Entry(needs="packing", off=("causal",)),
    "model.use_flex_attn": Entry(unmodelled="--attention-backend has attention's kernel"),
    _MASKS: Entry(unmodelled="documents are masked apart as --packing has them, if given"),
    "output layer": Entry(unmodelled="its product is in bf16, not narrow as the others"),
    "converters of a model with experts": Entry(
        refused="left out: experts' products stay in bf16, which is not modelled beside others"
    ),
    "model.name": Entry(
        refused=f"one of {', '.join(_FAMILIES)}: this family of models is not modelled"
    ),
    "optimizer.name": Entry(refused="AdamW: others are not modelled", off=("adamw", "adam")),
    "parallelism.expert_tensor_parallel_degree": Entry(
        refused="1, as experts have no tensor parallelism here", off=("1",)
    ),
    "parallelism.pipeline_parallel_first_stage_less_layers": Entry(
        refused="1, torchtitan's default", off=("1",)
    ),
    "parallelism.pipeline_parallel_last_stage_less_layers": Entry(
        refused="1, torchtitan's default", off=("1",)
    ),
}


def _prepare(keys: Keys) -> Keys:
    """Join keys that mean one option, and give the older layout's their newer names."""
    keys = {name: value for name, value in keys.items() if value != "{}"}
    if "training.compile" in keys:
        keys["compile.components"] = "model,loss" if _compiles_loss(keys) else "model"
    _prepare_microbatches(keys)
    keys = {_RENAMED.get(name, name): value for name, value in keys.items()}
    if _is_replicated(keys) and keys.get(_SHARDED) == "1":
        keys[_BUCKET] = _DDP_BUCKET
    for name in (_SHARDED, "training.global_batch_size"):
        if keys.get(name) == "-1":
            del keys[name]
    if keys.get("parallelism.fsdp_reshard_after_forward") == "default":
        del keys["parallelism.fsdp_reshard_after_forward"]
    if keys.get("training.mixed_precision_param") == "bfloat16":
        del keys["training.mixed_precision_param"]  # of DDP it is autocast
    if "training.max_norm" in keys:
        keys["training.max_norm"] = str(keys["training.max_norm"] != "0")
    if keys.pop("training.enable_loss_parallel", "true") == "false":
        keys["parallelism.disable_loss_parallel"] = "true"
    _prepare_model(keys)
    _prepare_recompute(keys)
    _prepare_compile(keys)
    _prepare_pipeline(keys)
    return keys


def _is_replicated(keys: Keys) -> bool:
    """Return whether ranks have whole weights, unless some of them shard."""
    return keys.get(_REPLICATED, "1") != "1" and keys.get(_CP, "1") == "1"


def _compiles_loss(keys: Keys) -> bool:
    """Return whether training.compile is of a layout since bbb1b616e (2 April 2025).

    [parallelism] is two weeks older (785c34c99); pipeline_parallel_microbatches went on
    7 April 2025 (5e2033c75), local_batch_size came on 5 June 2025 (8570415c3).
    """
    is_newer = _BATCH in keys or any(name.startswith("parallelism.") for name in keys)
    return is_newer and _OLDER_COUNTS[1] not in keys


def _prepare_model(keys: Keys) -> None:
    family = keys.get("model.name", "llama3")
    flavor = keys.pop("model.flavor", "debugmodel")
    if family not in (*_FAMILIES, "transformers_modeling_backend"):
        return  # refused by its name
    keys.pop("model.name", None)
    if family == "transformers_modeling_backend":
        return  # the model is of Hugging Face's hub
    name = f"{family} {flavor}"
    if flavor.removesuffix("_attn").endswith(("_flex", "_varlen")):
        keys[_MASKS] = "block_causal"
    if widths := _FLAVORS.get(name):
        keys["flavor.name"] = name.replace(" ", "-").lower()
        keys.update({f"flavor.{option}": value for option, value in widths.items()})
    else:
        keys["model.flavor"] = _BUILT_IN.get(name, f"torchtitan's {name}")


def _prepare_recompute(keys: Keys) -> None:
    mode = keys.setdefault(_MODE, "selective")
    every = keys.pop(_EVERY, "2")
    if mode == "selective" and every != "op":
        keys[_MODE] = "blocks"
        keys[_EVERY] = every


def _prepare_compile(keys: Keys) -> None:
    parts = keys.pop("compile.components", "")
    if keys.pop("compile.enable", "false") == "true":
        words = set(parts.split(",")) if parts else {"model", "loss"}
        scopes = {"model": "layers", "loss": "loss"}
        keys[_SCOPE] = "block" if len(words) > 1 else scopes.get(parts, parts)
    words = set(keys.pop(_CONVERTERS, "").split(",")) - {"", "[]"}
    if keys.pop("float8.enable_float8_linear", "") == "true" or keys.pop(
        "training.fp8_linear", ""
    ) not in ("", "false"):
        words.add("float8")
    words = {word.removeprefix("quantize.linear.") for word in words}
    if words:
        keys[_CONVERTERS] = ",".join(sorted(words))
        if _has_experts(keys):
            keys["converters of a model with experts"] = keys[_CONVERTERS]
    for converter, name in _FILTERS.items():
        default = "[]" if converter == "float8" else "output"
        if keys.get(_CONVERTERS) != converter:
            keys.pop(name, None)
        elif keys.get(name, default) == "[]":
            keys["output layer"] = "narrow"
        elif keys.get(name) == "output":  # which is what is modelled
            del keys[name]
    if keys.get(_CONVERTERS) != "float8":
        keys.pop(_FLOAT8_GATHER, None)


def _has_experts(keys: Keys) -> bool:
    name = keys.get("model.flavor", "")
    is_built_in = name in _BUILT_IN.values()
    return "flavor.num_experts" in keys or (is_built_in and find_model(name).moe is not None)


def _prepare_microbatches(keys: Keys) -> None:
    """Replace the number of micro-batches of older layouts by their size."""
    is_older = any(name in keys for name in (*_OLDER_PP, *_OLDER_COUNTS))
    counts = [keys.pop(name, "") for name in _OLDER_COUNTS]
    degree = next((keys[name] for name in (*_OLDER_PP, _PP) if name in keys), "1")
    if not is_older or degree == "1":
        return
    count = next((each for each in counts if each not in ("", "null", "-1")), degree)
    batch = keys.get("training.batch_size", keys.get(_BATCH, "8"))
    if not (batch.isdecimal() and count.isdecimal() and int(count)) or int(batch) % int(count):
        raise ConfigError(
            _OLDER_COUNTS[0], count, f"a divisor of the batch of a pass ({batch} sequences)"
        )
    keys[_MICRO_BATCH] = str(int(batch) // int(count))


def _prepare_pipeline(keys: Keys) -> None:
    """Replace the batch of a pass through the pipeline by micro-batches."""
    pp = int(keys.get(_PP, "1")) if keys.get(_PP, "1").isdecimal() else 1
    size = keys.pop(_MICRO_BATCH, "1")
    layers = keys.pop(_LAYERS_PER_STAGE, "")
    if pp == 1:
        keys.pop(_SCHEDULE, None)
        return
    batch = keys.get(_BATCH, "8")
    if not (batch.isdecimal() and size.isdecimal() and int(size)) or int(batch) % int(size):
        raise ConfigError(_MICRO_BATCH, size, f"a divisor of local_batch_size ({batch})")
    keys[_COUNT] = str(int(batch) // int(size))
    keys[_BATCH] = size
    if layers.isdecimal() and int(layers):
        stages, rest = divmod(math.ceil((_num_layers(keys) + 2) / int(layers)), pp)
        if rest or not stages:
            raise ConfigError(_LAYERS_PER_STAGE, layers, f"one with a multiple of {pp} stages")
        schedule = keys.get(_SCHEDULE, "1F1B")
        own = _STAGES_PER_RANK.get(schedule, range(2, stages + 2))
        if stages not in own:
            allowed = f"one with {own[0]} stages per rank for {schedule}, not {stages}"
            raise ConfigError(_LAYERS_PER_STAGE, layers, allowed)
        if stages > 1:
            keys[_STAGES] = str(stages)


def _num_layers(keys: Keys) -> int:
    if "flavor.num_layers" in keys:
        return int(keys["flavor.num_layers"])
    return find_model(keys.get("model.flavor", "")).num_layers


def _complete(keys: Keys) -> Keys:
    """Replace widths by a flavor, and our words by torchtitan's several keys."""
    widths = {
        name.removeprefix("flavor."): value
        for name, value in keys.items()
        if name.startswith("flavor.")
    }
    family, flavor = _flavor(widths)
    rest = {name: value for name, value in keys.items() if not name.startswith("flavor.")}
    keys = {"model.name": family, "model.flavor": flavor, **rest}
    mode = keys.setdefault(_MODE, "blocks")
    every = keys.pop(_EVERY, "1")
    if mode in ("selective", "blocks"):
        keys[_MODE] = "selective"
        keys[_EVERY] = "op" if mode == "selective" else every
    if scope := keys.pop(_SCOPE, ""):
        keys["compile.enable"] = "true"
        parts = {"block": "model,loss", "layers": "model", "loss": "loss"}
        keys["compile.components"] = parts[scope]
    is_sharded = _SHARDED in keys or _CP in keys
    bucket = keys.pop(_BUCKET, "0")
    if _is_replicated(keys) and not is_sharded:
        keys[_SHARDED] = "1"
        if bucket != _DDP_BUCKET:
            raise ConfigError(
                "bucket-cap-mb", bucket, f"{_DDP_BUCKET}, as torchtitan gives DDP"
            )
    if (dtype := keys.get(_PARAM_DTYPE)) and not is_sharded:
        raise ConfigError("param-dtype", dtype, "left out: torchtitan shards such weights")
    if name := _FILTERS.get(keys.get(_CONVERTERS, "")):
        keys[name] = "output"
        if "num_experts" in widths:
            allowed = "left out: torchtitan's experts stay in bf16"
            raise ConfigError("precision", keys[_CONVERTERS], allowed)
    if keys.get("training.max_norm"):
        keys["training.max_norm"] = "1.0" if keys["training.max_norm"] == "True" else "0"
    pp = int(keys.get(_PP, "1"))
    count = keys.pop(_COUNT, "1")
    stages = keys.pop(_STAGES, "2")
    if pp > 1:
        size = keys.get(_BATCH, "8")
        keys[_BATCH] = str(int(size) * int(count))
        keys[_MICRO_BATCH] = size
        if keys.get(_SCHEDULE, "1F1B") not in _STAGES_PER_RANK:
            if stages == "1":
                raise ConfigError("pp-stages", stages, "2 or more in torchtitan's file")
            layers = int(widths["num_layers"]) + 2
            size_of_stage = math.ceil(layers / (pp * int(stages)))
            if math.ceil(layers / size_of_stage) != pp * int(stages):
                allowed = f"one of which torchtitan makes {layers} layers with the ends"
                raise ConfigError("pp-stages", stages, allowed)
            keys[_LAYERS_PER_STAGE] = str(size_of_stage)
    return keys


def _flavor(widths: Options) -> tuple[str, str]:
    """Return the family and the flavor of a model. Raises ConfigError for no such model."""
    own = {name: widths_of(find_model(model)) for name, model in _BUILT_IN.items()}
    for name, each in (own | dict(_FLAVORS)).items():
        if {key: each.get(key) for key in NAMES} == {key: widths.get(key) for key in NAMES}:
            family, _, flavor = name.partition(" ")
            return family, flavor
    names = ", ".join((*_BUILT_IN, *_FLAVORS))
    raise ConfigError("model", "of other widths", f"a flavor of torchtitan: {names}")


_NUMBERS = ("true", "false")
_LISTS = ("compile.components", _CONVERTERS, *_FILTERS.values())


def toml(keys: Keys) -> str:
    """Return the file of these keys."""
    sections: dict[str, list[str]] = {}
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        if key in _LISTS:
            text = "[" + ", ".join(f'"{word}"' for word in value.split(",")) + "]"
        elif value in _NUMBERS or (value.replace(".", "", 1).isdecimal() and key != _EVERY):
            text = value
        else:
            text = f'"{value}"'
        sections.setdefault(section, []).append(f"{name} = {text}")
    return (
        "\n\n".join("\n".join((f"[{section}]", *lines)) for section, lines in sections.items())
        + "\n"
    )


TABLE = Table(
    framework="pytorch",
    title="torchtitan",
    entries=_USED | _IDLE,
    prepare=_prepare,
    complete=_complete,
    implied=("world_size", "model", "model_name"),
    fixed={"pp": "1"},
    freed_by="mbs",
)
