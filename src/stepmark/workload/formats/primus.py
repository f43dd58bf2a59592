"""Primus' benchmark inputs: `model_configs.json` and `attention_shapes.json`.

Source: AMD-AGI/Primus, benchmark/kernel/{gemm,attention}.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepmark.core.errors import ConfigError
from stepmark.core.model import MlaConfig, ModelConfig, MoeConfig
from stepmark.workload.formats.huggingface import in_words_of_file
from stepmark.workload.formats.source_file import convert, one_line, read_json

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
    "seq_len": "seqlen",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "moe.top_k": "num_experts_per_tok",
    "num_experts": "n_routed_experts",
}

_ONLY_DEEPSEEK = frozenset(_DeepSeek.__struct_fields__) - frozenset(_Model.__struct_fields__)


def read_model_configs(path: Path) -> list[ModelConfig]:
    """The models of a model_configs.json. Raises ConfigError.

    The file has no depth: every model has num_layers=1, an MoE layer for the DeepSeek kind.
    The shared experts are as wide as they are, n_shared x moe_intermediate_size; Primus
    itself benchmarks them with the dense intermediate_size.
    """
    return [_read_model(entry, where) for where, entry in _entries(path)]


def read_attention_shapes(path: Path) -> list[AttentionShape]:
    """The shapes of an attention_shapes.json. Raises ConfigError."""
    return [_read_shape(entry, where) for where, entry in _entries(path)]


def _entries(path: Path) -> list[tuple[str, object]]:
    raw = read_json(path)
    if not isinstance(raw, list) or not raw:
        raise ConfigError(f"{path}: top level", one_line(raw), "an array of one object or more")
    return [(f"{path}: [{index}].", entry) for index, entry in enumerate(raw)]


def _read_model(entry: object, where: str) -> ModelConfig:
    if not isinstance(entry, dict):
        raise ConfigError(where.rstrip("."), one_line(entry), "an object")
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
            **_deepseek(raw) if isinstance(raw, _DeepSeek) else _dense(raw),
        )
    except ConfigError as error:
        if error.field.startswith(where):
            raise
        raise in_words_of_file(error, entry, where, _NAMES) from None


def _dense(raw: _Model) -> dict[str, Any]:
    assert isinstance(raw, _Dense)
    return {"num_kv_heads": raw.num_key_value_heads, "head_dim": raw.head_dim}


def _deepseek(raw: _DeepSeek) -> dict[str, Any]:
    return {
        "num_kv_heads": raw.num_attention_heads,
        "head_dim": raw.qk_nope_head_dim + raw.qk_rope_head_dim,
        "moe": MoeConfig(
            num_experts=raw.n_routed_experts,
            top_k=raw.num_experts_per_tok,
            ffn_hidden_size=raw.moe_intermediate_size,
            num_shared_experts=raw.n_shared_experts,
            shared_ffn_hidden_size=raw.n_shared_experts * raw.moe_intermediate_size,
        ),
        "mla": MlaConfig(
            q_lora_rank=raw.q_lora_rank,
            kv_lora_rank=raw.kv_lora_rank,
            qk_nope_head_dim=raw.qk_nope_head_dim,
            qk_rope_head_dim=raw.qk_rope_head_dim,
            v_head_dim=raw.v_head_dim,
        ),
    }


def _read_shape(entry: object, where: str) -> AttentionShape:
    if not isinstance(entry, dict):
        raise ConfigError(where.rstrip("."), one_line(entry), "an object")
    raw = convert(entry, AttentionShape, where)
    if raw.num_head_q % raw.num_head_kv:
        allowed = f"a multiple of num_head_kv={raw.num_head_kv}"
        raise ConfigError(f"{where}num_head_q", raw.num_head_q, allowed)
    if raw.causal and raw.seqlen_q != raw.seqlen_kv:
        allowed = f"seqlen_q={raw.seqlen_q} when causal"
        raise ConfigError(f"{where}seqlen_kv", raw.seqlen_kv, allowed)
    return raw
