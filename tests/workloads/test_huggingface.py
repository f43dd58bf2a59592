import contextlib
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from validation import hugging_face_models as collection

from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.step import native
from stepmark.workloads.formats.huggingface.config import read_config
from stepmark.workloads.workload import generate
from stepmark.workloads.workload_flags import options_class

LINES = [line for path in collection.FILES for line in collection.read_lines(path)]
QWEN_NEXT, GRANITE = (
    next(line["config"] for line in LINES if line["name"] == name)
    for name in ("Qwen3-Next-80B-A3B", "granite-4.0-h-small")
)
# Another name that a note has, or another key of a file that says the same.
SYNONYMS = {
    "layer_types": "full_attention_interval",
    "mlp_layer_types": "first_k_dense_replace",
    "attention_other_setting": "num_sliding_attention_heads",
}
EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA = json.loads((EXAMPLES / "hf/llama-3.1-8b/config.json").read_text())
QWEN_MOE = json.loads((EXAMPLES / "hf/qwen3-30b-a3b/config.json").read_text())
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "attention_bias": False,
    "hidden_act": "silu",
}
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "head_dim": None,
    "sliding_window": None,
}
QWEN3_8B = {
    **LLAMA,
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
LITE = {
    **DEEPSEEK,
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "vocab_size": 102400,
}
GOOD = {
    "llama": LLAMA,
    "qwen3_moe": QWEN_MOE,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v2": LITE,
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "qwen3": QWEN3_8B,
}


def read(tmp_path: Path, content: object) -> ModelConfig:
    path = tmp_path / "config.json"
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(data)
    return read_config(path)


def message(tmp_path: Path, content: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "config.json" in text
    return text


@pytest.mark.parametrize(
    ("family", "params"),
    [
        ("llama", 8_030_261_248),
        ("qwen3_moe", 30_532_122_624),
        ("deepseek_v3", 671_026_419_200),
        ("deepseek_v2", 15_706_484_224),
        ("gpt2", 124_439_808),
        ("mixtral", 46_702_792_704),
        ("qwen3", 8_190_735_360),
    ],
)
def test_published_parameter_count(tmp_path: Path, family: str, params: int) -> None:
    assert read(tmp_path, GOOD[family]).num_params == params


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "deepseek-v2-lite", "qwen3-8b"]
)
def test_file_and_built_in_model_agree(tmp_path: Path, name: str) -> None:
    contents = {
        "llama-3.1-8b": LLAMA,
        "qwen3-30b-a3b": QWEN_MOE,
        "deepseek-v3": DEEPSEEK,
        "deepseek-v2-lite": LITE,
        "qwen3-8b": QWEN3_8B,
    }
    built_in, model = find_model(name), read(tmp_path, contents[name])
    about_the_file = {
        "name",
        "source",
        "aliases",
        "seq_len",
        "published_params",
        "published_active_params",
        "unmodelled",
        "max_context",
    }
    for field in set(ModelConfig.__slots__) - about_the_file:
        assert getattr(model, field) == getattr(built_in, field), field


def test_name_is_the_folder() -> None:
    assert read_config(EXAMPLES / "hf/llama-3.1-8b/config.json").name == "llama-3.1-8b"


def test_seq_len_is_capped(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA).seq_len == 8192
    assert read(tmp_path, LLAMA | {"max_position_embeddings": 4096}).seq_len == 4096
    assert read(tmp_path, GPT2).seq_len == 1024


def test_families_that_differ_by_biases(tmp_path: Path) -> None:
    mistral = read(tmp_path, LLAMA | {"model_type": "mistral"})
    qwen2 = read(tmp_path, LLAMA | {"model_type": "qwen2"})
    assert not mistral.qkv_bias
    assert qwen2.num_params - mistral.num_params == 32 * (32 + 2 * 8) * 128


@pytest.mark.parametrize(
    ("family", "per_layer"),
    [
        ("llama", 4096 + 2 * 1024 + 4096),  # q, k and v, out
        ("qwen3", 4096 + 2 * 1024 + 4096),
        ("qwen3_moe", 4096 + 2 * 512 + 2048),
        ("deepseek_v3", 1536 + (512 + 64) + 7168),  # down projections, out
        ("deepseek_v2", (512 + 64) + 2048),  # which projects queries at once, without biases
        ("mixtral", 0),
    ],
)
def test_attention_bias_is_that_of_transformers(
    tmp_path: Path, family: str, per_layer: int
) -> None:
    plain = read(tmp_path, GOOD[family] | {"attention_bias": False})
    biased = read(tmp_path, GOOD[family] | {"attention_bias": True})
    assert biased.num_params - plain.num_params == plain.num_layers * per_layer
    assert biased.num_active_matmul_params == plain.num_active_matmul_params
    notes = [note for note in biased.unmodelled if "_bias (" in note]
    assert bool(notes) is (per_layer == 0)
    assert all("attention_bias (true): transformers ignores it" in note for note in notes)


