"""Laws of patterns of layers: parameters and FLOPs of the tree are the model's."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.cases import flops
from stepmark.ground.errors import ConfigError
from stepmark.model.layers import (
    DeltaConfig,
    IndexerConfig,
    Layer,
    MambaConfig,
    MlaConfig,
    MoeConfig,
)
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model, load_models
from stepmark.model.ops import Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.layout import FUSED, Inputs, ShardLayout
from stepmark.step.module import Module
from stepmark.step.tree import build

MODELS = sorted(load_models())
MOE = MoeConfig(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=32,
    num_shared_experts=1,
    shared_ffn_hidden_size=48,
    shared_gate=True,
    router_bias=True,
    scoring="sigmoid",
    num_groups=4,
    top_groups=2,
)
DELTA = DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32)
MAMBA = MambaConfig(num_heads=4, head_dim=16, num_groups=2, state_dim=16, chunk=32)
MLA = MlaConfig(
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=16,
    indexer=IndexerConfig(num_heads=4, head_dim=16, top_k=24),
)


def num_params(root: Module) -> int:
    return sum(
        unit.times * param.numel
        for unit in root.inside
        for param in unit.all_params
        if not param.is_copy
    )


def forward_flops(root: Module, phase: Phase = Phase.FWD) -> int:
    return sum(
        unit.times * item.op.flops
        for unit in root.inside
        for leaf in unit.walk()
        for item in leaf.work
        if item.phase is phase
    )


def check(model: ModelConfig, fused: str = "train") -> None:
    seq = model.seq_len
    layout = ShardLayout(fused=FUSED[fused])
    root = build(model, layout, Inputs(mbs=2, seq_len=seq))
    tied = model.head_params if model.tied_embeddings else 0
    assert num_params(root) - tied == model.num_params
    assert forward_flops(root) == pytest.approx(2 * seq * flops.forward(model), rel=1e-12)
    names = Counter(param.name for unit in root.inside for param in unit.all_params)
    units = Counter(unit.name for unit in root.inside)
    assert max(units.values()) == 1, units
    for unit in root.inside:
        own = [param.name for param in unit.all_params]
        assert len(own) == len(set(own)), (unit.name, names)


@pytest.mark.parametrize("name", MODELS)
def test_the_tree_of_a_built_in_model_has_its_parameters_and_flops(name: str) -> None:
    model = find_model(name)
    check(model)
    check(model.tiny())
    check(model, "megatron")


layers = st.builds(
    lambda mixer, ffn, window, chunk, flags, width: Layer(
        mixer=mixer,
        ffn=ffn if mixer else (ffn or "dense"),
        window=window if mixer.startswith("attention") else 0,
        chunk=chunk if mixer.startswith("attention") and not window else 0,
        has_rope=flags[0],
        shares_kv=flags[1],
        rotary_dim=flags[2],
        has_sinks=flags[0],
        ffn_hidden_size=width,
    ),
    st.sampled_from(
        ["attention", "delta", "mamba", "lightning", "conv", "attention+mamba", ""]
    ),
    st.sampled_from(["model", "dense", "experts", ""]),
    st.sampled_from([0, 0, 16, 512]),
    st.sampled_from([0, 0, 32, 48]),
    st.tuples(st.booleans(), st.booleans(), st.sampled_from([0, 0, 8])),
    st.sampled_from([0, 80]),
)


@st.composite
def patterns(draw: Any) -> ModelConfig:
    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    gate = one("", "element", "head")
    tied = draw(st.booleans())
    placement, parallel = one(
        ("pre", False), ("post", False), ("both", False), ("shared", True), ("pre", True)
    )
    model = ModelConfig(
        name="drawn",
        hidden_size=64,
        num_layers=draw(st.integers(1, 7)),
        num_heads=4,
        num_kv_heads=one(1, 2, 4),
        head_dim=one(16, 24),
        ffn_hidden_size=96,
        vocab_size=128,
        seq_len=one(64, 96),
        activation=one("swiglu", "geglu", "clamped_swiglu", "gelu", "relu2"),
        norm=one("rmsnorm", "layernorm", "layernorm_no_bias", "layernorm_no_weight"),
        attention_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qk_norm_kind=one("head", "all", "unit", "layernorm", "layernorm_each"),
        moe=one(MOE, replace(MOE, latent_size=16), replace(MOE, has_norms=True)),
        pattern=tuple(draw(st.lists(layers, min_size=1, max_size=4))),
        delta=DELTA,
        conv_width=3,
        conv_bias=draw(st.booleans()),
        mamba=MAMBA
        if draw(st.booleans())
        else replace(MAMBA, has_out_bias=True, has_norm=False),
        norm_placement=placement,
        is_parallel=parallel,
        tied_embeddings=tied,
        biases=one((), ("mlp",), ("experts", "router"), ("out", "head")),
        rotary_dim=one(0, 8),
        gate=gate,
        has_sinks=draw(st.booleans()),
        v_norm=draw(st.booleans()),
        value_multiplier=one(1.0, 0.7),
        layer_scale=draw(st.booleans()),
        softcap=one(0.0, 50.0),
        logit_softcap=one(0.0, 30.0),
        embedding_multiplier=one(1.0, 8.0),
        embedding_norm=draw(st.booleans()),
        residual_multiplier=one(1.0, 0.2),
    )
    if model.mtp_layer.mixer and model.mtp_layer.ffn:
        model = replace(model, num_mtp_layers=one(0, 0, 1, 2))
    if draw(st.integers(0, 4)):
        return replace(model, **one({}, {}, later_inputs(model), DENSE_ALONE))
    return replace(
        model,
        num_kv_heads=4,
        head_dim=32,
        qk_norm=False,
        gate="",
        has_sinks=False,
        v_norm=False,
        mla=MLA,
        pattern=tuple(replace(layer, window=0, chunk=0) for layer in model.pattern),
    )


# Apertus: an activation with parameters, which experts do not have.
DENSE_ALONE = {
    "moe": None,
    "activation": "xielu",
    "pattern": (Layer(), Layer(mixer="", ffn="dense")),
    "biases": ("mlp",),
    "num_mtp_layers": 0,
}


def later_inputs(model: ModelConfig) -> dict[str, Any]:
    """Return Gemma 4's embedding per layer, and layers with keys of the first half's."""
    shared = (replace(layer, has_kv=False) for layer in model.pattern)
    return {
        "per_layer_width": 16 if model.is_gated else 0,
        "num_mtp_layers": 0,
        "pattern": (*model.pattern, *shared),
        "num_layers": model.num_layers + len(model.pattern),
    }


def test_shared_keys_are_those_of_an_earlier_layer() -> None:
    model = replace(find_model("gemma-3-1b"), num_layers=3)
    whole, shared = Layer(), Layer(has_kv=False)
    replace(model, pattern=(whole, shared, shared))
    for pattern in ((shared, whole, whole), (replace(whole, window=16), shared, shared)):
        with pytest.raises(
            ConfigError, match=r"layer.has_kv False is invalid: it must be true"
        ):
            replace(model, pattern=pattern)


@settings(max_examples=150, deadline=None)
@given(patterns())
def test_the_tree_of_any_pattern_has_its_parameters_and_flops(model: ModelConfig) -> None:
    check(model)
    check(model, "megatron")
    check(model, "huggingface")


@settings(max_examples=100, deadline=None)
@given(patterns())
def test_ranks_of_tp_share_parameters_and_products(model: ModelConfig) -> None:
    """Divided weights are a half each; products of both ranks are the model's."""
    model = replace(model, num_kv_heads=max(2, model.num_kv_heads))
    axes = ParallelConfig(tp=2)
    inputs = Inputs(mbs=1, seq_len=model.seq_len)
    if model.qk_norm and model.qk_norm_kind == "all" and not model.mla:
        with pytest.raises(ConfigError, match=r"tp 2 .*norms over all query heads"):
            build(model, ShardLayout(axes=axes), inputs)
        return
    if model.per_layer_width or not all(layer.has_kv for layer in model.pattern):
        for axis in ("tp", "pp"):
            layout = ShardLayout(axes=ParallelConfig(**{axis: 2}))
            words = "embeddings per layer|layers that share keys and values"
            with pytest.raises(ConfigError, match=f"{axis} 2 .* has ({words})"):
                build(model, layout, inputs)
        return
    root = build(model, ShardLayout(axes=axes), inputs)
    whole = build(model, ShardLayout(), inputs)
    total = sum(
        unit.times * item.op.flops * 2 // leaf.num_replicas
        for unit in root.inside
        for leaf in unit.walk()
        for item in leaf.work
        if item.phase is Phase.FWD
    )
    assert total == forward_flops(whole)
    for unit, own in zip(whole.inside, root.inside, strict=True):
        for param, part in zip(unit.all_params, own.all_params, strict=True):
            ratio = param.numel / part.numel
            assert ratio == (1 if part.is_partial or not part.is_trained else 2) or (
                param.part == "embedding" and "positions" in param.name
            ), part.name
