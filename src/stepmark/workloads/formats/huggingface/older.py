"""Families of the years before Llama, most with learned positions or parallel layers.

Source: configuration_*.py and modeling_*.py of transformers 5.23.
"""

from stepmark.model.layers import Layer
from stepmark.workloads.formats.huggingface.keys import Keys
from stepmark.workloads.formats.huggingface.shared_fields import (
    DEFAULT_SEQ_LEN,
    Fields,
    decoder,
    head_norms,
    read_activation,
    require,
)

_Names = tuple[str, ...]
_HIDDEN: _Names = ("hidden_size", "n_embed")
_LAYERS: _Names = ("num_hidden_layers", "n_layer")
_HEADS: _Names = ("num_attention_heads", "n_head")


def _older_decoder(
    keys: Keys,
    positions: int,
    *,
    hidden: _Names = _HIDDEN,
    layers: _Names = _LAYERS,
    heads: _Names = _HEADS,
) -> Fields:
    """Return what these families share: heads that divide the width, layer norms, a tied head.

    positions: the longest sequence. hidden, layers, heads: names of keys, the family's first.
    """
    width = keys.size(*hidden)
    num_layers = keys.size(*layers)
    num_heads = keys.size(*heads)
    if width % num_heads:
        allowed = f"a multiple of {keys.name_of(heads)}={num_heads}"
        raise keys.error(keys.name_of(hidden), allowed)
    return {
        "hidden_size": width,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": width // num_heads,
        "ffn_hidden_size": 4 * width,
        "vocab_size": keys.size("vocab_size"),
        "seq_len": min(positions, DEFAULT_SEQ_LEN),
        "norm": "layernorm",
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
    }


def gpt2(keys: Keys) -> Fields:
    if keys.flag("add_cross_attention"):
        raise keys.error("add_cross_attention", "false: a decoder only")
    positions = keys.size("n_positions", "max_position_embeddings")
    fields = _older_decoder(
        keys,
        positions,
        hidden=("n_embd", "hidden_size"),
        layers=("n_layer", "num_hidden_layers"),
        heads=("n_head", "num_attention_heads"),
    )
    return fields | {
        "ffn_hidden_size": keys.size("n_inner", default=None) or fields["ffn_hidden_size"],
        "max_positions": positions,
        "activation": read_activation(
            keys, "activation_function", gated=False, default="gelu_new"
        ),
        "linear_bias": True,
    }


def gpt_bigcode(keys: Keys) -> Fields:
    fields = gpt2(keys)
    return fields | {
        "num_kv_heads": 1 if keys.flag("multi_query", True) else fields["num_heads"]
    }


def gptj(keys: Keys) -> Fields:
    fields = gpt2(keys)
    width = keys.size("rotary_dim", default=64) or 0
    return fields | {
        "max_positions": 0,
        "tied_embeddings": keys.flag("tie_word_embeddings"),
        "linear_bias": False,
        "biases": ("mlp", "head"),
        "norm_placement": "shared",
        "is_parallel": True,
        "rotary_dim": width if width < fields["head_dim"] else 0,
    }


def gpt_neox(keys: Keys) -> Fields:
    is_parallel = keys.flag("use_parallel_residual", True)
    has_bias = keys.flag("attention_bias", True)
    return decoder(keys, rotary=0.25) | {
        "activation": read_activation(keys, gated=False, default="gelu"),
        "norm": "layernorm",
        "is_parallel": is_parallel,
        "linear_bias": has_bias,
        "biases": () if has_bias else ("mlp",),
    }


def opt(keys: Keys) -> Fields:
    positions = keys.size("max_position_embeddings", default=2048)
    fields = _older_decoder(keys, positions)
    hidden = fields["hidden_size"]
    if keys.size("word_embed_proj_dim", default=None) not in (None, hidden):
        raise keys.error("word_embed_proj_dim", f"hidden_size ({hidden})")
    require(keys, do_layer_norm_before=True, _remove_final_layer_norm=False)
    has_weight = keys.flag("layer_norm_elementwise_affine", True)
    return fields | {
        "ffn_hidden_size": keys.size("ffn_dim", default=3072),
        "max_positions": positions + 2,  # OPTLearnedPositionalEmbedding's offset
        "activation": read_activation(keys, "activation_function", gated=False, default="relu"),
        "norm": "layernorm" if has_weight else "layernorm_no_weight",
        "linear_bias": keys.flag("enable_bias", True),
    }


def bloom(keys: Keys) -> Fields:
    positions = keys.size("seq_length", default=2048)
    return _older_decoder(keys, positions) | {
        "activation": "gelu",
        "linear_bias": True,
        "embedding_norm": True,
        "pattern": (Layer(has_rope=False),),
    }


def falcon(keys: Keys) -> Fields:
    fields = _older_decoder(keys, keys.size("max_position_embeddings", default=2048))
    heads = fields["num_heads"]
    is_new = keys.flag("new_decoder_architecture")
    is_multi_query = keys.flag("multi_query", True)
    given = keys.size("num_kv_heads", "n_head_kv", default=None) or heads
    is_parallel = keys.flag("parallel_attn", True) or is_new
    num_norms = keys.size("num_ln_in_parallel_attn", default=None)
    num_norms = num_norms or (2 if is_new else 1)
    width = keys.size("ffn_hidden_size", default=None)
    return fields | {
        "num_kv_heads": given if is_new else 1 if is_multi_query else heads,
        "ffn_hidden_size": width or fields["ffn_hidden_size"],
        "activation": read_activation(keys, "activation", gated=False, default="gelu"),
        "norm_placement": "shared" if is_parallel and num_norms == 1 else "pre",
        "is_parallel": is_parallel,
        "linear_bias": keys.flag("bias"),
        "pattern": (Layer(has_rope=not keys.flag("alibi")),),
    }


def persimmon(keys: Keys) -> Fields:
    return (
        decoder(keys, rotary=0.5)
        | head_norms(keys, "qk_layernorm", "layernorm", default=True)
        | {
            "activation": read_activation(keys, gated=False, default="relu2"),
            "norm": "layernorm",
            "linear_bias": True,
        }
    )


def phi(keys: Keys) -> Fields:
    fields = decoder(keys, rotary=0.5) | head_norms(keys, "qk_layernorm", "layernorm")
    return fields | {
        "activation": read_activation(keys, gated=False, default="gelu_new"),
        "norm": "layernorm",
        "norm_placement": "shared",
        "is_parallel": True,
        "linear_bias": True,
        "biases": ("head",),
    }
