"""Hugging Face `config.json` of decoder-only families, as ModelConfig.

Only what changes shapes is read. `read_notes` names the other keys that change a step
(huggingface_keys.py).
"""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.model import MlaConfig, ModelConfig, MoeConfig
from stepmark.step.source_file import convert, one_line, read_json
from stepmark.workloads.formats.huggingface_keys import unmodelled

# Far above any model, and low enough that 4 x a width is still one ModelConfig accepts.
Size = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Count = Annotated[int, msgspec.Meta(ge=0, le=64)]

# A config names the longest context; steps are measured at this length or the model's own.
DEFAULT_SEQ_LEN = 8192


class _Family(msgspec.Struct):
    model_type: str


class _Llama(msgspec.Struct):
    """llama: dense."""

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
    attention_bias: bool = False
    mlp_bias: bool = False


class _GroupedQuery(_Llama, kw_only=True):
    """mistral, qwen2, qwen3: dense. A missing required field has another default per family."""

    num_key_value_heads: Size | None


class _Mixtral(_GroupedQuery, kw_only=True):
    num_local_experts: Size
    num_experts_per_tok: Size


class _Qwen3Moe(_GroupedQuery, kw_only=True):
    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None


class _DeepSeek(_Llama, kw_only=True):
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
    facts = {"name": name or family, "source": str(path)}
    try:
        return _FAMILIES[family](raw, where, facts)
    except ConfigError as error:
        if error.field.startswith(where):
            raise
        experts = next((key for key in _EXPERTS if key in raw), "num_experts")
        names = _LLAMA_NAMES | {"num_experts": experts}
        raise in_words_of_file(error, raw, where, names) from None


def read_notes(path: Path) -> list[str]:
    """Return notes on what read_config ignores of a file that it accepts."""
    raw = read_json(path)
    assert isinstance(raw, dict)
    modelled = msgspec.structs.fields(_FIELDS.get(raw["model_type"], _Llama))
    return [f"{path}: {note}" for note in unmodelled(raw, {key.name for key in modelled})]


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
    fields_type: type[_Llama] = _GroupedQuery,
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


def _dense(config: _Llama, where: str, head_dim: int | None = None) -> dict[str, Any]:
    """Return the common shapes. head_dim: the family's default; None: hidden / heads."""
    if config.attention_bias != config.mlp_bias:
        # In llama attention_bias covers the output projection too, which ModelConfig has
        # only together with the MLP's.
        value = one_line(config.attention_bias)
        allowed = f"mlp_bias, which is {one_line(config.mlp_bias)}"
        raise ConfigError(f"{where}attention_bias", value, allowed)
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
        "linear_bias": config.mlp_bias,
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
    "qwen3": partial(_llama, head_dim=128, qk_norm=True),
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
# Keys by family, where they are not llama's.
_FIELDS: dict[str, type[msgspec.Struct]] = {
    "mixtral": _Mixtral,
    "gpt2": _Gpt2,
    "qwen3_moe": _Qwen3Moe,
    "deepseek_v2": _DeepSeek,
    "deepseek_v3": _DeepSeek,
}
