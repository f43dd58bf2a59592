"""YAML of NeMo (trainer, model) and of Megatron-Bridge (model, train, ddp).

Their keys are Megatron-LM's arguments in other words, so that they are read by its table. Names
are those of NeMo's examples/nlp/language_modeling/conf/megatron_gpt_config.yaml and of the
dataclasses of Megatron-Bridge's ConfigContainer (training/config.py).
"""

import re
from collections.abc import Mapping

from stepmark.framework_files import megatron
from stepmark.framework_files.megatron_entries import OTHER_FAMILY
from stepmark.framework_files.table import (
    Keys,
    Table,
    refused,
    switches,
    unmodelled,
    without_effect,
)

# Sections whose keys are of files, logs and data.
_WHOLE = (
    *("exp_manager", "run", "hydra", "defaults", "restore_from_path", "model.data"),
    *("model.tokenizer", "model.nsys_profile", "model.optim.sched", "checkpoint", "logger"),
    *("rng", "scheduler", "tokenizer", "dataset", "profiling", "straggler", "ft", "rerun"),
    *("rerun_state_machine", "inprocess_restart", "validation", "model.memory_profile"),
    *("name", "base_results_dir", "model.log_token_counts", "nvrx_straggler", "peft"),
    *("env_vars", "model.teacher"),
    *("s3_checkpointing", "model.ub_tp_comm_overlap_cfg", "model.gc_interval"),
)
_SETTINGS = (
    *("model.", "train.", "ddp.", "comm_overlap.", "mixed_precision.", "dist."),
    "optimizer.",
)
_RENAMED = {
    "encoder_seq_length": "seq-length",
    "num_moe_experts": "num-experts",
    "rotary_percentage": "rotary-percent",
    "activations_checkpoint_granularity": "recompute-granularity",
    "activations_checkpoint_method": "recompute-method",
    "activations_checkpoint_num_layers": "recompute-num-layers",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "ub_tp_comm_overlap": "tp-comm-overlap",
    "sharp": "use-sharp",
    "qkv_bias": "add-qkv-bias",
    "override_vocab_size": "vocab-size",
    "fp8_params": "fp8-param-gather",
    "fp8_param": "fp8-param-gather",
    "fp8_param_gather": "fp8-param-gather",
    "layernorm_epsilon": "norm-epsilon",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "optim.overlap_grad_sync": "overlap-grad-reduce",
    "optim.overlap_param_sync": "overlap-param-gather",
    "optim.lr": "lr",
    "optim.weight_decay": "weight-decay",
    "average_in_collective": "ddp-average-in-collective",
    "bucket_size": "ddp-bucket-size",
    "pad_buckets_for_high_nccl_busbw": "ddp-pad-buckets-for-high-nccl-busbw",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "use_flash_attention": "use-flash-attn",
}
# Switches that are on unless Megatron-LM's argument is given.
_NEGATED = {
    "bias": "disable-bias-linear",
    "add_bias_linear": "disable-bias-linear",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "masked_softmax_fusion": "no-masked-softmax-fusion",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "apply_rope_fusion": "no-rope-fusion",
    "bias_dropout_add_fusion": "no-bias-dropout-fusion",
    "bias_dropout_fusion": "no-bias-dropout-fusion",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
    "align_grad_reduce": "no-align-grad-reduce",
    "align_param_gather": "no-align-param-gather",
    "persist_layer_norm": "no-persist-layer-norm",
    "grad_reduce_in_fp32": "grad-reduce-in-bf16",
    "mcore_gpt": "no-mcore-gpt",
}
_ACTIVATIONS: Mapping[str, str] = {
    "swiglu": "swiglu",
    "fast-swiglu": "swiglu",
    "silu": "swiglu",
    "geglu": "quick-geglu",
    "fast-geglu": "quick-geglu",
    "squared-relu": "squared-relu",
    "squared_relu": "squared-relu",
    "gelu": "openai-gelu",
}
_NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
_PRECISIONS = {
    **{"bf16": "bf16", "bf16_mixed": "bf16", "16": "fp16", "16_mixed": "fp16"},
    **{"fp16_mixed": "fp16", "32": "fp32", "32_true": "fp32"},
}
# What recipes of Megatron-Bridge add to a type: bf16_with_..., fp16_with_...
_GATHERED = {"fp8-param-gather": "true"}
_ENDS = {"first-last-layers-bf16": "true"} | _GATHERED
_RECIPES: Mapping[str, Keys] = {
    "fp8_delayed_scaling": {"fp8-format": "hybrid", "fp8-recipe": "delayed", **_GATHERED},
    "fp8_current_scaling": {"fp8-format": "hybrid", "fp8-recipe": "tensorwise", **_ENDS},
    "fp8_subchannel_scaling": {"fp8-format": "hybrid", "fp8-recipe": "blockwise"},
    "mxfp8": {"fp8-format": "e4m3", "fp8-recipe": "mxfp8", **_GATHERED},
    "nvfp4": {"fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
}
_RECIPE = re.compile(r"(bf16|fp16)_with_(\w+)_mixed")
_SHARDED = ("distributed_fused_adam", "mcore_distributed_optim", "distributed_adam")
_ADAMS = ("fused_adam", "adam", "adamw", "megatron_fused_adam", *_SHARDED)

# NeMo's, of models/language_modeling/megatron_gpt_model.py.
_DEFAULTS = {"model.megatron_amp_O2": "false", "model.mcore_gpt": "false"}
# What a provider of another family sets where a file does not.
_PROVIDED = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "normalization"),
    *("gated_linear_unit", "add_bias_linear", "position_embedding_type", "hidden_dropout"),
    "share_embeddings_and_output_weights",
)

