"""Families whose layers with a window have other heads than the others: Gemma 4 and its like.

Source: configuration_*.py and modeling_*.py of transformers 5.23, and keys of the Hub's files
that these read.
"""

from dataclasses import replace

from stepmark.model.layers import Layer, MoeConfig
from stepmark.workloads.formats.huggingface.keys import Keys, cycle
from stepmark.workloads.formats.huggingface.shared_fields import (
    Fields,
    attention_bias,
    decoder,
    deepseek_routing,
    every,
    gated,
    placed_experts,
    read_activation,
    read_types,
    read_windows,
    require,
    rotary_dim,
    with_defaults,
)


def gemma4(keys: Keys) -> Fields:
    """Return the text decoder of Gemma 4. "vision" is about tokens of images alone."""
    if keys.any_value("use_bidirectional_attention") not in (None, "vision"):
        raise keys.error("use_bidirectional_attention", "vision or null: a causal decoder")
    activation = read_activation(keys, "hidden_activation", default="gelu_pytorch_tanh")
    fields = decoder(keys, head_dim=256, tied=True, kv_heads=4, vocab=262_144)
    windows = read_windows(keys, fields["num_layers"], every(6), 512)
    windows[-1] = 0  # whatever the file says
    shares_kv = keys.flag("attention_k_eq_v")
    full_kv_heads = keys.size("num_global_key_value_heads", default=None)
    full = Layer(
        head_dim=keys.size("global_head_dim", default=512),
        num_kv_heads=(full_kv_heads or 0) if shares_kv else 0,
        shares_kv=shares_kv,
    )
    layers = [Layer(window=size) if size else full for size in windows]
    layers = _with_shared_kv(keys, layers, fields["ffn_hidden_size"])
    per_layer = keys.count("hidden_size_per_layer_input", default=256, null=0)
    rows = keys.size("vocab_size_per_layer_input", default=262_144)
    if per_layer and rows != fields["vocab_size"]:
        raise keys.error("vocab_size_per_layer_input", f"vocab_size ({fields['vocab_size']})")
    # Rotary positions of a quarter of a full layer's head cover it all, most by no angle.
    fields |= attention_bias(keys) | {
        "activation": activation,
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
        "norm_placement": "both",
        "qk_norm": True,
        "v_norm": True,
        "attention_scale": 1.0,
        "logit_softcap": keys.number("final_logit_softcapping", default=0),
        "layer_scale": True,
        "rotary_dim": 0,
        "per_layer_width": per_layer,
        "pattern": cycle(layers),
    }
    if not keys.flag("enable_moe_block"):
        return fields
    moe = MoeConfig(
        num_experts=keys.size("num_experts"),
        top_k=keys.size("top_k_experts"),
        ffn_hidden_size=keys.size("moe_intermediate_size", "expert_intermediate_size"),
        num_shared_experts=1,
        shared_ffn_hidden_size=fields["ffn_hidden_size"],
        has_norms=True,
    )
    return fields | {"moe": moe, "ffn_hidden_size": 0}


def _with_shared_kv(keys: Keys, layers: list[Layer], width: int) -> list[Layer]:
    """Return layers of which the last ones have the keys and values of earlier ones.

    width: of the FFN, which may be twice as wide there.
    """
    first = len(layers) - keys.count("num_kv_shared_layers", default=0)
    width = 2 * width if keys.flag("use_double_wide_mlp") else 0
    earlier = {layer.window for layer in layers[: max(0, first)]}
    if not {layer.window for layer in layers[first:]} <= earlier:
        raise keys.error("num_kv_shared_layers", "fewer: an earlier layer of each type is left")
    return [
        replace(layer, has_kv=False, ffn_hidden_size=width) if index >= first else layer
        for index, layer in enumerate(layers)
    ]


