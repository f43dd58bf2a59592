"""What families of Hugging Face's decoders share.

Defaults are those of classes of transformers 5.23.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.model.layers import (
    Layer,
    MambaConfig,
    MoeConfig,
)
from stepmark.workloads.formats.huggingface.keys import REQUIRED, Keys, cycle

Fields = dict[str, Any]

# A config names the longest context; steps are measured at this length or the model's own.
DEFAULT_SEQ_LEN = 8192

_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python", "gelu_accurate")
_GATED = {"silu": "swiglu", "swish": "swiglu", **dict.fromkeys(_GELUS, "geglu")}
_SAME = {name: name for name in ("silu", "relu", "relu2", "xielu")}
_PLAIN = {**_SAME, **dict.fromkeys(_GELUS, "gelu")}


def read_activation(keys: Keys, *names: str, gated: bool = True, default: str = "silu") -> str:
    name = keys.text(*names or ("hidden_act",), default=default)
    known = _GATED if gated else _PLAIN
    if name not in known:
        key = next((each for each in names if each in keys.raw), (names or ("hidden_act",))[0])
        raise keys.error(key, f"one of {', '.join(known)}")
    return known[name]


def decoder(
    keys: Keys,
    *,
    head_dim: int | None = None,
    kv_heads: Any = None,
    tied: bool = False,
    ffn: Any = REQUIRED,
    rotary: float = 1.0,
    vocab: Any = REQUIRED,
) -> Fields:
    """Return the fields that most families share.

    head_dim, kv_heads, tied, rotary: defaults of the family; None: hidden / heads, as many as
    query heads.
    """
    hidden = keys.size("hidden_size")
    heads = keys.size("num_attention_heads")
    width = keys.size("head_dim", default=head_dim, null=None)
    if width is None and hidden % heads:
        allowed = f"a multiple of num_attention_heads={heads}, or head_dim given"
        raise keys.error("hidden_size", allowed)
    width = width or hidden // heads
    num_kv = keys.size("num_key_value_heads", default=kv_heads, null=None) or heads
    sizes = {"head_dim": width, "num_key_value_heads": num_kv}
    keys.absent |= {name: value for name, value in sizes.items() if name not in keys.raw}
    return {
        "hidden_size": hidden,
        "num_layers": keys.size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": num_kv,
        "head_dim": width,
        "ffn_hidden_size": keys.size("intermediate_size", default=ffn),
        "vocab_size": keys.size("vocab_size", default=vocab),
        "seq_len": min(keys.size("max_position_embeddings", default=8192), DEFAULT_SEQ_LEN),
        "tied_embeddings": keys.flag("tie_word_embeddings", tied),
        "rotary_dim": rotary_dim(keys, width, rotary),
    }


def rotary_dim(keys: Keys, head_dim: int, default: float = 1.0) -> int:
    """Return the rotated width of a head; 0: all of it."""
    given = keys.raw.get("rope_parameters")
    inside = given.get("partial_rotary_factor") if isinstance(given, dict) else None
    if isinstance(inside, int | float) and not isinstance(inside, bool):
        default = float(inside)
    share = keys.number("partial_rotary_factor", "rotary_pct", default=default)
    width = int(head_dim * share)
    if not 0 < width <= head_dim:
        allowed = f"above 0 and at most 1, and a width from 1 with head_dim={head_dim}"
        raise ConfigError(f"{keys.where}partial_rotary_factor", share, allowed)
    if width == head_dim:
        keys.absent.pop("partial_rotary_factor", None)  # no size follows from it
        return 0
    return width - width % 2


def gated(keys: Keys, **defaults: Any) -> Fields:
    return {**decoder(keys, **defaults), "activation": read_activation(keys)}


def attention_bias(keys: Keys, default: bool = False) -> Fields:
    """Return biases of q, k, v and out."""
    return {"attention_bias": keys.flag("attention_bias", default)}


def all_biases(keys: Keys) -> Fields:
    """Return biases of attention and of the MLP, each by its key."""
    attention = keys.flag("attention_bias")
    mlp = keys.flag("mlp_bias")
    if attention and mlp:
        return {"linear_bias": True}
    return {"attention_bias": attention, "biases": ("mlp",) if mlp else ()}


def read_windows(
    keys: Keys, count: int, default: Callable[[int], bool], window: Any
) -> list[int]:
    """Return the window of each layer by its type, or else by the family's rule."""
    size = keys.count("sliding_window", default=window, null=None) or 0
    windows = [size if default(index) else 0 for index in range(count)]
    num_sliding = count - windows.count(0)
    rule = f"{num_sliding} of {count} with a window" if size else None
    types = read_types(keys, count, rule=rule)
    if types is None:
        return windows
    return [0 if kind == "full_attention" else size for kind in types]


