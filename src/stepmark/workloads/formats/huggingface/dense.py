"""Families of dense decoders, from Llama on.

Source: configuration_*.py and modeling_*.py of transformers 5.23.
"""

from typing import Any

from stepmark.model.layers import Layer
from stepmark.workloads.formats.huggingface.keys import Keys, cycle
from stepmark.workloads.formats.huggingface.shared_fields import (
    Fields,
    all_biases,
    always,
    attention_bias,
    decoder,
    every,
    gated,
    head_norms,
    multipliers,
    read_activation,
    read_ropes,
    read_types,
    read_windows,
    windowed,
    with_defaults,
)


def llama(keys: Keys, **defaults: Any) -> Fields:
    """Return a dense model; also of Arcee, whose MLP is not gated."""
    return gated(keys, **defaults) | all_biases(keys)


def arcee(keys: Keys) -> Fields:
    activation = read_activation(keys, gated=False, default="relu2")
    return decoder(keys) | all_biases(keys) | {"activation": activation}


def apertus(keys: Keys) -> Fields:
    activation = read_activation(keys, gated=False, default="xielu")
    fields = decoder(keys, ffn=14336, vocab=131_072) | attention_bias(keys)
    return fields | {"activation": activation, "qk_norm": True}


def mistral(keys: Keys, window: int | None = 4096) -> Fields:
    return windowed(keys, gated(keys, kv_heads=8), always, window)


def qwen_windows(keys: Keys, fields: Fields) -> Fields:
    """Return layers with a window from max_window_layers on, where one is used."""
    if not keys.flag("use_sliding_window"):
        read_types(keys, fields["num_layers"])
        if not keys.raw.get("sliding_window"):
            keys.absent.pop("use_sliding_window", None)  # which has nothing to switch off
        return fields
    first = keys.count("max_window_layers", default=28)
    return windowed(keys, fields, lambda index: index >= first, 4096)


def qwen2(keys: Keys) -> Fields:
    return qwen_windows(keys, gated(keys, kv_heads=32) | {"qkv_bias": True})


def qwen3(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=32, head_dim=128) | attention_bias(keys) | {"qk_norm": True}
    return qwen_windows(keys, fields)


def glm(keys: Keys, *, both: bool = False) -> Fields:
    """Return GLM-4, with the norms of GLM-4-0414 before and after."""
    fields = gated(keys, kv_heads=2, head_dim=128, rotary=0.5)
    bias = keys.flag("attention_bias", not both)
    return fields | {"qkv_bias": bias, "norm_placement": "both" if both else "pre"}


def gemma(keys: Keys, *names: str, **defaults: Any) -> Fields:
    """Return the fields of all Gemmas. names: of the activation; none: the first Gemma's."""
    names = names or ("hidden_act", "hidden_activation")
    activation = read_activation(keys, *names, default="gelu_pytorch_tanh")
    fields = decoder(keys, head_dim=256, tied=True, **defaults) | attention_bias(keys)
    return fields | {
        "activation": activation,
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
    }


def _gemma_heads(keys: Keys, fields: Fields) -> Fields:
    scalar = keys.number("query_pre_attn_scalar", default=256)
    return fields | {
        "norm_placement": "both",
        "attention_scale": scalar**-0.5,
        "softcap": keys.number("attn_logit_softcapping", default=0),
        "logit_softcap": keys.number("final_logit_softcapping", default=0),
    }