def step3p5(keys: Keys) -> Fields:
    """Return the text decoder of Step-3.5-Flash and Step-3.7-Flash, by old and new keys.

    transformers ties tables by a key outside of the decoder's, the Hub's code by one inside.
    """
    require(keys, use_head_wise_attn_gate=True, use_bidirectional_attention=False)
    count = keys.size("num_hidden_layers")
    keys = _without_mtp(keys, count)
    kv_heads = keys.size("num_key_value_heads", "num_attention_groups", default=8)
    keys = replace(keys, raw={**keys.raw, "num_key_value_heads": kv_heads})
    keys.read.add("partial_rotary_factors")
    fields = gated(keys, head_dim=128, ffn=11264, vocab=128_815) | attention_bias(keys)
    windows = read_windows(keys, count, lambda index: False, None)
    types = read_types(keys, count) or ["full_attention"] * count
    if fields["tied_embeddings"]:
        raise keys.error("tie_word_embeddings", "false")
    if "sliding_attention" in types and not any(windows):
        raise keys.error(
            "sliding_window", "a number of keys: some layers are sliding_attention"
        )
    sliding_heads = _sliding_heads(keys, fields)
    layers = [
        Layer(
            window=window,
            num_heads=sliding_heads if window else 0,
            rotary_dim=rotary,
        )
        for window, rotary in zip(windows, _rotated_widths(keys, fields, types), strict=True)
    ]
    width = keys.size("share_expert_dim", "share_expert_dims", default=1280)
    moe = MoeConfig(
        num_experts=keys.size(
            *("n_routed_experts", "num_local_experts", "moe_num_experts"), default=288
        ),
        top_k=keys.size("num_experts_per_tok", "moe_top_k", default=8),
        ffn_hidden_size=keys.size("moe_intermediate_size", default=1280),
        num_shared_experts=1,
        shared_ffn_hidden_size=width,
        router_bias=True,
        scoring="sigmoid",
    )
    keys.read |= {"use_moe_router_bias", "moe_router_activation"}
    fields |= {
        "pattern": cycle(layers),
        "qk_norm": True,
        "gate": "head",
        "attention_scale": keys.number("query_pre_attn_scalar", default=fields["head_dim"])
        ** -0.5,
        "biases": ("mlp",) if keys.flag("mlp_bias") else (),
    }
    return placed_experts(fields, moe, _dense_layers(keys, count, num_first=3))


def _without_mtp(keys: Keys, count: int) -> Keys:
    """Return keys whose lists have no entries of multi-token prediction, which come last."""
    names = ("layer_types", "mlp_layer_types", "partial_rotary_factors")
    longer = count + keys.count("num_nextn_predict_layers", "num_mtp_layers", default=0)
    keys.read -= {"num_nextn_predict_layers", "num_mtp_layers"}  # a note says that they lack
    lists = {name: value for name in names if isinstance(value := keys.raw.get(name), list)}
    short = {name: value[:count] for name, value in lists.items() if len(value) == longer}
    return replace(keys, raw={**keys.raw, **short})


def _sliding_heads(keys: Keys, fields: Fields) -> int:
    """Return the number of heads of layers with a window."""
    other = keys.part("attention_other_setting")
    default = fields["num_heads"]
    if other is not None:
        for name, ours in (("num_attention_groups", "num_kv_heads"), ("head_dim", "head_dim")):
            if other.size(name, default=fields[ours]) != fields[ours]:
                raise other.error(name, f"{fields[ours]}, as in other layers")
        default = other.size("num_attention_heads", default=default)
    return int(keys.size("num_sliding_attention_heads", default=default, null=default))


def _rotated_widths(
    keys: Keys, fields: Fields, types: list[str], default: float = 1.0
) -> list[int]:
    """Return the rotated width of each layer's heads; 0: all of it. default: a share."""
    width = fields["head_dim"]
    shares = keys.entries("partial_rotary_factors", count=len(types))
    if shares is None:
        by_type = keys.any_value("rope_parameters")
        own = by_type if isinstance(by_type, dict) else {}
        if not own:
            keys.absent["partial_rotary_factors"] = default
        parts = {kind: own[kind] for kind in types if isinstance(own.get(kind), dict)}
        shares = [parts.get(kind, {}).get("partial_rotary_factor", default) for kind in types]
    of_layer = (
        rotary_dim(Keys({"partial_rotary_factor": share}, keys.where), width)
        for share in shares
    )
    return list(of_layer)