def read_types(keys: Keys, count: int, *more: str, rule: str | None = None) -> list[str] | None:
    """Return the types of layers that a file lists. rule: of the family for a missing list."""
    return keys.entries("layer_types", *more, count=count, allowed=_TYPES, rule=rule)


_TYPES = (
    *("full_attention", "sliding_attention", "chunked_attention", "linear_attention"),
    *("attention", "mamba", "hybrid", "moe", "mlp"),
)


def every(count: int) -> Callable[[int], bool]:
    """Return whether a layer is one of those before every `count`-th."""
    return lambda index: (index + 1) % count != 0 if count else False


def always(index: int) -> bool:
    return True


def windowed(keys: Keys, fields: Fields, default: Callable[[int], bool], window: Any) -> Fields:
    """Return layers with the windows of read_windows."""
    windows = read_windows(keys, fields["num_layers"], default, window)
    return fields | {"pattern": cycle(Layer(window=size) for size in windows)}


def head_norms(keys: Keys, name: str, kind: str, *, default: bool = False) -> Fields:
    """Return norms of queries and keys of this kind, which a flag switches on."""
    has_norm = keys.flag(name, default)
    return {"qk_norm": has_norm, "qk_norm_kind": kind if has_norm else "head"}


def all_experts(fields: Fields, **moe: Any) -> Fields:
    """Return experts in place of each FFN, each as wide as a file says of that."""
    width = fields["ffn_hidden_size"]
    return fields | {"moe": MoeConfig(ffn_hidden_size=width, **moe), "ffn_hidden_size": 0}


def require(keys: Keys, **flags: bool) -> None:
    """Raise ConfigError for a flag that is not as the family has it."""
    for name, must in flags.items():
        if keys.flag(name, must) is not must:
            raise keys.error(name, str(must).lower())


def placed_experts(fields: Fields, moe: MoeConfig, is_dense: Sequence[bool]) -> Fields:
    """Return the pattern with dense layers where they are, leading ones by their number."""
    num_leading = next((i for i, dense in enumerate(is_dense) if not dense), len(is_dense))
    if num_leading == len(is_dense):
        return fields
    given = fields.get("pattern", (Layer(),))
    layers = [given[index % len(given)] for index in range(len(is_dense))]
    if any(is_dense[num_leading:]):
        layers = [
            replace(layer, ffn="dense" if dense else "experts")
            for layer, dense in zip(layers, is_dense, strict=True)
        ]
        num_leading = 0
    width = fields["ffn_hidden_size"] if any(is_dense) else 0
    moe = replace(moe, first_dense_layers=num_leading)
    return fields | {"moe": moe, "pattern": cycle(layers), "ffn_hidden_size": width}


def multipliers(keys: Keys) -> Fields:
    """Return Granite's: logits are divided."""
    return {
        "embedding_multiplier": keys.number("embedding_multiplier", default=1),
        "residual_multiplier": keys.number("residual_multiplier", default=1),
        "logit_multiplier": 1 / (keys.number("logits_scaling", default=1) or 1),
        "attention_scale": keys.number("attention_multiplier", default=1),
    }


