"""Families of which some layers carry a state from token to token, instead of attention.

Source: configuration_*.py and modeling_*.py of transformers 5.23; Nemotron-H's pattern:
hybrid_override_pattern of its config.
"""

from dataclasses import replace

from stepmark.model.layers import (
    DeltaConfig,
    Layer,
    MambaConfig,
    MoeConfig,
)
from stepmark.workloads.formats.huggingface.experts import qwen_experts, shared_gated
from stepmark.workloads.formats.huggingface.keys import Keys, cycle
from stepmark.workloads.formats.huggingface.shared_fields import (
    Fields,
    all_biases,
    all_experts,
    attention_bias,
    decoder,
    deepseek_routing,
    every,
    gated,
    multipliers,
    read_activation,
    read_mamba,
    read_types,
)


def _delta(keys: Keys, fields: Fields, value_heads: int) -> Fields:
    """Return attention with a gate in every n-th layer, and Gated DeltaNet in the others."""
    count = fields["num_layers"]
    types = read_types(keys, count)
    if types is None:
        step = keys.size("full_attention_interval", default=4)
        is_full = [not every(step)(index) for index in range(count)]
    else:
        keys.read.add("full_attention_interval")
        is_full = [kind == "full_attention" for kind in types]
    layers = [Layer(mixer="attention" if full else "delta", has_rope=full) for full in is_full]
    delta = DeltaConfig(
        num_key_heads=keys.size("linear_num_key_heads", default=16),
        num_value_heads=keys.size("linear_num_value_heads", default=value_heads),
        key_dim=keys.size("linear_key_head_dim", default=128),
        value_dim=keys.size("linear_value_head_dim", default=128),
        conv_width=keys.size("linear_conv_kernel_dim", default=4),
    )
    gate = "element" if keys.flag("attn_output_gate", True) else ""
    return (
        fields
        | attention_bias(keys)
        | {"qk_norm": True, "gate": gate, "delta": delta, "pattern": cycle(layers)}
    )


def qwen3_next(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=2, head_dim=256, rotary=0.25, ffn=5632)
    fields = _delta(keys, fields, 32)
    defaults = {"experts": 512, "top_k": 10, "width": 512}
    return qwen_experts(keys, fields, defaults, **shared_gated(keys, 512))


def qwen3_5(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=4, head_dim=256, rotary=0.25)
    return _delta(keys, fields, 32)


def qwen3_5_moe(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=2, head_dim=256, rotary=0.25, ffn=None)
    fields = _delta(keys, fields, 32) | {"ffn_hidden_size": 0}
    defaults = {"experts": 256, "top_k": 8, "width": 512}
    return qwen_experts(keys, fields, defaults, **shared_gated(keys, 512))


def granitemoehybrid(keys: Keys) -> Fields:
    fields = gated(keys, ffn=None) | attention_bias(keys) | multipliers(keys)
    count = fields["num_layers"]
    positions = keys.any_value("position_embedding_type", "nope")
    types = (
        read_types(keys, count, "layers_block_type", rule=f"mamba in all {count} layers")
        or ["mamba"] * count
    )
    is_mamba = [kind in ("mamba", "linear_attention") for kind in types]
    layers = [
        Layer(mixer="mamba" if mamba else "attention", has_rope=positions == "rope")
        for mamba in is_mamba
    ]
    width = keys.size("shared_intermediate_size", default=1024)
    experts = keys.count("num_local_experts", default=8)
    inner = keys.size("mamba_expand", default=2) * fields["hidden_size"]
    more: Fields = {"pattern": cycle(layers), "mamba": read_mamba(keys, inner, has_norm=True)}
    if not experts:
        return fields | more | {"ffn_hidden_size": width}
    moe = MoeConfig(
        num_experts=experts,
        top_k=keys.size("num_experts_per_tok", default=2),
        ffn_hidden_size=keys.size("intermediate_size"),
        num_shared_experts=1,
        shared_ffn_hidden_size=width,
    )
    return fields | more | {"moe": moe, "ffn_hidden_size": 0}


def bamba(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=8, rotary=0.5) | all_biases(keys)
    listed = keys.items("attn_layer_indices", rule="none (mamba in all layers)") or []
    layers = [
        Layer(mixer="attention" if index in listed else "mamba")
        for index in range(fields["num_layers"])
    ]
    inner = keys.size("mamba_expand", default=2) * fields["hidden_size"]
    mamba = read_mamba(keys, inner, has_norm=True)
    return fields | {"pattern": cycle(layers), "mamba": mamba}


def falcon_h1(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=8) | all_biases(keys)
    size = keys.size("mamba_d_ssm", default=1024)
    inner = size or keys.size("mamba_expand", default=2) * fields["hidden_size"]
    has_norm = keys.flag("mamba_rms_norm")
    mamba = read_mamba(keys, inner, has_norm=has_norm)
    mamba = replace(mamba, has_out_bias=keys.flag("projectors_bias"))
    return fields | {
        "pattern": (Layer(mixer="attention+mamba"),),
        "mamba": mamba,
        "embedding_multiplier": keys.number("embedding_multiplier", default=1),
        "logit_multiplier": keys.number("lm_head_multiplier", default=1),
    }


_NEMOTRON = {
    "M": Layer(mixer="mamba", ffn=""),
    "*": Layer(ffn="", has_rope=False),
    "-": Layer(mixer="", ffn="dense"),
    "E": Layer(mixer="", ffn="experts"),
}
_NEMOTRON_NAMES = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


