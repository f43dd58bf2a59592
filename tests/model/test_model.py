import itertools
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model import model_tables
from stepmark.model.layers import DENSE, EXPERTS, MlaConfig, MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model, load_models

# Counts of published checkpoints (safetensors headers or the model's own printed count).
EXACT = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    # llm-train-bench, derived from its configs.
    "llama-3.1-70b-proxy": 5_523_972_096,
    "llama-3.1-70b-proxy-1l": 2_957_008_896,
}
MODELS = sorted(load_models())


@pytest.mark.parametrize(("name", "params"), EXACT.items())
def test_num_params_is_the_published_count(name: str, params: int) -> None:
    model = find_model(name)
    assert model.num_params == params == model.published_params


@pytest.mark.parametrize(
    ("name", "openai", "padded"),
    [("gpt2-125m", 124_439_808, 124_475_904), ("gpt2-1.5b", 1_557_611_200, 1_557_686_400)],
)
def test_gpt2_has_the_document_s_vocabulary(name: str, openai: int, padded: int) -> None:
    model = find_model(name)
    assert model.vocab_size == 50304
    assert model.num_params == padded
    assert replace(model, vocab_size=50257).num_params == openai == model.published_params


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("gpt-7b", 7_470_985_216),
        ("gpt-13b", 12_862_028_800),
        ("gpt-22b", 22_078_408_704),
        ("gpt-175b", 174_618_808_320),
    ],
)
def test_aicb_gpt_counts_by_hand(name: str, params: int) -> None:
    model = find_model(name)
    h = model.hidden_size
    tables = (model.vocab_size + model.max_positions) * h
    assert (
        model.num_params == tables + model.num_layers * (12 * h * h + 4 * h) + 2 * h == params
    )


def test_active_params() -> None:
    assert find_model("mixtral-8x7b").num_active_params == 12_879_925_248
    assert find_model("qwen3-30b-a3b").num_active_params == 3_353_032_704
    # 37_552_282_624 without the 14_848 router biases.
    assert find_model("deepseek-v3").num_active_params == 37_552_282_624 + 58 * 256


@pytest.mark.parametrize("name", MODELS)
def test_active_is_near_the_announced(name: str) -> None:
    model = find_model(name)
    if model.published_active_params:
        assert model.num_active_params == pytest.approx(model.published_active_params, rel=0.12)
    elif model.moe is None:
        assert model.num_active_params == model.num_params


def test_one_llama_70b_layer() -> None:
    # With norms this is eight times 106_956_800, the count in a real FSDP trace.
    model = find_model("llama-3.1-70b")
    assert model.layer_params() == 855_654_400 == 8 * 106_956_800
    assert model.layer_matmul_params() == 855_638_016
    assert model.layer_params() - model.layer_matmul_params() == 2 * 8192


@pytest.mark.parametrize("name", MODELS)
def test_parts_add_up_to_the_whole(name: str) -> None:
    full = find_model(name)
    for model in (full, full.tiny(), full.scaled(Fraction(1, 8))):
        check_sum(model)


def check_sum(model: ModelConfig) -> None:
    counts = model.layer_counts
    layers = sum(count * model.layer_params(layer) for layer, count in counts.items())
    rest = model.num_embedding_params + model.head_params + model.norm_params
    assert layers + rest == model.num_params
    assert counts.total() == model.num_layers
    moe = EXPERTS if model.moe else DENSE
    weights = sum(one.num_weights for one in model.linears(moe))
    assert model.layer_matmul_params(moe) == weights
    assert model.layer_params(moe) >= weights + 2 * model.norm_params
    assert model.num_active_matmul_params < model.num_active_params + model.head_params
    assert model.layer_matmul_params(moe, active=True) <= model.layer_matmul_params(moe)
    assert model.num_active_params <= model.num_params


def test_embedding_that_is_also_the_head_counts_once() -> None:
    untied = find_model("llama-3.1-8b")
    tied = replace(untied, tied_embeddings=True)
    assert untied.num_params - tied.num_params == untied.head_params
    assert tied.num_embedding_params == 0
    assert find_model("gpt2-125m").num_embedding_params == 1024 * 768  # positions
    assert tied.num_active_matmul_params == untied.num_active_matmul_params