def gemma2(keys: Keys) -> Fields:
    keys = with_defaults(keys, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    fields = gemma(keys, "hidden_activation", kv_heads=4)
    return _gemma_heads(keys, windowed(keys, fields, lambda index: index % 2 == 0, 4096))


def vaultgemma(keys: Keys) -> Fields:
    """Return VaultGemma: Gemma 2 without norms after attention and MLP."""
    return gemma2(keys) | {"norm_placement": "pre"}


def gemma3(keys: Keys) -> Fields:
    fields = gemma(keys, "hidden_activation", kv_heads=4, vocab=262_208) | {"qk_norm": True}
    step = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _gemma_heads(keys, windowed(keys, fields, every(step), 4096))


def olmo(keys: Keys) -> Fields:
    return gated(keys) | attention_bias(keys) | {"norm": "layernorm_no_weight"}


def olmo2(keys: Keys) -> Fields:
    normed = {"norm_placement": "post", "qk_norm": True, "qk_norm_kind": "all"}
    return gated(keys) | attention_bias(keys) | normed


def olmo3(keys: Keys) -> Fields:
    return windowed(keys, olmo2(keys), every(4), 4096)


def phi3(keys: Keys) -> Fields:
    return windowed(keys, gated(keys), always, None)


def hyperclovax(keys: Keys) -> Fields:
    placement = "both" if keys.flag("use_post_norm") else "pre"
    return granite(keys) | {"norm_placement": placement}


def cwm(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=8, head_dim=128) | all_biases(keys)
    step = keys.size("window_pattern", default=4)
    return windowed(keys, fields, lambda index: index % step > 0, 8192)


def granite(keys: Keys) -> Fields:
    return gated(keys) | all_biases(keys) | multipliers(keys)


def nemotron(keys: Keys) -> Fields:
    return (
        decoder(keys, rotary=0.5)
        | all_biases(keys)
        | {
            "activation": read_activation(keys, gated=False, default="relu2"),
            "norm": "layernorm",
        }
    )


def seed_oss(keys: Keys) -> Fields:
    biases = ["out"] if keys.flag("attention_out_bias") else []
    biases += ["mlp"] if keys.flag("mlp_bias") else []
    fields = gated(keys, kv_heads=8, head_dim=128)
    return fields | {"qkv_bias": keys.flag("attention_bias", True), "biases": tuple(biases)}


def smollm3(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=4, tied=True) | all_biases(keys)
    count = fields["num_layers"]
    ropes = read_ropes(keys, count, keys.size("no_rope_layer_interval", default=4))
    windows = [0] * count
    if keys.flag("use_sliding_window"):
        windows = read_windows(keys, count, lambda index: not ropes[index], None)
    layers = (
        Layer(window=size, has_rope=rope) for size, rope in zip(windows, ropes, strict=True)
    )
    return fields | {"pattern": cycle(layers)}


def starcoder2(keys: Keys) -> Fields:
    default = "gelu_pytorch_tanh"
    fields = decoder(keys, kv_heads=2, tied=True) | {
        "activation": read_activation(keys, gated=False, default=default),
        "norm": "layernorm",
        "linear_bias": keys.flag("use_bias", True),
    }
    return windowed(keys, fields, always, None)


def ernie(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=2, head_dim=128, tied=True)
    return fields | {"linear_bias": keys.flag("use_bias")}


def cohere(keys: Keys) -> Fields:
    return (
        head_norms(keys, "use_qk_norm", "layernorm_each")
        | gated(keys, tied=True)
        | attention_bias(keys)
        | {
            "norm": "layernorm_no_bias",
            "norm_placement": "shared",
            "is_parallel": True,
            "logit_multiplier": keys.number("logit_scale", default=0.0625),
        }
    )


def cohere2(keys: Keys) -> Fields:
    fields = cohere(keys)
    step = keys.size("sliding_window_pattern", default=4)
    windows = read_windows(keys, fields["num_layers"], every(step), 4096)
    layers = (Layer(window=size, has_rope=size > 0) for size in windows)
    return fields | {"pattern": cycle(layers)}


def stablelm(keys: Keys) -> Fields:
    is_parallel = keys.flag("use_parallel_residual")
    normed = head_norms(keys, "qk_layernorm", "layernorm_each")
    return (
        gated(keys, rotary=0.25)
        | normed
        | {
            "norm": "layernorm",
            "norm_placement": "shared" if is_parallel else "pre",
            "is_parallel": is_parallel,
            "qkv_bias": keys.flag("use_qkv_bias"),
        }
    )


def exaone4(keys: Keys) -> Fields:
    """Return EXAONE 4; with experts it has its norms before."""
    fields = gated(keys, kv_heads=32)
    given = keys.any_value("sliding_window_pattern", 4)
    step = (
        len(given)
        if isinstance(given, str)
        else keys.count("sliding_window_pattern", default=4)
    )
    windows = read_windows(keys, fields["num_layers"], every(step), 4096)
    is_hybrid = any(windows)
    layers = (Layer(window=size, has_rope=size > 0 or not is_hybrid) for size in windows)
    more = {"norm_placement": "post", "qk_norm": True, "pattern": cycle(layers)}
    return fields | more


def internlm3(keys: Keys) -> Fields:
    """Return InternLM3, whose attention and MLP have biases both or neither."""
    attention = keys.flag("attention_bias", keys.flag("qkv_bias"))
    mlp = keys.flag("mlp_bias", keys.flag("bias"))
    if attention != mlp:
        raise keys.error("qkv_bias", f"as bias ({str(mlp).lower()})")
    return gated(keys, kv_heads=2, head_dim=128) | {"linear_bias": mlp}


def helium(keys: Keys) -> Fields:
    biases = ("mlp",) if keys.flag("mlp_bias") else ()
    fields = gated(keys, kv_heads=20, head_dim=128)
    return fields | {"qkv_bias": keys.flag("attention_bias"), "biases": biases}


def nemotron_nas(keys: Keys) -> Fields:
    """Return NVIDIA's searched models, whose layers have widths of their own."""
    fields = gated(keys, ffn=None, kv_heads=1) | all_biases(keys)
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    blocks = keys.items("block_configs") or []
    layers = []
    for index, block in enumerate(blocks):
        own = Keys({"block": block}, f"{keys.where}block_configs[{index}].").part("block")
        attention, ffn = (own.part(name) if own else None for name in ("attention", "ffn"))
        if attention is None or ffn is None:
            raise keys.error("block_configs", "of attention and ffn")
        if attention.flag("replace_with_linear") or ffn.flag("replace_with_linear"):
            raise keys.error("block_configs", "without replace_with_linear")
        has_attention = not attention.flag("no_op")
        has_ffn = not ffn.flag("no_op")
        layer = Layer(
            mixer="attention" if has_attention else "",
            ffn="dense" if has_ffn else "",
            num_kv_heads=heads // attention.size("n_heads_in_group") if has_attention else 0,
            ffn_hidden_size=_nas_width(ffn.number("ffn_mult", default=0), hidden)
            if has_ffn
            else 0,
        )
        layers.append(layer)
    if len(layers) != fields["num_layers"]:
        raise keys.error("block_configs", f"an array of {fields['num_layers']}")
    widths = [layer.ffn_hidden_size for layer in layers]
    kv_heads = [layer.num_kv_heads for layer in layers if layer.num_kv_heads]
    common = {"num_kv_heads": max(kv_heads), "ffn_hidden_size": max(widths)}
    return fields | common | {"pattern": cycle(layers)}


def _nas_width(mult: float, hidden: int) -> int:
    """Return _ffn_mult_to_intermediate_size of modeling_decilm.py."""
    width = int(2 * mult * hidden / 3)
    return width + -width % 256