def _dense_layers(keys: Keys, count: int, num_first: int) -> list[bool]:
    """Return whether each layer has a dense MLP: the first ones, if a file does not say."""
    types = keys.entries("mlp_layer_types", count=count, allowed=("dense", "sparse"))
    if types is not None:
        return [kind == "dense" for kind in types]
    ones = keys.entries("moe_layer_freq", count=count, allowed=(0, 1))
    if ones is not None:
        return [not one for one in ones]
    listed = keys.any_value("moe_layers_enum")
    if listed is None:
        keys.absent["mlp_layer_types"] = f"{num_first} dense layers, then experts"
        return [index < num_first for index in range(count)]
    numbers = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(numbers, list) or not all(
        str(each).strip().isdigit() for each in numbers
    ):
        raise keys.error("moe_layers_enum", "numbers of layers, with commas")
    with_experts = {int(each) for each in numbers}
    return [index not in with_experts for index in range(count)]


def mimo_v2_flash(keys: Keys) -> Fields:
    """Return MiMo-V2-Flash, whose layers with a window have sinks, and twice the KV heads."""
    count = keys.size("num_hidden_layers", default=48)
    defaults = {"hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64}
    keys = with_defaults(keys, **defaults)
    # transformers has no chunks: layers with a window have that alone.
    keys.read |= {"partial_rotary_factor", "partial_rotary_factors", "attention_chunk_size"}
    # transformers does not read the Hub's share of rotary positions, which is its default.
    whole = replace(keys, raw={**keys.raw, "partial_rotary_factor": 1.0})
    fields = gated(whole, head_dim=192, kv_heads=4, ffn=16384, vocab=152_576)
    v_width = keys.size("v_head_dim", default=128)
    _check_sliding_heads(keys, fields, v_width)
    types = read_types(keys, count) or _types_of_numbers(keys, count)
    previous = keys.size("sliding_window_size", default=None)
    window = keys.size("sliding_window", default=129) if previous is None else previous + 1
    keys.read.add("sliding_window")
    rotary, *others = dict.fromkeys(_rotated_widths(keys, fields, types, default=0.334))
    if others:
        raise keys.error("rope_parameters", "of one partial_rotary_factor")
    if keys.count("n_shared_experts", default=None):
        raise keys.error("n_shared_experts", "null: transformers has none")
    moe = MoeConfig(
        num_experts=keys.size("n_routed_experts", "num_local_experts", default=256),
        top_k=keys.size("num_experts_per_tok", default=8),
        ffn_hidden_size=keys.size("moe_intermediate_size", default=2048),
        **deepseek_routing(keys, sigmoid=True),
    )
    full = Layer(has_sinks=False)
    sliding = Layer(window=window, num_kv_heads=2 * fields["num_kv_heads"])
    keys = with_defaults(keys, attention_value_scale=0.707)
    fields |= {
        "qkv_bias": keys.flag("attention_bias"),
        "value_head_dim": 0 if v_width == fields["head_dim"] else v_width,
        "value_multiplier": keys.number("attention_value_scale", default=1),
        "has_sinks": True,
        "rotary_dim": rotary,
        "pattern": cycle(sliding if kind == "sliding_attention" else full for kind in types),
    }
    return placed_experts(fields, moe, _dense_layers(keys, count, num_first=1))


def _check_sliding_heads(keys: Keys, fields: Fields, v_width: int) -> None:
    """Raise ConfigError for keys of layers with a window that transformers does not read."""
    for name, must in (
        ("swa_num_attention_heads", fields["num_heads"]),
        ("swa_num_key_value_heads", 2 * fields["num_kv_heads"]),
        ("swa_head_dim", fields["head_dim"]),
        ("swa_v_head_dim", v_width),
    ):
        if keys.size(name, default=must) != must:
            raise keys.error(name, str(must))
    require(keys, add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False)


def _types_of_numbers(keys: Keys, count: int) -> list[str]:
    """Return types of layers by the Hub's list of ones, which have a window, and zeros."""
    numbers = keys.entries(
        "hybrid_layer_pattern", count=count, allowed=(0, 1), rule="5 of 6 with a window"
    )
    names = ["full_attention", "sliding_attention"]
    if numbers is None:
        is_full = [index == 0 or (index + 1) % 6 == 0 for index in range(count)]
        return [names[0] if full else names[1] for full in is_full]
    return [names[int(number)] for number in numbers]