def test_head_widths() -> None:
    assert (find_model("deepseek-v3").d_qk, find_model("deepseek-v3").d_v) == (192, 128)
    assert (find_model("qwen3-32b").d_qk, find_model("qwen3-32b").d_v) == (128, 128)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_names_its_source_and_is_found_by_each_name(name: str) -> None:
    model = find_model(name)
    assert model.name == name
    assert model.source.startswith("https://")
    for alias in (name.upper(), name.replace("-", "_"), *model.aliases):
        assert find_model(alias) == model


def test_no_name_means_two_models() -> None:
    names = [model_tables._key(n) for m in load_models().values() for n in (m.name, *m.aliases)]
    spelt_alike = {n for n in names if names.count(n) > 1}
    # An alias may repeat its own model's name in another spelling, never another model's.
    for key in spelt_alike:
        owners = {
            m.name
            for m in load_models().values()
            if key in map(model_tables._key, (m.name, *m.aliases))
        }
        assert len(owners) == 1


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("LLAMA_3.1 70B", "llama-3.1-70b"),
        ("llama-3-70b", "llama-3.1-70b"),
        ("Llama2_7B", "llama-2-7b"),
        ("Mistral_8x22B", "mixtral-8x22b"),
        ("Mixtral_8*7B", "mixtral-8x7b"),
        ("Deepseek_V2_Lite", "deepseek-v2-lite"),
        ("gpt_175B", "gpt-175b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ],
)
def test_peers_spellings(asked: str, found: str) -> None:
    assert find_model(asked).name == found


def test_unknown_name_lists_close_ones_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b") as caught:
        find_model("lama-3.1-8b")
    assert "\n" not in str(caught.value)
    for hopeless in ("", "zzzz", "\n", "../../etc/passwd"):
        with pytest.raises(ConfigError):
            find_model(hopeless)


def test_a_file_name_loads_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_all() -> None:
        raise AssertionError("the other files were read")

    monkeypatch.setattr(model_tables, "load_models", load_all)
    assert find_model("Qwen3-8B").num_layers == 36


@pytest.mark.parametrize("name", MODELS)
def test_tiny(name: str) -> None:
    full, tiny = find_model(name), find_model(name).tiny()
    kv_heads = 4 if full.mla else 2
    kinds = len(dict.fromkeys(full.pattern))
    num_leading = bool(full.moe and full.moe.first_dense_layers and kinds > 1)
    assert tiny.num_layers == max(2, kinds + num_leading)
    assert len(tiny.layer_counts) >= min(2, len(full.layer_counts))
    assert (tiny.hidden_size, tiny.vocab_size, tiny.seq_len) == (64, 512, 64)
    assert (tiny.num_heads, tiny.num_kv_heads) == (4, kv_heads)
    assert tiny.num_params < 500_000
    assert tiny.name == f"{name}@tiny"
    assert (tiny.moe is None, tiny.mla is None) == (full.moe is None, full.mla is None)
    assert tiny.published_params is None
    if tiny.moe:
        assert full.moe
        assert (tiny.moe.num_experts, tiny.moe.top_k) == (4, min(2, full.moe.top_k))
        assert tiny.num_moe_layers >= 1
        assert (tiny.num_dense_layers > 0) == (full.num_dense_layers > 0)


@pytest.mark.parametrize("name", MODELS)
def test_scaled_stays_valid(name: str) -> None:
    for denominator, tp in itertools.product((2, 3, 8, 64, 1024), (1, 2, 8)):
        check_scaled(find_model(name), denominator, tp)


def check_scaled(full: ModelConfig, denominator: int, tp: int) -> None:
    small = full.scaled(Fraction(1, denominator), tp=tp)
    ratio = full.num_heads // full.num_kv_heads
    assert small.num_heads == ratio * small.num_kv_heads
    assert small.num_kv_heads % tp == 0
    widths = [small.hidden_size, small.head_dim, small.d_v]
    assert all(width % 16 == 0 for width in widths)
    assert all(w % (16 * tp) == 0 for w in (small.ffn_hidden_size, small.vocab_size))
    assert small.head_dim <= full.head_dim
    assert (small.num_layers, small.seq_len) == (full.num_layers, full.seq_len)
    if small.moe and full.moe:
        assert (small.moe.num_experts, small.moe.top_k) == (
            full.moe.num_experts,
            full.moe.top_k,
        )
        assert small.moe.ffn_hidden_size % (16 * tp) == 0
    assert small.name == f"{full.name}@1/{denominator}"


