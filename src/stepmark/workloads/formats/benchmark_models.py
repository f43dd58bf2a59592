"""Models and shapes as other benchmarks describe them in JSON: Primus and llm-train-bench.

Primus (AMD-AGI/Primus, benchmark/kernel/{gemm,attention}): `model_configs.json` and
`attention_shapes.json`. llm-train-bench has two architectures: GPT (learned positions,
LayerNorm, GELU, biases, a head tied to the token table) and Llama (RMSNorm, rotary positions,
SwiGLU, grouped heads, no biases, its own head); fields without an effect on shapes (rope_base,
norm_eps) are ignored, as unknown ones are.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.layers import MlaConfig, MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.step.source_file import convert, one_line, read_json
from stepmark.workloads.formats.huggingface.config import in_words_of_file

# Far above any model, and low enough that 4 x a width is still one ModelConfig accepts.
Size = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Count = Annotated[int, msgspec.Meta(ge=0, le=64)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class _Model(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Name
    seqlen: Size
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    vocab_size: Size


class _Dense(_Model, kw_only=True, forbid_unknown_fields=True):
    num_key_value_heads: Size
    head_dim: Size


class _DeepSeek(_Model, kw_only=True, forbid_unknown_fields=True):
    kv_lora_rank: Size
    moe_intermediate_size: Size
    num_experts_per_tok: Size
    n_routed_experts: Size
    n_shared_experts: Count
    q_lora_rank: Size | None
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size


class AttentionShape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One entry of attention_shapes.json; batch and dtype are not in it."""

    model: Name
    seqlen_q: Size
    seqlen_kv: Size
    num_head_q: Size
    num_head_kv: Size
    head_dim_qk: Size
    head_dim_v: Size
    causal: bool