def test_biases_of_all_layers_are_llamas(tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    model = read(tmp_path, LLAMA | biases)
    per_layer = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert model.num_params - read(tmp_path, LLAMA).num_params == 32 * per_layer
    assert read(tmp_path, QWEN3_8B | biases).linear_bias is False


def test_heads_default_to_mha(tmp_path: Path) -> None:
    without = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert read(tmp_path, without).num_kv_heads == 32


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_missing_kv_heads_are_another_number_per_family(tmp_path: Path, family: str) -> None:
    """transformers takes 8, 8, 32, 32 and 4, however many heads there are; null is as many."""
    model = {**LLAMA, **MIXTRAL, **QWEN_MOE, "model_type": family}
    without = {k: v for k, v in model.items() if k != "num_key_value_heads"}
    count = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}[family]
    assert read(tmp_path, without).num_kv_heads == count
    assert read(tmp_path, {**model, "num_key_value_heads": None}).num_kv_heads == 32


@pytest.mark.parametrize("field", ["n_shared_experts", "first_k_dense_replace", "q_lora_rank"])
def test_missing_fields_of_deepseek_have_a_default_per_version(
    tmp_path: Path, field: str
) -> None:
    without = {k: v for k, v in DEEPSEEK.items() if k != field}
    assert f"{field} is missing: it is a required field" in message(tmp_path, without)


@pytest.mark.parametrize(("family", "head_dim"), [("qwen3", 128), ("qwen3_moe", 64)])
def test_missing_head_dim_is_that_of_transformers(
    tmp_path: Path, family: str, head_dim: int
) -> None:
    without = {k: v for k, v in QWEN_MOE.items() if k != "head_dim"} | {"model_type": family}
    assert read(tmp_path, without).head_dim == head_dim  # 2048 / 32 heads is 64


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"hidden_size": -1}, "hidden_size -1"),
        ({"hidden_size": 10**18}, "hidden_size 1000000000000000000"),
        ({"hidden_size": "4096"}, "hidden_size 4096 is invalid: it must be int, not str"),
        ({"hidden_size": 4096.5}, "hidden_size 4096.5"),
        ({"hidden_size": True}, "hidden_size true"),
        ({"hidden_size": None}, "hidden_size null"),
        ({"hidden_size": [1]}, "hidden_size 'an array of 1'"),
        ({"hidden_size": 4097},
         "hidden_size 4097 is invalid: it must be a multiple of num_attention_heads=32"),
        ({"num_key_value_heads": 5},
         "num_attention_heads 32 is invalid: it must be a multiple of num_key_value_heads=5"),
        ({"model_type": "bert"}, "model_type bert is invalid: it must be one of "),
        ({"model_type": 3}, "model_type 3"),
        ({"hidden_act": "relu"}, "hidden_act relu is invalid: it must be one of silu, swish"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings no"),
    ],
)  # fmt: skip
def test_bad_value_is_named(tmp_path: Path, change: dict[str, object], told: str) -> None:
    assert told in message(tmp_path, LLAMA | change)


def test_contradictions_speak_the_file_s_names(tmp_path: Path) -> None:
    told = message(tmp_path, MIXTRAL | {"num_experts_per_tok": 9})
    assert "num_experts_per_tok 9 is invalid: it must be at most num_local_experts=8" in told
    told = message(tmp_path, DEEPSEEK | {"first_k_dense_replace": 62})
    assert (
        "first_k_dense_replace 62 is invalid: it must be at most num_hidden_layers=61" in told
    )
    told = message(tmp_path, {**QWEN_NEXT, "linear_num_key_heads": 7})
    assert "linear_num_value_heads 32 is invalid" in told
    assert "a multiple of linear_num_key_heads=7" in told
    told = message(tmp_path, {**GRANITE, "mamba_n_groups": 3})
    assert "mamba_n_groups 3 is invalid: it must be a divisor of mamba_n_heads=128" in told
    assert "head_dim 127 is invalid: it must be an even" in message(
        tmp_path, {**LLAMA, "head_dim": 127}
    )
    assert "mlp_only_layers" in message(tmp_path, QWEN_MOE | {"mlp_only_layers": ["5"]})
    assert "moe_layer_freq" in message(tmp_path, DEEPSEEK | {"moe_layer_freq": 2})