# TransformerConfig has them, and no argument of Megatron-LM.
_FP8_ATTENTION = ("fp8-dot-product-attention", "fp8-multi-head-attention")

_OWN = {
    **switches(*_FP8_ATTENTION),
    **without_effect("files, logs and data", " ".join(_WHOLE)),
    **without_effect(
        "how a job runs",
        """
        trainer.accelerator trainer.logger trainer.enable_checkpointing
        trainer.use_distributed_sampler trainer.replace_sampler_ddp trainer.max_epochs
        trainer.max_steps trainer.max_time trainer.log_every_n_steps
        trainer.val_check_interval trainer.limit_val_batches trainer.limit_test_batches
        trainer.gradient_clip_val trainer.benchmark trainer.enable_model_summary
        trainer.num_sanity_val_steps trainer.enable_progress_bar trainer.strategy
        """,
    ),
    **without_effect(
        "the same step in Megatron-LM's core",
        """
        use-scaled-init-method do-layer-norm-weight-decay pre-process post-process
        headscale transformer-block-type normalize-attention-scores attention-type
        native-amp-init-scale native-amp-growth-interval
        grad-allreduce-chunk-size-mb grad-div-ar-fusion apex-transformer-log-level
        gradient-as-bucket-view sync-batch-comm use-emha batch-p2p-comm gc-interval
        resume-from-checkpoint bias-activation-fusion bias-gelu-fusion optim.betas
        optim.bucket-cap-mb optim.contiguous-grad-buffer optim.contiguous-param-buffer
        optim.eps optim.exclude-norm-and-bias optim.grad-sync-dtype fp8-margin
        fp8-wgrad reduce-amax use-te-rng-tracker enable-cuda-graph-rng rotary-base
        seq-len-interpolation-factor scale-positional-embedding get-attention-mask-from-fusion
        apply-embedding-scaling embedding-scale data-parallel-size barrier-with-l1-time
        deteministic-mode finetune-lr validation-param-sync-overlap
        layernorm-zero-centered-gamma qk-layernorm-per-head trainer.limit_train_batches
        fsdp-sharding-strategy fsdp-grad-reduce-dtype fsdp-sharded-checkpoint
        fsdp-use-orig-params optim.capturable moe-router-pre-softmax eval-iters eval-interval
        use-qkv-bias no-bias-in-linear check-for-nan-in-grad dist-ckpt-format
        dist-ckpt-load-on-device dist-ckpt-parallel-save dist-ckpt-torch-dist-multiproc
        dist-ckpt-parallel-load dist-ckpt-assume-constant-structure
        dist-ckpt-parallel-dist-opt autocast-dtype params-dtype pipeline-dtype
        enable-autocast target tp-comm-bootstrap-backend ub-tp-comm-bootstrap-backend
        """,
    ),
    **unmodelled("optimizer states and gradients are in fp32", "optim.dtype"),
    **unmodelled("there is no dropout in the MLP", "ffn-dropout"),
    **unmodelled("communication is that of the default", "ub-tp-comm-overlap-cfg nccl-ub"),
    **refused(
        "0: recomputation is alike in all micro-batches and stages",
        "num-micro-batches-with-partial-activation-checkpoints "
        "activations-checkpoint-layers-per-pipeline",
    ),
    **refused(
        "left out: models of images are not modelled",
        "freeze-language-model freeze-vision-model freeze-vision-projection "
        "use-hf-vision-model vision-projection",
    ),
    **refused(
        "left out: it is not modelled",
        "cpu-offloading cpu-offloading-activations cpu-offloading-weights",
    ),
    **refused(
        OTHER_FAMILY,
        "mcore-customization-config.new-decoder-architecture "
        "mcore-customization-config.parallel-attention",
    ),
    **refused(
        "left out: distillation, which runs a teacher as well, is not modelled", "model.teacher"
    ),
    **unmodelled(
        "those that this file lacks have Megatron-LM's defaults",
        "settings-of-a-recipe-in-Python",
    ),
    **refused(
        f"GPTModelProvider, or beside all of {', '.join(_PROVIDED)}: its own are not known",
        "model-provider",
    ),
    **unmodelled("layers are those of Megatron-Core", "no-mcore-gpt"),
    **refused("left out: FSDP of NeMo is not modelled", "fsdp"),
    **refused("left out: give --lora-rank to train adapters alone", "peft"),
    **refused(
        "silu with its gate, gelu or squared-relu: others are not modelled", "activation-func"
    ),
    **refused(
        "bf16_mixed, fp16_mixed, or one of these with a recipe of FP8 or FP4", "precision"
    ),
    **refused(
        "true: weights in fp32 under autocast are not modelled", "megatron-amp-o2", "true"
    ),
    **refused("hybrid or e4m3", "fp8"),
    **refused("e2m1", "fp4"),
    **refused("1", "trainer.accumulate_grad_batches", "1"),
}


