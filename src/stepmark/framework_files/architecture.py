"""The widths of a model as options of ours, and back to a name."""

from collections.abc import Iterator
from dataclasses import fields

from stepmark.framework_files.table import Options
from stepmark.ground.errors import ConfigError
from stepmark.model.model import LATER, ModelConfig


def widths_of(model: ModelConfig) -> Options:
    """Return the options that build a model. Raises ConfigError for one they cannot."""
    if model.attention_bias:
        allowed = "left out: files of frameworks have biases of q, k and v alone, or all"
        raise ConfigError("attention-bias", "true", allowed)
    if unsaid := [*_unsaid_fields(model)]:
        allowed = f"one whose {', '.join(unsaid)} a file of a framework can say"
        raise ConfigError("model", model.name, allowed)
    widths: dict[str, object] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size or (model.moe or model).ffn_hidden_size,
        "num_heads": model.num_heads,
        "vocab_size": model.vocab_size,
        "max_positions": model.max_positions,
        "swiglu": model.activation == "swiglu",
        "norm": model.norm,
        "linear_bias": model.linear_bias,
        "qkv_bias": model.qkv_bias,
        "qk_norm": model.qk_norm,
        "untied": not model.tied_embeddings,
    }
    if mla := model.mla:
        widths |= {
            field.name: getattr(mla, field.name) or 0
            for field in fields(mla)
            if field.name != "indexer"
        }
    else:
        widths |= {"num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    if moe := model.moe:
        widths |= {
            "num_experts": moe.num_experts,
            "top_k": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn_hidden_size,
            "dense_layers": moe.first_dense_layers,
            "router_bias": moe.router_bias,
        }
        if moe.num_groups > 1:
            widths |= {"expert_groups": moe.num_groups, "top_groups": moe.top_groups}
        if moe.num_shared_experts:
            widths["shared_ffn_hidden_size"] = moe.shared_ffn_hidden_size
    if model.num_mtp_layers:
        widths["num_mtp_layers"] = model.num_mtp_layers
    return {name: str(value) for name, value in widths.items()}


def _unsaid_fields(model: ModelConfig) -> Iterator[str]:
    """Yield fields with an effect that the options below do not have."""
    for part in (model, model.moe, model.mla):
        for field in fields(part) if part is not None else ():
            is_later = field.name in LATER and field.name not in (*_ROUTING, "num_mtp_layers")
            if is_later and getattr(part, field.name) != field.default:
                yield field.name
    if model.activation not in ("swiglu", "gelu"):
        yield "activation"
    if model.norm not in ("rmsnorm", "layernorm"):
        yield "norm"


_ROUTING = ("scoring", "num_groups", "top_groups")  # which change no shape


NAMES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads"),
    *("head_dim", "vocab_size", "max_positions", "swiglu", "norm", "linear_bias"),
    *("qkv_bias", "qk_norm", "untied", "num_experts", "top_k", "moe_ffn_hidden_size"),
    *("dense_layers", "router_bias", "shared_ffn_hidden_size", "q_lora_rank"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("num_mtp_layers", "expert_groups", "top_groups"),
)