_NAMES = {
    "seq_len": ("seqlen",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "ffn_hidden_size": ("intermediate_size",),
    "moe.top_k": ("num_experts_per_tok",),
    "moe.num_experts": ("n_routed_experts",),
}

_ONLY_DEEPSEEK = frozenset(_DeepSeek.__struct_fields__) - frozenset(_Model.__struct_fields__)


def read_model_configs(path: Path) -> list[ModelConfig]:
    """Read the models of a model_configs.json. Raise ConfigError.

    The file has no depth: every model has num_layers=1, an MoE layer for the DeepSeek kind.
    The shared experts are as wide as they are, n_shared x moe_intermediate_size; Primus
    itself benchmarks them with the dense intermediate_size.
    """
    return [_read_model(entry, where) for where, entry in _entries(path)]


def read_attention_shapes(path: Path) -> list[AttentionShape]:
    """Read the shapes of an attention_shapes.json. Raise ConfigError."""
    return [_read_shape(entry, where) for where, entry in _entries(path)]


def _entries(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    raw = read_json(path)
    if not isinstance(raw, list) or not raw:
        raise ConfigError(f"{path}: top level", one_line(raw), "an array of one object or more")
    for index, entry in enumerate(raw):
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{path}: [{index}]", one_line(entry), "an object, as in a list of models"
            )
        yield f"{path}: [{index}].", entry


def _read_model(entry: dict[str, object], where: str) -> ModelConfig:
    deepseek = not _ONLY_DEEPSEEK.isdisjoint(entry)
    try:
        raw: _Model = convert(entry, _DeepSeek if deepseek else _Dense, where)
        return ModelConfig(
            name=raw.model,
            hidden_size=raw.hidden_size,
            num_layers=1,
            num_heads=raw.num_attention_heads,
            ffn_hidden_size=raw.intermediate_size,
            vocab_size=raw.vocab_size,
            seq_len=raw.seqlen,
            source=f"{where.rstrip('.')} (Primus: names no depth, hence 1 layer)",
            **_layers(raw),
        )
    except ConfigError as error:
        if error.field.startswith(where):
            raise
        raise in_words_of_file(error, entry, where, _NAMES) from None


def _deepseek_layers(raw: _DeepSeek) -> dict[str, Any]:
    """Return experts and latent attention."""
    shared = raw.n_shared_experts
    moe = MoeConfig(
        num_experts=raw.n_routed_experts,
        top_k=raw.num_experts_per_tok,
        ffn_hidden_size=raw.moe_intermediate_size,
        num_shared_experts=shared,
        shared_ffn_hidden_size=shared * raw.moe_intermediate_size,
    )
    mla = MlaConfig(
        q_lora_rank=raw.q_lora_rank,
        kv_lora_rank=raw.kv_lora_rank,
        qk_nope_head_dim=raw.qk_nope_head_dim,
        qk_rope_head_dim=raw.qk_rope_head_dim,
        v_head_dim=raw.v_head_dim,
    )
    return {"moe": moe, "mla": mla, "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim}


def _layers(raw: _Model) -> dict[str, Any]:
    if isinstance(raw, _DeepSeek):
        return {"num_kv_heads": raw.num_attention_heads} | _deepseek_layers(raw)
    assert isinstance(raw, _Dense)
    return {"num_kv_heads": raw.num_key_value_heads, "head_dim": raw.head_dim}


def _read_shape(entry: dict[str, object], where: str) -> AttentionShape:
    raw = convert(entry, AttentionShape, where)
    if raw.num_head_q % raw.num_head_kv:
        allowed = f"a multiple of num_head_kv={raw.num_head_kv}"
        raise ConfigError(f"{where}num_head_q", raw.num_head_q, allowed)
    if raw.causal and raw.seqlen_q != raw.seqlen_kv:
        allowed = f"seqlen_q={raw.seqlen_q} when causal"
        raise ConfigError(f"{where}seqlen_kv", raw.seqlen_kv, allowed)
    return raw


Multiplier = Annotated[float, msgspec.Meta(gt=0, le=64)]

_ARCHITECTURES = ("gpt", "llama")
# Fields of Llama only, for files that do not name their architecture.
_ONLY_LLAMA = ("n_kv_heads", "ffn_mult", "ffn_factor", "rope_base", "norm_eps")


class _Gpt(msgspec.Struct):
    n_layers: Size
    n_heads: Size
    d_embd: Size
    max_seq_len: Size
    vocab_size: Size


class _Llama(_Gpt, kw_only=True):
    n_kv_heads: Size
    d_hid: Size | None = None  # of the MLP; else from the next two
    ffn_mult: Multiplier | None = None
    ffn_factor: Size | None = None


def is_config(raw: object) -> bool:
    """Return whether a JSON document is of this kind, by a field that no other kind has."""
    return isinstance(raw, dict) and "d_embd" in raw


def read_config(path: Path) -> ModelConfig:
    """Read the model that a file describes, named after the file. Raise ConfigError."""
    where = f"{path}: "
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}top level", one_line(raw), "an object")
    shapes = _llama(raw, where) if _architecture(raw, where) == "llama" else _gpt(raw, where)
    return ModelConfig(name=path.stem, source=str(path), **shapes)


def _architecture(raw: dict[str, object], where: str) -> str:
    name = raw.get("arch_name")
    if name is None:
        return "llama" if any(field in raw for field in _ONLY_LLAMA) else "gpt"
    if name not in _ARCHITECTURES:
        raise not_one_of(f"{where}arch_name", one_line(name), _ARCHITECTURES)
    return str(name)


def _gpt(raw: dict[str, object], where: str) -> dict[str, Any]:
    config = convert(raw, _Gpt, where)
    return _shared(config, where) | {
        "num_kv_heads": config.n_heads,
        "ffn_hidden_size": 4 * config.d_embd,
        "max_positions": config.max_seq_len,
        "activation": "gelu",
        "norm": "layernorm",
        "tied_embeddings": True,
        "linear_bias": True,
    }


def _llama(raw: dict[str, object], where: str) -> dict[str, Any]:
    config = convert(raw, _Llama, where)
    if config.n_heads % config.n_kv_heads:
        allowed = f"a divisor of n_heads={config.n_heads}"
        raise ConfigError(f"{where}n_kv_heads", config.n_kv_heads, allowed)
    return _shared(config, where) | {
        "num_kv_heads": config.n_kv_heads,
        "ffn_hidden_size": _ffn_width(config, where),
    }


def _shared(config: _Gpt, where: str) -> dict[str, Any]:
    if config.d_embd % config.n_heads:
        allowed = f"a multiple of n_heads={config.n_heads}"
        raise ConfigError(f"{where}d_embd", config.d_embd, allowed)
    return {
        "hidden_size": config.d_embd,
        "num_layers": config.n_layers,
        "num_heads": config.n_heads,
        "head_dim": config.d_embd // config.n_heads,
        "vocab_size": config.vocab_size,
        "seq_len": config.max_seq_len,
    }


def _ffn_width(config: _Llama, where: str) -> int:
    """Return 2/3 of 4 x d_embd, times ffn_mult, rounded up to a multiple of ffn_factor.

    Source: Llama 3's reference model, where these are ffn_dim_multiplier and multiple_of.
    """
    if config.d_hid is not None:
        return config.d_hid
    for name in ("ffn_mult", "ffn_factor"):
        if getattr(config, name) is None:
            raise ConfigError(f"{where}{name}", "missing", "it is a required field, or d_hid")
    assert config.ffn_mult is not None
    assert config.ffn_factor is not None
    width = int(config.ffn_mult * (8 * config.d_embd // 3))
    return -(-width // config.ffn_factor) * config.ffn_factor