def _prepare(keys: Keys) -> Keys:
    """Return the keys in Megatron-LM's words."""
    tokenizer = _of_tokenizer(keys)
    is_bridge = any(name.startswith("train.") for name in keys)
    of_bridge = _of_bridge(keys) if is_bridge else {}
    keys = _joined(keys if is_bridge else _DEFAULTS | keys)
    words = (
        tokenizer
        | _of_activation(keys)
        | _of_trainer(keys)
        | _of_precision(keys)
        | _of_optimizer(keys)
    )
    if keys.get("model.cpu_offloading") != "true":
        for name in ("num_layers", "activations", "weights"):
            keys.pop(f"model.cpu_offloading_{name}", None)
    for name, value in keys.items():
        words |= _in_words_of_megatron(name, value)
    words = of_bridge | words
    if is_bridge and "model.vocab_size" in keys:  # the tokenizer's alone is padded
        words["padded-vocab-size"] = words.pop("vocab-size")
    if "model.override_vocab_size" in keys:
        words.pop("tokenizer-type", None)
    if "num-query-groups" in words:
        words["group-query-attention"] = "true"
    if words.get("recompute-num-layers") == "0" or "recompute-granularity" not in words:
        words.pop("recompute-num-layers", None)
        words.pop("recompute-method", None)
    return megatron.TABLE.prepare(words)


def _of_bridge(keys: Keys) -> Keys:
    """Return what Megatron-Bridge's classes set, and what a recipe may set besides the file.

    GPTModelProvider (models/gpt_provider.py, 067f987df) fuses the loss; model and data have one
    length of sequences (training/config.py).
    """
    words = {"cross-entropy-loss-fusion": "true"}
    for name in ("dataset.seq_length", "dataset.sequence_length"):
        if (length := keys.get(name, "")).isdecimal() and _is_empty(keys, "model.seq_length"):
            words["seq-length"] = length
    if "model.num_layers" not in keys or not any(name.startswith("ddp.") for name in keys):
        words["settings-of-a-recipe-in-Python"] = "given"
    provider = keys.get("model._target_", "").rpartition(".")[2]
    is_open = any(_is_empty(keys, f"model.{name}") for name in _PROVIDED)
    if "model.num_layers" in keys and provider not in ("", "GPTModelProvider") and is_open:
        words["model-provider"] = provider
    return words


def _is_empty(keys: Keys, name: str) -> bool:
    return keys.get(name, "null") == "null"


def _of_trainer(keys: Keys) -> Keys:
    devices = keys.pop("trainer.devices", "")
    nodes = keys.pop("trainer.num_nodes", "1")
    return {"nproc_per_node": devices, "nnodes": nodes} if devices.isdecimal() else {}


def _of_precision(keys: Keys) -> Keys:
    sections = ("mixed_precision", "model")
    dtypes = ("bf16", "fp16", "fp32")
    own = [keys.get(f"{section}.{dtype}") for section in sections for dtype in dtypes]
    default = "32" if any(own) else "bf16_mixed"  # the section says its type itself
    of_model = keys.pop("model.precision", "")  # the trainer's, by reference
    precision = keys.pop("trainer.precision", "") or keys.pop("mixed_precision", "")
    precision = precision or ("" if "$" in of_model else of_model) or default
    keys.pop("mixed_precision.fp32", None)
    words = _of_recipe(precision.replace("-", "_"))
    if keys.get("model.megatron_amp_O2") == "false" and "precision" not in words:
        keys["model.megatron_amp_O2"] = "off" if words else "true"
    is_e4m3 = keys.pop("model.fp8_e4m3", "") == "true"
    keys.pop("model.fp8_hybrid", None)
    for name in ("model.fp8", "mixed_precision.fp8"):
        value = keys.get(name, "")
        if value in ("true", "hybrid", "e4m3"):
            words["fp8-format"] = "e4m3" if is_e4m3 or value == "e4m3" else "hybrid"
            del keys[name]
    for name in ("model.fp4", "mixed_precision.fp4"):
        if keys.get(name) == "e2m1":
            words["fp4-format"] = keys.pop(name)
    recipe = keys.pop("mixed_precision.fp8_recipe", "tensorwise")
    if any(own) and "fp8-format" in words:
        words["fp8-recipe"] = recipe
    return words


