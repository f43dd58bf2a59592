"""Families with mixtures of experts, all of whose layers have attention.

Source: configuration_*.py and modeling_*.py of transformers 5.23.
"""

from typing import Any

from stepmark.model.layers import (
    IndexerConfig,
    Layer,
    MlaConfig,
    MoeConfig,
)
from stepmark.workloads.formats.huggingface.dense import exaone4, qwen_windows
from stepmark.workloads.formats.huggingface.keys import Keys, cycle
from stepmark.workloads.formats.huggingface.shared_fields import (
    DEFAULT_SEQ_LEN,
    Fields,
    all_experts,
    always,
    attention_bias,
    decoder,
    deepseek_experts,
    every,
    gated,
    head_norms,
    multipliers,
    placed_experts,
    read_activation,
    read_ropes,
    read_types,
    read_windows,
    require,
    windowed,
)


def mixtral(keys: Keys) -> Fields:
    fields = all_experts(
        gated(keys, kv_heads=8),
        num_experts=keys.size("num_local_experts", default=8),
        top_k=keys.size("num_experts_per_tok", default=2),
    )
    return windowed(keys, fields, always, None)


def qwen_experts(keys: Keys, fields: Fields, defaults: Fields, **more: Any) -> Fields:
    """Return experts, and the layers that have a dense MLP instead."""
    count = fields["num_layers"]
    step = keys.size("decoder_sparse_step", default=1)
    dense = keys.items("mlp_only_layers", rule="none") or []
    for layer in dense:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise keys.error("mlp_only_layers", "a list of layers")
    is_dense = [index in dense or (index + 1) % step != 0 for index in range(count)]
    moe = MoeConfig(
        num_experts=keys.size("num_experts", "num_local_experts", default=defaults["experts"]),
        top_k=keys.size("num_experts_per_tok", default=defaults["top_k"]),
        ffn_hidden_size=keys.size("moe_intermediate_size", default=defaults["width"]),
        **more,
    )
    return placed_experts(fields, moe, is_dense)


def qwen3_moe(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=4, ffn=6144) | attention_bias(keys) | {"qk_norm": True}
    fields = qwen_windows(keys, fields)
    return qwen_experts(keys, fields, {"experts": 128, "top_k": 8, "width": 768})


def qwen3_vl_moe(keys: Keys) -> Fields:
    """Return the decoder of Qwen3-VL: Qwen3's with other defaults."""
    fields = gated(keys, kv_heads=16, ffn=5632) | attention_bias(keys) | {"qk_norm": True}
    return qwen_experts(keys, fields, {"experts": 60, "top_k": 4, "width": 1408})


def shared_gated(keys: Keys, width: int) -> Fields:
    size = keys.count("shared_expert_intermediate_size", default=width)
    return {
        "num_shared_experts": min(1, size),
        "shared_ffn_hidden_size": size,
        "shared_gate": size > 0,
    }


def qwen2_moe(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=16, ffn=5632)
    fields = qwen_windows(keys, fields | {"qkv_bias": keys.flag("qkv_bias", True)})
    defaults = {"experts": 60, "top_k": 4, "width": 1408}
    return qwen_experts(keys, fields, defaults, **shared_gated(keys, 5632))


