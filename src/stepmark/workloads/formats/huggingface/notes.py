"""Keys of Hugging Face's `config.json` that change a step and that the model lacks.

Keys are those of `transformers` and of published configs. A key with a value that switches it
off (null, false, 0, empty) has no effect, whatever it is.
"""

from collections.abc import Callable, Mapping, Set

from stepmark.step.source_file import one_line

Config = Mapping[str, object]
_Test = Callable[[object, Config], bool]


def _is_set(value: object, config: Config) -> bool:
    return bool(value)


def _is_not_one(value: object, config: Config) -> bool:
    return value != 1


def _is_used_window(value: object, config: Config) -> bool:
    is_qwen = str(config.get("model_type")).startswith("qwen")  # which has it switched off
    return bool(value) and config.get("use_sliding_window", not is_qwen) is not False


_IGNORED = "transformers ignores it in this family"
_SHARED_EXPERTS = ("shared_expert_intermediate_size", "num_shared_experts", "n_shared_experts")
# What the step lacks, and whether a value has the effect; nothing for most: any value has.
_EFFECTS: dict[str, tuple[str, _Test]] = {
    **dict.fromkeys(
        (
            "num_nextn_predict_layers",
            "num_mtp_layers",
            "mtp_num_layers",
            "mtp_num_hidden_layers",
        ),
        (
            "multi-token-prediction layers are left out (Megatron's rules count them with "
            "--num-mtp-layers)",
            _is_set,
        ),
    ),
    **dict.fromkeys(
        ("quantization_config", "compression_config"),
        ("weights and products have the job's type, not the quantized one", _is_set),
    ),
    "sliding_window": ("attention reaches all earlier tokens", _is_used_window),
    "layer_types": (
        "all layers have full causal attention",
        lambda value, config: (
            isinstance(value, list) and bool(set(map(str, value)) - {"full_attention"})
        ),
    ),
    **dict.fromkeys(
        (
            "attention_chunk_size",
            "dual_chunk_attention_config",
            "index_topk",
            "sparse_attention",
        ),
        ("attention reaches all earlier tokens", _is_set),
    ),
    **dict.fromkeys(
        (
            "final_logit_softcapping",
            "attn_logit_softcapping",
            "logit_softcapping",
            "logits_soft_cap",
        ),
        ("logits are not capped", _is_set),
    ),
    **dict.fromkeys(
        ("attention_sinks", "use_attention_sinks", "attn_sink", "add_attention_sinks"),
        ("attention has no sinks", _is_set),
    ),
    **dict.fromkeys(
        ("swiglu_limit", "clip_qkv", "qkv_clip"), ("values are not clamped", _is_set)
    ),
    **dict.fromkeys(
        ("swiglu_limits", "swiglu_limits_shared"),
        (
            "values are not clamped",
            lambda value, config: isinstance(value, list) and any(value),
        ),
    ),
    **dict.fromkeys(_SHARED_EXPERTS, ("shared experts are left out", _is_set)),
    **dict.fromkeys(
        ("shared_expert_gate", "use_shared_expert_gate"),
        ("shared experts have no gate", _is_set),
    ),
    **dict.fromkeys(
        (
            *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
            *("dropout", "resid_dropout", "embd_dropout", "ffn_dropout"),
        ),
        ("dropout is left out", _is_set),
    ),
    **dict.fromkeys(("attention_bias", "mlp_bias"), (_IGNORED, _is_set)),
    **dict.fromkeys(("qk_norm", "use_qk_norm"), ("queries and keys are not normed", _is_set)),
    **dict.fromkeys(
        (
            *("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
            *("scale_emb", "scale_depth", "mup_width_multiplier"),
        ),
        ("values are not scaled", _is_not_one),
    ),
    "partial_rotary_factor": ("rotary positions cover whole heads", _is_not_one),
    "no_rope_layers": (
        "all layers have rotary positions",
        lambda value, config: isinstance(value, list) and not all(value),
    ),
    "n_group": (
        "any experts may be chosen, not those of topk_group groups",
        lambda value, config: bool(value) and value != config.get("topk_group", value),
    ),
    **dict.fromkeys(
        ("router_aux_loss_coef", "router_z_loss_coef"),
        (
            "the router has no auxiliary loss",
            lambda value, config: bool(value) and config.get("output_router_logits") is True,
        ),
    ),
    "aux_loss_alpha": ("the router has no auxiliary loss", _is_set),
    "router_jitter_noise": ("the router's input has no noise", _is_set),
    "pretraining_tp": ("products are not sliced", _is_not_one),
    "reorder_and_upcast_attn": ("attention has the job's type", _is_set),
    "add_cross_attention": ("there is no cross attention", _is_set),
    **dict.fromkeys(
        ("vision_config", "audio_config"), ("only the decoder is modelled", _is_set)
    ),
}
# Names, ids, defaults of generation, constants of functions, and choices of an implementation.
_NAMES = """
_attn_implementation _attn_implementation_autoset _name_or_path activation_function
architectures attention_multiplier attn_implementation auto_map bos_token_id
chunk_size_feed_forward cls_token_id decoder_start_token_id do_sample dtype eos_token_id
ep_size finetuning_task gradient_checkpointing head_dim hidden_act id2label
initializer_range is_decoder is_encoder_decoder label2id layer_norm_eps layer_norm_epsilon
layernorm_epsilon moe_router_scaling_factor norm_eps route_scale swa_rope_theta
mask_token_id max_length max_position_embeddings max_window_layers min_length
model_max_length model_type n_ctx name_or_path norm_topk_prob
original_max_position_embeddings output_attentions output_hidden_states output_router_logits
pad_token_id problem_type qk_head_dim query_pre_attn_scalar return_dict rms_norm_eps
rope_interleave rope_parameters rope_scaling rope_theta routed_scaling_factor
scale_attn_by_inverse_layer_idx scale_attn_weights scoring_func sep_token_id seq_aux
summary_activation summary_first_dropout summary_proj_to_labels summary_type
summary_use_proj task_specific_params tokenizer_class topk_group topk_method torch_dtype
torchscript transformers_version unk_token_id use_bfloat16 use_cache use_sliding_window
"""
_WITHOUT_EFFECT = frozenset(_NAMES.split())
_MOST = 20  # unknown keys in a note


def unmodelled(config: Config, modelled: Set[str]) -> list[str]:
    """Return notes on keys with an effect that the model lacks, and one on unknown keys.

    modelled: the keys that are read.
    """
    lacks: dict[str, list[str]] = {}
    unknown = []
    for key, value in config.items():
        if key in modelled:
            continue
        if key in _EFFECTS:
            what, has_effect = _EFFECTS[key]
            if key in _SHARED_EXPERTS and not modelled.isdisjoint(_SHARED_EXPERTS):
                what = _IGNORED  # the family has shared experts, by another key
            if value is not None and has_effect(value, config):
                lacks.setdefault(what, []).append(f"{key} ({one_line(value)})")
        elif key not in _WITHOUT_EFFECT and value:
            unknown.append(ascii(key[:60])[1:-1])
    notes = [f"not modelled: {', '.join(keys)}: {what}" for what, keys in lacks.items()]
    if unknown:
        more = f" and {len(unknown) - _MOST} more" if len(unknown) > _MOST else ""
        words = ", ".join(sorted(unknown)[:_MOST])
        notes.append(f"unknown keys, which the model does not have: {words}{more}")
    return notes