def test_leading_dense_layers(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN_MOE | {"mlp_only_layers": [1, 0]})
    assert (model.num_dense_layers, model.ffn_hidden_size) == (2, 6144)


@pytest.mark.parametrize("family", GOOD)
def test_dropped_and_misspelt_fields_are_named(tmp_path: Path, family: str) -> None:
    for field in ("vocab_size", "n_embd" if family == "gpt2" else "hidden_size"):
        rest = {k: v for k, v in GOOD[family].items() if k != field}
        assert f"{field} is missing: it is a required field" in message(tmp_path, rest)
        misspelt = field.replace("d", "", 1) if "d" in field else field.replace("b", "", 1)
        told = message(tmp_path, {**rest, misspelt: 4096})
        assert f"it is an unknown field, did you mean `{field}`?" in told


def test_misspelt_optional_field_is_named(tmp_path: Path) -> None:
    content = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    told = message(tmp_path, {**content, "num_key_value_head": 8})
    assert "it is an unknown field, did you mean `num_key_value_heads`?" in told


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"\xff\xfe\x00",
        b'"\xff"',
        b"null",
        b"[]",
        b"NaN",
        b'{"model_type": NaN}',
        b'{"model_type": "llama"',
        b'{"model_type": "llama"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}",
        b'{"model_type": "llama", "hidden_size": 1e400}',
        b'{"model_type": "llama", "hidden_size": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model_type": "llama", "hidden\\nsize": 1}',
        b'{"model_type": "\\u2028\\r\\n"}',
        random.Random(0).randbytes(2**20),
    ],
)
def test_garbage_is_one_line(tmp_path: Path, content: bytes) -> None:
    message(tmp_path, content)


def test_a_thousand_unknown_keys_are_fast(tmp_path: Path) -> None:
    content = {f"hidden_siz{i}": i for i in range(50_000)} | LLAMA
    start = time.perf_counter()
    assert read(tmp_path, content).num_layers == 32
    assert time.perf_counter() - start < 2


def test_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", Path("nul\0.json"), Path("x" * 5000)):
        with pytest.raises(ConfigError):
            read_config(path)


def notes(tmp_path: Path, content: dict[str, object]) -> list[str]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    notes = [note.removeprefix(f"{path}: ") for note in read_config(path).unmodelled]
    return [note for note in notes if not note.startswith("absent keys")]


def note_on_absent_keys(tmp_path: Path, content: dict[str, object]) -> str:
    every = read(tmp_path, content).unmodelled
    return next((note for note in every if "json: absent keys" in note), "")


@pytest.mark.parametrize("family", GOOD)
def test_a_plain_config_has_no_notes(tmp_path: Path, family: str) -> None:
    assert notes(tmp_path, GOOD[family]) == []


UNMODELLED: list[tuple[dict[str, object], dict[str, object], str]] = [
    (DEEPSEEK, {"num_nextn_predict_layers": 1}, "multi-token-prediction layers are left out"),
    (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "weights and products have"),
    (DEEPSEEK, {"aux_loss_alpha": 0.001}, "no auxiliary loss"),
    (LLAMA, {"final_logit_softcapping": 30.0}, "logits are not capped"),
    (LLAMA, {"attention_sinks": True}, "attention has no sinks"),
    (QWEN_MOE, {"shared_expert_intermediate_size": 512}, "shared experts are left out"),
    (QWEN_MOE, {"shared_expert_gate": True}, "shared experts have no gate"),
    (QWEN_MOE, {"router_aux_loss_coef": 0.001, "output_router_logits": True}, "no auxiliary"),
    (GPT2, {"attn_pdrop": 0.1}, "dropout is left out"),
    (LLAMA, {"no_rope_layers": [1, 1, 1, 0]}, "all layers have rotary positions"),
    (LLAMA, {"residual_multiplier": 0.22}, "values are not scaled"),
    (LLAMA, {"num_local_experts": 8}, "unknown keys, which the model does not have: num_local"),
]


