"""What the step does not run of a model, and what a model has that some layouts do not divide.

A model may have every field that it can state. Each is here: the step runs all of its values,
or those beside its default are a part with a name.
"""

from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any

from stepmark.model.layers import DeltaConfig, Layer, MambaConfig, MlaConfig, MoeConfig
from stepmark.model.model import ModelConfig

# Fields whose values all layouts run: widths, counts, names, and what holds other fields.
RUN = frozenset(
    {
        *("name", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
        *("ffn_hidden_size", "vocab_size", "seq_len", "tied_embeddings", "qkv_bias"),
        *("attention_bias", "linear_bias", "qk_norm", "max_positions", "moe", "mla", "pattern"),
        *("delta", "mamba", "source", "published_params", "published_active_params"),
        *("aliases", "unmodelled", "max_context"),
        *("layer.ffn_hidden_size",),
        *("moe.num_experts", "moe.top_k", "moe.ffn_hidden_size", "moe.num_shared_experts"),
        *("moe.shared_ffn_hidden_size", "moe.first_dense_layers", "moe.router_bias"),
        *("mla.q_lora_rank", "mla.kv_lora_rank", "mla.qk_nope_head_dim"),
        *("mla.qk_rope_head_dim", "mla.v_head_dim"),
        # Widths of mixers that layer.mixer names.
        *(f"delta.{each.name}" for each in fields(DeltaConfig)),
        *(f"mamba.{each.name}" for each in fields(MambaConfig)),
    }
)
# Field -> what a model has with another value than the default or one of _PLAIN.
PARTS = {
    "activation": "an activation other than SwiGLU and GELU",
    "norm": "layer norms without bias or weight",
    "norm_placement": "norms in other places than before each part",
    "is_parallel": "parallel attention and FFN",
    "biases": "biases of single layers",
    "qk_norm_kind": "norms over all heads or without weights, or layer norms of heads",
    "rotary_dim": "partly rotated heads",
    "gate": "gated attention",
    "shares_kv": "values that are the keys",
    "value_head_dim": "values of another width than keys",
    "v_norm": "normed values",
    "value_multiplier": "scaled values",
    "has_sinks": "attention sinks",
    "softcap": "capped attention scores",
    "logit_softcap": "capped logits",
    "attention_scale": "an attention scale of its own",
    "embedding_multiplier": "scaled embeddings",
    "conv_width": "short convolutions",
    "conv_bias": "biases of short convolutions",
    "embedding_norm": "a norm of embeddings",
    "residual_multiplier": "scaled residuals",
    "per_layer_width": "embeddings per layer",
    "layer_scale": "scaled layers",
    "logit_multiplier": "scaled logits",
    "num_mtp_layers": "multi-token prediction",
    "packing": "packed sequences",
    "layer.mixer": "layers that carry a state, or have no attention",
    "layer.ffn": "layers without FFN, or dense ones between those with experts",
    "layer.window": "sliding windows",
    "layer.chunk": "attention in chunks",
    "layer.has_rope": "layers without rotary positions",
    "layer.has_indexer": "layers that share an indexer's keys",
    "layer.has_sinks": "attention sinks in some layers alone",
    "layer.has_qk_norm": "norms of queries and keys in some layers alone",
    "layer.has_kv": "layers that share keys and values",
    "layer.shares_kv": "values that are the keys",
    "layer.num_heads": "layers with another number of heads",
    "layer.num_kv_heads": "layers with another number of KV heads",
    "layer.head_dim": "layers with another width of heads",
    "layer.rotary_dim": "layers with another rotated width",
    "moe.scoring": "a router with sigmoids",
    "moe.num_groups": "groups of experts",
    "moe.top_groups": "a choice of groups of experts",
    "moe.shared_gate": "gated shared experts",
    "moe.latent_size": "latent experts",
    "moe.has_norms": "experts with norms of their own",
    "mla.indexer": "DeepSeek's indexer",
}
_PLAIN: dict[str, Collection[object]] = {
    "activation": ("gelu",),
    "norm": ("layernorm",),
}
# Parts that tensor parallelism does not divide.
UNDIVIDED = frozenset(
    {
        *("gate", "shares_kv", "has_sinks", "embedding_norm", "qk_norm_kind"),
        *("layer.mixer", "layer.ffn", "layer.num_heads", "layer.num_kv_heads"),
        *("layer.head_dim", "layer.shares_kv", "norm", "num_mtp_layers"),
    }
)
# Parts that context parallelism does not compute; windows, chunks and states are refused by
# every kind of step (model/parallel.py).
OF_ALL_KEYS = frozenset({"has_sinks", "softcap", "num_mtp_layers"})
# Parts that the step does not have.
LACKING = frozenset(
    {
        *("mla.indexer", "layer.has_indexer", "v_norm", "layer_scale", "moe.has_norms"),
        *("per_layer_width", "layer.has_kv", "value_head_dim", "value_multiplier"),
        *("conv_width", "conv_bias", "packing"),
    }
)


def parts(model: ModelConfig, among: Collection[str]) -> list[str]:
    """Return in words what the model has of these fields."""
    configs: tuple[tuple[str, Any], ...] = (
        ("", model),
        *(("layer.", layer) for layer in model.pattern),
        ("moe.", model.moe),
        ("mla.", model.mla),
    )
    words = (
        PARTS[name]
        for prefix, config in configs
        if config is not None
        for name in _other_fields(prefix, config)
        if name in among
    )
    return list(dict.fromkeys(words))


def _other_fields(prefix: str, config: Any) -> Iterator[str]:
    """Yield the fields of PARTS that the config has."""
    for each in fields(config):
        name = prefix + each.name
        value = getattr(config, each.name)
        if name in PARTS and value != each.default and value not in _PLAIN.get(name, ()):
            yield name


CONFIGS = {
    "": ModelConfig,
    "layer.": Layer,
    "moe.": MoeConfig,
    "mla.": MlaConfig,
    "delta.": DeltaConfig,
    "mamba.": MambaConfig,
}