def with_defaults(keys: Keys, **defaults: Any) -> Keys:
    """Return keys of a family that has values where a file has none."""
    keys.absent |= {name: value for name, value in defaults.items() if name not in keys.raw}
    return replace(keys, raw={**defaults, **keys.raw})


def read_ropes(keys: Keys, count: int, interval: int) -> list[bool]:
    """Return whether each layer has rotary positions, which every n-th lacks."""
    if not keys.any_value("no_rope_layers"):
        return [every(interval)(index) for index in range(count)]
    return [bool(value) for value in keys.entries("no_rope_layers", count=count) or ()]


def read_mamba(keys: Keys, inner: int, *, has_norm: bool) -> MambaConfig:
    """Return Mamba-2 by the keys of Bamba and its like. inner: width of all heads."""
    heads = keys.size("mamba_n_heads", default=128)
    is_auto = keys.any_value("mamba_d_head", "auto") == "auto"
    width = inner // heads if is_auto else keys.size("mamba_d_head")
    keys.read.add("mamba_expand")
    if heads * width != inner:
        allowed = (
            f"such that heads x mamba_d_head ({width}) are the inner width, {inner} (by "
            f"mamba_expand and hidden_size={keys.raw['hidden_size']}, or mamba_d_ssm)"
        )
        raise keys.error("mamba_n_heads", allowed)
    has_bias = keys.flag("mamba_proj_bias")
    return MambaConfig(
        num_heads=heads,
        head_dim=width,
        num_groups=keys.size("mamba_n_groups", default=1),
        state_dim=keys.size("mamba_d_state", default=256),
        conv_width=keys.size("mamba_d_conv", default=4),
        chunk=keys.size("mamba_chunk_size", default=256),
        conv_bias=keys.flag("mamba_conv_bias", True),
        has_bias=has_bias,
        has_out_bias=has_bias,
        has_norm=has_norm,
    )


def deepseek_routing(keys: Keys, *, sigmoid: bool) -> Fields:
    groups = keys.size("n_group", default=None) or 1
    if keys.text("topk_method", default="") == "greedy":  # DeepSeek-V2's without groups
        groups = 1
    return {
        "router_bias": sigmoid,
        "scoring": "sigmoid" if sigmoid else "softmax",
        "num_groups": groups,
        "top_groups": min(groups, keys.size("topk_group", default=None) or groups),
    }


def _num_leading(keys: Keys, default: Any) -> int:
    """Return the number of leading dense layers, by their types if those are listed."""
    types = keys.entries("mlp_layer_types", count=keys.size("num_hidden_layers"))
    if types is None:
        return int(keys.count("first_k_dense_replace", default=default))
    keys.read.add("first_k_dense_replace")
    count = types.count("dense")
    if types != ["dense"] * count + ["sparse"] * (len(types) - count):
        raise keys.error("mlp_layer_types", "dense layers first, then sparse ones")
    return count


def deepseek_experts(keys: Keys, fields: Fields, *, sigmoid: bool, **defaults: Any) -> Fields:
    """Return experts under DeepSeek's names, with shared ones as wide as several of them."""
    width = keys.size("moe_intermediate_size", default=defaults.get("width", REQUIRED))
    shared = keys.count("n_shared_experts", default=defaults.get("shared", REQUIRED)) or 0
    if keys.size("moe_layer_freq", default=1) != 1:
        raise keys.error("moe_layer_freq", "1: MoE in every layer after the dense")
    moe = MoeConfig(
        num_experts=keys.size(
            "n_routed_experts",
            "num_experts",
            "num_local_experts",
            default=defaults.get("experts", REQUIRED),
        ),
        top_k=keys.size("num_experts_per_tok", default=defaults.get("top_k", REQUIRED)),
        ffn_hidden_size=width,
        num_shared_experts=shared,
        shared_ffn_hidden_size=shared * width,
        first_dense_layers=_num_leading(keys, defaults.get("dense", REQUIRED)),
        **deepseek_routing(keys, sigmoid=sigmoid),
    )
    return fields | {"moe": moe}