@pytest.mark.parametrize(("config", "more", "note"), UNMODELLED)
def test_a_key_with_an_effect_that_is_not_modelled_is_noted(
    tmp_path: Path, config: dict[str, object], more: dict[str, object], note: str
) -> None:
    (found,) = notes(tmp_path, config | more)
    assert note in found
    assert list(more)[0 if "model_type" not in more else 1] in found


@pytest.mark.parametrize(
    "more",
    [
        {"num_nextn_predict_layers": 0, "quantization_config": None, "attention_dropout": 0.0},
        {"sliding_window": 4096, "use_sliding_window": False, "unheard_of": False},
        {"sliding_window": 4096, "model_type": "qwen2"},
        {"layer_types": ["full_attention"] * 2, "n_group": 8, "topk_group": 8},
        {"router_aux_loss_coef": 0.001, "partial_rotary_factor": 1.0, "pretraining_tp": 1},
    ],
)
def test_what_is_switched_off_is_not_noted(tmp_path: Path, more: dict[str, object]) -> None:
    assert notes(tmp_path, LLAMA | more) == []


def test_sizes_of_the_family_are_noted(tmp_path: Path) -> None:
    """A key that is spelled unlike any of the family's leaves a default that decides a step."""
    known = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    heads = known["num_attention_heads"]
    note = note_on_absent_keys(tmp_path, {**known, "kv_heads": 8})
    assert f"num_key_value_heads {heads}" in note
    assert "num_key_value_heads" not in note_on_absent_keys(tmp_path, LLAMA)
    full = {**LLAMA, "head_dim": 128}
    assert note_on_absent_keys(tmp_path, full) == ""


def test_no_default_is_silent(tmp_path: Path) -> None:
    """Without a key a model is the same, refused, or has a note with the key's name."""
    drawn = (line for line in LINES if "flipped" not in line["name"])  # which contradict
    by_family = {collection.family(line): line["config"] for line in drawn}
    for config in (*by_family.values(), GRANITE):
        try:
            full = read(tmp_path, config)
        except ConfigError:
            continue
        inner = config.get("text_config") or config
        for key in inner:
            rest = {name: value for name, value in inner.items() if name != key}
            with contextlib.suppress(ConfigError):
                change = {"text_config": rest} if inner is not config else {}
                content = {**config, **change} if change else rest
                model = read(tmp_path, content)
                names = ("name", "max_context", "rotary_dim")  # of which no size follows
                same = {name: getattr(full, name) for name in names}
                is_same = replace(model, **same) == full
                words = " ".join((*model.unmodelled, *rest))
                is_noted = key in words or SYNONYMS.get(key, key) in words
                assert is_same or is_noted, (key, inner)


def test_notes_on_shared_experts_agree_with_the_model(tmp_path: Path) -> None:
    """Qwen2-MoE's has its own width, and reads no number of shared experts."""
    config = QWEN_MOE | {"model_type": "qwen2_moe", "n_shared_experts": 2}
    (ignored,) = notes(tmp_path, config)
    assert "n_shared_experts (2): transformers ignores it in this family" in ignored
    assert "shared_expert_intermediate_size 5632" in note_on_absent_keys(tmp_path, config)
    moe = read(tmp_path, config).moe
    assert moe is not None
    assert (moe.num_shared_experts, moe.shared_ffn_hidden_size) == (1, 5632)


def test_an_unchanged_file_is_read_once(tmp_path: Path) -> None:
    model = read(tmp_path, LLAMA)
    assert read(tmp_path, LLAMA) is model
    assert read(tmp_path, {**LLAMA, "num_hidden_layers": 16}).num_layers == 16


def test_the_longest_context_is_that_of_the_file(tmp_path: Path) -> None:
    model = read(tmp_path, LLAMA | {"max_position_embeddings": 131072})
    assert (model.seq_len, model.max_context) == (8192, 131072)


def test_a_window_that_transformers_adds_is_read(tmp_path: Path) -> None:
    added = read(tmp_path, LLAMA | {"model_type": "mistral"})
    assert [layer.window for layer in added.pattern] == [4096]
    none = read(tmp_path, LLAMA | {"model_type": "mistral", "sliding_window": None})
    assert [layer.window for layer in none.pattern] == [0]


def test_notes_of_a_file_stand_in_the_workload(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"attention_sinks": True, "unheard_of": 7}))
    options = options_class("fsdp")(framework="fsdp", model=str(path), world_size=8)
    workload = generate(options)
    assert sum(str(path) in note for note in workload.notes) == 3
    again = native.decode(native.encode(workload))
    assert any("unheard_of" in note for note in again.notes)