def deepseek(
    keys: Keys,
    *,
    sigmoid: bool,
    indexed: bool = False,
    index_heads: int = 64,
    **defaults: Any,
) -> Fields:
    keys.read.add("head_dim")  # the file's, where there is one, is the rope part only
    heads = keys.size("num_attention_heads")
    indexer = None
    if indexed:
        indexer = IndexerConfig(
            num_heads=keys.size("index_n_heads", default=index_heads),
            head_dim=keys.size("index_head_dim", default=128),
            top_k=keys.size("index_topk", default=2048),
        )
    mla = MlaConfig(
        q_lora_rank=keys.size("q_lora_rank", null=None),
        kv_lora_rank=keys.size("kv_lora_rank"),
        qk_nope_head_dim=keys.size("qk_nope_head_dim"),
        qk_rope_head_dim=keys.size("qk_rope_head_dim"),
        v_head_dim=keys.size("v_head_dim"),
        indexer=indexer,
    )
    shares = read_shared_indexers(keys) if indexed else []
    if keys.size("num_key_value_heads", default=heads, null=heads) != heads:
        allowed = f"num_attention_heads={heads}: latent attention has keys for each head"
        raise keys.error("num_key_value_heads", allowed)
    fields = {
        "hidden_size": keys.size("hidden_size"),
        "num_layers": keys.size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        "ffn_hidden_size": keys.size("intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "seq_len": min(keys.size("max_position_embeddings"), DEFAULT_SEQ_LEN),
        "tied_embeddings": keys.flag("tie_word_embeddings"),
        "activation": read_activation(keys),
        "mla": mla,
        **attention_bias(keys),
    }
    if shares:
        layers = (Layer(has_indexer=not shared) for shared in shares)
        fields["pattern"] = cycle(layers)
    if not sigmoid and keys.flag("mlp_bias"):
        fields["biases"] = ("mlp",)
    return deepseek_experts(keys, fields, sigmoid=sigmoid, **defaults)


def read_shared_indexers(keys: Keys) -> list[bool]:
    """Return whether each layer takes the keys that an earlier one's indexer chose."""
    count = keys.size("num_hidden_layers")
    types = keys.entries("indexer_types", count=count, allowed=("full", "shared"))
    step = keys.size("index_topk_freq", default=1)
    offset = keys.count("index_skip_topk_offset", default=2)
    if types is None:
        return [max(index - offset + 1, 0) % step > 0 for index in range(count)]
    return [kind == "shared" for kind in types]


def glm4_moe(keys: Keys) -> Fields:
    floor = keys.size("hidden_size") // keys.size("num_attention_heads")
    fields = gated(keys, kv_heads=8, head_dim=floor, ffn=10944, rotary=0.5)
    fields |= {"qkv_bias": keys.flag("attention_bias"), "qk_norm": keys.flag("use_qk_norm")}
    defaults = {"width": 1408, "shared": 1, "experts": 128, "top_k": 8, "dense": 1}
    return deepseek_experts(keys, fields, sigmoid=True, **defaults)


def solar_open(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=8, head_dim=128, ffn=None) | {"ffn_hidden_size": 0}
    fields |= {"qkv_bias": keys.flag("attention_bias")}
    defaults = {"width": 1280, "shared": 1, "experts": 128, "top_k": 8, "dense": 0}
    return deepseek_experts(keys, fields, sigmoid=True, **defaults)


def exaone_moe(keys: Keys) -> Fields:
    fields = exaone4(keys) | {"norm_placement": "pre"}
    shared = keys.count("num_shared_experts", default=1)
    defaults = {"width": 1024, "shared": shared, "experts": 64, "top_k": 8, "dense": 1}
    return deepseek_experts(keys, fields, sigmoid=True, **defaults)


def dots1(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=32) | attention_bias(keys) | {"qk_norm": True}
    fields = windowed(keys, fields, lambda index: False, 4096)
    defaults = {"shared": None, "experts": None, "top_k": None, "dense": 0}
    return deepseek_experts(keys, fields, sigmoid=True, **defaults)


def gpt_oss(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, head_dim=64)
    keys.text("hidden_act", default="silu")
    fields = all_experts(
        windowed(keys, fields, lambda index: index % 2 == 0, 128),
        num_experts=keys.size("num_local_experts", default=128),
        top_k=keys.size("num_experts_per_tok", "experts_per_token", default=4),
    )
    keys.read |= {"swiglu_limit", "swiglu_alpha"}
    return fields | {
        "activation": "clamped_swiglu",
        "attention_bias": keys.flag("attention_bias", True),
        "biases": ("experts", "router"),
        "has_sinks": True,
    }


def llama4(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=8, head_dim=128) | attention_bias(keys)
    count = fields["num_layers"]
    interval = keys.size("no_rope_layer_interval", default=4)
    has_rope = read_ropes(keys, count, interval)
    chunk = keys.size("attention_chunk_size", default=8192) or 0
    types = read_types(keys, count)
    is_chunked = [kind == "chunked_attention" for kind in types] if types else has_rope
    step = keys.size("interleave_moe_layer_step", default=1)
    listed = keys.items("moe_layers")
    with_experts = listed if listed is not None else range(step - 1, count, step)
    has_norm = keys.flag("use_qk_norm", True)
    layers = [
        Layer(chunk=chunk if chunked else 0, has_rope=rope, has_qk_norm=rope or not has_norm)
        for chunked, rope in zip(is_chunked, has_rope, strict=True)
    ]
    moe = MoeConfig(
        num_experts=keys.size("num_local_experts", default=16),
        top_k=keys.size("num_experts_per_tok", default=1),
        ffn_hidden_size=fields["ffn_hidden_size"],
        num_shared_experts=1,
        shared_ffn_hidden_size=fields["ffn_hidden_size"],
        scoring="sigmoid",
    )
    fields |= {
        "ffn_hidden_size": keys.size("intermediate_size_mlp", default=16384),
        "pattern": cycle(layers),
        "qk_norm": has_norm,
        "qk_norm_kind": "unit" if has_norm else "head",
    }
    return placed_experts(fields, moe, [index not in with_experts for index in range(count)])


def afmoe(keys: Keys) -> Fields:
    """Return Arcee's Trinity, whose layers without a window have no rotary positions."""
    # The gate, which is in one product with q, k and v, has none.
    require(keys, attention_bias=False)
    fields = gated(keys, head_dim=128, ffn=6144)
    count = fields["num_layers"]
    step = keys.size("global_attn_every_n_layers", default=4)
    windows = read_windows(keys, count, every(step), 1024)
    width = keys.size("moe_intermediate_size", default=1408)
    shared = keys.count("num_shared_experts", default=2)
    moe = MoeConfig(
        num_experts=keys.size("num_experts", default=64),
        top_k=keys.size("num_experts_per_tok", default=6),
        ffn_hidden_size=width,
        num_shared_experts=shared,
        shared_ffn_hidden_size=shared * width,
        first_dense_layers=keys.count("num_dense_layers", default=1),
        router_bias=True,
        scoring="sigmoid",
    )
    is_scaled = keys.flag("mup_enabled")
    return fields | {
        "moe": moe,
        "norm_placement": "both",
        "qk_norm": True,
        "gate": "element",
        "embedding_multiplier": fields["hidden_size"] ** 0.5 if is_scaled else 1.0,
        "pattern": cycle(Layer(window=size, has_rope=size > 0) for size in windows),
    }


def olmoe(keys: Keys, width: int = 2048) -> Fields:
    fields = gated(keys, ffn=width) | attention_bias(keys)
    fields = all_experts(
        fields,
        num_experts=keys.size("num_experts", default=64),
        top_k=keys.size("num_experts_per_tok", default=8),
    )
    return fields | {"qk_norm": True, "qk_norm_kind": "all"}


def flex_olmo(keys: Keys) -> Fields:
    return olmoe(keys, 11008) | {"norm_placement": "post"}


def phimoe(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=8, ffn=6400) | attention_bias(keys)
    if keys.size("num_experts_per_tok", default=2) != 2:
        raise keys.error("num_experts_per_tok", "2: the router takes two whatever it says")
    num_experts = keys.size("num_local_experts", default=16)
    fields = all_experts(fields, num_experts=num_experts, top_k=2)
    return windowed(keys, fields, always, None) | {
        "norm": "layernorm",
        "biases": ("head",) if keys.flag("lm_head_bias") else (),
    }


def granitemoe(keys: Keys, *, shared: bool = False) -> Fields:
    fields = gated(keys) | attention_bias(keys) | multipliers(keys)
    width = keys.count("shared_intermediate_size", default=0) if shared else 0
    return all_experts(
        fields,
        num_experts=keys.size("num_local_experts", default=8),
        top_k=keys.size("num_experts_per_tok", default=2),
        num_shared_experts=min(1, width),
        shared_ffn_hidden_size=width,
    )


def minimax_m2(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=8, head_dim=128)
    width = keys.size("rotary_dim", default=None)
    fields = all_experts(
        fields,
        num_experts=keys.size("num_local_experts", "num_experts", default=256),
        top_k=keys.size("num_experts_per_tok", default=8),
        router_bias=True,
        scoring="sigmoid",
    )
    keys.read.add("use_routing_bias")  # transformers has the bias in any case
    return (
        fields
        | head_norms(keys, "use_qk_norm", "all", default=True)
        | {
            "rotary_dim": width
            if width and width < fields["head_dim"]
            else fields["rotary_dim"],
        }
    )


def ernie_moe(keys: Keys) -> Fields:
    fields = gated(keys, kv_heads=4, tied=True)
    count = fields["num_layers"]
    first = keys.count("moe_layer_start_index", default=1)
    end = keys.any_value("moe_layer_end_index", -1)
    last = count - 1 if end in (-1, None) else keys.count("moe_layer_end_index")
    step = keys.size("moe_layer_interval", default=1)
    is_dense = [
        not (first <= index <= last and (index + 1) % step == 0) for index in range(count)
    ]
    width = keys.size("moe_intermediate_size", default=1536)
    shared = keys.count("moe_num_shared_experts", default=2)
    has_bias = keys.flag("use_bias")
    moe = MoeConfig(
        num_experts=keys.size("moe_num_experts", "num_experts", default=64),
        top_k=keys.size("moe_k", "num_experts_per_tok", default=6),
        ffn_hidden_size=width,
        num_shared_experts=shared,
        shared_ffn_hidden_size=shared * width,
        router_bias=keys.flag("moe_use_aux_free", True),
    )
    if has_bias:
        fields |= {"attention_bias": True, "biases": ("mlp", "head")}
    return placed_experts(fields, moe, is_dense)


def hunyuan(keys: Keys, *, with_experts: bool = False) -> Fields:
    fields = gated(keys) | attention_bias(keys) | {"qk_norm": keys.flag("use_qk_norm", True)}
    if not with_experts:
        return fields
    top_k = keys.any_value("moe_topk", 1)
    if isinstance(top_k, list):
        if len(set(map(str, top_k))) != 1:
            raise keys.error("moe_topk", "the same in all layers")
        top_k = top_k[0]
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise keys.error("moe_topk", "a whole number")
    return all_experts(
        fields,
        num_experts=keys.size("num_experts", default=1),
        top_k=top_k,
        num_shared_experts=1,
        shared_ffn_hidden_size=fields["ffn_hidden_size"],
    )