def test_scaled_divides() -> None:
    small = find_model("llama-3.1-70b").scaled(Fraction(1, 4))
    assert (small.hidden_size, small.ffn_hidden_size) == (2048, 7168)
    assert (small.num_heads, small.num_kv_heads, small.head_dim) == (16, 2, 128)
    assert small.vocab_size == 32064
    one = find_model("llama-3.1-70b")
    assert one.scaled(Fraction(1)) is one
    # Where the GQA ratio keeps more heads than 1/64 leaves, heads get narrower.
    small = one.scaled(Fraction(1, 64))
    assert (small.hidden_size, small.num_heads, small.head_dim) == (128, 8, 16)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [2, 7, 200])
def test_layers_are_of_the_same_kinds(name: str, count: int) -> None:
    full = find_model(name)
    model = full.with_layers(count)
    assert model.num_layers == count
    assert (model.num_dense_layers > 0) == (full.num_dense_layers > 0)
    assert (model.num_moe_layers > 0) == (full.num_moe_layers > 0)
    assert full.with_layers(full.num_layers) is full
    if count != full.num_layers:
        assert model.name == f"{full.name}@{count}-layers"
        assert model.layer_params() == full.layer_params()
        assert model.num_params != full.num_params


def test_one_layer_cannot_be_of_two_kinds() -> None:
    assert find_model("llama-3.1-8b").with_layers(1).name == "llama-3.1-8b@1-layers"
    with pytest.raises(ConfigError, match="num-layers 1 is invalid: it must be at least 2"):
        find_model("deepseek-v3").with_layers(1)


@pytest.mark.parametrize("factor", [Fraction(0), Fraction(-1, 2), Fraction(2)])
def test_scale_out_of_range(factor: Fraction) -> None:
    with pytest.raises(ConfigError, match="scale"):
        find_model("llama-2-7b").scaled(factor)


BASE = {
    "name": "m",
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_hidden_size": 128,
    "vocab_size": 512,
    "seq_len": 64,
}
SIZES = [field for field in BASE if field not in ("name",)]


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("bad", [0, -1, 2**31, 1.0, float("nan"), True, "64", None])
def test_sizes_are_positive_integers(field: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=field):
        ModelConfig(**{**BASE, field: bad})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_heads": 3}, "num_heads"),
        ({"num_kv_heads": 8}, "num_heads"),
        ({"activation": "tanh"}, "activation"),
        ({"norm": "batchnorm"}, "norm"),
        ({"qkv_bias": 1}, "qkv_bias"),
        ({"name": ""}, "name"),
        ({"max_positions": 32}, "seq_len"),
        ({"moe": MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=64, first_dense_layers=3)},
         "first_dense_layers"),
        ({"moe": MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=64, first_dense_layers=1),
          "ffn_hidden_size": 0}, "ffn_hidden_size"),
        ({"moe": MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=64), "linear_bias": True},
         "linear_bias"),
        ({"mla": MlaConfig(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8,
                           qk_rope_head_dim=8, v_head_dim=16)}, "num_kv_heads"),
        ({"mla": MlaConfig(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16,
                           qk_rope_head_dim=8, v_head_dim=16), "num_kv_heads": 4}, "head_dim"),
    ],
)  # fmt: skip
def test_contradictions(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig(**{**BASE, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"top_k": 5}, "top_k"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_shared_experts": 1}, "shared_ffn_hidden_size"),
        ({"shared_ffn_hidden_size": 64}, "shared_ffn_hidden_size"),
        ({"first_dense_layers": -1}, "first_dense_layers"),
        ({"router_bias": "yes"}, "router_bias"),
    ],
)
def test_moe_contradictions(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MoeConfig(**{"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64, **changes})


def test_models_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        find_model("llama-2-7b").hidden_size = 1


def test_multi_token_prediction_needs_a_last_layer_of_both_parts() -> None:
    with pytest.raises(ConfigError, match=r"num_mtp_layers 1 .* lacks attention or an FFN"):
        replace(find_model("nemotron-h-56b"), num_mtp_layers=1)
    assert replace(find_model("llama-3.1-8b"), num_mtp_layers=1).num_mtp_layers == 1