def _of_recipe(name: str) -> Keys:
    """Return the words of a precision; an unknown one stays, to be refused."""
    if dtype := _PRECISIONS.get(name):
        return {} if dtype == "fp32" else {dtype: "true"}
    match = _RECIPE.fullmatch(name)
    if match is None or match[2] not in _RECIPES:
        return {"precision": name}
    return {match[1]: "true", **_RECIPES[match[2]]}


def _of_tokenizer(keys: Keys) -> Keys:
    """Return the type of the tokenizer, and the size of one that has no vocabulary."""
    words: Keys = {}
    for section in ("tokenizer", "model.tokenizer"):
        for name in ("tokenizer_type", "type"):
            if value := keys.get(f"{section}.{name}", ""):
                words["tokenizer-type"] = value
        size = keys.get(f"{section}.vocab_size", "")
        if words.get("tokenizer-type") == "NullTokenizer" and size.isdecimal():
            words["vocab-size"] = size
    return words


def _of_activation(keys: Keys) -> Keys:
    """Join the activation of Megatron-Bridge with its gate."""
    gated = keys.pop("model.gated_linear_unit", "")
    name = keys.get("model.activation_func", "").rpartition(".")[2]
    is_silu = name in ("silu", "swish")
    if not gated and not is_silu:
        return {}
    keys.pop("model.activation_func", None)
    if is_silu:
        return {"activation-func": name} if gated == "false" else {"swiglu": "true"}
    return {"quick-geglu": "true"} if gated == "true" else {}


def _of_optimizer(keys: Keys) -> Keys:
    optimizer = keys.pop("model.optim.name", "fused_adam")
    words = {"optimizer": "adam" if optimizer in _ADAMS else optimizer}
    if optimizer in _SHARDED:
        words["use-distributed-optimizer"] = "true"
    if keys.get("model.optim.grad_sync_dtype") == "bf16":
        words["grad-reduce-in-bf16"] = "true"
    return words


_REFERENCE = re.compile(r"\$\{(?:\.|training\.model\.|model\.)(\w+)\}")
_PRODUCT = re.compile(r"\$\{multiply: *(\d+) *, *(\d+)\}")


def _resolved(value: str, keys: Keys) -> str:
    """Return a value with OmegaConf's references to the model, and products of two numbers."""
    value = _REFERENCE.sub(lambda match: keys.get(f"model.{match[1]}", match[0]), value)
    return _PRODUCT.sub(lambda match: str(int(match[1]) * int(match[2])), value)


def _joined(keys: Keys) -> Keys:
    """Return the keys without empty ones, and one for each section of files and data."""
    joined: Keys = {}
    for name, value in keys.items():
        parts = name.split(".")
        sections = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        section = next((each for each in sections if each in _WHOLE), "")
        is_part = bool(section) and section != name
        if is_part or value not in ("null", "", "[]", "{}"):
            joined[section or name] = "given" if section else _resolved(value, keys)
    return joined


def _in_words_of_megatron(name: str, value: str) -> Keys:
    own = next((name.removeprefix(each) for each in _SETTINGS if name.startswith(each)), "")
    if not own or name in _WHOLE:
        return {name: value}
    if own in ("_target_", "activation_func", "activation"):
        word = _ACTIVATIONS.get(value.rpartition(".")[2], "")
        other = "target" if own == "_target_" else "activation-func"
        return {word: "true"} if word else {other: value}
    if own in _NEGATED:
        return {_NEGATED[own]: "true"} if value == "false" else {}
    if own == "normalization":
        return {own: _NORMS.get(value.lower(), value)}
    if own == "transformer_engine":
        return {} if value == "true" else {"transformer-impl": "local"}
    return {_RENAMED.get(own, own.replace("_", "-").lower()): value}


TABLE = Table(
    framework="megatron",
    title="NeMo",
    entries=_OWN | dict(megatron.TABLE.entries),
    prepare=_prepare,
)