def nemotron_h(keys: Keys) -> Fields:
    listed = keys.items("layers_block_type", "layer_types")
    pattern = keys.text("hybrid_override_pattern", default="")
    letters = pattern or [_NEMOTRON_NAMES.get(str(kind), "?") for kind in listed or ()]
    for letter in letters:
        if letter not in _NEMOTRON:
            key = "hybrid_override_pattern" if pattern else "layers_block_type"
            raise keys.error(key, "of M (Mamba-2), * (attention), - (MLP), E (experts)")
    if not letters:
        raise keys.error("hybrid_override_pattern", "given, or layers_block_type")
    head_dim = keys.size("head_dim", "attention_head_dim", default=128)
    sizes = {"num_hidden_layers": len(letters), "head_dim": head_dim}
    keys = replace(keys, raw={**keys.raw, **sizes})
    fields = decoder(keys, kv_heads=8, ffn=21504)
    mamba = MambaConfig(
        num_heads=keys.size("mamba_num_heads", default=128),
        head_dim=keys.size("mamba_head_dim", default=64),
        num_groups=keys.size("n_groups", "mamba_n_groups", default=8),
        state_dim=keys.size("ssm_state_size", default=128),
        conv_width=keys.size("conv_kernel", "mamba_d_conv", default=4),
        chunk=keys.size("chunk_size", "mamba_chunk_size", default=128),
        conv_bias=keys.flag("use_conv_bias", True),
        has_bias=keys.flag("use_bias"),
        has_out_bias=keys.flag("use_bias"),
    )
    more: Fields = {
        "activation": read_activation(keys, "mlp_hidden_act", gated=False, default="relu2"),
        "mamba": mamba,
        "pattern": cycle(_NEMOTRON[letter] for letter in letters),
        "biases": ("mlp",) if keys.flag("mlp_bias") else (),
    }
    if "E" in letters:
        shared = keys.count("n_shared_experts", default=1)
        width = keys.size("moe_shared_expert_intermediate_size", default=7688)
        more["moe"] = MoeConfig(
            num_experts=keys.size("n_routed_experts", "num_local_experts", default=8),
            top_k=keys.size("num_experts_per_tok", default=2),
            ffn_hidden_size=keys.size("moe_intermediate_size", default=7688),
            num_shared_experts=shared,
            shared_ffn_hidden_size=width if shared else 0,
            latent_size=keys.size("moe_latent_size", default=None) or 0,
            **deepseek_routing(keys, sigmoid=True),
        )
    keys.flag("attention_bias")
    return fields | more | {"tied_embeddings": False}  # whatever the file says


_CONV_TYPES = ("full_attention", "conv")


def _short_convolutions(keys: Keys, fields: Fields, types: list[str]) -> Fields:
    """Return LFM2's layers: attention with normed queries and keys, or a short convolution."""
    layers = (
        Layer() if kind == "full_attention" else Layer(mixer="conv", has_rope=False)
        for kind in types
    )
    keys.read |= {"conv_dim", "conv_dim_out", "num_heads", "block_dim"}  # not read there, too
    return fields | {
        "tied_embeddings": keys.flag("tie_embedding", fields["tied_embeddings"]),
        "conv_width": keys.size("conv_L_cache", default=3),
        "conv_bias": keys.flag("conv_bias"),
        "activation": "swiglu",
        "qk_norm": True,
        "pattern": cycle(layers),
    }


def lfm2(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, tied=True, ffn=12288)
    count = fields["num_layers"]
    width = keys.size("block_ff_dim", default=fields["ffn_hidden_size"])
    if keys.flag("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        multiplier = keys.number("block_ffn_dim_multiplier", default=1)
        if keys.raw.get("block_ffn_dim_multiplier", 1) is not None:
            multiple = keys.size("block_multiple_of", default=256)
            width = multiple * -(-int(multiplier * width) // multiple)
    types = keys.entries("layer_types", count=count, allowed=_CONV_TYPES)
    listed = keys.items("full_attn_idxs", rule=None if types else "all layers")
    full = range(count) if listed is None else listed
    if types is None:
        types = ["full_attention" if index in full else "conv" for index in range(count)]
    return _short_convolutions(keys, fields | {"ffn_hidden_size": width}, types)


def lfm2_moe(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, tied=True, ffn=7168)
    count = fields["num_layers"]
    types = keys.entries("layer_types", count=count, allowed=_CONV_TYPES)
    if types is None:
        raise keys.error("layer_types", "given")
    moe = MoeConfig(
        num_experts=keys.size("num_experts", default=32),
        top_k=keys.size("num_experts_per_tok", default=4),
        ffn_hidden_size=keys.size("moe_intermediate_size", default=1792),
        first_dense_layers=keys.count("num_dense_layers", default=2),
        router_bias=keys.flag("use_expert_bias", True),
        scoring="sigmoid",
    )
    return _short_convolutions(keys, fields, types) | {"moe": moe}


def minimax(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=8)
    count = fields["num_layers"]
    numbers = keys.entries("attn_type_list", count=count, allowed=(0, 1))
    rule = "full_attention in every second layer" if numbers is None else None
    types = read_types(keys, count, rule=rule)
    is_full = [bool(index % 2) for index in range(count)]
    if types is not None:
        is_full = [kind == "full_attention" for kind in types]
    elif numbers is not None:
        is_full = [value == 1 for value in numbers]
    layers = [
        Layer(mixer="attention" if full else "lightning", has_rope=full) for full in is_full
    ]
    return all_experts(
        fields | {"pattern": cycle(layers)},
        num_experts=keys.size("num_local_experts", default=8),
        top_k=keys.size("num_experts_per_tok", default=2),
    )
