"""Hugging Face `config.json` of decoder-only families, as ModelConfig.

Only what changes shapes is read. `unmodelled` names the other keys that change a step. Keys are
those of `transformers` and of published configs. A key with a value that switches it off (null,
false, 0, empty) has no effect, whatever it is.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.model import MlaConfig, ModelConfig, MoeConfig
from stepmark.step.source_file import convert, one_line, read_json

Config = Mapping[str, object]
_Test = Callable[[object, Config], bool]


def _is_set(value: object, config: Config) -> bool:
    return bool(value)


def _is_not_one(value: object, config: Config) -> bool:
    return value != 1


def _is_used_window(value: object, config: Config) -> bool:
    is_qwen = str(config.get("model_type")).startswith("qwen")  # which has it switched off
    return bool(value) and config.get("use_sliding_window", not is_qwen) is not False


# What the step lacks, and whether a value has the effect; nothing for most: any value has.
_EFFECTS: dict[str, tuple[str, _Test]] = {
    **dict.fromkeys(
        (
            "num_nextn_predict_layers",
            "num_mtp_layers",
            "mtp_num_layers",
            "mtp_num_hidden_layers",
        ),
        ("multi-token-prediction layers are left out", _is_set),
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
        ("shared_expert_intermediate_size", "num_shared_experts", "n_shared_experts"),
        ("shared experts are left out", _is_set),
    ),
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
    **dict.fromkeys(
        ("attention_bias", "mlp_bias"), ("transformers ignores it in this family", _is_set)
    ),
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
# Keys with an effect where the config lacks them, by model_type; of transformers 5.23.
_DEFAULTS: dict[str, Config] = {"mistral": {"sliding_window": 4096}}


def unmodelled(config: Config, modelled: Collection[str]) -> list[str]:
    """Return notes on keys with an effect that the model lacks, and one on unknown keys.

    modelled: the keys that are read.
    """
    lacks: dict[str, list[str]] = {}
    unknown = []
    defaults = _DEFAULTS.get(str(config.get("model_type")), {})
    for key, value in {**defaults, **config}.items():
        if key in modelled:
            continue
        if key in _EFFECTS:
            what, has_effect = _EFFECTS[key]
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


# Far above any model, and low enough that 4 x a width is still one ModelConfig accepts.
Size = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Count = Annotated[int, msgspec.Meta(ge=0, le=64)]

# A config names the longest context; steps are measured at this length or the model's own.
DEFAULT_SEQ_LEN = 8192


class _Family(msgspec.Struct):
    model_type: str


class _Decoder(msgspec.Struct):
    """Fields of all families but gpt2."""

    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size
    vocab_size: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False


class _Llama(_Decoder):
    """llama: dense."""

    attention_bias: bool = False
    mlp_bias: bool = False


class _GroupedQuery(_Decoder, kw_only=True):
    """mistral, qwen2: dense. A missing required field has another default per family."""

    num_key_value_heads: Size | None


class _Qwen3(_GroupedQuery, kw_only=True):
    attention_bias: bool = False


class _Mixtral(_GroupedQuery, kw_only=True):
    num_local_experts: Size
    num_experts_per_tok: Size


class _Qwen3Moe(_Qwen3, kw_only=True):
    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None


class _DeepSeek(_Decoder, kw_only=True):
    attention_bias: bool = False
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    n_routed_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    # Required: a missing one means another default per version.
    q_lora_rank: Size | None
    n_shared_experts: Count | None
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)]
    moe_layer_freq: Size = 1


class _Gpt2(msgspec.Struct):
    n_embd: Size
    n_layer: Size
    n_head: Size
    n_positions: Size
    vocab_size: Size
    n_inner: Size | None = None
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = True
    add_cross_attention: bool = False


# Our name of a field -> the file's, where a check of ModelConfig fails.
_LLAMA_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "qkv_bias": "attention_bias",
    "linear_bias": "mlp_bias",
    "moe.top_k": "num_experts_per_tok",
    "moe.first_dense_layers": "first_k_dense_replace",
}
_EXPERTS = ("num_local_experts", "n_routed_experts")


def read_config(path: Path) -> ModelConfig:
    """Read the model that a Hugging Face config.json describes. Raise ConfigError.

    The model is named after the file's folder if the file is config.json.
    """
    where = f"{path}: "
    raw = read_json(path)
    family = convert(raw, _Family, where).model_type
    if family not in _FAMILIES:
        raise not_one_of(f"{where}model_type", one_line(family), _FAMILIES)
    assert isinstance(raw, dict)
    name = path.parent.name if path.name == "config.json" else path.stem
    modelled = msgspec.structs.fields(_FIELDS.get(family, _Llama))
    notes = unmodelled(raw, {key.name for key in modelled})
    facts = {
        "name": name or family,
        "source": str(path),
        "unmodelled": tuple(f"{path}: {note}" for note in notes),
    }
    try:
        return _FAMILIES[family](raw, where, facts)
    except ConfigError as error:
        if error.field.startswith(where):
            raise
        experts = next((key for key in _EXPERTS if key in raw), "num_experts")
        names = _LLAMA_NAMES | {"num_experts": experts}
        raise in_words_of_file(error, raw, where, names) from None


def in_words_of_file(
    error: ConfigError, raw: dict[str, object], where: str, names: dict[str, str]
) -> ConfigError:
    """Return a failed check of ModelConfig in the names and the value of the file."""
    field = names.get(error.field, error.field.removeprefix("mla.").removeprefix("moe."))
    allowed = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), error.allowed)
    return ConfigError(f"{where}{field}", one_line(raw.get(field, "missing")), allowed)


def _llama(
    raw: dict[str, object],
    where: str,
    facts: dict[str, Any],
    *,
    fields_type: type[_Decoder] = _GroupedQuery,
    head_dim: int | None = None,
    **more: bool,
) -> ModelConfig:
    """Return a dense model. more: facts of the family without a field in the file."""
    config = convert(raw, fields_type, where)
    return ModelConfig(**facts, **_dense(config, where, head_dim) | more)


def _mixtral(raw: dict[str, object], where: str, facts: dict[str, Any]) -> ModelConfig:
    config = convert(raw, _Mixtral, where)
    moe = MoeConfig(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        ffn_hidden_size=config.intermediate_size,
    )
    return ModelConfig(**facts, moe=moe, **_dense(config, where) | {"ffn_hidden_size": 0})


def _qwen3_moe(raw: dict[str, object], where: str, facts: dict[str, Any]) -> ModelConfig:
    config = convert(raw, _Qwen3Moe, where)
    if config.decoder_sparse_step != 1:
        field = f"{where}decoder_sparse_step"
        raise ConfigError(field, config.decoder_sparse_step, "1: every layer is MoE")
    dense = sorted(set(config.mlp_only_layers or ()))
    if dense != list(range(len(dense))):
        field = f"{where}mlp_only_layers"
        raise ConfigError(field, dense, "empty or the leading layers 0, 1, ...")
    moe = MoeConfig(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        ffn_hidden_size=config.moe_intermediate_size,
        first_dense_layers=len(dense),
    )
    shapes = _dense(config, where)
    if not dense:
        shapes["ffn_hidden_size"] = 0
    return ModelConfig(**facts, qk_norm=True, moe=moe, **shapes)


def _deepseek(raw: dict[str, object], where: str, facts: dict[str, Any]) -> ModelConfig:
    config = convert(raw, _DeepSeek, where)
    if config.moe_layer_freq != 1:
        field = f"{where}moe_layer_freq"
        raise ConfigError(field, config.moe_layer_freq, "1: MoE in every layer after the dense")
    layers = deepseek_layers(
        config,
        first_dense_layers=config.first_k_dense_replace,
        router_bias=raw["model_type"] == "deepseek_v3",
    )
    # The file's head_dim, where there is one, is the rope part only.
    return ModelConfig(**facts, **_dense(config, where) | layers)


def deepseek_layers(config: Any, **router: Any) -> dict[str, Any]:
    """Return experts and latent attention of a config whose fields have DeepSeek's names."""
    shared = config.n_shared_experts or 0
    moe = MoeConfig(
        num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        ffn_hidden_size=config.moe_intermediate_size,
        num_shared_experts=shared,
        shared_ffn_hidden_size=shared * config.moe_intermediate_size,
        **router,
    )
    mla = MlaConfig(**{field.name: getattr(config, field.name) for field in fields(MlaConfig)})
    return {"moe": moe, "mla": mla, "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim}


def _gpt2(raw: dict[str, object], where: str, facts: dict[str, Any]) -> ModelConfig:
    config = convert(raw, _Gpt2, where)
    if config.n_embd % config.n_head:
        raise ConfigError(
            f"{where}n_embd", config.n_embd, f"a multiple of n_head={config.n_head}"
        )
    _check_activation(config.activation_function, f"{where}activation_function", *_GELUS)
    if config.add_cross_attention:
        raise ConfigError(f"{where}add_cross_attention", "true", "false: a decoder only")
    return ModelConfig(
        **facts,
        hidden_size=config.n_embd,
        num_layers=config.n_layer,
        num_heads=config.n_head,
        num_kv_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
        ffn_hidden_size=config.n_inner or 4 * config.n_embd,
        vocab_size=config.vocab_size,
        seq_len=min(config.n_positions, DEFAULT_SEQ_LEN),
        max_positions=config.n_positions,
        activation="gelu",
        norm="layernorm",
        tied_embeddings=config.tie_word_embeddings,
        linear_bias=True,
    )


def _dense(config: _Decoder, where: str, head_dim: int | None = None) -> dict[str, Any]:
    """Return the common shapes. head_dim: the family's default; None: hidden / heads."""
    attention_bias = getattr(config, "attention_bias", False)
    mlp_bias = getattr(config, "mlp_bias", False)
    if mlp_bias and not attention_bias:
        allowed = "false, or attention_bias true, too: an MLP alone with biases is not modelled"
        raise ConfigError(f"{where}mlp_bias", "true", allowed)
    _check_activation(config.hidden_act, f"{where}hidden_act", "silu")
    heads = config.num_attention_heads
    head_dim = config.head_dim or head_dim
    if head_dim is None and config.hidden_size % heads:
        allowed = f"a multiple of num_attention_heads={heads}, or head_dim given"
        raise ConfigError(f"{where}hidden_size", config.hidden_size, allowed)
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads or heads,
        "head_dim": head_dim or config.hidden_size // heads,
        "ffn_hidden_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "seq_len": min(config.max_position_embeddings, DEFAULT_SEQ_LEN),
        "activation": "swiglu",
        "tied_embeddings": config.tie_word_embeddings,
        "attention_bias": attention_bias and not mlp_bias,
        "linear_bias": mlp_bias,
    }


def _check_activation(name: str, field: str, *allowed: str) -> None:
    """Raise ConfigError for another name; the gated families call theirs silu."""
    if name not in allowed:
        several = "one of " if len(allowed) > 1 else ""
        raise ConfigError(field, name, several + ", ".join(allowed))


_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")

_FAMILIES: dict[str, Callable[..., ModelConfig]] = {
    "llama": partial(_llama, fields_type=_Llama),
    "mistral": _llama,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "qwen2": partial(_llama, qkv_bias=True),  # on q, k and v only
    "qwen3": partial(_llama, fields_type=_Qwen3, head_dim=128, qk_norm=True),
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
# Keys by family, where they are not llama's.
_FIELDS: dict[str, type[msgspec.Struct]] = {
    "mistral": _GroupedQuery,
    "qwen2": _GroupedQuery,
    "qwen3": _Qwen3,
    "mixtral": _Mixtral,
    "gpt2": _Gpt2,
    "qwen3_moe": _Qwen3Moe,
    "deepseek_v2": _DeepSeek,
    "deepseek_v3": _DeepSeek,
}
